// Package healthcheck answers load balancers that ask, on a Service's health-check node port, whether this node has
// endpoints of it. It follows what has been acknowledged, and answers in kube-proxy's words.
package healthcheck

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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

// minRetry and maxRetry are how long to wait before a port that can't be opened is tried again: each time twice as long.
const minRetry, maxRetry = 500 * time.Millisecond, 30 * time.Second

// Server has a listener for each Service that wants to be checked.
type Server struct {
	log     *slog.Logger
	healthy func() bool

	wake chan struct{}
	mu   sync.Mutex
	// wanted is what was acknowledged last.
	wanted map[intent.Key]*plan.HealthCheck
	// planned are those beside them whose Services are not in the kernel yet.
	planned []*plan.HealthCheck
	where   []netip.Addr
	refused map[intent.Key]bool     // the kernel does not have all of them
	notes   map[intent.Key][]string // what of them can't be opened

	open map[socket]*listener // of Run alone
}

// socket is where one family of a Service's check is listened for.
type socket struct {
	service intent.Key
	family  intent.Family
	at      netip.AddrPort
}

type listener struct {
	socket net.Listener
	http   *http.Server
	ended  chan struct{}

	// failure is why it could not be opened, and retry when it is tried again; nil: it is open.
	failure error
	wait    time.Duration
	retry   time.Time
}

// New returns a server; healthy says whether the proxy's rules are there and up to date. It starts nothing.
func New(log *slog.Logger, healthy func() bool) *Server {
	return &Server{log: log, healthy: healthy, wake: make(chan struct{}, 1), wanted: map[intent.Key]*plan.HealthCheck{}, open: map[socket]*listener{}}
}

// Acknowledged notes the checks of changed plans, where they are answered, and which Services the kernel does not have all of.
func (s *Server) Acknowledged(changes []plan.ServiceChange, facts *plan.Facts, refused map[intent.Key]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused, s.planned = refused, nil
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
		s.wakeUp()
	}
}

// Planned notes the checks of plans that are not in the kernel yet: they are answered that this node serves nothing.
func (s *Server) Planned(checks []*plan.HealthCheck, facts *plan.Facts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(checks)+len(s.planned) == 0 {
		return
	}
	s.planned = checks
	if s.where == nil { // otherwise what was acknowledged holds
		s.where = facts.NodePorts.Checks
	}
	s.wakeUp()
}

func (s *Server) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Notes are, for each Service, which of its health-check node ports can't be opened and why.
func (s *Server) Notes() map[intent.Key][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notes
}

// Run opens and closes listeners until the context ends.
func (s *Server) Run(ctx context.Context) {
	defer func() {
		for k := range s.open {
			s.close(k)
		}
	}()
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-retry.C:
		}
		if next := s.follow(ctx, time.Now()); next.IsZero() {
			retry.Stop()
		} else {
			retry.Reset(time.Until(next))
		}
	}
}

// follow brings the listeners in line with what is wanted: those that go first, since a port may move between Services. It returns when
// to try again, zero if nothing failed.
func (s *Server) follow(ctx context.Context, now time.Time) (next time.Time) {
	want := s.sockets()
	for k := range s.open {
		if _, still := want[k]; !still {
			s.close(k)
		}
	}
	notes := map[intent.Key][]string{}
	for k := range want {
		l := s.open[k]
		if l == nil || l.failure == nil && l.hasEnded() || l.failure != nil && !now.Before(l.retry) {
			l = s.listen(ctx, k, l, now)
		}
		if l.failure == nil {
			continue
		}
		if next.IsZero() || l.retry.Before(next) {
			next = l.retry
		}
		notes[k.service] = append(notes[k.service], fmt.Sprintf("health-check node port %d can't be opened at %s, so balancers take this node for unhealthy: %v", k.at.Port(), k.at, l.failure))
	}
	for _, list := range notes {
		slices.Sort(list)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notes = notes
	return next
}

func (l *listener) hasEnded() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

func (s *Server) sockets() map[socket]struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[socket]struct{}{}
	for _, check := range slices.AppendSeq(slices.Clone(s.planned), maps.Values(s.wanted)) {
		key := check.Service
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

// listen opens a socket; before is what it was, nil for nothing.
func (s *Server) listen(ctx context.Context, k socket, before *listener, now time.Time) *listener {
	// By family, so that IPv6's wildcard does not take IPv4 as well.
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp"+strconv.Itoa(int(k.family)), k.at.String())
	if err != nil {
		entry := &listener{failure: err, wait: minRetry}
		if op := (*net.OpError)(nil); errors.As(err, &op) {
			entry.failure = op.Err // it names the address, too
		}
		if before != nil && before.failure != nil {
			entry.wait = min(2*before.wait, maxRetry)
		} else {
			s.log.Error("a health-check node port can't be opened; trying again", "service", k.service.String(), "address", k.at.String(), "err", err)
		}
		entry.retry = now.Add(entry.wait)
		s.open[k] = entry
		return entry
	}
	if before != nil {
		s.log.Info("a health-check node port is open now", "service", k.service.String(), "address", k.at.String())
	}
	entry := &listener{
		socket: l,
		http:   &http.Server{Handler: s.handler(k), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute},
		ended:  make(chan struct{}),
	}
	s.open[k] = entry
	go func() {
		err := entry.http.Serve(l)
		close(entry.ended)
		if !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("a health-check node port has ended; opening it again", "service", k.service.String(), "address", k.at.String(), "err", err)
			s.wakeUp()
		}
	}()
	return entry
}

func (s *Server) close(k socket) {
	if l := s.open[k]; l.failure == nil {
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
		check, refused := s.wanted[k.service], s.refused[k.service]
		s.mu.Unlock()
		there := check != nil && check.Port == k.at.Port()
		a := answer{ServiceProxyHealthy: there && !refused && s.healthy()}
		a.Service.Namespace, a.Service.Name = k.service.Namespace, k.service.Name
		if there {
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
