package live

import (
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"portal/internal/intent"
	"portal/internal/nettest"
	"portal/internal/proxy/nf"
	"portal/internal/trace"
)

// inNamespace runs a test in a network namespace of its own, in which 10.96.0.1:80 leads to 10.0.0.1:8080.
func inNamespace(t *testing.T, test func()) {
	t.Helper()
	nettest.InNamespace(t, func() {
		for _, words := range []string{
			"ip link set lo up", "ip addr add 10.0.0.1/32 dev lo", "ip route add 10.96.0.0/16 dev lo src 10.0.0.1",
			"nft add table ip services", "nft add chain ip services out { type nat hook output priority -100; }", "nft add chain ip services filter { type filter hook output priority 0; }",
			"nft add rule ip services out ip daddr 10.96.0.1 tcp dport 80 dnat to 10.0.0.1:8080", "nft add rule ip services out ip daddr 10.96.0.1 udp dport 53 dnat to 10.0.0.1:5353",
			"nft add rule ip services filter ip daddr 10.96.0.2 drop", "nft add rule ip services filter ip daddr 10.96.0.3 tcp dport 80 reject with tcp reset",
		} {
			if out, err := exec.Command("sh", "-c", strings.ReplaceAll(strings.ReplaceAll(words, "{", "'{"), "}", "}'")).CombinedOutput(); err != nil {
				t.Errorf("%s: %v %s", words, err, out)
				return
			}
		}
		l, err := net.Listen("tcp", "10.0.0.1:8080")
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Close()
		test()
	})
}

func here(f func() error) error { return f() }

// TestPackets: what a packet does is seen, and differences are found.
func TestPackets(t *testing.T) {
	inNamespace(t, func() {
		endpoint := []trace.End{{Address: netip.MustParseAddrPort("10.0.0.1:8080")}}
		for _, c := range []struct {
			to       string
			protocol intent.Protocol
			plan     trace.Report
			outcome  Outcome
			verdict  string // of some rule that it meets
			differs  string
		}{
			{to: "10.96.0.1:80", protocol: intent.TCP, plan: trace.Report{Verdict: trace.Arrives, Service: "a/b", Ends: endpoint}, outcome: Connected, verdict: "accept"},
			{
				to: "10.96.0.1:80", protocol: intent.TCP, plan: trace.Report{Verdict: trace.Arrives, Service: "a/b", Ends: []trace.End{{Address: netip.MustParseAddrPort("10.0.0.1:8081")}}},
				outcome: Connected, verdict: "accept", differs: "sent it to 10.0.0.1:8080, which is none of the endpoints",
			},
			{to: "10.96.0.1:80", protocol: intent.TCP, plan: trace.Report{Verdict: trace.Rejected, Service: "a/b"}, outcome: Connected, verdict: "accept", differs: "should be rejected, but was answered"},
			{
				to: "10.96.0.1:80", protocol: intent.TCP, outcome: Connected, verdict: "accept", differs: "should become an address of node n",
				plan: trace.Report{Verdict: trace.Arrives, Service: "a/b", Node: "n", Ends: []trace.End{{Address: endpoint[0].Address, Masqueraded: true, SourceNode: "n"}}},
			},
			{to: "10.96.0.1:53", protocol: intent.UDP, plan: trace.Report{Verdict: trace.Arrives}, outcome: Refused, verdict: "accept", differs: "nobody listens"},
			{to: "10.96.0.2:80", protocol: intent.TCP, plan: trace.Report{Verdict: trace.Dropped}, outcome: NoAnswer, verdict: "drop"},
			{to: "10.96.0.2:80", protocol: intent.TCP, plan: trace.Report{Verdict: trace.Arrives}, outcome: NoAnswer, verdict: "drop", differs: "should arrive, but was not answered"},
			{to: "10.96.0.3:80", protocol: intent.TCP, plan: trace.Report{Verdict: trace.Rejected}, outcome: Refused, verdict: "drop"},
		} {
			patience := 30 * time.Second
			if c.outcome == NoAnswer {
				patience = time.Second
			}
			r, err := Run(Options{Sender: here, Node: here, To: netip.MustParseAddrPort(c.to), Protocol: c.protocol, Patience: patience})
			if err != nil {
				t.Errorf("%s: %v", c.to, err)
				continue
			}
			c.plan.Target = netip.MustParseAddrPort(c.to)
			r.Compare(&c.plan, c.protocol, false)
			met := false
			for _, rule := range r.Rules {
				met = met || rule.Table == "services" && rule.Handle != 0 && rule.Verdict == c.verdict
			}
			differences := strings.Join(r.Differences, "; ")
			if r.Outcome != c.outcome || !met || !strings.Contains(differences, c.differs) || c.differs == "" && differences != "" {
				t.Errorf("%s: %s, rules %v, differences %q; want %s, a rule that says %s, and %q", c.to, r.Outcome, r.Rules, differences, c.outcome, c.verdict, c.differs)
			}
			if !strings.HasPrefix(c.to, "10.96.0.1:80") {
				continue
			}
			if r.Endpoint != endpoint[0].Address || r.Seen != r.Source {
				t.Errorf("%s: conntrack has %s, seen as %s; want %s and %s", c.to, r.Endpoint, r.Seen, endpoint[0].Address, r.Source)
			}
		}
		out, err := exec.Command("nft", "list", "tables").CombinedOutput()
		if err != nil || strings.Contains(string(out), "portal-trace") {
			t.Errorf("a table is left: %s %v", out, err)
		}
	})
}

