package test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"

	"portal/internal/trace"
	"portal/test/harness"
)

var (
	tracePairs = flag.Int("trace.pairs", 60, "how many pairs of source and destination are traced and tried in each mode")
	traceModes = flag.String("trace.modes", "nftables", "the modes of the labs in which traces are compared with packets")
	traceSeed  = flag.Uint64("trace.seed", 1, "the seed by which pairs are chosen")
)

// TestTrace sends packets between random places of a lab, in each mode, and demands that they end where the trace says.
func TestTrace(t *testing.T) {
	t.Parallel()
	for _, mode := range strings.Split(*traceModes, ",") {
		t.Run(mode, func(t *testing.T) {
			l := startTraceLab(t, mode)
			w, err := trace.NewWorld(l.objects(t), trace.Settings{Mode: mode})
			if err != nil {
				t.Fatal(err)
			}
			l.synced(t, w)
			began := time.Now()
			ends := l.compare(t, w, l.pairs(*tracePairs))
			t.Logf("%d pairs in %v: %v", *tracePairs, time.Since(began), ends)
			for _, v := range []trace.Verdict{trace.Arrives, trace.Rejected, trace.Dropped, trace.Lost} {
				if ends[v] == 0 && *tracePairs >= 500 {
					t.Errorf("no pair's end is %s: the world has become too simple", v)
				}
			}
			l.command(t, mode)
			l.live(t, mode)
			l.top(t, mode)
		})
	}
}

// pair is a question and how it is tried.
type pair struct {
	trace.Question
	network string
	port    uint16
	addr    netip.Addr
	name    string // resolved by DNS; empty: addr is given
}

func (p pair) String() string { return fmt.Sprintf("from %s to %s", p.From, p.To) }

// pairs chooses places and destinations.
func (l *traceLab) pairs(n int) (out []pair) {
	r := rand.New(rand.NewPCG(*traceSeed, 1))
	senders := slices.Sorted(maps.Keys(l.places))
	services := slices.DeleteFunc(slices.Sorted(maps.Keys(l.services)), func(name string) bool { return name == "kubernetes" }) // it answers otherwise
	for len(out) < n {
		p := pair{Question: trace.Question{From: senders[r.IntN(len(senders))], Namespace: "default"}, network: "tcp"}
		service := l.services[services[r.IntN(len(services))]]
		port := 0
		if r.IntN(3) == 0 {
			p.network, port = "udp", 1
		}
		ok := true
		switch r.IntN(12) {
		case 0, 1, 2:
			ok = p.clusterIP(r, service, port)
		case 3, 4, 5:
			ok = p.nodePort(r, l, service, port)
		case 6, 7, 8:
			ok = p.outer(r, service, port)
		case 9:
			p.direct(r, l)
		case 10:
			ok = p.named(service, port)
		case 11:
			p.nobody(r)
		}
		if !ok {
			continue
		}
		host := p.name
		if host == "" {
			host = p.addr.String()
			if p.addr.Is6() {
				host = "[" + host + "]"
			}
			if p.From == trace.Client {
				p.Via = traceVia(p.addr)
			}
		}
		p.To = fmt.Sprintf("%s:%d/%s", host, p.port, p.network)
		out = append(out, p)
	}
	return out
}

func (p *pair) clusterIP(r *rand.Rand, s *corev1.Service, port int) bool {
	if s.Spec.ClusterIP == corev1.ClusterIPNone || len(s.Spec.ClusterIPs) == 0 {
		return false
	}
	p.addr = netip.MustParseAddr(s.Spec.ClusterIPs[r.IntN(len(s.Spec.ClusterIPs))])
	p.port = portOf(s, port)
	if r.IntN(8) == 0 {
		p.port = 81 // which none has
	}
	return true
}

func portOf(s *corev1.Service, port int) uint16 {
	return uint16(s.Spec.Ports[min(port, len(s.Spec.Ports)-1)].Port)
}

func (p *pair) nodePort(r *rand.Rand, l *traceLab, s *corev1.Service, port int) bool {
	if len(s.Spec.Ports) < 2 || s.Spec.Ports[port].NodePort == 0 {
		return false
	}
	addrs := l.places[l.NodeNames()[r.IntN(l.Nodes)]].addrs
	p.addr, p.port = addrs[r.IntN(len(addrs))], uint16(s.Spec.Ports[port].NodePort)
	if strings.HasPrefix(p.From, "node") && r.IntN(6) == 0 {
		p.addr = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}[r.IntN(2)]
	}
	return true
}

