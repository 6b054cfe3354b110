package bgp

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"
)

// Options are a Speaker's.
type Options struct {
	// Node is this machine's name.
	Node string
	// KeepOnStop leaves routes with peers that agreed to keep them for a while, for a process that is about to follow. Otherwise they are
	// withdrawn when the speaker stops.
	KeepOnStop bool
	// NextHops finds a peer's next hops; nil: FindNextHops.
	NextHops func(Peer) (NextHops, error)
	Log      *slog.Logger
}

// Speaker announces routes to peers.
type Speaker struct {
	Options
	dirty chan struct{}
	// lookAgain is how often next hops are looked for, and failures tried again: addresses of interfaces come and go. After patience a session that
	// does not come up is reported.
	lookAgain, patience time.Duration

	mu     sync.Mutex
	peers  []Peer
	routes []Route
	set    bool
	status map[netip.Addr]*session // of the peers that are wanted
	failed uint64

	// The rest is Run's alone.
	server  *server
	running map[netip.Addr]Peer     // as the server has them
	hops    map[netip.Addr]NextHops // of these, too
	sent    map[netip.Addr]Route
}

// neighbour is a peer that this machine has a way to.
type neighbour struct {
	Peer
	hops NextHops
}

// session is what is known of a peer's.
type session struct {
	up      bool
	since   time.Time // of the state, or of the configuration
	flaps   uint64
	lost    bool   // it was up, and must be made anew
	reason  string // why it is perhaps not up
	warned  bool   // that it does not come up
	missing string // next hops that are missing, as last logged
	routes  int
}

// Status is what is known of one peer's session.
type Status struct {
	Peer   netip.Addr
	Up     bool
	Flaps  uint64
	Routes int // that are announced to it while it is up
}

// New makes a speaker.
func New(o Options) *Speaker {
	if o.NextHops == nil {
		o.NextHops = FindNextHops
	}
	return &Speaker{
		Options: o, dirty: make(chan struct{}, 1), lookAgain: 5 * time.Second, patience: 15 * time.Second, status: map[netip.Addr]*session{}, running: map[netip.Addr]Peer{}, sent: map[netip.Addr]Route{},
	}
}

// Set says whom to announce what. It never blocks.
func (s *Speaker) Set(peers []Peer, routes []Route) {
	s.mu.Lock()
	s.peers, s.routes, s.set = peers, routes, true
	s.mu.Unlock()
	s.wake()
}

func (s *Speaker) wake() {
	select {
	case s.dirty <- struct{}{}:
	default:
	}
}

// Status are the peers' sessions, and how often something could not be done and was tried again.
func (s *Speaker) Status() (out []Status, failures uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for a, n := range s.status {
		st := Status{Peer: a, Up: n.up, Flaps: n.flaps}
		if n.up {
			st.Routes = n.routes
		}
		out = append(out, st)
	}
	slices.SortFunc(out, func(x, y Status) int { return x.Peer.Compare(y.Peer) })
	return out, s.failed
}

// Run announces until the context ends; then routes are withdrawn, or left for the process that follows.
func (s *Speaker) Run(ctx context.Context) {
	ticker := time.NewTicker(s.lookAgain)
	defer ticker.Stop()
	defer func() { s.stop(s.KeepOnStop) }()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.dirty:
		case <-ticker.C:
		}
		if err := s.sync(); err != nil {
			s.mu.Lock()
			s.failed++
			s.mu.Unlock()
			s.Log.Error("BGP: sync failed, retrying", "err", err, "in", s.lookAgain)
		}
	}
}

// stop ends all sessions; keep: peers that agreed to that keep the routes.
func (s *Speaker) stop(keep bool) {
	if s.server == nil {
		return
	}
	s.server.stop(keep)
	if keep {
		s.Log.Info("BGP stopped, routes are left with peers that keep them for a restart")
	} else {
		s.Log.Info("BGP stopped, routes are withdrawn", "routes", len(s.sent))
	}
	s.server, s.hops = nil, nil
	clear(s.running)
	clear(s.sent)
}

// sync brings the server to what is wanted.
func (s *Speaker) sync() error {
	s.mu.Lock()
	peers, routes, set := s.peers, s.routes, s.set
	s.mu.Unlock()
	if !set {
		return nil
	}
	want := s.neighbours(peers)
	if len(want) == 0 {
		s.stop(false) // no process follows that would announce to them
		return nil
	}
	if s.server == nil {
		first := want[slices.SortedFunc(maps.Keys(want), netip.Addr.Compare)[0]]
		server, err := start(first.LocalAS, s.routerID(want), s.Log, s.changed, s.heard)
		if err != nil {
			return err
		}
		s.server = server
	}
	if err := s.syncHops(want); err != nil {
		return err
	}
	// Routes first: a peer that is new gets all of them at once, and with them the end of what it kept from an earlier process.
	return errors.Join(s.syncRoutes(routes, want), s.syncPeers(want))
}