// TestMissed: a packet that arrived without the node that was looked at seeing it came in elsewhere.
func TestMissed(t *testing.T) {
	endpoint := netip.MustParseAddrPort("10.0.0.1:8080")
	steps := func(nodes ...string) (out []trace.Step) {
		for _, n := range nodes {
			out = append(out, trace.Step{Node: n})
		}
		return out
	}
	plan := func(steps []trace.Step) *trace.Report {
		return &trace.Report{Verdict: trace.Arrives, Service: "default/web", Node: "n1", Steps: steps, Ends: []trace.End{{Address: endpoint}}}
	}
	direct := plan(steps("", "n1", "n2"))
	for name, c := range map[string]struct {
		plan   *trace.Report
		result Result
		missed bool
	}{
		"came in elsewhere":                   {direct, Result{Looked: true, Outcome: Connected}, true},
		"a datagram that came in elsewhere":   {direct, Result{Looked: true, Outcome: Sent}, true},
		"seen by conntrack":                   {direct, Result{Looked: true, Outcome: Connected, Endpoint: endpoint}, false},
		"seen by nf_tables":                   {direct, Result{Looked: true, Outcome: Connected, Rules: []nf.Traced{{Table: "t"}}}, false},
		"nobody looked":                       {direct, Result{Outcome: Connected}, false},
		"from another node, with its address": {plan(steps("n2", "n1")), Result{Looked: true, Outcome: Connected}, false},
		"no Service on its way":               {&trace.Report{Verdict: trace.Arrives, Node: "n1", Steps: steps("n1")}, Result{Looked: true, Outcome: Connected}, false},
		"should not arrive":                   {&trace.Report{Verdict: trace.Rejected, Service: "default/web", Node: "n1", Steps: steps("n1")}, Result{Looked: true, Outcome: Refused}, false},
	} {
		t.Run(name, func(t *testing.T) {
			c.result.Compare(c.plan, intent.TCP, false)
			if missed := strings.Contains(strings.Join(c.result.Differences, "; "), "node n1 saw nothing of the packet"); missed != c.missed || !missed && len(c.result.Differences) > 0 {
				t.Errorf("the differences are %q", c.result.Differences)
			}
		})
	}
}

// TestOthersTrace: somebody else has the kernel trace packets that never stop coming.
func TestOthersTrace(t *testing.T) {
	inNamespace(t, func() {
		for _, rule := range [][]string{
			{"add", "chain", "ip", "services", "others", "{ type filter hook output priority -600; }"},
			{"add", "rule", "ip", "services", "others", "udp", "dport", "9", "meta", "nftrace", "set", "1"},
		} {
			if out, err := exec.Command("nft", rule...).CombinedOutput(); err != nil {
				t.Errorf("%v: %v %s", rule, err, out)
				return
			}
		}
		noise, err := net.Dial("udp", "10.0.0.1:9")
		if err != nil {
			t.Error(err)
			return
		}
		defer noise.Close()
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = noise.Write([]byte("x"))
				}
			}
		}()
		defer func() { close(stop); <-stopped }()
		r, err := Run(Options{Sender: here, Node: here, To: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: intent.TCP, Patience: 30 * time.Second})
		if err != nil || r.Outcome != Connected {
			t.Error(r, err)
		}
	})
}

// TestProtocol: what can't be sent is not tried.
func TestProtocol(t *testing.T) {
	if _, err := Run(Options{Protocol: intent.SCTP}); err == nil || !strings.Contains(err.Error(), "only TCP and UDP") {
		t.Errorf("SCTP: %v", err)
	}
}
