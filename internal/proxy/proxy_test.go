package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/foreign"
)

// TestLife: nothing is applied before everything is listed; then all at once, and then what changes.
func TestLife(t *testing.T) {
	in(t, nil, func(w *world) {
		w.after(time.Minute)
		w.expect(0, "")
		w.listed()
		w.expect(1, placeA)
		w.cluster.SetService(service("b", "10.96.0.2"))
		w.settle()
		w.expect(2, placeA+", "+placeB)
		if d := w.kernel.deltas[1]; d.Full || len(d.Frontends) != 1 {
			w.Errorf("the second delta is %+v", d)
		}
		w.cluster.SetService(service("b", "10.96.0.2")) // another object that means the same
		w.settle()
		w.cluster.DeleteService(intent.Key{Namespace: "ns", Name: "a"})
		w.cluster.DeleteSlice(intent.Key{Namespace: "ns", Name: "a-1"})
		w.settle()
		w.expect(3, placeB)
		w.after(10 * time.Minute)
		w.expect(3, placeB)
		if len(w.proxy.known) != 1 || w.flows.changes != 4 || w.checks.changes != 4 {
			w.Errorf("%d known, followers heard of %d and %d changes", len(w.proxy.known), w.flows.changes, w.checks.changes)
		}
	})
}

// TestFirstSyncIsWhole: what has been listed is in the first sync, however close to its end it came.
func TestFirstSyncIsWhole(t *testing.T) {
	for range 50 {
		in(t, nil, func(w *world) {
			var listing sync.WaitGroup
			listing.Go(func() {
				for i := range 200 {
					w.cluster.SetService(service(fmt.Sprint("s", i), fmt.Sprintf("10.96.1.%d", i)))
				}
				w.cluster.MarkListed(intent.Services)
			})
			listing.Go(func() {
				for i := range 200 {
					w.cluster.SetSlice(slice(fmt.Sprint("s", i), fmt.Sprintf("10.244.1.%d", i)))
				}
				w.cluster.MarkListed(intent.EndpointSlices)
			})
			listing.Wait()
			w.settle()
			if n := len(w.kernel.deltas); n != 1 || len(w.kernel.held) != 201 {
				w.Errorf("Apply was called %d times, and there are %d frontends", n, len(w.kernel.held))
			}
		})
	}
}

// TestCoalesces: the first of many changes is applied at once, the others together.
func TestCoalesces(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		for i := range 100 {
			w.cluster.SetService(service(fmt.Sprint("s", i), fmt.Sprintf("10.96.1.%d", i)))
			time.Sleep(10 * time.Microsecond)
		}
		w.settle()
		if n := len(w.kernel.deltas); n < 2 || n > 3 || len(w.kernel.held) != 101 {
			w.Errorf("applied %d times, %d held", n, len(w.kernel.held))
		}
	})
}

// TestMinSync: what counts is the period of the mode that runs, whichever was asked for.
func TestMinSync(t *testing.T) {
	in(t, func(o *Options) {
		o.Config.MinSync = map[string]time.Duration{o.Modes[0].Name(): time.Second, "another": time.Hour}
	}, func(w *world) {
		w.listed()
		for i := range 50 {
			w.cluster.SetSlice(slice("a", fmt.Sprintf("10.244.0.%d", i+2)))
			time.Sleep(100 * time.Millisecond)
		}
		w.after(2 * time.Second)
		for i := range w.kernel.at[1:] {
			if gap := w.kernel.at[i+1].Sub(w.kernel.at[i]); gap < time.Second {
				w.Errorf("only %v between two changes", gap)
			}
		}
		w.expect(len(w.kernel.at), "10.96.0.1:80/tcp→10.244.0.51:8080")
		if n := len(w.kernel.at); n < 5 || n > 7 {
			w.Errorf("applied %d times in 5 s", n)
		}
	})
}

