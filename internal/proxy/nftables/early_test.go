package nftables

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
)

// prepare lets the backend prepare what has changed; after an error nothing counts as prepared.
func prepare(be *tables, s *plan.Snapshot) error {
	err := be.Prepare(context.Background(), s)
	if err != nil {
		s.Forget()
		return err
	}
	s.Prepared()
	return nil
}

// hooks demands a number of chains by which packets come in, as the nft tool sees them.
func hooks(t testing.TB, want int) {
	t.Helper()
	out, err := exec.Command("nft", "list", "chains").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	if n := strings.Count(string(out), " hook "); n != want {
		t.Fatalf("packets come in by %d chains, expected %d", n, want)
	}
}

// prepared prepares, and demands that all is there and that no packet comes in.
func prepared(t testing.TB, be *tables, s *plan.Snapshot) {
	t.Helper()
	if err := prepare(be, s); err != nil {
		t.Fatal(err)
	}
	hooks(t, 0)
	verify(t, be, s)
}

// served applies, and demands that all is there and at work.
func served(t testing.TB, be *tables, s *plan.Snapshot) {
	t.Helper()
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	working(t, be, s)
}

func working(t testing.TB, be *tables, s *plan.Snapshot, except ...int) {
	t.Helper()
	hooks(t, 4*len(s.Facts.Families))
	verify(t, be, s, except...)
	if err := be.Check(context.Background()); err != nil {
		t.Fatal(err)
	}
}

var (
	tableText = regexp.MustCompile(`(?ms)^table (\S+) \S+ \{\n(.*?)^\}$`)
	partText  = regexp.MustCompile(`(?ms)^\t(\S+ \S+) \{\n(.*?)^\t\}$`)
	sizeText  = regexp.MustCompile(`(?m)^\t*size \d+\n`)
	elemsText = regexp.MustCompile(`(?s)elements = \{(.*?)\}`)
)

// listing is all that the nft tool finds, by family and name, but for what may differ: sizes, and the order of all but rules.
func listing(t testing.TB) map[string]string {
	t.Helper()
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
	found := map[string]string{}
	for _, table := range tableText.FindAllStringSubmatch(string(out), -1) {
		for _, part := range partText.FindAllStringSubmatch(table[2], -1) {
			found[table[1]+" "+part[1]] = elemsText.ReplaceAllStringFunc(sizeText.ReplaceAllString(part[2], ""), func(text string) string {
				list := strings.Split(elemsText.FindStringSubmatch(text)[1], ",")
				for i := range list {
					list[i] = strings.TrimSpace(list[i])
				}
				slices.Sort(list)
				return strings.Join(list, "\n\t\t")
			})
		}
	}
	return found
}

// sameListing demands that the kernel has what it has when a backend is told everything at once, but for chains that wait
// for another frontend. Nothing is left afterwards.
func sameListing(t testing.TB, be *tables, s *plan.Snapshot) {
	t.Helper()
	got := listing(t)
	for family, one := range be.byFamily {
		name := map[intent.Family]string{intent.IPv4: "ip", intent.IPv6: "ip6"}[family]
		for shape, use := range one.shapes {
			if use.refs == 0 {
				delete(got, name+" chain "+shape.chain())
				got[name+" map shapes"] = regexp.MustCompile(`(?m)\n.* goto `+shape.chain()+`$`).ReplaceAllString(got[name+" map shapes"], "")
			}
		}
	}
	clean(t)
	s.Forget()
	if err := apply(opened(t), s); err != nil {
		t.Fatal(err)
	}
	want := listing(t)
	if len(want) < 13*len(s.Facts.Families) {
		t.Fatalf("only %v", want)
	}
	for name, text := range want {
		if got[name] != text {
			t.Errorf("%s has\n%s, expected\n%s", name, got[name], text)
		}
		delete(got, name)
	}
	for name, text := range got {
		t.Errorf("there is %s with\n%s", name, text)
	}
	clean(t)
}

