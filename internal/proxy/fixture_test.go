package proxy

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/iptables"
	"portal/internal/proxy/ipvs"
	"portal/internal/proxy/nftables"
	"portal/internal/proxy/userspace"
)

// kernel is a mode that keeps what is applied in memory.
type kernel struct {
	mu    sync.Mutex
	looks int

	name     string
	probe    error
	fail     error // of the next Apply, and cleared by it
	refuse   map[plan.FrontendKey]error
	lost     bool // somebody flushed it
	cleaned  atomic.Int64
	stuck    int64 // so many Cleanups fail
	deltas   []*plan.Delta
	at       []time.Time
	held     map[plan.FrontendKey]*plan.Frontend
	facts    *plan.Facts
	closed   bool
	tooSoon  func() bool
	slow     time.Duration // of each Apply
	problems []string
}

func (k *kernel) Name() string                                  { return k.name }
func (k *kernel) Probe(context.Context, []intent.Family) error  { return k.probe }
func (k *kernel) Open(context.Context) (backend.Backend, error) { return k, nil }
func (k *kernel) Cleanup(context.Context) error {
	if k.cleaned.Add(1) <= k.stuck {
		return errors.New("another process has the lock")
	}
	return nil
}
func (k *kernel) Limits() []string       { return nil }
func (k *kernel) Traits() backend.Traits { return traits[k.name] }
func (k *kernel) Close() error           { k.closed = true; return nil }

// traits are those of the modes.
var traits = func() map[string]backend.Traits {
	out := map[string]backend.Traits{}
	for _, m := range []backend.Mode{nftables.New(nftables.Options{}), iptables.New(iptables.Options{}), ipvs.New(ipvs.Options{}), userspace.New(userspace.Options{})} {
		out[m.Name()] = m.Traits()
	}
	return out
}()

// look puts what the test did before what the loop does next.
func (k *kernel) look() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.looks++
}

// lose is what somebody does who flushes the rules.
func (k *kernel) lose() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.lost = true
}

func (k *kernel) Check(context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.lost {
		return errors.New("the table is gone")
	}
	return nil
}

func (k *kernel) Apply(_ context.Context, next *plan.Snapshot, d *plan.Delta) error {
	time.Sleep(k.slow)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.deltas, k.at = append(k.deltas, d), append(k.at, time.Now())
	if k.tooSoon != nil && k.tooSoon() {
		k.problems = append(k.problems, "applied before everything was listed")
	}
	if err := k.fail; err != nil {
		k.fail = nil
		return err
	}
	if d.Full {
		k.held, k.lost = maps.Clone(next.Frontends), false
	}
	for _, c := range d.Frontends {
		delete(k.held, c.FrontendKey)
		if c.New != nil {
			k.held[c.FrontendKey] = c.New
		}
	}
	k.facts = next.Facts
	var refused *backend.Refused
	for key, err := range k.refuse {
		if k.held[key] != nil {
			delete(k.held, key)
			if refused == nil {
				refused = &backend.Refused{Frontends: map[plan.FrontendKey]error{}}
			}
			refused.Frontends[key] = err
		}
	}
	if refused != nil {
		return refused
	}
	return nil
}

// places are the addresses of frontends that the kernel has, with where they lead to.
func (k *kernel) places() string { return places(k.held) }