// TestFailure: a failed change is tried again as it was, then in full, and ever more seldom; changes in between are in.
func TestFailure(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		w.kernel.fail = errors.New("busy")
		w.cluster.SetService(service("b", "10.96.0.2"))
		w.settle()
		w.expect(2, placeA)
		w.after(time.Second)
		w.expect(3, placeA+", "+placeB)
		if w.kernel.deltas[2].Full {
			w.Error("the second try was a full one")
		}
		w.cluster.DeleteService(intent.Key{Namespace: "ns", Name: "b"})
		for range 4 {
			w.kernel.fail = errors.New("busy")
			n := len(w.kernel.deltas)
			for len(w.kernel.deltas) == n {
				w.after(10 * time.Millisecond)
			}
		}
		w.after(time.Minute)
		w.expect(8, placeA)
		if !w.kernel.deltas[7].Full {
			w.Error("the last try was no full one")
		}
		gaps := []time.Duration{}
		for i := 4; i < 8; i++ {
			gaps = append(gaps, w.kernel.at[i].Sub(w.kernel.at[i-1]))
		}
		if gaps[3] < 2*gaps[0] {
			w.Errorf("no patience: %v", gaps)
		}
	})
}

// TestRefused: one frontend that the kernel refuses keeps no other from being served, and is tried again.
func TestRefused(t *testing.T) {
	in(t, nil, func(w *world) {
		key := plan.FrontendKey{Addr: netip.MustParseAddr("10.96.0.2"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80}
		w.kernel.refuse = map[plan.FrontendKey]error{key: errors.New("does not fit")}
		w.listed()
		w.cluster.SetService(service("b", "10.96.0.2"))
		w.cluster.SetService(service("c", "10.96.0.3"))
		w.settle()
		const placeC = "10.96.0.3:80/tcp→reject"
		w.expect(2, placeA+", "+placeC)
		st := w.proxy.State(intent.Key{Namespace: "ns", Name: "b"})
		if len(st.Frontends) != 1 || st.Frontends[0].Refused != "does not fit" || !st.Frontends[0].Acknowledged.IsZero() {
			w.Errorf("people see %+v", st.Frontends)
		}
		if st := w.proxy.State(intent.Key{Namespace: "ns", Name: "b"}, intent.Key{Namespace: "ns", Name: "c"}, intent.Key{Namespace: "other", Name: "a"}); len(st.Frontends) != 2 {
			w.Errorf("of two Services, people see %+v", st.Frontends)
		}
		w.kernel.refuse = nil
		w.after(time.Minute)
		w.expect(3, placeA+", "+placeB+", "+placeC)
	})
}

// TestDrift: what somebody removed is back within a minute.
func TestDrift(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		w.kernel.lost, w.kernel.held = true, nil
		w.after(time.Minute)
		w.expect(2, placeA)
		if st := w.proxy.State(); st.Drifts != 1 || !w.kernel.deltas[1].Full {
			w.Errorf("drifts %d, full %v", st.Drifts, w.kernel.deltas[1].Full)
		}
	})
}

// TestFacts: what is learnt of the node changes plans; a Node that is away for a while is as it was.
func TestFacts(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		if a := w.kernel.facts.NodePorts.Addrs; fmt.Sprint(a) != "[192.0.2.1]" {
			w.Errorf("without a Node, node ports are at %v", a)
		}
		node := &intent.Node{Name: "n1", Labels: map[string]string{"topology.kubernetes.io/zone": "z1"}, Addresses: []intent.NodeAddress{{Type: "InternalIP", Addr: netip.MustParseAddr("192.0.2.7")}}}
		w.cluster.SetNode(node)
		w.settle()
		if f := w.kernel.facts; f.Zone != "z1" || len(f.NodePorts.Addrs) != 0 {
			w.Errorf("facts %+v", f)
		}
		w.local.list = append(w.local.list, netip.MustParseAddr("192.0.2.7"))
		w.local.changed <- struct{}{}
		w.settle()
		if a := w.kernel.facts.NodePorts.Addrs; fmt.Sprint(a) != "[192.0.2.7]" {
			w.Errorf("node ports are at %v", a)
		}
		w.cluster.DeleteNode("n1")
		w.settle()
		if w.kernel.facts.Zone != "z1" {
			w.Error("a Node that is away took its zone along")
		}
		w.expect(3, placeA)
		w.cluster.SetServiceCIDR(&intent.ServiceCIDR{Name: "kubernetes", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}})
		w.settle()
		if p := w.kernel.facts.ServicePrefixes; fmt.Sprint(p) != "[10.96.0.0/16]" {
			w.Errorf("the prefixes of Services are %v", p)
		}
	})
}