func clean(t testing.TB) {
	t.Helper()
	if err := New(Options{}).Cleanup(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// various is a Service with one of everything.
func various(i int) *intent.Entry {
	e := service(i, "10.244.1.1", "10.244.1.2", "10.244.1.3")
	e.Service.ClusterIPs = append(e.Service.ClusterIPs, netip.AddrFrom16([16]byte{0: 0xfd, 3: 0x96, 15: byte(i)}))
	e.Service.Affinity = 1e9
	e.Service.Type, e.Service.Ports[0].NodePort = intent.LoadBalancer, uint16(30000+i)
	e.Service.Ingress = []intent.Ingress{{Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})}}
	e.Service.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	return e
}

// What is prepared step by step lets no packet in, and is in the end what it is when it is told at once.
func TestPrepare(t *testing.T) {
	inNamespace(t)
	be, s := opened(t), plan.NewSnapshot(facts)
	for _, list := range [][]*intent.Entry{
		{}, {service(1, "10.244.1.1"), service(2)}, {various(3), service(4, "10.244.1.1", "10.244.1.2")}, {}, {various(5)},
		{service(2, "10.244.1.2"), service(4)},
	} {
		for _, e := range list {
			plans(s, e)
		}
		prepared(t, be, s)
	}
	s.Delete(service(2).Service.Key)
	plans(s, service(4, "10.244.1.1", "10.244.1.2"))
	plans(s, service(6, "10.244.1.6"))
	if d := s.Delta(); !d.Ahead || len(d.Frontends) != 3 {
		t.Fatalf("left are %+v", d)
	}
	served(t, be, s)
	plans(s, service(7, "10.244.1.7"))
	s.Delete(service(1).Service.Key)
	served(t, be, s)
	sameListing(t, be, s)

	// Also if nothing is left to tell but that it opens.
	be = opened(t)
	s.Forget()
	prepared(t, be, s)
	served(t, be, s)
	sameListing(t, be, s)
}

// Random Services that change at random while they are prepared and when they are served. That it opens is sometimes
// refused.
func TestPreparedFollowsSnapshot(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		inNamespace(t) // each time: that is quicker than to clean up
		be, s := opened(t), plan.NewSnapshot(facts)
		change := func() {
			for range rapid.IntRange(0, 4).Draw(rt, "changes") {
				if i := rapid.IntRange(0, 4).Draw(rt, "service"); rapid.IntRange(0, 4).Draw(rt, "delete") == 0 {
					s.Delete(service(i).Service.Key)
				} else {
					plans(s, drawn(rt, i))
				}
			}
		}
		expect := func(err error, open bool) {
			if err != nil {
				rt.Fatal(err)
			}
			verify(t, be, s)
			for f, one := range be.byFamily {
				if left, err := be.socket.inventory(one.layout); err != nil || left == nil || left.open() != open {
					rt.Fatalf("IPv%d has %+v (%v), and is to be open: %v", f, left, err, open)
				}
			}
		}
		for range rapid.IntRange(1, 5).Draw(rt, "steps") {
			change()
			expect(prepare(be, s), false)
		}
		change()
		if rapid.IntRange(0, 3).Draw(rt, "refused") == 0 {
			be.transact = func([]byte) error { return nf.Refusal{1: unix.ENOMEM} }
			if apply(be, s) == nil {
				rt.Fatal("a refusal went unnoticed")
			}
			be.transact = be.socket.Transact
			change()
		}
		for range 3 {
			expect(apply(be, s), true)
			change()
		}
	})
}

