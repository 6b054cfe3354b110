// Package healthcheck answers load balancers that ask, on a Service's health-check node port, whether this node has
// endpoints of it. It follows what has been acknowledged, and answers in kube-proxy's words.
package healthcheck

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// retryEvery is how often a port that another program has is tried again.
const retryEvery = 10 * time.Second

// Server has a listener for each Service that wants to be checked.
type Server struct {
	log     *slog.Logger
	healthy func() bool

	wake chan struct{}
	mu   sync.Mutex
	// wanted is what was acknowledged last.
	wanted map[intent.Key]*plan.HealthCheck
	where  []netip.Addr

	open map[socket]*listener // of Run alone
}

// socket is where one family of a Service's check is listened for.
type socket struct {
	service intent.Key
	family  intent.Family
	at      netip.AddrPort
}

type listener struct {
	http   *http.Server
	ended  chan struct{}
	failed bool
}

// New returns a server; healthy says whether the proxy keeps up. It starts nothing.
func New(log *slog.Logger, healthy func() bool) *Server {
	return &Server{log: log, healthy: healthy, wake: make(chan struct{}, 1), wanted: map[intent.Key]*plan.HealthCheck{}, open: map[socket]*listener{}}
}

// Acknowledged notes the checks of changed plans and where they are answered.
func (s *Server) Acknowledged(changes []plan.ServiceChange, facts *plan.Facts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	where := facts.NodePorts.Checks
	some := !slices.Equal(where, s.where) && len(s.wanted) > 0
	s.where = where
	for i := range changes {
		c := &changes[i]
		_, had := s.wanted[c.Key]
		switch {
		case c.New != nil && c.New.HealthCheck != nil:
			s.wanted[c.Key], some = c.New.HealthCheck, true
		case had:
			delete(s.wanted, c.Key)
			some = true
		}
	}
	if some {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// Run opens and closes listeners until the context ends.
func (s *Server) Run(ctx context.Context) {
	defer func() {
		for k := range s.open {
			s.close(k)
		}
	}()
	retry := time.NewTicker(retryEvery)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-retry.C:
		}
		s.follow(ctx)
	}
}

// follow brings the listeners in line with what is wanted: those that go first, since a port may move between Services.
func (s *Server) follow(ctx context.Context) {
	want := s.sockets()
	for k := range s.open {
		if _, still := want[k]; !still {
			s.close(k)
		}
	}
	for k := range want {
		if l := s.open[k]; l == nil || l.failed {
			s.listen(ctx, k, l == nil)
		}
	}
}

func (s *Server) sockets() map[socket]struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[socket]struct{}{}
	for key, check := range s.wanted {
		for family := range check.Endpoints {
			for _, a := range s.where {
				if intent.FamilyOf(a) == family {
					out[socket{key, family, netip.AddrPortFrom(a, check.Port)}] = struct{}{}
				}
			}
		}
	}
	return out
}

func (s *Server) listen(ctx context.Context, k socket, first bool) {
	// By family, so that IPv6's wildcard does not take IPv4 as well.
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp"+strconv.Itoa(int(k.family)), k.at.String())
	if err != nil {
		if first {
			s.log.Error("a health-check node port can't be opened; trying again", "service", k.service.String(), "address", k.at.String(), "err", err)
		}
		s.open[k] = &listener{failed: true}
		return
	}
	entry := &listener{
		http:  &http.Server{Handler: s.handler(k), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute},
		ended: make(chan struct{}),
	}
	s.open[k] = entry
	go func() {
		defer close(entry.ended)
		if err := entry.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("a health-check node port has ended", "service", k.service.String(), "address", k.at.String(), "err", err)
		}
	}()
}

func (s *Server) close(k socket) {
	if l := s.open[k]; !l.failed {
		l.http.Close()
		<-l.ended
	}
	delete(s.open, k)
}

type answer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// handler answers for one Service in one family, whatever the path.
func (s *Server) handler(k socket) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		check := s.wanted[k.service]
		s.mu.Unlock()
		a := answer{ServiceProxyHealthy: s.healthy()}
		a.Service.Namespace, a.Service.Name = k.service.Namespace, k.service.Name
		if check != nil {
			a.LocalEndpoints = check.Endpoints[k.family]
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(a.LocalEndpoints))
		if a.LocalEndpoints == 0 || !a.ServiceProxyHealthy {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(a)
	})
}
