package bgp

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

const limit = 60 * time.Second

func (r *router) has(want ...string) {
	r.t.Helper()
	slices.Sort(want)
	eventually(r.t, fmt.Sprintf("the router %s has %q", r.at, want), func() string {
		if got := r.routes(); !slices.Equal(got, want) {
			return fmt.Sprintf("%q", got)
		}
		return ""
	})
}

func eventually(t *testing.T, what string, problem func() string) {
	t.Helper()
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		p := problem()
		if p == "" {
			return
		}
		if time.Since(begin) > limit {
			t.Fatalf("not after %v: %s; %s", limit, what, p)
		}
	}
}

// logged keeps what is logged.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// speak runs a speaker until stop is called.
func speak(t *testing.T, keep bool, hops ...func() NextHops) (s *Speaker, log *logged, stop func()) {
	t.Helper()
	hops = append(hops, func() NextHops {
		return NextHops{V4: netip.MustParseAddr("127.0.0.1"), V6: netip.MustParseAddr("2001:db8::11")}
	})
	log = &logged{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s", log)
		}
	})
	s = New(Options{Node: "n1", KeepOnStop: keep, Log: slog.New(slog.NewTextHandler(log, nil)), NextHops: func(Peer) (NextHops, error) {
		return hops[0](), nil
	}})
	s.lookAgain, s.patience = 100*time.Millisecond, 3*time.Second
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.Run(ctx) })
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return s, log, stop
}

func first(all []Status, _ uint64) Status { return all[0] }

func route(text string) Route { return Route{Addr: netip.MustParseAddr(text)} }

const (
	plain4 = "192.0.2.10/32 by 64512 via 127.0.0.1"
	plain6 = "2001:db8:1::10/128 by 64512 via 2001:db8::11"
)

// TestAnnounce: routes of both families go over one session, with what their pools say; a change is sent, a peer more gets all, and
// when the speaker stops, routes are gone. What a router sends is not passed on to another.
func TestAnnounce(t *testing.T) {
	one := newRouter(t, "127.0.0.2", "")
	s, _, stop := speak(t, false)
	a, b := route("192.0.2.10"), route("2001:db8:1::10")
	s.Set([]Peer{one.peer()}, []Route{a, b})
	one.has(plain4, plain6)
	if status, _ := s.Status(); len(status) != 1 || !status[0].Up || status[0].Routes != 2 || status[0].Flaps != 0 {
		t.Errorf("status %+v", status)
	}
	a.Communities, a.LargeCommunities = []uint32{64512<<16 | 7}, [][3]uint32{{64512, 1, 2}}
	s.Set([]Peer{one.peer()}, []Route{a})
	one.has(plain4 + " {Communities: 64512:7} {LargeCommunity: [ 64512:1:2]}")
	a.Metric, a.Communities, a.LargeCommunities = 7, nil, nil
	s.Set([]Peer{one.peer()}, []Route{a})
	one.has(plain4 + " metric 7")
	one.ask("add", "198.51.100.1")
	two := newRouter(t, "127.0.0.3", "")
	s.Set([]Peer{one.peer(), two.peer()}, []Route{route("192.0.2.10"), b})
	two.has(plain4, plain6)
	s.Set([]Peer{two.peer()}, []Route{b})
	one.has("198.51.100.1/32 via 192.0.2.1")
	two.has(plain6)
	stop()
	two.has()
}

// lostOnly waits until the router has lost a route, and checks that it was the only one and that the one session since let it keep routes. These
// events come later than what they are about, but in order.
func (r *router) lostOnly() {
	r.t.Helper()
	eventually(r.t, "a route that was withdrawn, and a session", func() string {
		if seen := r.ask("seen", ""); seen.Lost == 0 || len(seen.Promises) == 0 {
			return fmt.Sprintf("%+v", seen)
		}
		return ""
	})
	if seen := r.ask("seen", ""); seen.Lost != 1 || !slices.Equal(seen.Promises, []bool{true}) {
		r.t.Errorf("the router has lost %d routes, want 1; sessions that let it keep routes: %v", seen.Lost, seen.Promises)
	}
}

// TestRestart: a process that leaves its routes finds them with the peer, which at no time lost one; what the next process does not announce
// any more goes.
func TestRestart(t *testing.T) {
	r := newRouter(t, "127.0.0.2", "")
	s, _, stop := speak(t, true)
	s.Set([]Peer{r.peer()}, []Route{route("192.0.2.10"), route("192.0.2.11"), route("2001:db8:1::10")})
	r.has(plain4, strings.Replace(plain4, ".10/", ".11/", 1), plain6)
	r.ask("watch", "")
	stop()
	r.has(plain4+" stale", strings.Replace(plain4, ".10/", ".11/", 1)+" stale", plain6+" stale")
	next, _, _ := speak(t, true)
	next.Set([]Peer{r.peer()}, []Route{route("192.0.2.10"), route("2001:db8:1::10")})
	r.has(plain4, plain6)
	r.lostOnly()
}

// TestLastPeerRemoved: a peer that is not one any more loses all routes at once, also if it was the last one, and if they were to be kept for a restart.
func TestLastPeerRemoved(t *testing.T) {
	r := newRouter(t, "127.0.0.2", "")
	s, _, _ := speak(t, true)
	s.Set([]Peer{r.peer()}, []Route{route("192.0.2.10")})
	r.has(plain4)
	s.Set(nil, []Route{route("192.0.2.10")})
	r.has()
}