// TestUnlistedAddresses: if listing this machine's addresses fails, it is tried again, less and less often, though nothing else changes.
func TestUnlistedAddresses(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		w.local.list, w.local.fail = []netip.Addr{netip.MustParseAddr("192.0.2.7")}, 3
		w.local.changed <- struct{}{}
		w.settle()
		w.after(300 * time.Millisecond)
		if a := w.kernel.facts.NodePorts.Addrs; fmt.Sprint(a) != "[192.0.2.1]" {
			w.Errorf("node ports are at %v though the addresses are not known", a)
		}
		w.after(time.Second)
		if a := w.kernel.facts.NodePorts.Addrs; w.local.fail != 0 || fmt.Sprint(a) != "[192.0.2.7]" {
			w.Errorf("node ports are at %v, and %d more lists would fail", a, w.local.fail)
		}
		if w.proxy.due != (time.Time{}) {
			w.Error("another sync is due though nothing is left to do")
		}
	})
}

func TestChoose(t *testing.T) {
	no := errors.New("the kernel has none")
	for _, c := range []struct {
		want            string
		nodePorts       string
		nft, ipt, ipvs  error
		mode, complaint string
	}{
		{"auto", "", nil, nil, nil, "nftables", ""},
		{"", "", no, nil, nil, "iptables", ""},
		{"auto", "", no, no, nil, "userspace", ""},
		{"ipvs", "", nil, nil, nil, "ipvs", ""},
		{"ipvs", "", nil, nil, no, "iptables", ""},
		{"ipvs", "", nil, no, no, "", "no proxy mode can run here: iptables: the kernel has none"},
		{"nftables", "", no, nil, nil, "", "the proxy mode nftables can't run here: the kernel has none"},
		{"fast", "", nil, nil, nil, "", `proxy mode "fast" is not one of auto, nftables, iptables, ipvs, userspace`},
		{"auto", "127.0.0.0/8", nil, nil, nil, "iptables", ""},
		{"auto", "localhost", nil, nil, nil, "iptables", ""},
		{"auto", "::1/128", nil, nil, nil, "userspace", ""},
		{"auto", "127.0.0.0/8", nil, no, nil, "userspace", ""},
		{"nftables", "127.0.0.0/8", nil, nil, nil, "nftables", ""},
	} {
		modes := []backend.Mode{&kernel{name: "nftables", probe: c.nft}, &kernel{name: "iptables", probe: c.ipt}, &kernel{name: "ipvs", probe: c.ipvs}, &kernel{name: "userspace"}}
		o := Options{Modes: modes, Mode: c.want, Config: Config{Families: []intent.Family{intent.IPv4, intent.IPv6}}, Log: slog.New(slog.DiscardHandler)}
		if c.nodePorts != "" {
			var err error
			if o.Config.NodePorts, err = plan.ParseNodePortAddresses([]string{c.nodePorts}); err != nil {
				t.Fatal(err)
			}
		}
		m, err := choose(t.Context(), &o)
		switch {
		case c.complaint != "":
			if err == nil || err.Error() != c.complaint {
				t.Errorf("%s: error %v, want %s", c.want, err, c.complaint)
			}
		case err != nil || m.Name() != c.mode:
			t.Errorf("%s: %v, %v, want %s", c.want, m, err, c.mode)
		}
	}
}

