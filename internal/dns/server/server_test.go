package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"portal/internal/dns/zone"
	"portal/internal/intent"
	"portal/internal/intent/watch"
)

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

func namespaced(ns, name string) intent.Key { return intent.Key{Namespace: ns, Name: name} }

// small is a cluster with a Service of each kind.
func small() *intent.Cluster {
	c := intent.NewCluster()
	addr := netip.MustParseAddr
	for _, ns := range []string{"default", "shop"} {
		c.SetNamespace(&intent.Namespace{Name: ns})
	}
	http := []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80}}
	c.SetService(&intent.Service{Key: namespaced("shop", "web"), ClusterIPs: []netip.Addr{addr("10.96.0.10"), addr("fd00:96::10")}, Ports: http})
	c.SetService(&intent.Service{Key: namespaced("shop", "db"), Headless: true, Ports: http})
	c.SetService(&intent.Service{Key: namespaced("shop", "out"), Type: intent.ExternalName, ExternalName: "www.example.com"})
	var ends []intent.Endpoint
	for i := range 3 {
		ends = append(ends, intent.Endpoint{Addr: addr(fmt.Sprintf("10.1.0.%d", i+1)), Hostname: fmt.Sprintf("db-%d", i), Condition: intent.Ready | intent.Serving})
	}
	c.SetSlice(&intent.Slice{Key: namespaced("shop", "db-1"), Service: "db", Family: intent.IPv4, Endpoints: ends,
		Ports: []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: 8080}}})
	return c
}

// started runs a server for the test's time and returns it with its address.
func started(t testing.TB, c *intent.Cluster, o Options) (*Server, string) {
	t.Helper()
	if len(o.Listen) == 0 {
		o.Listen = []netip.AddrPort{loopback}
	}
	if o.Zone.Zones == nil {
		o.Zone.Zones = []string{"cluster.local"}
	}
	if o.Zone.Pods == "" {
		o.Zone.Pods = zone.PodsInsecure
	}
	if o.Zone.TTL == 0 {
		o.Zone.TTL = 30
	}
	s, err := New(c, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	for end := time.Now().Add(5 * time.Second); !s.Ready() && c.Complete(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not ready after 5 s")
		}
	}
	return s, s.Addrs()[0].String()
}

func ask(t testing.TB, addr, network, name string, typ uint16) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	c := dns.Client{Net: network, Timeout: 3 * time.Second}
	r, _, err := c.Exchange(m, addr)
	if err != nil {
		t.Fatalf("%s %s over %s: %v", dns.TypeToString[typ], name, network, err)
	}
	return r
}

// tool returns the path of a program; without it the test is skipped, but for root, who can install it: it fails.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	if os.Geteuid() == 0 {
		t.Fatalf("%s is missing: install it first", name)
	}
	t.Skipf("%s is not installed", name)
	return ""
}

// conformanceCluster is the state that the recorded answers belong to.
func conformanceCluster(t *testing.T, dir string) *intent.Cluster {
	raw, err := os.ReadFile(filepath.Join(dir, "state.json"))
	if err != nil {
		t.Fatal(err)
	}
	var state [][]json.RawMessage
	if err := json.Unmarshal(raw, &state); err != nil {
		t.Fatal(err)
	}
	c := intent.NewCluster()
	c.SetNamespace(&intent.Namespace{Name: "default"})
	c.SetService(&intent.Service{Key: namespaced("default", "kubernetes"), ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports: []intent.Port{{Name: "https", Protocol: intent.TCP, Port: 443}}})
	for _, s := range state {
		var kind struct{ Kind string }
		read := func(v any) {
			if err := json.Unmarshal(s[1], v); err != nil {
				t.Fatal(err)
			}
		}
		read(&kind)
		switch kind.Kind {
		case "Namespace":
			var o corev1.Namespace
			read(&o)
			c.SetNamespace(watch.Namespace(&o))
		case "Service":
			var o corev1.Service
			read(&o)
			c.SetService(watch.Service(&o))
		case "EndpointSlice":
			var o discoveryv1.EndpointSlice
			read(&o)
			c.SetSlice(watch.Slice(&o))
		}
	}
	return c
}

