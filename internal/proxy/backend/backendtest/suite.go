// Package backendtest is the one suite that every mode of the proxy passes: a node, Pods and a client outside in network
// namespaces, Services planned as in life, real packets, and the oracle as the judge. It knows no mode.
package backendtest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/plan/oracle"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/conntrack"
)

// Options say what a mode does differently from the plan. The zero value is a mode that does all of it.
type Options struct {
	// HidesSource: an endpoint always sees an address of the node.
	HidesSource bool
	// ShowsOutside: except that endpoints on the node see clients outside, where the plan does not rewrite the source.
	ShowsOutside bool
	// Only runs the test of this name; empty: all.
	Only string
	// PassesOtherPorts: other ports of a cluster IP aren't rejected.
	PassesOtherPorts bool
	// PassesFromNode: what the node itself sends to an external or load-balancer IP without endpoints isn't rejected.
	PassesFromNode bool
	// RefusesFirst: what has no endpoints is rejected also to those whom source ranges exclude.
	RefusesFirst bool
	// DropsUnallocated: what goes to service addresses that nobody has is dropped.
	DropsUnallocated bool
	// Loopback: node ports are served on 127.0.0.1 too, where facts say so.
	Loopback bool
	// RestartBreaks: a restart ends living flows.
	RestartBreaks bool
	// NotRandom: endpoints take turns, so that spreading is more even than chance.
	NotRandom bool
	// ServiceSource: the node has the Services' addresses itself, and connects to a Service from that Service's own.
	ServiceSource bool
	// SCTP: this kernel has it. Brief: it is so slow that less must do.
	SCTP, Brief bool
	// OneFamily leaves IPv6 out.
	OneFamily bool
	// Patience is how long an answer may take; zero: 4 s. Silence is believed after a twelfth of it, a second at most.
	Patience time.Duration
}

func (o *Options) silence() time.Duration { return min(o.Patience/12, time.Second) }

// Run runs the suite. mode is called for each start of the proxy.
func Run(t *testing.T, mode func() backend.Mode, o Options) {
	if rounds := os.Getenv("PORTAL_VM"); rounds != "" {
		o.emulated(rounds)
	}
	if o.Patience == 0 {
		o.Patience = 4 * time.Second
	}
	w := newWorld(t)
	if err := w.node.do(func() error { return mode().Probe(context.Background(), o.families()) }); err != nil {
		t.Fatalf("this machine can't run the mode: %v", err)
	}
	for _, c := range []struct {
		name string
		run  func(*testing.T, *suite)
	}{
		{"routes", testRoutes},
		{"facts", testFacts},
		{"spreading", testSpreading},
		{"affinity", testAffinity},
		{"flows", testFlows},
		{"handshakes", testHandshakes},
		{"rewrite", testRewrite},
		{"drift", testDrift},
		{"foreign", testForeign},
		{"random", testRandom},
		{"sctp", testSCTP},
	} {
		if o.Only != "" && c.name != o.Only {
			continue
		}
		if c.name == "sctp" && !o.SCTP {
			continue // test/vm runs it in a kernel that has it
		}
		t.Run(c.name, func(t *testing.T) {
			s := &suite{world: w, Options: o, mode: mode, plan: plan.NewSnapshot(w.facts(o))}
			s.start(t)
			defer s.stop(t)
			c.run(t, s)
		})
	}
}

func (o *Options) families() []intent.Family {
	if o.OneFamily {
		return []intent.Family{intent.IPv4}
	}
	return []intent.Family{intent.IPv4, intent.IPv6}
}

// facts are the node's.
func (w *world) facts(o Options) *plan.Facts {
	return &plan.Facts{
		Node: "node", Zone: "here", Families: o.families(), Addrs: w.node.addrs[:2],
		Pods:      plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}},
		NodePorts: plan.NodePorts{Addrs: w.node.addrs[:2]},
	}
}

// suite is one test's proxy.
type suite struct {
	*world
	Options
	mode    func() backend.Mode
	current backend.Mode
	backend backend.Backend
	plan    *plan.Snapshot
	cleaner *conntrack.Cleaner // of the tests that have flows cleaned
}

// start starts the proxy; what it had been told before counts as forgotten.
func (s *suite) start(t *testing.T) {
	t.Helper()
	s.current = s.mode()
	err := s.node.do(func() (err error) {
		s.backend, err = s.current.Open(context.Background())
		return err
	})
	if err != nil {
		t.Fatalf("opening the mode: %v", err)
	}
	s.plan.Forget()
}

func (s *suite) halt(t *testing.T) {
	t.Helper()
	if err := s.node.do(s.backend.Close); err != nil {
		t.Errorf("closing: %v", err)
	}
}

func (s *suite) restart(t *testing.T) {
	t.Helper()
	s.halt(t)
	s.start(t)
	s.apply(t)
}

func (s *suite) stop(t *testing.T) {
	t.Helper()
	s.halt(t)
	if err := s.node.do(func() error { return s.mode().Cleanup(context.Background()) }); err != nil {
		t.Errorf("cleaning up: %v", err)
	}
}

// set plans Services.
func (s *suite) set(specs ...spec) {
	for _, x := range specs {
		e := x.entry(s)
		s.plan.Set(e.Service.Key, plan.For(e, s.plan.Facts))
	}
}

