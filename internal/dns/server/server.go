// Package server is the DNS server: sockets, protocols, limits and counters around package zone, which answers for the
// cluster, and package forward, which resolves other names.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"portal/internal/dns/forward"
	"portal/internal/dns/hosts"
	"portal/internal/dns/wire"
	"portal/internal/dns/zone"
	"portal/internal/intent"
)

// Options configure a Server.
type Options struct {
	Listen []netip.AddrPort // UDP and TCP
	// Device is the only network interface that Listen accepts queries from; empty: any.
	Device string
	// TLS is for DNS over TLS and over HTTPS, on the addresses below.
	TLS         *tls.Config
	ListenTLS   []netip.AddrPort
	ListenHTTPS []netip.AddrPort

	Zone zone.Options
	// Fallthrough are zones whose missing names are forwarded.
	Fallthrough []string
	// Forward resolves other names; nil: they are refused.
	Forward *forward.Forwarder
	// Stubs are zones that are forwarded elsewhere, or refused if nil. A name belongs to the longest zone that contains it,
	// the cluster's zones included; of two alike the cluster's.
	Stubs map[string]*forward.Forwarder
	// Hosts answer first, for names in their zones that are in no longer stub zone.
	Hosts []*hosts.Hosts
	// Autopath resolves a Pod's search path on the server. It needs verified pods.
	Autopath bool
	// Search are further domains of the path, after the cluster's.
	Search []string

	// AllowRecursion are the networks for whose clients other names are resolved; nil: PrivateNetworks, and what
	// AllowClusterNetworks adds.
	AllowRecursion []netip.Prefix
	// AllowPrivate adds PrivateNetworks and the cluster's to AllowRecursion.
	AllowPrivate  bool
	AllowTransfer []netip.Prefix // none: nobody
	RateLimit     int            // identical responses a second to a network; 0: no limit
	MaxUDPSize    int            // of responses; 0: DefaultUDPSize, and to clients on loopback what they accept
	MaxTCPConns   int            // on each address, HTTPS included
	// MaxWaiting bounds how many queries wait for upstreams.
	MaxWaiting int
	// FileShare: of so many file descriptors of the process one is for this server; 0: all are.
	FileShare int
	Sockets   int // UDP sockets on each address; 0: one for each processor, and at least minSockets
	QueryLog  io.Writer
	Log       *slog.Logger
}

// DefaultUDPSize is the longest response over UDP: it passes nearly every network unfragmented, and leaves little to gain for
// those who forge the source address of queries.
const DefaultUDPSize = wire.Advertised

// minSockets is more than small machines have processors. The kernel assigns a client's port to a socket, so one that sends more
// than can be answered fills the queue of one socket, and only those of an eighth of the others' queries wait or get lost there.
const minSockets = 8

// Server serves DNS.
type Server struct {
	opts         Options
	cluster      *intent.Cluster
	zones        *zone.Zones
	forward      *forward.Forwarder
	metrics      *metrics
	limiter      *limiter
	queries      *queryLog
	fallthroughs []string // wire form
	stubs        []stub
	recursive    bool // there is a forwarder
	access       recursionAccess
	transfers    networks
	waiting      *waitlist
	spare        chan *worker // to be used again
	resolving    sync.WaitGroup
	search       []string

	udp     []*udpSocket
	packets packetStack
	streams []*stream
	https   []*httpsListener
}

// New opens the sockets. Run serves them.
func New(cluster *intent.Cluster, o Options) (*Server, error) {
	o.defaults()
	var s *Server
	o.Zone.Elsewhere = func(q *wire.Query, exists bool) bool {
		_, listed := s.fromHosts(make([]byte, 0, outSize), q, outSize)
		return listed || s.stubbed(q) || !exists && s.fallsThrough(q)
	}
	zones, err := zone.New(cluster, o.Zone)
	if err != nil {
		return nil, err
	}
	s = &Server{
		opts: o, cluster: cluster, zones: zones, forward: o.Forward, limiter: newLimiter(o.RateLimit),
		queries: newQueryLog(o.QueryLog), waiting: newWaitlist(o.MaxWaiting), spare: make(chan *worker, 64),
		access: newRecursionAccess(o.AllowRecursion, o.AllowPrivate), transfers: newNetworks(o.AllowTransfer),
	}
	var names []string
	for i, n := range zones.Origins() {
		if i >= maxZones-1 {
			return nil, fmt.Errorf("too many zones: at most %d", maxZones-3)
		}
		names = append(names, wire.UnpackName([]byte(n)))
	}
	if s.fallthroughs, err = packAll(o.Fallthrough); err != nil {
		return nil, err
	}
	if s.search, err = packAll(o.Search); err != nil {
		return nil, err
	}
	if s.stubs, err = newStubs(o.Stubs); err != nil {
		return nil, err
	}
	s.recursive = len(s.forwarders()) > 0
	label := ""
	if len(o.Listen) > 0 {
		label = o.Listen[0].String()
	}
	s.metrics = newMetrics(label, names)
	if err := s.listen(); err != nil {
		s.closeAll()
		return nil, err
	}
	return s, nil
}