// Sets that become too small while they are prepared are made anew, and so they are when that happens at the last moment.
func TestPreparedSetsGrow(t *testing.T) {
	inNamespace(t)
	const enough = 13_000
	grow := func(s *plan.Snapshot, to int) {
		for i := len(s.Services); i < to; i++ {
			plans(s, service(i, endpoint(i, 0)))
		}
	}
	var endpoints []string
	for i := range enough {
		endpoints = append(endpoints, endpoint(i, 1))
	}
	for name, overflow := range map[string]func(*plan.Snapshot){
		"frontends": func(s *plan.Snapshot) { grow(s, enough) },
		"endpoints": func(s *plan.Snapshot) { plans(s, service(7, endpoints...)) },
	} {
		for _, early := range []bool{true, false} {
			be, s := opened(t), plan.NewSnapshot(facts)
			for _, n := range []int{0, 1, 1100} {
				grow(s, n)
				prepared(t, be, s)
			}
			first := be.byFamily[intent.IPv4]
			if n := max(first.services.size, first.backends.size); n >= enough {
				t.Fatalf("at first there is room for %d", n)
			}
			overflow(s)
			if early {
				prepared(t, be, s)
				grow(s, len(s.Services)+10)
				prepared(t, be, s)
			}
			grow(s, len(s.Services)+10)
			served(t, be, s)
			if be.byFamily[intent.IPv4] == first {
				t.Errorf("nothing had to be made anew for many %s", name)
			}
			clean(t)
		}
	}
}

// What a process that was killed has prepared is no hindrance to the next, and nothing of it stays.
func TestPreparedByAnother(t *testing.T) {
	inNamespace(t)
	for _, early := range []bool{true, false} {
		before := plan.NewSnapshot(facts)
		plans(before, various(1))
		plans(before, service(2, "10.244.1.1"))
		prepared(t, opened(t), before)
		be, s := opened(t), plan.NewSnapshot(facts)
		plans(s, service(2, "10.244.1.1", "10.244.1.2"))
		plans(s, service(3))
		if early {
			prepared(t, be, s)
			plans(s, service(4, "10.244.1.4"))
		}
		served(t, be, s)
		sameListing(t, be, s)
	}
	s := plan.NewSnapshot(facts)
	plans(s, various(1))
	prepared(t, opened(t), s)
	clean(t)
	if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("left: %s (%v)", out, err)
	}
}

// A table of an earlier process where packets come in is not touched before all is known, whichever family it is of.
func TestPrepareLeavesServing(t *testing.T) {
	inNamespace(t)
	for _, f := range [][]intent.Family{facts.Families, facts.Families[:1], facts.Families[1:]} {
		its := *facts
		its.Families = f
		before := plan.NewSnapshot(&its)
		plans(before, various(1))
		served(t, opened(t), before)
		be, s := opened(t), plan.NewSnapshot(facts)
		plans(s, service(2, "10.244.1.1"))
		generation, err := be.socket.generation()
		if err != nil {
			t.Fatal(err)
		}
		if err := prepare(be, s); !errors.Is(err, backend.ErrServing) {
			t.Fatalf("with IPv%v at work: %v", f, err)
		}
		// The kernel counts transactions.
		if now, err := be.socket.generation(); err != nil || now != generation {
			t.Errorf("with IPv%v at work something was changed (%v)", f, err)
		}
		served(t, be, s)
		clean(t)
	}
}