func places(held map[plan.FrontendKey]*plan.Frontend) string {
	var out []string
	for key, f := range held {
		out = append(out, key.String()+"→"+f.Routes[plan.FromPod].String())
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

type addresses struct {
	list    []netip.Addr
	changed chan struct{}
	fail    int // so many lists fail
}

func (a *addresses) List() (hostnet.Addresses, error) {
	if a.fail > 0 {
		a.fail--
		return hostnet.Addresses{}, errors.New("the dump was interrupted")
	}
	return hostnet.Addresses{Local: a.list, Node: a.list}, nil
}

func (a *addresses) Changes(context.Context) <-chan struct{} { return a.changed }

type followed struct{ changes, calls int }

func (f *followed) note(c []plan.ServiceChange) { f.changes += len(c); f.calls++ }

type flows struct{ followed }

func (f *flows) Acknowledged(c []plan.ServiceChange, _ *plan.Snapshot, _ []netip.Addr, _ bool) {
	f.note(c)
}

type checks struct {
	followed
	refused map[intent.Key]bool
	notes   map[intent.Key][]string
	planned atomic.Pointer[[]*plan.HealthCheck]
}

func (f *checks) Planned(c []*plan.HealthCheck, _ *plan.Facts) { f.planned.Store(&c) }

func (f *checks) Acknowledged(c []plan.ServiceChange, _ *plan.Facts, refused map[intent.Key]bool) {
	f.note(c)
	f.refused = refused
}

func (f *checks) Notes() map[intent.Key][]string { return f.notes }

// world is a proxy at work on a kernel in memory.
type world struct {
	*testing.T
	cluster *intent.Cluster
	kernel  *kernel
	local   *addresses
	flows   flows
	checks  checks
	proxy   *Proxy
	stop    func()
}

func service(name, ip string) *intent.Service {
	return &intent.Service{
		Key: intent.Key{Namespace: "ns", Name: name}, ClusterIPs: []netip.Addr{netip.MustParseAddr(ip)},
		Ports: []intent.Port{{Protocol: intent.TCP, Port: 80}},
	}
}

func slice(service string, addrs ...string) *intent.Slice {
	s := &intent.Slice{
		Key: intent.Key{Namespace: "ns", Name: service + "-1"}, Service: service, Family: intent.IPv4,
		Ports: []intent.EndpointPort{{Protocol: intent.TCP, Port: 8080}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, intent.Endpoint{Addr: netip.MustParseAddr(a), Condition: intent.Ready})
	}
	return s
}

// in runs a test in a bubble of time, with a proxy that has seen one Service.
func in(t *testing.T, change func(*Options), test func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t, cluster: intent.NewCluster(intent.Services, intent.EndpointSlices), kernel: &kernel{name: "nftables"}}
		w.kernel.tooSoon = func() bool { return !w.cluster.Complete() }
		w.local = &addresses{list: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, changed: make(chan struct{}, 1)}
		o := Options{
			Cluster: w.cluster, Config: Config{Node: "n1", Families: []intent.Family{intent.IPv4}}, Modes: []backend.Mode{w.kernel}, Mode: "auto",
			Local: w.local, Flows: &w.flows, Checks: &w.checks, Health: &Health{Node: func() *intent.Node { return w.cluster.Node("n1") }, Listed: func() bool { return w.cluster.Complete() }},
			Log: slog.New(slog.DiscardHandler),
		}
		if change != nil {
			change(&o)
		}
		w.cluster = o.Cluster
		w.proxy = New(o)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- w.proxy.Run(ctx) }()
		w.stop = func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("the proxy ended: %v", err)
			}
		}
		w.cluster.SetService(service("a", "10.96.0.1"))
		w.cluster.SetSlice(slice("a", "10.244.0.1"))
		test(w)
		w.stop()
		if !w.kernel.closed {
			t.Error("the backend was not closed")
		}
		for _, p := range w.kernel.problems {
			t.Error(p)
		}
	})
}

// settle lets all that is due happen, and a little more.
func (w *world) settle() { w.after(20 * time.Millisecond) }

func (w *world) after(d time.Duration) {
	w.kernel.look()
	time.Sleep(d)
	synctest.Wait()
}

func (w *world) listed() {
	w.cluster.MarkListed(intent.Services)
	w.cluster.MarkListed(intent.EndpointSlices)
	w.settle()
}

func (w *world) expect(applies int, places string) {
	w.Helper()
	if len(w.kernel.deltas) != applies {
		w.Errorf("Apply was called %d times, want %d", len(w.kernel.deltas), applies)
	}
	if got := w.kernel.places(); got != places {
		w.Errorf("the kernel has\n     %s\nwant %s", got, places)
	}
}

const placeA, placeB = "10.96.0.1:80/tcp→10.244.0.1:8080", "10.96.0.2:80/tcp→reject"