func packAll(names []string) ([]string, error) {
	var out []string
	for _, n := range names {
		w, err := wire.PackName(n)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", n, err)
		}
		out = append(out, w)
	}
	return out, nil
}

func (o *Options) defaults() {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.MaxTCPConns, 2000)
	set(&o.MaxWaiting, 2000)
	set(&o.Sockets, max(minSockets, runtime.GOMAXPROCS(0)))
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	var files unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil {
		o.fitDescriptors(int(min(files.Cur, 1<<30)) / max(1, o.FileShare))
	}
}

// fitDescriptors lowers limits so that connections take at most half of the file descriptors and queries to upstreams a
// quarter: the rest is for everything else.
func (o *Options) fitDescriptors(files int) {
	conns := max(1, files/2/max(1, len(o.Listen)+len(o.ListenTLS)+len(o.ListenHTTPS)))
	waiting := max(1, files/4)
	if conns < o.MaxTCPConns || waiting < o.MaxWaiting {
		o.MaxTCPConns, o.MaxWaiting = min(conns, o.MaxTCPConns), min(waiting, o.MaxWaiting)
		o.Log.Info("limits lowered to fit the limit of open files", "files", files, "connections", o.MaxTCPConns, "waitingQueries", o.MaxWaiting)
	}
}

func (s *Server) listen() error {
	for _, a := range s.opts.Listen {
		err := s.listenBoth(a)
		for try := 0; err != nil && a.Port() == 0 && try < 10; try++ {
			err = s.listenBoth(a) // the port that was free for TCP may be taken for UDP
		}
		if err != nil {
			return err
		}
	}
	for _, a := range s.opts.ListenTLS {
		l, err := listen(net.ListenConfig{}, "tls", a)
		if err != nil {
			return err
		}
		c := s.opts.TLS.Clone()
		c.NextProtos = []string{"dot"}
		s.streams = append(s.streams, s.newStream(tls.NewListener(s.limited(l), c), protoTLS))
	}
	for _, a := range s.opts.ListenHTTPS {
		l, err := listen(net.ListenConfig{}, "https", a)
		if err != nil {
			return err
		}
		s.https = append(s.https, s.newHTTPS(s.limited(l)))
	}
	return nil
}

// listenBoth opens an address for TCP and UDP, in this order: UDP sockets share their port with those of another server,
// which would lose queries to them; a second TCP listener is an error.
func (s *Server) listenBoth(a netip.AddrPort) error {
	l, err := s.listenTCP(a)
	if err != nil {
		return err
	}
	a = netip.AddrPortFrom(a.Addr(), uint16(l.Addr().(*net.TCPAddr).Port))
	sockets, err := s.listenUDP(a, s.opts.Sockets)
	if err != nil {
		l.Close()
		return err
	}
	s.udp = append(s.udp, sockets...)
	s.streams = append(s.streams, s.newStream(s.limited(l), protoTCP))
	return nil
}

func (s *Server) limited(l net.Listener) net.Listener {
	return limitConns(l, s.opts.MaxTCPConns, s.metrics.refusedConns, s.opts.Log)
}

func (s *Server) listenTCP(a netip.AddrPort) (net.Listener, error) {
	var config net.ListenConfig
	if s.opts.Device != "" {
		config.Control = func(_, _ string, c syscall.RawConn) (err error) {
			e := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), s.opts.Device) })
			return errors.Join(e, err)
		}
	}
	return listen(config, "tcp", a)
}

func listen(config net.ListenConfig, what string, a netip.AddrPort) (net.Listener, error) {
	l, err := config.Listen(context.Background(), "tcp", a.String())
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		err = op.Err // it names the address, too
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s %s: %w", what, a, err)
	}
	return l, nil
}