// TestWarnsOfUnservedNodePorts: of loopback addresses for node ports that the mode can't serve, one line says so, and none of others.
func TestWarnsOfUnservedNodePorts(t *testing.T) {
	for _, c := range []struct {
		mode, nodePorts string
		warned          string
	}{
		{"nftables", "127.0.0.0/8", "127.0.0.0/8"},
		{"ipvs", "127.0.0.0/8", "127.0.0.0/8"},
		{"nftables", "localhost", "127.0.0.0/8"},
		{"iptables", "::1/128", "::1/128"},
		{"iptables", "127.0.0.0/8", ""},
		{"userspace", "127.0.0.0/8", ""},
		{"userspace", "::1/128", ""},
		{"nftables", "192.0.2.0/24", ""},
		{"nftables", "", ""},
	} {
		var log bytes.Buffer
		in(t, func(o *Options) {
			o.Modes[0].(*kernel).name, o.Mode = c.mode, c.mode
			o.Config.Families = []intent.Family{intent.IPv4, intent.IPv6}
			o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
			if c.nodePorts != "" {
				var err error
				if o.Config.NodePorts, err = plan.ParseNodePortAddresses([]string{c.nodePorts}); err != nil {
					t.Fatal(err)
				}
			}
		}, func(w *world) { w.listed() })
		var lines []string
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, "node ports") {
				lines = append(lines, line)
			}
		}
		want := fmt.Sprintf("mode=%s addresses=%s\n", c.mode, c.warned)
		if c.warned == "" && lines != nil || c.warned != "" && (len(lines) != 1 || !strings.Contains(lines[0], "level=WARN") || !strings.HasSuffix(lines[0], want)) {
			t.Errorf("%s with --nodeport-addresses=%s says %q", c.mode, c.nodePorts, lines)
		}
	}
}

// TestFallbacks: what a mode could program only by its second way is counted in a metric and in /state, once.
func TestFallbacks(t *testing.T) {
	second := &secondWay{}
	in(t, func(o *Options) {
		second.kernel = o.Modes[0].(*kernel)
		o.Modes = []backend.Mode{second}
	}, func(w *world) {
		r := prometheus.NewRegistry()
		if err := w.proxy.Register(r); err != nil {
			w.Fatal(err)
		}
		expect := func(want uint64) {
			w.Helper()
			if got := gathered(w, r)["portal_proxy_fallbacks_total{}"]; got != float64(want) {
				w.Errorf("the metric is %v, want %d", got, want)
			}
			state, err := json.Marshal(w.proxy.State())
			if err != nil {
				w.Fatal(err)
			}
			if has := strings.Contains(string(state), fmt.Sprintf(`"fallbacks":%d`, want)); has != (want > 0) || want == 0 && strings.Contains(string(state), "fallbacks") {
				w.Errorf("/state says %s, want %d fallbacks", state, want)
			}
		}
		w.listed()
		expect(0)
		for i, step := range []struct{ more, want uint64 }{{2, 2}, {0, 2}, {1, 3}} {
			second.times += step.more
			w.cluster.SetSlice(slice("a", fmt.Sprintf("10.244.0.%d", i+2)))
			w.settle()
			expect(step.want)
		}
	})
}

// secondWay is a mode that says that it fell back.
type secondWay struct {
	*kernel
	times uint64
}

func (s *secondWay) Open(context.Context) (backend.Backend, error) { return s, nil }
func (s *secondWay) Fallbacks() uint64                             { return s.times }

// TestCleansOthers: what other modes left goes once this one serves, and not before.
func TestCleansOthers(t *testing.T) {
	other := &kernel{name: "iptables"}
	in(t, func(o *Options) { o.Modes = append(o.Modes, other) }, func(w *world) {
		w.settle()
		if other.cleaned.Load() != 0 {
			w.Error("cleaned before serving")
		}
		w.listed()
		if other.cleaned.Load() != 1 || w.kernel.cleaned.Load() != 0 {
			w.Errorf("the other was cleaned %d times, this one %d", other.cleaned.Load(), w.kernel.cleaned.Load())
		}
	})
}

// TestCleansOthersUntilDone: what can't be removed is tried again, less and less often, and the log has it once.
func TestCleansOthersUntilDone(t *testing.T) {
	var log bytes.Buffer
	stuck, other := &kernel{name: "iptables", stuck: 5}, &kernel{name: "ipvs"}
	in(t, func(o *Options) {
		o.Modes = append(o.Modes, stuck, other)
		o.Log = slog.New(slog.NewTextHandler(&log, nil))
	}, func(w *world) {
		w.listed()
		if stuck.cleaned.Load() != 1 {
			w.Errorf("cleaned %d times at once", stuck.cleaned.Load())
		}
		w.after(time.Hour)
		if stuck.cleaned.Load() != 6 || other.cleaned.Load() != 1 {
			w.Errorf("cleaned %d times, and the other one %d: want 6 and 1", stuck.cleaned.Load(), other.cleaned.Load())
		}
	})
	if text := log.String(); strings.Count(text, "could not remove the rules of another proxy mode") != 1 || strings.Count(text, "removed the rules of another proxy mode") != 1 {
		t.Errorf("the log:\n%s", text)
	}
	// A proxy that ends does not wait for it.
	forever := &kernel{name: "iptables", stuck: 1 << 30}
	in(t, func(o *Options) { o.Modes = append(o.Modes, forever) }, func(w *world) {
		w.listed()
		w.after(time.Minute)
		if forever.cleaned.Load() < 5 || forever.cleaned.Load() > 20 {
			w.Errorf("cleaned %d times in a minute", forever.cleaned.Load())
		}
	})
}