// What is learnt of the node after something was prepared is in what is told in the end.
func TestPreparedFactsChange(t *testing.T) {
	inNamespace(t)
	for name, change := range map[string]func(*plan.Facts){
		"plans only":       func(f *plan.Facts) { f.MasqueradeAll = true },
		"node ports":       func(f *plan.Facts) { f.NodePorts.Addrs = []netip.Addr{netip.MustParseAddr("172.31.0.12")} },
		"all node's ports": func(f *plan.Facts) { f.NodePorts = plan.NodePorts{All: true} },
		"pods":             func(f *plan.Facts) { f.Pods = plan.Detector{Interface: "cbr0"} },
		"unallocated":      func(f *plan.Facts) { f.ServicePrefixes = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")} },
		"one family":       func(f *plan.Facts) { f.Families = f.Families[:1] },
		"other family":     func(f *plan.Facts) { f.Families = f.Families[1:] },
	} {
		changed := *facts
		change(&changed)
		for _, order := range [][]*plan.Facts{{facts, &changed}, {&changed, facts}} {
			for _, early := range []bool{true, false} {
				be, s := opened(t), plan.NewSnapshot(order[0])
				plans(s, various(1))
				plans(s, service(2, "10.244.1.1"))
				prepared(t, be, s)
				s.SetFacts(order[1])
				plans(s, various(3))
				if early {
					// As in the loop, those that were prepared follow when everything is known.
					if err := prepare(be, s); err != nil {
						t.Fatalf("with %s: %v", name, err)
					}
					hooks(t, 0)
				}
				plans(s, various(1))
				plans(s, service(2, "10.244.1.1"))
				plans(s, service(4, "10.244.1.4"))
				served(t, be, s)
				sameListing(t, be, s)
				if t.Failed() {
					t.Fatalf("with %s", name)
				}
			}
		}
	}
}

// A table that could not be opened stays closed, and the next try opens it.
func TestOpeningFails(t *testing.T) {
	inNamespace(t)
	for _, forgotten := range []bool{false, true} {
		be, s := opened(t), plan.NewSnapshot(facts)
		plans(s, various(1))
		plans(s, service(2, "10.244.1.1"))
		prepared(t, be, s)
		plans(s, service(2, "10.244.1.2"))
		plans(s, service(3, "10.244.1.1"))
		be.transact = func([]byte) error { return nf.Refusal{1: unix.ENOMEM} }
		for range 2 {
			if err := apply(be, s); !errors.Is(err, unix.ENOMEM) {
				t.Fatalf("a refusal went unnoticed: %v", err)
			}
			hooks(t, 0)
		}
		be.transact = be.socket.Transact
		plans(s, service(4, "10.244.1.1"))
		if forgotten {
			s.Forget() // as the loop does after two failures
		}
		served(t, be, s)
		sameListing(t, be, s)
	}
}

// One frontend that the kernel refuses, when it is prepared or in the end, keeps no other from being served.
func TestRefusedEarly(t *testing.T) {
	inNamespace(t)
	for _, early := range []bool{true, false} {
		be, s := opened(t), plan.NewSnapshot(facts)
		r := &refuser{be: be, addrs: map[string]bool{"10.244.9.9": true}}
		be.transact = r.transact
		plans(s, service(1, "10.244.1.1"))
		plans(s, service(2, "10.244.1.2"))
		prepared(t, be, s)
		plans(s, service(2, "10.244.1.9"))
		plans(s, service(3, "10.244.9.9", "10.244.1.1"))
		var refused *backend.Refused
		if early {
			if err := prepare(be, s); !errors.As(err, &refused) {
				t.Fatalf("preparing: %v", err)
			}
			hooks(t, 0)
		}
		if err := apply(be, s); !errors.As(err, &refused) || len(refused.Frontends) != 1 {
			t.Fatalf("in the end: %v", err)
		}
		working(t, be, s, 3)
		delete(r.addrs, "10.244.9.9")
		served(t, be, s)
		sameListing(t, be, s)
	}
}

// What somebody removed while it was prepared is there in the end.
func TestPreparedDrift(t *testing.T) {
	inNamespace(t)
	for _, harm := range []string{"flush ruleset", "delete table ip portal", "delete table ip6 portal", "flush map ip portal backends"} {
		for _, early := range []bool{true, false} {
			be, s := opened(t), plan.NewSnapshot(facts)
			plans(s, service(1, "10.244.1.1", "10.244.1.2"))
			plans(s, various(2))
			prepared(t, be, s)
			if out, err := exec.Command("nft", harm).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v %s", harm, err, out)
			}
			plans(s, service(2, "10.244.1.4"))
			if early {
				prepared(t, be, s)
			}
			served(t, be, s)
			sameListing(t, be, s)
			if t.Failed() {
				t.Fatalf("after %q", harm)
			}
		}
	}
}
