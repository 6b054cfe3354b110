package server

import (
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"portal/internal/dns/zone"
	"portal/internal/intent"
)

// By default only private networks and the cluster's may ask for other names; the cluster's names are for everybody.
func TestNoOpenResolver(t *testing.T) {
	s, _ := started(t, small(), Options{Forward: upstream(t), Fallthrough: []string{"in-addr.arpa"}})
	w, addr := s.newWorker(protoUDP), netip.MustParseAddr
	ask := func(name string, typ uint16, from string) (int, verdict) {
		m := new(dns.Msg)
		m.SetQuestion(name, typ)
		raw, _ := m.Pack()
		out, v := w.handle(make([]byte, 0, outSize), raw, addr(from))
		if v != reply {
			return -1, v
		}
		return int(out[3] & 15), v
	}
	for _, from := range []string{"127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.1", "169.254.20.10", "::1", "fd00::1", "fe80::1%lo"} {
		if _, v := ask("www.example.com.", dns.TypeA, from); v != later {
			t.Errorf("%s may not ask for other names", from)
		}
	}
	outside := []string{"203.0.113.1", "8.8.8.8", "172.32.0.1", "2001:db8::1", "11.0.0.1"}
	for _, from := range outside {
		if rcode, _ := ask("www.example.com.", dns.TypeA, from); rcode != dns.RcodeRefused {
			t.Errorf("%s asks for another name: %s", from, dns.RcodeToString[rcode])
		}
		if rcode, v := ask("web.shop.svc.cluster.local.", dns.TypeA, from); rcode != dns.RcodeSuccess || v != reply {
			t.Errorf("%s asks for a name of the cluster: %s", from, dns.RcodeToString[rcode])
		}
		for name, typ := range map[string]uint16{"9.9.9.9.in-addr.arpa.": dns.TypePTR, "out.shop.svc.cluster.local.": dns.TypeA} {
			if _, v := ask(name, typ, from); v != reply {
				t.Errorf("%s makes the server ask others through %s", from, name)
			}
		}
	}
	select {
	case <-s.RecursionRefused():
	default:
		t.Error("nobody was notified")
	}
	s.AllowClusterNetworks([]netip.Prefix{netip.MustParsePrefix("2001:db8::/48"), netip.MustParsePrefix("203.0.113.1/32")})
	for from, want := range map[string]verdict{"2001:db8:0:7::1": later, "203.0.113.1": later, "203.0.113.2": reply, "2001:db8:1::": reply} {
		if _, v := ask("www.example.com.", dns.TypeA, from); v != want {
			t.Errorf("%s, with the cluster's networks known: %v, want %v", from, v, want)
		}
	}
}

func TestNetworks(t *testing.T) {
	var list []netip.Prefix
	for _, s := range []string{"10.0.0.0/8", "10.1.0.0/16", "10.0.0.0/16", "192.0.2.7/32", "192.0.2.9/32", "fd00::/8", "fd00:1::/32", "::/0"} {
		list = append(list, netip.MustParsePrefix(s))
	}
	n := newNetworks(list)
	if len(n) != 4 {
		t.Errorf("%v: prefixes within others are left in", n)
	}
	for a, want := range map[string]bool{"10.255.255.255": true, "9.255.255.255": false, "11.0.0.0": false, "192.0.2.7": true, "192.0.2.8": false, "192.0.2.9": true, "::1": true, "255.255.255.255": false} {
		if n.contains(netip.MustParseAddr(a)) != want {
			t.Errorf("%s: want %v", a, want)
		}
	}
	if newNetworks(nil).contains(netip.MustParseAddr("127.0.0.1")) {
		t.Error("nothing contains an address")
	}
}

func TestRefusesRecursionFromOutside(t *testing.T) {
	_, addr := started(t, small(), Options{Forward: upstream(t), AllowRecursion: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}})
	if m := ask(t, addr, "udp", "www.example.com.", dns.TypeA); m.Rcode != dns.RcodeRefused {
		t.Errorf("%v", m)
	}
	if m := ask(t, addr, "udp", "web.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 1 {
		t.Errorf("%v", m)
	}
}