// outer is an external or a balancer's address.
func (p *pair) outer(r *rand.Rand, s *corev1.Service, port int) bool {
	list := slices.Clone(s.Spec.ExternalIPs)
	for _, in := range s.Status.LoadBalancer.Ingress {
		list = append(list, in.IP)
	}
	if len(list) == 0 {
		return false
	}
	p.addr, p.port = netip.MustParseAddr(list[r.IntN(len(list))]), portOf(s, port)
	return true
}

// direct is a Pod's or a node's own address.
func (p *pair) direct(r *rand.Rand, l *traceLab) {
	names := slices.Sorted(maps.Keys(l.places))
	name := names[r.IntN(len(names))]
	for name == trace.Client {
		name = names[r.IntN(len(names))]
	}
	p.port = tracePort
	if strings.HasPrefix(name, "node") {
		p.port = traceNodePort
	}
	addrs := l.places[name].addrs
	p.addr = addrs[r.IntN(len(addrs))]
}

func (p *pair) named(s *corev1.Service, port int) bool {
	if p.From == trace.Client || len(s.Spec.Ports) == 0 {
		return false
	}
	p.name = s.Name
	p.port = portOf(s, port)
	if s.Spec.ClusterIP == corev1.ClusterIPNone {
		p.port = tracePort
	}
	return true
}

// nobody are addresses in ranges of the cluster that nobody has, and ports that nobody listens at.
func (p *pair) nobody(r *rand.Rand) {
	addrs := []string{"10.96.250.250", "fd00:96::fafa", "10.244.1.250", "192.168.100.12", "fd00:100::d"}
	p.addr, p.port = netip.MustParseAddr(addrs[r.IntN(len(addrs))]), 9
}

// compare tries pairs side by side, and counts how they end.
func (l *traceLab) compare(t *testing.T, w *trace.World, pairs []pair) map[trace.Verdict]int {
	t.Helper()
	ends := map[trace.Verdict]int{}
	var wg sync.WaitGroup
	limit := make(chan struct{}, 24)
	for _, p := range pairs {
		report, err := w.Trace(p.Question)
		if err != nil {
			t.Errorf("%s: %v", p, err)
			continue
		}
		ends[report.Verdict]++
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			if err := l.try(&p, report); err != nil {
				var said strings.Builder
				for _, s := range report.Steps {
					fmt.Fprintf(&said, "\n  %s %s: %s", s.Node, s.Kind, s.Text)
				}
				t.Errorf("%s (via %q): %v; the trace says %s: %s%s\n  %+v", p, p.Via, err, report.Verdict, report.Reason, &said, report.Ends)
			}
		})
	}
	wg.Wait()
	return ends
}

// patience is for answers that must come, silence for those that must not.
const (
	tracePatience = 30 * time.Second
	traceSilence  = 2 * time.Second
)

// try sends the packet and says in what it differs from the trace.
func (l *traceLab) try(p *pair, r *trace.Report) error {
	from := l.places[p.From]
	if p.name != "" {
		if err := l.resolve(p, from, r); err != nil || r.Verdict == trace.Unresolved {
			return err
		}
		p.addr = r.Target.Addr()
	}
	patience := tracePatience
	if r.Verdict == trace.Dropped || r.Verdict == trace.Lost || r.Verdict == trace.Leaves {
		patience = traceSilence
	}
	to := netip.AddrPortFrom(p.addr, p.port)
	got := from.ask(p.network, to, patience)
	switch r.Verdict {
	case trace.Rejected:
		if got.what != "refused" {
			return fmt.Errorf("%v, want refused", got)
		}
	case trace.Dropped:
		if got.what != "silence" {
			return fmt.Errorf("%v, want silence", got)
		}
	case trace.Arrives:
		return l.arrived(p, r, &got)
	default:
		if got.what == "answered" {
			return fmt.Errorf("%v, want no answer", got)
		}
	}
	return nil
}

// arrived compares who answered, and whom it saw, with where the trace ends.
func (l *traceLab) arrived(p *pair, r *trace.Report, got *seen) error {
	if p.port == 9 { // nobody listens there
		if got.what != "refused" || len(r.Ends) != 1 || r.Ends[0].Node == "" {
			return fmt.Errorf("%s, want refused by a node itself", got.what)
		}
		return nil
	}
	if got.what != "answered" {
		return fmt.Errorf("%s, want an answer", got.what)
	}
	at := slices.IndexFunc(r.Ends, func(e trace.End) bool { return e.Address == got.by })
	if at < 0 {
		return fmt.Errorf("%s answered", got.by)
	}
	end := r.Ends[at]
	switch {
	case end.Masqueraded:
		if !l.nodes(end.SourceNode, got.source) {
			return fmt.Errorf("%s saw %s, want an address of %s", got.by, got.source, end.SourceNode)
		}
	case strings.HasPrefix(p.From, "node"):
		if !l.nodes(p.From, got.source) {
			return fmt.Errorf("%s saw %s, want an address of %s", got.by, got.source, p.From)
		}
	case got.source != r.Source:
		return fmt.Errorf("%s saw %s, want %s", got.by, got.source, r.Source)
	}
	return nil
}