func (s *Server) closeAll() {
	for _, u := range s.udp {
		u.close()
	}
	for _, t := range s.streams {
		t.l.Close()
	}
	for _, h := range s.https {
		h.l.Close()
	}
}

// Addrs are the addresses of UDP and TCP.
func (s *Server) Addrs() []netip.AddrPort {
	var out []netip.AddrPort
	for _, t := range s.streams {
		if t.proto == protoTCP {
			a, _ := netip.ParseAddrPort(t.l.Addr().String())
			out = append(out, a)
		}
	}
	return out
}

// Ready reports whether everything has been listed once.
func (s *Server) Ready() bool { return s.zones.Ready() }

// Register registers the server's metrics.
func (s *Server) Register(r prometheus.Registerer) error {
	m := s.metrics
	all := []prometheus.Collector{s, m.refusedConns, m.evicted, m.refusedRecursion, m.latency, m.apiUp, m.apiSince}
	seen := map[*forward.Metrics]bool{}
	for _, f := range s.forwarders() {
		if !seen[f.Metrics()] {
			seen[f.Metrics()] = true
			all = append(all, f.Metrics())
		}
	}
	var errs []error
	for _, c := range all {
		errs = append(errs, r.Register(c))
	}
	return errors.Join(errs...)
}

// APIStatus records in the metrics whether a resource is being watched.
func (s *Server) APIStatus(resource string, connected bool, since time.Time) {
	v := 0.0
	if connected {
		v = 1
	}
	s.metrics.apiUp.WithLabelValues(resource).Set(v)
	s.metrics.apiSince.WithLabelValues(resource).Set(float64(since.UnixMilli()) / 1e3)
}

// Run serves until the context ends or a socket fails, and returns when everything it started has ended.
func (s *Server) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	start := func(f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				cancel(err)
			}
		})
	}
	start(s.follow)
	for _, u := range s.udp {
		start(u.serve)
	}
	for _, t := range s.streams {
		start(t.serve)
	}
	for _, h := range s.https {
		start(h.serve)
	}
	for _, h := range s.opts.Hosts {
		start(func(ctx context.Context) error { h.Run(ctx); return nil })
	}
	for _, f := range s.forwarders() {
		start(func(ctx context.Context) error { f.Run(ctx); return nil })
		start(func(ctx context.Context) error { f.FindLoops(ctx); return nil })
	}
	if s.queries != nil {
		start(func(ctx context.Context) error {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			defer s.queries.flush()
			for {
				select {
				case <-ctx.Done():
					return nil
				case <-tick.C:
					s.queries.flush()
				}
			}
		})
	}
	<-ctx.Done()
	s.closeStreams()
	wg.Wait()
	s.resolving.Wait()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (s *Server) closeStreams() {
	for _, t := range s.streams {
		t.l.Close()
	}
}

// follow updates the records when intent changes.
func (s *Server) follow(ctx context.Context) error {
	feed := s.cluster.Follow()
	defer feed.Close()
	for {
		d, err := feed.Next(ctx)
		if err != nil {
			return nil
		}
		s.zones.Update(d)
		s.observe(d, time.Now())
	}
}

// observe records how long changes of endpoints took to get here.
func (s *Server) observe(d *intent.Changes, now time.Time) {
	if !s.zones.Ready() {
		return
	}
	for k := range d.Services {
		e := s.cluster.Entry(k)
		if e == nil || e.Service == nil {
			continue
		}
		var newest time.Time
		for _, sl := range e.Slices {
			if sl.TriggerTime.After(newest) {
				newest = sl.TriggerTime
			}
		}
		if newest.IsZero() {
			continue
		}
		kind := "cluster_ip"
		if e.Service.Headless {
			kind = "headless_without_selector"
			if e.Service.HasSelector {
				kind = "headless_with_selector"
			}
		}
		s.metrics.latency.WithLabelValues(kind).Observe(now.Sub(newest).Seconds())
	}
}

// elsewhere reports whether a name that is missing in its zone is resolved in another way.
func (s *Server) elsewhere(q *wire.Query, from netip.Addr) bool {
	if s.opts.Autopath && s.searches(q, from) {
		return true
	}
	return s.fallsThrough(q) && s.mayRecurse(from)
}

// fallsThrough reports whether a name is forwarded if it is missing in its zone.
func (s *Server) fallsThrough(q *wire.Query) bool {
	return slices.ContainsFunc(s.fallthroughs, q.In) && s.forwarder(q) != nil
}
