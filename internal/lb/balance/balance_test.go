package balance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// clock is turned by hand.
type clock struct {
	sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.Lock()
	defer c.Unlock()
	return c.at
}

func (c *clock) turn(d time.Duration) {
	c.Lock()
	defer c.Unlock()
	c.at = c.at.Add(d)
}

func newClock() *clock { return &clock{at: time.Unix(1_000_000, 0)} }

func address(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80)
}

func client(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})
}

func endpoints(n int) []config.Endpoint {
	var out []config.Endpoint
	for i := range n {
		out = append(out, config.Endpoint{Address: address(i), Name: fmt.Sprintf("pod-%03d", i)})
	}
	return out
}

func poolOf(kind config.PolicyKind, n int) *config.Pool {
	return &config.Pool{Protocol: config.TCP, Policy: config.Policy{Kind: kind}, Endpoints: endpoints(n)}
}

func newPool(cfg *config.Pool, zone string, c *clock) *Pool {
	p := New(cfg, zone, c.now)
	source := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	p.random = func() uint64 {
		mu.Lock()
		defer mu.Unlock()
		return source.Uint64()
	}
	return p
}

func pick(t *testing.T, p *Pool, k Key, not ...*Endpoint) *Use {
	t.Helper()
	u, err := p.Pick(k, not)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// shares counts where n uses go that end at once.
func shares(t *testing.T, p *Pool, n int) map[netip.AddrPort]int {
	t.Helper()
	out := map[netip.AddrPort]int{}
	for i := range n {
		u := pick(t, p, Key{Client: client(i)})
		out[u.Endpoint.Address]++
		u.Done(OK)
	}
	return out
}

func TestShares(t *testing.T) {
	for _, c := range []struct {
		kind   config.PolicyKind
		within int // of the exact share of 6000 uses
	}{
		{"", 0}, {config.RoundRobin, 0}, {config.Random, 150}, {config.LeastConnections, 6000}, {config.LeastRequest, 150}, {config.ConsistentHash, 250},
	} {
		cfg := poolOf(c.kind, 3)
		cfg.Endpoints[1].Weight = 2
		cfg.Endpoints[2].Weight = 3
		got := shares(t, newPool(cfg, "", newClock()), 6000)
		for i := range 3 {
			want := 1000 * (i + 1)
			if n := got[address(i)]; n < want-c.within || n > want+c.within {
				t.Errorf("%q: endpoint %d of weight %d got %d of 6000", c.kind, i, i+1, n)
			}
		}
	}
}

// TestLeastConnections: with connections that stay open, their number follows the weights.
func TestLeastConnections(t *testing.T) {
	cfg := poolOf(config.LeastConnections, 3)
	cfg.Endpoints[2].Weight = 2
	p := newPool(cfg, "", newClock())
	for range 400 {
		pick(t, p, Key{})
	}
	for i, want := range []int64{100, 100, 200} {
		if got := p.Endpoints()[i].Active(); got != want {
			t.Errorf("endpoint %d has %d connections, want %d", i, got, want)
		}
	}
}

// TestLeastRequest: an endpoint that never finishes is avoided.
func TestLeastRequest(t *testing.T) {
	p := newPool(poolOf(config.LeastRequest, 10), "", newClock())
	slow := p.Endpoints()[0]
	stuck := 0
	for i := range 1000 {
		u := pick(t, p, Key{Client: client(i)})
		if u.Endpoint == slow {
			stuck++
			continue
		}
		u.Done(OK)
	}
	if stuck > 5 {
		t.Errorf("the endpoint that never finishes got %d of 1000", stuck)
	}
}

func TestSmooth(t *testing.T) {
	cfg := poolOf(config.RoundRobin, 3)
	cfg.Endpoints[0].Weight = 5
	p := newPool(cfg, "", newClock())
	got := ""
	for range 7 {
		got += pick(t, p, Key{}).Endpoint.Config().Name[6:]
	}
	if got != "0010200" {
		t.Errorf("turns %s, want the heavy one's spread: 0010200", got)
	}
}

func TestNegativeWeight(t *testing.T) {
	cfg := poolOf("", 2)
	cfg.Endpoints[0].Weight = -1
	p := newPool(cfg, "", newClock())
	p.SetHealth(address(1), false)
	if got := shares(t, p, 10); got[address(1)] != 10 {
		t.Errorf("shares %v: an endpoint without a share got one", got)
	}
}

// TestConsistentHash: without one of 20 endpoints only its own keys move, and they come back with it.
func TestConsistentHash(t *testing.T) {
	for _, weight := range []int{0, 3} {
		cfg := poolOf(config.ConsistentHash, 20)
		cfg.Endpoints[4].Weight = weight
		p := newPool(cfg, "", newClock())
		where := func() []*Endpoint {
			var out []*Endpoint
			for i := range 10_000 {
				u := pick(t, p, Key{Client: client(i)})
				out = append(out, u.Endpoint)
				u.Done(OK)
			}
			return out
		}
		before := where()
		p.SetHealth(address(7), false)
		moved := 0
		for i, e := range where() {
			switch {
			case e == before[i]:
			case before[i].Address != address(7):
				t.Fatalf("key %d moved from %v, which stayed", i, before[i].Address)
			default:
				moved++
			}
		}
		if moved < 300 || moved > 700 {
			t.Errorf("%d of 10000 keys moved, want about 1/20", moved)
		}
		p.SetHealth(address(7), true)
		for i, e := range where() {
			if e != before[i] {
				t.Fatalf("key %d did not come back", i)
			}
		}
	}
}

func TestHashOfHeader(t *testing.T) {
	cfg := poolOf(config.ConsistentHash, 20)
	cfg.Policy.Hash, cfg.Policy.Name = config.HashHeader, "X-User"
	p := newPool(cfg, "", newClock())
	first := pick(t, p, Key{Client: client(0), Hash: "anna"}).Endpoint
	for i := range 50 {
		if e := pick(t, p, Key{Client: client(i), Hash: "anna"}).Endpoint; e != first {
			t.Fatalf("the same value went to %v and %v", first.Address, e.Address)
		}
	}
}

// TestShard: keys go by number; that of an endpoint which can't be used is taken by the next.
func TestShard(t *testing.T) {
	p := newPool(poolOf(config.Shard, 5), "", newClock())
	all := p.Endpoints()
	p.SetHealth(address(2), false)
	for i := range 500 {
		want := all[hashAddr(client(i))%5]
		if want == all[2] {
			want = all[3]
		}
		if got := pick(t, p, Key{Client: client(i)}).Endpoint; got != want {
			t.Fatalf("key %d went to %v, want %v", i, got.Address, want.Address)
		}
	}
}

func TestLeader(t *testing.T) {
	cfg := poolOf(config.Leader, 3)
	p := newPool(cfg, "", newClock())
	at := func(what string, want int) {
		t.Helper()
		for range 3 {
			if got := pick(t, p, Key{}).Endpoint.Address; got != address(want) {
				t.Fatalf("%s: leader %v, want %v", what, got, address(want))
			}
		}
		if p.Leader().Address != address(want) {
			t.Fatalf("%s: Leader says %v", what, p.Leader().Address)
		}
	}
	at("at first", 0)
	p.SetHealth(address(0), false)
	at("the first is lost", 1)
	p.SetHealth(address(0), true)
	at("it comes back", 1)
	if u := pick(t, p, Key{}, p.Endpoints()[1]); u.Endpoint.Address != address(2) {
		t.Fatalf("after a failure %v", u.Endpoint.Address)
	}
	at("the second failed", 2)
	p.Update(&config.Pool{Protocol: config.TCP, Policy: cfg.Policy, Endpoints: cfg.Endpoints[:2]}, "")
	at("the third left", 0)
	p.SetLeader(address(1))
	at("taken over", 1)
}

// TestLeaderLimit: another endpoint does not help the leader out.
func TestLeaderLimit(t *testing.T) {
	cfg := poolOf(config.Leader, 3)
	cfg.EndpointConnections = 1
	p := newPool(cfg, "", newClock())
	pick(t, p, Key{})
	if _, err := p.Pick(Key{}, nil); !errors.Is(err, ErrBusy) {
		t.Fatalf("error %v, want ErrBusy", err)
	}
}

func TestAffinity(t *testing.T) {
	cfg := poolOf(config.RoundRobin, 5)
	cfg.Affinity = time.Minute
	c := newClock()
	p := newPool(cfg, "", c)
	first := pick(t, p, Key{Client: client(1)}).Endpoint
	for range 5 {
		c.turn(59 * time.Second)
		if e := pick(t, p, Key{Client: client(1)}).Endpoint; e != first {
			t.Fatal("the client changed its endpoint within the time")
		}
		pick(t, p, Key{Client: client(2)})
	}
	c.turn(time.Minute)
	if e := pick(t, p, Key{Client: client(1)}).Endpoint; e == first {
		t.Fatal("the client kept its endpoint after the time")
	}
	second := pick(t, p, Key{Client: client(1)}).Endpoint
	p.SetHealth(second.Address, false)
	if e := pick(t, p, Key{Client: client(1)}).Endpoint; e == second {
		t.Fatal("the client went to an endpoint that is not healthy")
	}
}

func TestAffinityIsBounded(t *testing.T) {
	var a affinity
	e := &Endpoint{}
	at := time.Unix(1000, 0)
	for i := range 3 * affinityMost * affinityShards / 2 {
		a.set(netip.AddrFrom4([4]byte{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}), e, at, time.Hour)
	}
	total := 0
	for i := range a {
		total += len(a[i].clients)
	}
	if most := affinityShards * (affinityMost + 1024); total > most {
		t.Errorf("%d clients remembered, want at most %d", total, most)
	}
}

func TestZone(t *testing.T) {
	cfg := poolOf(config.RoundRobin, 4)
	cfg.PreferZone = true
	cfg.Endpoints[0].Zone, cfg.Endpoints[1].Zone, cfg.Endpoints[2].Zone = "a", "a", "b"
	p := newPool(cfg, "a", newClock())
	if got := shares(t, p, 40); got[address(0)] != 20 || got[address(1)] != 20 {
		t.Errorf("shares %v, want only those of the zone", got)
	}
	// One that failed just now is not the only one: a retry leaves the zone if it must.
	if u := pick(t, p, Key{}, p.Endpoints()[0], p.Endpoints()[1]); u.Endpoint.Config().Zone == "a" {
		t.Error("the retry went to an endpoint that was tried")
	}
	p.SetHealth(address(0), false)
	p.SetHealth(address(1), false)
	if got := shares(t, p, 40); got[address(2)] != 20 || got[address(3)] != 20 {
		t.Errorf("shares %v, want those of other zones", got)
	}
	p.SetHealth(address(2), false)
	p.SetHealth(address(3), false)
	if got := shares(t, p, 40); len(got) != 4 {
		t.Errorf("shares %v, want all where none is healthy", got)
	}
	p.SetHealth(address(1), true)
	p.Update(cfg, "b")
	if got := shares(t, p, 10); got[address(1)] != 10 {
		t.Errorf("shares %v, want the only healthy one", got)
	}
}

func TestSlowStart(t *testing.T) {
	cfg := poolOf(config.RoundRobin, 2)
	cfg.SlowStart = 100 * time.Second
	c := newClock()
	p := newPool(cfg, "", c)
	if got := shares(t, p, 100); got[address(0)] != 50 {
		t.Errorf("shares %v at the pool's begin, want equal ones", got)
	}
	more := *cfg
	more.Endpoints = endpoints(3)
	p.Update(&more, "")
	for _, step := range []struct {
		after time.Duration
		want  int
	}{{0, 50}, {50 * time.Second, 210}, {50 * time.Second, 350}} {
		c.turn(step.after)
		if got := shares(t, p, 1050)[address(2)]; got < step.want-2 || got > step.want+2 {
			t.Errorf("after %v more the new endpoint got %d of 1050, want %d", step.after, got, step.want)
		}
	}
}

func TestOutlier(t *testing.T) {
	cfg := poolOf(config.RoundRobin, 4)
	cfg.Outlier = &config.Outlier{Failures: 3, Ejection: 10 * time.Second, MostEjected: 50}
	c := newClock()
	p := newPool(cfg, "", c)
	all := p.Endpoints()
	fail := func(i, times int) {
		for range times {
			u := &Use{Endpoint: all[i], pool: p}
			all[i].acquire(0)
			u.Done(ConnectFailed)
			u.Done(ConnectFailed) // only the first counts
		}
	}
	out := func() (n int) {
		got := shares(t, p, 100)
		return 4 - len(got)
	}
	fail(0, 2)
	(&Use{Endpoint: all[0], pool: p}).Succeeded()
	fail(0, 2)
	if out() != 0 {
		t.Fatal("ejected although failures were not in a row")
	}
	fail(0, 3)
	fail(1, 3)
	fail(2, 30)
	if got := out(); got != 2 || !all[0].Ejected() || !all[1].Ejected() || all[2].Ejected() {
		t.Fatalf("%d of 4 are out, want half", got)
	}
	c.turn(10 * time.Second)
	if out() != 0 || all[0].Ejected() {
		t.Fatal("still out after the time")
	}
	fail(0, 3)
	c.turn(19 * time.Second)
	if out() != 1 {
		t.Fatal("the second ejection is not twice as long")
	}
	c.turn(time.Second)
	if out() != 0 {
		t.Fatal("the second ejection is longer than twice")
	}
	c.turn(time.Hour)
	fail(0, 3)
	c.turn(10 * time.Second)
	if out() != 0 {
		t.Fatal("after an hour without a failure the ejection is not as long as the first")
	}
	if n := all[0].Counters.Ejections.Load(); n != 3 {
		t.Errorf("%d ejections counted, want 3", n)
	}
}

func TestLimits(t *testing.T) {
	cfg := poolOf(config.RoundRobin, 2)
	cfg.EndpointConnections, cfg.EndpointRequests = 3, 1
	p := newPool(cfg, "", newClock())
	var last *Use
	for range 6 {
		last = pick(t, p, Key{})
	}
	if _, err := p.Pick(Key{}, nil); !errors.Is(err, ErrBusy) {
		t.Fatalf("error %v, want ErrBusy", err)
	}
	last.Done(OK)
	last.Done(OK)
	pick(t, p, Key{})
	if _, err := p.Pick(Key{}, nil); !errors.Is(err, ErrBusy) {
		t.Fatalf("error %v: Done counted twice", err)
	}
	cfg2 := *cfg
	cfg2.Protocol = config.HTTP
	p = newPool(&cfg2, "", newClock())
	pick(t, p, Key{})
	pick(t, p, Key{})
	if _, err := p.Pick(Key{}, nil); !errors.Is(err, ErrBusy) {
		t.Fatalf("error %v, want ErrBusy for requests", err)
	}
	e := p.Endpoints()[0]
	if !e.Open(1) || e.Open(1) {
		t.Error("Open does not keep the limit")
	}
	e.Close()
	if !e.Open(1) {
		t.Error("Close makes no room")
	}
}

func TestEmpty(t *testing.T) {
	p := newPool(poolOf("", 0), "", newClock())
	if _, err := p.Pick(Key{}, nil); !errors.Is(err, ErrNoEndpoint) {
		t.Fatalf("error %v, want ErrNoEndpoint", err)
	}
	p.Update(poolOf("", 1), "")
	e := p.Endpoints()[0]
	if _, err := p.Pick(Key{}, []*Endpoint{e}); !errors.Is(err, ErrNoEndpoint) {
		t.Fatalf("error %v, want ErrNoEndpoint if the only one was tried", err)
	}
	p.Update(nil, "")
	if _, err := p.Pick(Key{}, nil); !errors.Is(err, ErrNoEndpoint) {
		t.Fatalf("error %v, want ErrNoEndpoint", err)
	}
}

// TestLeaving: an endpoint that comes back while it drains is the same one; another Pod at its address is not.
func TestLeaving(t *testing.T) {
	cfg := poolOf("", 2)
	p := newPool(cfg, "", newClock())
	var left []*Endpoint
	p.OnLeave(func(e *Endpoint) { left = append(left, e) })
	first := p.Endpoints()[0]
	u := pick(t, p, Key{})
	if u.Endpoint != first {
		u.Done(OK)
		u = pick(t, p, Key{})
	}
	one := *cfg
	one.Endpoints = cfg.Endpoints[1:]
	p.Update(&one, "")
	if len(left) != 1 || left[0] != first || first.LeftAt().IsZero() || first.Usable() {
		t.Fatalf("left %v, at %v", left, first.LeftAt())
	}
	p.Update(cfg, "")
	if p.Endpoints()[0] != first || !first.LeftAt().IsZero() || !first.Usable() || first.Active() != 1 {
		t.Fatal("it is not the same one after it came back")
	}
	u.Done(OK)
	other := *cfg
	other.Endpoints = endpoints(2)
	other.Endpoints[0].Name = "another"
	p.Update(&other, "")
	if len(left) != 2 || p.Endpoints()[0] == first || first.LeftAt().IsZero() {
		t.Fatal("another Pod at the same address is taken for the one that left")
	}
}