func (s *suite) apply(t *testing.T) {
	t.Helper()
	if err := s.tryApply(); err != nil {
		t.Fatalf("applying: %v", err)
	}
}

func (s *suite) tryApply() error {
	err := s.node.do(func() error { return s.backend.Apply(context.Background(), s.plan, s.plan.Delta()) })
	if err == nil {
		s.plan.Acknowledge()
	}
	return err
}

func (s *suite) check() error {
	return s.node.do(func() error { return s.backend.Check(context.Background()) })
}

// probe is a client's question.
type probe struct {
	from *host
	src  netip.Addr // any where invalid
	to   netip.AddrPort
	p    intent.Protocol
	// tries is how often at most it is asked where several endpoints may answer; all must have, if it is many.
	tries int
}

func (p probe) String() string { return fmt.Sprintf("%s > %s/%s", p.from.name, p.to, p.p) }

// many is a number of tries in which each of a few endpoints is met for sure.
const many = 80

// judge asks the oracle.
func (s *suite) judge(p probe, src netip.Addr) oracle.Answer {
	return oracle.Judge(s.plan, oracle.Packet{
		Src: netip.AddrPortFrom(src, 1), Dst: p.to, Protocol: p.p, In: p.from.in,
		SrcLocal: s.isNode(src), DstLocal: s.isNode(p.to.Addr()),
	})
}

func (s *suite) isNode(a netip.Addr) bool {
	for _, n := range s.node.addrs {
		if n == a {
			return true
		}
	}
	return a.IsLoopback() || s.ServiceSource && s.isService(a)
}

func (s *suite) isService(a netip.Addr) bool {
	for k := range s.plan.Frontends {
		if k.Addr == a {
			return true
		}
	}
	return s.plan.ClusterIPs[a] > 0
}

// source is what a packet of the host will have as its source.
func (p *probe) source() netip.Addr {
	if p.src.IsValid() {
		return p.src
	}
	for _, a := range p.from.addrs {
		if a.Is4() == p.to.Addr().Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// ask probes and returns what is wrong.
func (s *suite) ask(p probe) error {
	want := s.judge(p, p.source())
	patience := s.Patience
	if want.Verdict == oracle.Drop || want.Verdict == oracle.Pass || want.Verdict == oracle.Reject && p.p == intent.SCTP {
		patience = s.silence()
	}
	tries := 1
	if want.Verdict == oracle.Forward && len(want.Endpoints) > 1 {
		tries = max(p.tries, 1)
	}
	met := map[netip.AddrPort]bool{}
	for range tries {
		got := p.from.try(p.p, p.src, p.to, patience)
		// The kernel's choice of a source counts.
		if got.src.IsValid() && got.src != p.source() && !got.src.IsUnspecified() {
			want = s.judge(p, got.src)
		}
		if err := s.compare(p, want, got); err != nil {
			return err
		}
		if got.what == answered {
			met[got.endpoint] = true
		}
		if len(met) == len(want.Endpoints) {
			return nil
		}
	}
	if want.Verdict == oracle.Forward && tries == many {
		return fmt.Errorf("%v: of %v only %v answered", p, want.Endpoints, met)
	}
	return nil
}

// compare says what is wrong with an outcome.
func (s *suite) compare(p probe, want oracle.Answer, got outcome) error {
	bad := func(expected string) error {
		return fmt.Errorf("%v from %s: %s; expected: %s", p, got.src, got, expected)
	}
	verdict := want.Verdict
	if verdict == oracle.Drop && s.RefusesFirst && want.Frontend != nil && want.Frontend.Rejected() {
		verdict = oracle.Reject
	}
	switch verdict {
	case oracle.Reject:
		passes := want.Frontend == nil && s.PassesOtherPorts ||
			want.Frontend != nil && s.PassesFromNode && p.from == s.node && want.Frontend.Kind != plan.ClusterIP
		// SCTP takes no notice of ICMP's refusals.
		passes = passes || p.p == intent.SCTP
		if got.what != refused && !(passes && got.what != answered) {
			return bad("refused")
		}
	case oracle.Drop:
		if got.what != silence {
			return bad("silence")
		}
	case oracle.Pass:
		if got.what == answered {
			return bad("no answer")
		}
	case oracle.Forward:
		if got.what != answered || !want.Allows(got.endpoint) {
			return bad(fmt.Sprintf("an answer of one of %v", want.Endpoints))
		}
		rewritten := s.isNode(got.seen)
		switch {
		case s.hides(p.from, got.endpoint.Addr()) || want.Rewrites(got.endpoint) || s.ServiceSource && s.isService(got.src):
			if !rewritten {
				return bad("a source of the node")
			}
		case got.seen != got.src:
			return bad("the client's own source")
		}
	}
	return nil
}

// hides says whether the mode hides a client from an endpoint by its nature.
func (s *suite) hides(client *host, endpoint netip.Addr) bool {
	shown := s.ShowsOutside && client == s.outside && slices.ContainsFunc(s.pods, func(pod *host) bool {
		return slices.Contains(pod.addrs, endpoint)
	})
	return s.HidesSource && !shown
}

// askAll probes side by side.
func (s *suite) askAll(t *testing.T, probes []probe) {
	t.Helper()
	var wg sync.WaitGroup
	limit := make(chan struct{}, 64)
	for _, p := range probes {
		wg.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			if err := s.ask(p); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}