// TestTellsOfForeignRules: what another proxy left is in the log, in /state and in a metric.
func TestTellsOfForeignRules(t *testing.T) {
	var log bytes.Buffer
	in(t, func(o *Options) {
		o.Log = slog.New(slog.NewTextHandler(&log, nil))
		o.Foreign = func(context.Context) ([]foreign.Leftover, error) {
			return []foreign.Leftover{{What: "nftables tables", Where: "nft", Count: 2}, {What: "iptables chains", Where: "iptables-legacy", Count: 5}}, nil
		}
	}, func(w *world) {
		r := prometheus.NewRegistry()
		if err := w.proxy.Register(r); err != nil {
			w.Fatal(err)
		}
		w.listed()
		if got := w.proxy.State().Foreign; len(got) != 2 || got[0].Count != 2 {
			w.Errorf("/state has %v", got)
		}
		if got := gathered(w, r)["portal_proxy_foreign_rules{}"]; got != 7 {
			w.Errorf("the metric is %v", got)
		}
		for _, want := range []string{"2 nftables tables (nft)", "5 iptables chains (iptables-legacy)", "--cleanup-foreign"} {
			if !strings.Contains(log.String(), want) {
				w.Errorf("the log does not have %q: %s", want, log.String())
			}
		}
	})
}

func TestMetrics(t *testing.T) {
	in(t, nil, func(w *world) {
		r := prometheus.NewRegistry()
		if err := w.proxy.Register(r); err != nil {
			w.Fatal(err)
		}
		w.listed()
		time.Sleep(time.Second)
		changed := slice("a", "10.244.0.9")
		changed.TriggerTime = time.Now().Add(-300 * time.Millisecond)
		w.cluster.SetSlice(changed)
		b := service("b", "10.96.0.2")
		b.InternalLocal = true
		w.cluster.SetService(b)
		w.cluster.SetSlice(slice("b", "10.244.0.3"))
		w.settle()
		want := map[string]float64{
			`kubeproxy_sync_full_proxy_rules_duration_seconds{ip_family="IPv4"}`:                              1,
			`kubeproxy_sync_partial_proxy_rules_duration_seconds{ip_family="IPv4"}`:                           1,
			`kubeproxy_sync_proxy_rules_duration_seconds{ip_family="IPv4"}`:                                   2,
			`kubeproxy_network_programming_duration_seconds{ip_family="IPv4"}`:                                1,
			`kubeproxy_sync_proxy_rules_service_changes_total{}`:                                              2,
			`kubeproxy_sync_proxy_rules_endpoint_changes_total{}`:                                             3,
			`kubeproxy_sync_proxy_rules_service_changes_pending{}`:                                            0,
			`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"}`: 1,
			`kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"}`: 0,
			`portal_proxy_services{}`: 2, `portal_proxy_frontends{}`: 2, `portal_proxy_mode{mode="nftables"}`: 1, `portal_proxy_drifts_total{}`: 0,
		}
		got := gathered(w, r)
		for name, v := range want {
			if g, ok := got[name]; !ok || g != v {
				w.Errorf("%s is %v, want %v", name, g, v)
			}
		}
	})
}

// gathered maps each series to its value, or to its number of observations.
func gathered(w *world, r *prometheus.Registry) map[string]float64 {
	all, err := r.Gather()
	if err != nil {
		w.Fatal(err)
	}
	out := map[string]float64{}
	for _, family := range all {
		for _, m := range family.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			v := m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			out[family.GetName()+"{"+strings.Join(labels, ",")+"}"] = v
		}
	}
	return out
}