// The recorded answers of CoreDNS, as they are and with every question asked over TCP.
func TestConformance(t *testing.T) {
	dir, err := filepath.Abs("../../../test/recorded/dns")
	if err != nil {
		t.Fatal(err)
	}
	python := tool(t, "python3")
	// One of the recorded answers is longer than 1,232 bytes: CoreDNS sends what the client asks for.
	_, addr := started(t, conformanceCluster(t, dir), Options{})
	golden := filepath.Join(dir, "golden.json")
	for name, file := range map[string]string{"as recorded": golden, "over TCP": overTCP(t, golden)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(python, "-B", filepath.Join(dir, "check.py"), "check", file)
			cmd.Env = append(os.Environ(), "SETUP=0", "SERVER=http://127.0.0.1:1", "TOKEN=none", "DNS="+addr)
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), " 0 failed") {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Log(strings.TrimSpace(string(out)))
		})
	}
}

// overTCP writes a copy of the cases in which each comes by TCP, where size does not matter.
func overTCP(t *testing.T, golden string) string {
	raw, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	var cases, out []map[string]any
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if c["raw"] != nil || c["part_of"] != nil {
			continue
		}
		c["tcp"] = true
		out = append(out, c)
	}
	raw, _ = json.Marshal(out)
	path := filepath.Join(t.TempDir(), "tcp.json")
	if err := os.WriteFile(path, raw, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPipelinedTCP(t *testing.T) {
	_, addr := started(t, small(), Options{})
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	const n = 200
	var all []byte
	for i := range n {
		m := new(dns.Msg)
		m.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
		m.Id = uint16(i)
		b, _ := m.Pack()
		all = append(append(all, byte(len(b)>>8), byte(len(b))), b...)
	}
	if _, err := c.Write(all); err != nil {
		t.Fatal(err)
	}
	conn := dns.Conn{Conn: c}
	seen := map[uint16]bool{}
	for range n {
		m, err := conn.ReadMsg()
		if err != nil {
			t.Fatalf("after %d answers: %v", len(seen), err)
		}
		seen[m.Id] = len(m.Answer) == 1
	}
	if len(seen) != n {
		t.Fatalf("%d different answers to %d questions", len(seen), n)
	}
}

func TestRoundRobin(t *testing.T) {
	_, addr := started(t, small(), Options{Sockets: 1})
	first := map[string]int{}
	for range 30 {
		m := ask(t, addr, "udp", "db.shop.svc.cluster.local.", dns.TypeA)
		first[m.Answer[0].(*dns.A).A.String()]++
	}
	if len(first) != 3 || first["10.1.0.1"] != 10 {
		t.Fatalf("who came first: %v", first)
	}
}

// A wildcard socket must answer from the address that was asked: a resolver drops answers from others.
func TestAnswersFromTheAddressAsked(t *testing.T) {
	for _, listen := range []string{"0.0.0.0:0", "[::]:0"} {
		s, _ := started(t, small(), Options{Listen: []netip.AddrPort{netip.MustParseAddrPort(listen)}})
		for _, a := range []string{"127.0.0.1", "127.0.0.77"} {
			m := ask(t, net.JoinHostPort(a, fmt.Sprint(s.Addrs()[0].Port())), "udp", "web.shop.svc.cluster.local.", dns.TypeA)
			if len(m.Answer) != 1 {
				t.Errorf("%s via %s: %v", listen, a, m)
			}
		}
	}
}

func TestTransfer(t *testing.T) {
	all := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	_, open := started(t, small(), Options{AllowTransfer: all})
	_, closed := started(t, small(), Options{})
	request := new(dns.Msg)
	request.SetAxfr("cluster.local.")
	got := map[string]int{}
	ch, err := new(dns.Transfer).In(request, open)
	if err != nil {
		t.Fatal(err)
	}
	for env := range ch {
		if env.Error != nil {
			t.Fatal(env.Error)
		}
		for _, rr := range env.RR {
			got[rr.Header().Name+" "+dns.TypeToString[rr.Header().Rrtype]]++
		}
	}
	for name, n := range map[string]int{
		"cluster.local. SOA": 2, "web.shop.svc.cluster.local. A": 1, "web.shop.svc.cluster.local. AAAA": 1, "_http._tcp.web.shop.svc.cluster.local. SRV": 1,
		"db.shop.svc.cluster.local. A": 3, "db-1.db.shop.svc.cluster.local. A": 1, "out.shop.svc.cluster.local. CNAME": 1, "_http._tcp.db.shop.svc.cluster.local. SRV": 3,
		"dns-version.cluster.local. TXT": 1,
	} {
		if got[name] != n {
			t.Errorf("%s: %d records, want %d", name, got[name], n)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
	if m := ask(t, closed, "tcp", "cluster.local.", dns.TypeAXFR); m.Rcode != dns.RcodeRefused {
		t.Errorf("a transfer to nobody: %v", dns.RcodeToString[m.Rcode])
	}
}

// TestTransferEndsAtNestedZones: of a zone that is served by itself, a transfer of the one above has the delegation and its addresses, and nothing else.
func TestTransferEndsAtNestedZones(t *testing.T) {
	o := Options{AllowTransfer: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	o.Zone.Zones = []string{"cluster.local", "b.cluster.local", "deep.b.cluster.local"}
	o.Zone.Reverse = []string{"in-addr.arpa", "10.in-addr.arpa"}
	o.Zone.Servers = []netip.Addr{netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("2001:db8::53")}
	_, server := started(t, small(), o)
	for zone, nested := range map[string][]string{
		"cluster.local.": {"b.cluster.local."}, "b.cluster.local.": {"deep.b.cluster.local."}, "deep.b.cluster.local.": nil,
		"in-addr.arpa.": {"10.in-addr.arpa."}, "10.in-addr.arpa.": nil,
	} {
		request := new(dns.Msg)
		request.SetAxfr(zone)
		ch, err := new(dns.Transfer).In(request, server)
		if err != nil {
			t.Fatal(err)
		}
		got, below := map[string]int{}, 0
		for env := range ch {
			if env.Error != nil {
				t.Fatal(env.Error)
			}
			for _, rr := range env.RR {
				name, kind := rr.Header().Name, dns.TypeToString[rr.Header().Rrtype]
				if got[name+" "+kind]++; slices.ContainsFunc(nested, func(n string) bool { return dns.IsSubDomain(n, name) }) {
					below++
				}
			}
		}
		for _, want := range append(nested, zone) {
			for _, record := range []string{want + " NS", "ns.dns." + want + " A", "ns.dns." + want + " AAAA"} {
				if got[record] != 1 {
					t.Errorf("%s: %d records %s, want 1", zone, got[record], record)
				}
			}
		}
		own, wanted := "web.shop.svc."+zone+" A", 1
		if strings.HasSuffix(zone, "in-addr.arpa.") {
			own, wanted = "10.0.96.10.in-addr.arpa. PTR", strings.Count(zone, "10.")
		}
		if got[own] != wanted {
			t.Errorf("%s: %d records %s", zone, got[own], own)
		}
		if below != 3*len(nested) || got[zone+" SOA"] != 2 {
			t.Errorf("%s: %d records of nested zones, want %d: %v", zone, below, 3*len(nested), got)
		}
	}
}

// TestNestedZoneHasItsNameServer: a zone that begins where another one has a name of its own keeps its NS record.
func TestNestedZoneHasItsNameServer(t *testing.T) {
	for _, nested := range []string{"svc.cluster.local", "shop.svc.cluster.local"} {
		o := Options{}
		o.Zone.Zones = []string{nested, "cluster.local"}
		o.Zone.Servers = []netip.Addr{netip.MustParseAddr("192.0.2.53")}
		_, server := started(t, small(), o)
		if m := ask(t, server, "udp", nested+".", dns.TypeNS); len(m.Answer) != 1 || m.Answer[0].Header().Rrtype != dns.TypeNS {
			t.Errorf("%s: %v", nested, m)
		}
	}
}

func TestRateLimit(t *testing.T) {
	_, addr := started(t, small(), Options{RateLimit: 20})
	c, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m := new(dns.Msg)
	m.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	b, _ := m.Pack()
	whole, cut := 0, 0
	for range 200 {
		c.Write(b)
	}
	c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	buf := make([]byte, 512)
	for {
		n, err := c.Read(buf)
		if err != nil {
			break
		}
		var r dns.Msg
		if r.Unpack(buf[:n]) == nil && r.Truncated {
			cut++
		} else {
			whole++
		}
	}
	if whole < 20 || whole > 35 || cut < 60 || cut > 100 {
		t.Fatalf("of 200: %d whole, %d cut off; want about 20, and half of the rest", whole, cut)
	}
	if r := ask(t, addr, "tcp", "web.shop.svc.cluster.local.", dns.TypeA); len(r.Answer) != 1 {
		t.Error("TCP, which cannot be forged, is limited, too")
	}
}