// nodes says whether an address is a node's: among the machines, or among its Pods.
func (l *traceLab) nodes(name string, a netip.Addr) bool {
	number := strings.TrimPrefix(name, "node")
	if a.IsLoopback() || slices.Contains(l.places[name].addrs, a) {
		return true
	}
	for i := range l.pods {
		if pod := &l.pods[i]; pod.Spec.NodeName == "node"+number {
			for _, own := range l.places[pod.Name].addrs {
				bits := 24
				if own.Is6() {
					bits = 64
				}
				if gateway := netip.PrefixFrom(own, bits).Masked().Addr().Next(); gateway == a {
					return true
				}
			}
		}
	}
	return false
}

// resolve asks the cluster's DNS for the name, and compares with the trace.
func (l *traceLab) resolve(p *pair, from spot, r *trace.Report) error {
	server := netip.AddrPortFrom(netip.MustParseAddr("10.96.0.10"), 53).String()
	m := new(dns.Msg)
	m.SetQuestion(p.name+".default.svc.cluster.local.", dns.TypeA)
	var answer *dns.Msg
	err := from.do(func() error {
		var err error
		for range 5 { // a datagram may be lost
			if answer, _, err = (&dns.Client{Timeout: 5 * time.Second}).Exchange(m, server); err == nil {
				break
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	var got, want []netip.Addr
	for _, rr := range answer.Answer {
		if a, ok := rr.(*dns.A); ok {
			addr, _ := netip.AddrFromSlice(a.A.To4())
			got = append(got, addr)
		}
	}
	for _, text := range strings.FieldsFunc(r.Steps[0].Text, func(c rune) bool { return c == ' ' || c == ',' }) {
		if a, err := netip.ParseAddr(text); err == nil {
			want = append(want, a)
		}
	}
	slices.SortFunc(got, netip.Addr.Compare)
	slices.SortFunc(want, netip.Addr.Compare)
	if !slices.Equal(got, want) {
		return fmt.Errorf("DNS answers %v, the trace says %v", got, want)
	}
	return nil
}

// portalTrace runs the program, and returns what it prints and its exit status.
func (l *traceLab) portalTrace(t *testing.T, mode string, args ...string) (string, int) {
	t.Helper()
	out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"trace", "--kubeconfig", l.Kubeconfig, "--proxy-mode", mode}, args...)...)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return out, exit.ExitCode()
	case err != nil:
		t.Fatal(err)
	}
	return out, 0
}

// command asks the program itself.
func (l *traceLab) command(t *testing.T, mode string) {
	t.Helper()
	run := func(args ...string) (string, int) { return l.portalTrace(t, mode, args...) }
	for _, one := range []struct {
		args []string
		exit int
		has  []string
	}{
		{[]string{"--from", "p1a", "--to", "all:80"}, 0, []string{"ARRIVES", "all.default.svc.cluster.local.", "the cluster IP of Service default/all, port web", "6 endpoints", "each with odds 1/6", "Pod default/p3b on node node3"}},
		{[]string{"--from", "client", "--to", "none:80", "--via", "node1"}, 1, []string{"REJECTED", "its selector matches no Pod"}},
		{[]string{"--from", "node3", "--to", "inner-local:80"}, 1, []string{"DROPPED", "internalTrafficPolicy of Service default/inner-local is Local, and node node3 has no endpoint"}},
		{[]string{"--from", "p1a", "--to", "alias:80"}, 0, []string{"LEAVES", "alias of example.com"}},
		{[]string{"--from", "p1a", "--to", "missing:80"}, 1, []string{"UNRESOLVED"}},
		{[]string{"--from", "p9", "--to", "all:80"}, 2, []string{"--from", "p9"}},
		{[]string{"--from", "p1a", "--to", "all"}, 2, []string{"--to"}},
	} {
		out, exit := run(one.args...)
		for _, text := range one.has {
			if exit != one.exit || !strings.Contains(out, text) {
				t.Errorf("portal trace %v: exit status %d, want %d with %q:\n%s", one.args, exit, one.exit, text, out)
				break
			}
		}
	}
	out, _ := run("--from", "p1a", "--to", "all:80", "-o", "json")
	var report trace.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil || report.Verdict != trace.Arrives || len(report.Ends) != 6 {
		t.Errorf("as JSON: %v\n%s", err, out)
	}
}