// api is where the proxy reaches the API.
type api struct {
	at      []netip.AddrPort
	changed chan struct{}
}

func (a *api) List() []netip.AddrPort   { return a.at }
func (a *api) Changed() <-chan struct{} { return a.changed }

// TestKeepsItsWayToTheAPI: a Service that asks for the API's address does not get it, and /state says so; nor when the API
// moves to an address that a Service has.
func TestKeepsItsWayToTheAPI(t *testing.T) {
	at := &api{at: []netip.AddrPort{netip.MustParseAddrPort("203.0.113.5:80")}}
	in(t, func(o *Options) { at.changed, o.API = make(chan struct{}, 1), at }, func(w *world) {
		w.listed()
		evil := service("b", "10.96.0.2")
		evil.ExternalIPs = []netip.Addr{netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("203.0.113.6")}
		w.cluster.SetService(evil)
		w.settle()
		w.expect(2, placeA+", "+placeB+", 203.0.113.6:80/tcp→reject")
		if notes := w.proxy.State().Notes; len(notes) != 1 || !strings.Contains(notes[0].Message, "203.0.113.5:80/tcp") {
			w.Errorf("notes %v", notes)
		}
		at.at = append(at.at, netip.MustParseAddrPort("203.0.113.6:80"))
		at.changed <- struct{}{}
		w.settle()
		w.expect(3, placeA+", "+placeB)
	})
}

// TestNotesEndpointsThatAreClusterIPs: a connection to one would have to be led twice.
func TestNotesEndpointsThatAreClusterIPs(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		w.cluster.SetService(service("b", "10.96.0.2"))
		w.cluster.SetSlice(slice("b", "10.96.0.1", "10.244.0.2"))
		w.settle()
		notes := w.proxy.State(intent.Key{Namespace: "ns", Name: "b"}).Notes
		if len(notes) != 1 || !strings.Contains(notes[0].Message, "10.96.0.1:8080 is the cluster IP") {
			w.Errorf("notes %v", notes)
		}
	})
}

// TestDriftRepairBacksOff: somebody who removes the rules again and again is not fought at full speed, changes are applied
// all the same, and /state says what was found.
func TestDriftRepairBacksOff(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		for range 10 * 60 { // ten minutes
			w.kernel.lose()
			w.after(time.Second)
		}
		full := len(w.kernel.deltas)
		if full < 8 || full > 20 {
			w.Errorf("synced %d times in ten minutes", full)
		}
		if st := w.proxy.State(); st.LastDrift != "the table is gone" || st.LastDriftAt.IsZero() {
			w.Errorf("/state says %q at %v", st.LastDrift, st.LastDriftAt)
		}
		// Just after a repair the next one is a minute away; a change is not.
		for n, end := len(w.kernel.deltas), time.Now().Add(5*time.Minute); len(w.kernel.deltas) == n; {
			if time.Now().After(end) {
				w.Fatal("no repair within five minutes")
			}
			w.kernel.lose()
			w.after(time.Second)
		}
		w.kernel.lose()
		n := len(w.kernel.deltas)
		w.after(40 * time.Second)
		w.cluster.SetService(service("b", "10.96.0.2"))
		w.settle()
		if len(w.kernel.deltas) != n+1 || w.kernel.deltas[n].Full {
			w.Errorf("a change while drift waits: %d syncs", len(w.kernel.deltas)-n)
		}
	})
}

// TestPacing: syncs that cost much are made seldom enough to leave most of a processor to others.
func TestPacing(t *testing.T) {
	in(t, nil, func(w *world) {
		w.listed()
		w.kernel.slow = 100 * time.Millisecond
		before := len(w.kernel.deltas)
		for i := range 2000 { // a change every 5 ms for 10 s
			w.cluster.SetSlice(slice("a", fmt.Sprintf("10.244.%d.%d", i/250, 1+i%250)))
			time.Sleep(5 * time.Millisecond)
		}
		n := len(w.kernel.deltas) - before
		if busy := time.Duration(n) * w.kernel.slow; n < 20 || busy > 4*time.Second {
			w.Errorf("%d syncs took %v of 10 s", n, busy)
		}
		w.after(time.Second)
		w.kernel.slow = 0
	})
}