// neighbours are the peers with their next hops. One without any waits.
func (s *Speaker) neighbours(peers []Peer) map[netip.Addr]neighbour {
	out, wanted := map[netip.Addr]neighbour{}, map[netip.Addr]bool{}
	for _, p := range peers {
		wanted[p.Address] = true
		hops, err := s.NextHops(p)
		missing := ""
		switch {
		case err != nil:
			missing = err.Error()
		case !hops.V4.IsValid():
			missing = "the interface to the peer has no IPv4 address, routes of that family are not announced"
		case !hops.V6.IsValid():
			missing = "the interface to the peer has no global IPv6 address, routes of that family are not announced"
		}
		s.mu.Lock()
		n := s.status[p.Address]
		if n == nil {
			n = &session{since: time.Now()}
			s.status[p.Address] = n
		}
		news := missing != n.missing
		n.missing = missing
		s.mu.Unlock()
		if news && missing != "" {
			s.Log.Warn("BGP: next hop missing", "peer", p.Address, "why", missing)
		}
		if before, had := s.hops[p.Address]; err != nil && had {
			hops = before // a route that is gone for a moment ends no session
		}
		if hops != (NextHops{}) {
			out[p.Address] = neighbour{p, hops}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.status, func(a netip.Addr, _ *session) bool { return !wanted[a] })
	return out
}

// routerID names this machine among routers: the address of a session, or else something that no other node has.
func (s *Speaker) routerID(peers map[netip.Addr]neighbour) netip.Addr {
	for _, a := range slices.SortedFunc(maps.Keys(peers), netip.Addr.Compare) {
		if a.Is4() {
			return peers[a].hops.V4
		}
	}
	sum := sha256.Sum256([]byte(s.Node))
	return netip.AddrFrom4([4]byte{sum[0]%223 + 1, sum[1], sum[2], sum[3]})
}

// syncHops sets the next hops of all peers. A session goes on if they change: the peer is sent its routes again.
func (s *Speaker) syncHops(peers map[netip.Addr]neighbour) error {
	hops := map[netip.Addr]NextHops{}
	for a, n := range peers {
		hops[a] = n.hops
	}
	if maps.Equal(hops, s.hops) {
		return nil
	}
	if err := s.server.nextHops(hops); err != nil {
		return err
	}
	var errs []error
	for a, now := range hops {
		if before, had := s.hops[a]; had && before != now {
			s.Log.Info("BGP: next hops changed", "peer", a, "nextHop4", now.V4, "nextHop6", now.V6)
			errs = append(errs, s.server.resend(a))
		}
	}
	s.hops = hops
	return errors.Join(errs...)
}

func (s *Speaker) syncRoutes(routes []Route, peers map[netip.Addr]neighbour) error {
	want := map[netip.Addr]Route{}
	for _, r := range routes {
		want[r.Addr] = r
	}
	var errs []error
	for a := range s.sent {
		if _, ok := want[a]; ok {
			continue
		}
		if err := s.server.withdraw(a); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(s.sent, a)
		s.Log.Info("withdrawing an address", "address", a, "by", "bgp")
	}
	for _, r := range routes {
		if before, ok := s.sent[r.Addr]; ok && reflect.DeepEqual(before, r) {
			continue
		}
		if err := s.server.announce(r); err != nil {
			errs = append(errs, err)
			continue
		}
		s.sent[r.Addr] = r
		s.Log.Info("announcing an address", "address", r.Addr, "by", "bgp")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for p, n := range peers {
		count := 0
		for a := range s.sent {
			if n.hops.of(a).IsValid() {
				count++
			}
		}
		if st := s.status[p]; st != nil {
			st.routes = count
		}
	}
	return errors.Join(errs...)
}

// syncPeers ends the sessions of peers that are not wanted any more or changed, and begins those that are new. One that was lost is begun anew: the
// peer may have kept its routes, and only a session that says that it was restarted lets it keep them.
func (s *Speaker) syncPeers(want map[netip.Addr]neighbour) error {
	lost := map[netip.Addr]bool{}
	s.mu.Lock()
	for a, n := range s.status {
		lost[a] = n.lost
		n.lost = false
	}
	s.mu.Unlock()
	var errs []error
	for a, have := range s.running {
		now, wanted := want[a]
		if wanted && reflect.DeepEqual(have, now.Peer) && !lost[a] {
			continue
		}
		if err := s.server.remove(a); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(s.running, a)
		switch {
		case !wanted:
			s.Log.Info("BGP: peer removed", "peer", a)
		case !lost[a]:
			s.Log.Info("BGP: peer changed, its session is restarted", "peer", a)
			s.reset(a)
		}
	}
	for a, n := range want {
		if _, ok := s.running[a]; ok {
			continue
		}
		if err := s.server.add(n.Peer); err != nil {
			errs = append(errs, err)
			continue
		}
		s.running[a] = n.Peer
		if !lost[a] {
			s.Log.Info("BGP: peer added", "peer", a, "as", n.AS, "localAS", n.LocalAS, "nextHop4", n.hops.V4, "nextHop6", n.hops.V6)
		}
	}
	s.overdue()
	return errors.Join(errs...)
}

func (s *Speaker) reset(a netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.status[a]; n != nil {
		n.up, n.since, n.warned, n.reason = false, time.Now(), false, ""
	}
}

// overdue reports sessions that do not come up, once.
func (s *Speaker) overdue() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for a, n := range s.status {
		if !n.up && !n.warned && time.Since(n.since) > s.patience {
			n.warned = true
			s.Log.Warn("BGP: session does not come up, retrying", "peer", a, "for", time.Since(n.since).Round(time.Second),
				"why", cmp.Or(n.reason, "the peer does not answer: it must listen, and expect this address"))
		}
	}
}

// heard takes in what may be why a session is not up.
func (s *Speaker) heard(peer netip.Addr, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.status[peer]; n != nil {
		n.reason = what
	}
}

// changed takes in that a session came up or was lost.
func (s *Speaker) changed(peer netip.Addr, up bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.status[peer]
	if n == nil || n.up == up {
		return
	}
	n.up, n.since, n.warned, n.lost = up, time.Now(), false, !up
	if up {
		s.Log.Info("BGP: session up", "peer", peer)
	} else {
		n.flaps++
		s.Log.Warn("BGP: session lost, reconnecting", "peer", peer, "why", cmp.Or(n.reason, "the connection was closed"))
		s.wake()
	}
	n.reason = ""
}