// TestLost: a session that breaks is begun anew, and the router keeps its routes meanwhile.
func TestLost(t *testing.T) {
	r := newRouter(t, "127.0.0.2", "")
	relay := newRelay(t, r.at)
	p := r.peer()
	p.Address, p.Port = relay.at.Addr(), relay.at.Port()
	s, _, _ := speak(t, false)
	s.Set([]Peer{p}, []Route{route("192.0.2.10")})
	r.has(plain4)
	r.ask("watch", "")
	relay.cut()
	eventually(t, "the session is back", func() string {
		if status, _ := s.Status(); len(status) != 1 || status[0].Flaps != 1 || !status[0].Up {
			return fmt.Sprintf("%+v", status)
		}
		return ""
	})
	r.has(plain4)
	s.Set([]Peer{p}, []Route{route("192.0.2.10"), route("192.0.2.11")})
	r.has(plain4, strings.Replace(plain4, ".10/", ".11/", 1))
	s.Set([]Peer{p}, []Route{route("192.0.2.10")})
	r.lostOnly()
}

// relay passes connections on, and can cut them.
type relay struct {
	at    netip.AddrPort
	mu    sync.Mutex
	conns []net.Conn
}

func newRelay(t *testing.T, to netip.AddrPort) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.4:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	r := &relay{at: netip.MustParseAddrPort(l.Addr().String())}
	t.Cleanup(r.cut)
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}}).Dial("tcp", to.String())
			if err != nil {
				in.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, in, out)
			r.mu.Unlock()
			for a, b := range map[net.Conn]net.Conn{in: out, out: in} {
				go func() {
					_, _ = io.Copy(a, b)
					a.Close()
				}()
			}
		}
	}()
	return r
}

func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		c.Close()
	}
	r.conns = nil
}

// TestPassword: a session is signed, a wrong password has none come up, and none is logged.
func TestPassword(t *testing.T) {
	const right, wrong = "correct horse", "battery staple"
	r := newRouter(t, "127.0.0.2", right)
	s, log, _ := speak(t, false)
	p := r.peer()
	p.Password = wrong
	s.Set([]Peer{p}, []Route{route("192.0.2.10")})
	eventually(t, "the session is reported", func() string {
		if text := log.String(); !strings.Contains(text, "does not come up") {
			return "the log: " + text
		}
		return ""
	})
	p.Password = right
	s.Set([]Peer{p}, []Route{route("192.0.2.10")})
	r.has(plain4)
	if text := log.String() + fmt.Sprintf("%v %+v %#v", p, p, p); strings.Contains(text, right) || strings.Contains(text, wrong) {
		t.Errorf("the password is shown:\n%s", text)
	}
}

// TestWrongAS: a peer that is not what it should be is named in one warning.
func TestWrongAS(t *testing.T) {
	r := newRouter(t, "127.0.0.2", "")
	s, log, _ := speak(t, false)
	p := r.peer()
	p.AS = 64999
	s.Set([]Peer{p}, []Route{route("192.0.2.10")})
	eventually(t, "a warning", func() string {
		if text := log.String(); !strings.Contains(text, "does not come up") || !strings.Contains(text, "bad peer as") {
			return "the log: " + text
		}
		return ""
	})
	if status, _ := s.Status(); status[0].Up {
		t.Error("the session is up")
	}
}

// TestNextHops: routes of a family that the machine has no address of are not announced, the others are; when it has one, or another one, the session
// goes on.
func TestNextHops(t *testing.T) {
	r := newRouter(t, "127.0.0.2", "")
	hops := NextHops{V4: netip.MustParseAddr("127.0.0.1")}
	var mu sync.Mutex
	s, log, _ := speak(t, false, func() NextHops {
		mu.Lock()
		defer mu.Unlock()
		return hops
	})
	s.Set([]Peer{r.peer()}, []Route{route("192.0.2.10"), route("2001:db8:1::10")})
	r.has(plain4)
	if status, _ := s.Status(); status[0].Routes != 1 || !strings.Contains(log.String(), "no global IPv6 address") {
		t.Errorf("%+v\n%s", status, log)
	}
	r.ask("watch", "")
	mu.Lock()
	hops.V4, hops.V6 = netip.MustParseAddr("127.0.0.9"), netip.MustParseAddr("2001:db8::11")
	mu.Unlock()
	r.has(strings.Replace(plain4, "127.0.0.1", "127.0.0.9", 1), plain6)
	mu.Lock()
	hops.V4 = netip.Addr{}
	mu.Unlock()
	r.has(plain6)
	if seen, status := r.ask("seen", ""), first(s.Status()); len(seen.Promises) != 0 || status.Flaps != 0 {
		t.Errorf("the session did not go on: %+v %+v", seen, status)
	}
}

// TestLocalPreference: peers of the same AS get it, and a path without any AS.
func TestLocalPreference(t *testing.T) {
	r := newRouter(t, "127.0.0.2", "", routerAS)
	s, _, _ := speak(t, false)
	p := r.peer()
	p.LocalAS = routerAS
	preference := uint32(200)
	a := route("192.0.2.10")
	a.LocalPreference = &preference
	s.Set([]Peer{p}, []Route{a})
	r.has("192.0.2.10/32 by  via 127.0.0.1 preference 200")
}