func TestAutopath(t *testing.T) {
	c := small()
	c.SetPod(&intent.Pod{Key: namespaced("shop", "me"), Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	_, addr := started(t, c, Options{Forward: upstream(t), Autopath: true, Zone: zone.Options{Pods: zone.PodsVerified}})
	// The first name of the search path is answered for the last one.
	m := ask(t, addr, "udp", "www.example.com.shop.svc.cluster.local.", dns.TypeA)
	if m.Rcode != dns.RcodeSuccess || len(m.Answer) != 2 || m.Answer[0].(*dns.CNAME).Target != "www.example.com." {
		t.Errorf("%v", m)
	}
	m = ask(t, addr, "udp", "web.shop.shop.svc.cluster.local.", dns.TypeA)
	if len(m.Answer) != 2 || m.Answer[0].(*dns.CNAME).Target != "web.shop.svc.cluster.local." {
		t.Errorf("%v", m)
	}
	// A path that is not this Pod's gets no short cut, and what is nowhere stays denied.
	for _, name := range []string{"www.example.com.default.svc.cluster.local.", "nowhere.example.shop.svc.cluster.local."} {
		if m := ask(t, addr, "udp", name, dns.TypeA); m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: %v", name, m)
		}
	}
}

// TestAutopathEndsAtFirstName: the first name of the path that exists is the answer, also if it has no such record, and what comes
// after a name that could not be resolved is not.
func TestAutopathEndsAtFirstName(t *testing.T) {
	c := small()
	c.SetPod(&intent.Pod{Key: namespaced("shop", "me"), Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	c.SetService(&intent.Service{Key: namespaced("default", "four"), ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.4")}, Ports: []intent.Port{{Protocol: intent.TCP, Port: 80}}})
	// Outside, all names have addresses of both families, but for some of the search path.
	world := answering(t, func(r *dns.Msg) *dns.Msg {
		m, q := new(dns.Msg).SetReply(r), r.Question[0]
		switch name := dns.CanonicalName(q.Name); {
		case name == "broken.example.corp.example.":
			m.Rcode = dns.RcodeServerFailure
		case name == "empty.example.corp.example.":
			m.Ns = []dns.RR{&dns.SOA{Hdr: dns.RR_Header{Name: "corp.example.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 60}, Ns: "a.", Mbox: "b.", Minttl: 60}}
		case dns.IsSubDomain("corp.example.", name) && name != "in.example.corp.example.":
			m.Rcode = dns.RcodeNameError
		case q.Qtype == dns.TypeA:
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(192, 0, 2, 1)}}
		default:
			m.Answer = []dns.RR{&dns.AAAA{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeAAAA, Class: dns.ClassINET, Ttl: 60}, AAAA: net.ParseIP("2001:db8::1")}}
		}
		return m
	})
	_, addr := started(t, c, Options{Forward: world, Autopath: true, Search: []string{"corp.example"}, Zone: zone.Options{Pods: zone.PodsVerified}})
	for _, q := range []struct {
		name string
		typ  uint16
		want string // the target; "": no records
	}{
		{"four.default", dns.TypeA, "four.default.svc.cluster.local."},
		{"four.default", dns.TypeAAAA, ""},
		{"in.example", dns.TypeAAAA, "in.example.corp.example."},
		{"empty.example", dns.TypeA, ""},
		{"out.example", dns.TypeAAAA, "out.example."},
	} {
		m := ask(t, addr, "udp", q.name+".shop.svc.cluster.local.", q.typ)
		got := ""
		if len(m.Answer) == 2 && m.Answer[0].Header().Name == q.name+".shop.svc.cluster.local." {
			got = m.Answer[0].(*dns.CNAME).Target
		}
		if got != q.want || m.Rcode != dns.RcodeSuccess || len(m.Answer) == 0 && (len(m.Ns) != 1 || m.Ns[0].Header().Rrtype != dns.TypeSOA) {
			t.Errorf("%s %s leads to %q, want %q:\n%v", dns.TypeToString[q.typ], q.name, got, q.want, m)
		}
	}
	if m := ask(t, addr, "udp", "broken.example.shop.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Errorf("beyond a name that could not be resolved: %v", m)
	}
}

// TestAutopathFallsThrough: a zone that falls through does so for the first name of a search path, too.
func TestAutopathFallsThrough(t *testing.T) {
	c := small()
	c.SetPod(&intent.Pod{Key: namespaced("shop", "me"), Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	_, addr := started(t, c, Options{Forward: always(t, "192.0.2.1"), Fallthrough: []string{"cluster.local"}, Autopath: true, Zone: zone.Options{Pods: zone.PodsVerified}})
	if m := ask(t, addr, "udp", "legacy.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 1 || m.Answer[0].Header().Rrtype != dns.TypeA {
		t.Errorf("%v", m)
	}
}

// TestAutopathIsNoWayAround: a Pod that may not recurse gets the cluster's names of its search path, and no others.
func TestAutopathIsNoWayAround(t *testing.T) {
	c := small()
	c.SetPod(&intent.Pod{Key: namespaced("shop", "me"), Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	_, addr := started(t, c, Options{
		Forward: upstream(t), Autopath: true, Zone: zone.Options{Pods: zone.PodsVerified},
		AllowRecursion: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
	})
	if m := ask(t, addr, "udp", "www.example.com.shop.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Errorf("%v", m)
	}
	if m := ask(t, addr, "udp", "web.shop.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 2 {
		t.Errorf("%v", m)
	}
}

// TestPrivateBesideOthers: a network beside private ones takes none of those away, the cluster's included.
func TestPrivateBesideOthers(t *testing.T) {
	s, _ := started(t, small(), Options{AllowPrivate: true, AllowRecursion: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}})
	s.AllowClusterNetworks([]netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")})
	for text, want := range map[string]bool{"203.0.113.1": true, "10.1.2.3": true, "127.0.0.1": true, "198.51.100.7": true, "192.0.2.1": false} {
		if got := s.mayRecurse(netip.MustParseAddr(text)); got != want {
			t.Errorf("%s may recurse: %v, want %v", text, got, want)
		}
	}
}
