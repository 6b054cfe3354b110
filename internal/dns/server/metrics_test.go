package server

import (
	"bytes"
	"crypto/tls"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"portal/internal/dns/forward"
	"portal/internal/dns/zone"
	"portal/internal/intent"
)

// The metrics must be gathered without an error after any use: every protocol, family and response code, several zones and
// upstreams, some of them alike.
func TestMetricsAfterUse(t *testing.T) {
	config, pool := selfSigned(t)
	shared := forward.NewMetrics()
	to := func(zone string, addrs ...string) *forward.Forwarder {
		o := forward.Defaults()
		o.Zone, o.Metrics = zone, shared
		for _, a := range addrs {
			o.Upstreams = append(o.Upstreams, forward.Upstream{Addr: netip.MustParseAddrPort(a)})
		}
		return forward.New(o)
	}
	world := upstreamAddr(t)
	s, _ := started(t, small(), Options{
		Listen: []netip.AddrPort{loopback, netip.MustParseAddrPort("[::1]:0")}, TLS: config, ListenTLS: []netip.AddrPort{loopback}, ListenHTTPS: []netip.AddrPort{loopback},
		Zone:    zone.Options{Zones: []string{"cluster.local", "other.local"}},
		Forward: to(".", world, world), Stubs: map[string]*forward.Forwarder{"lan.example": to("lan.example", world), "shut.example": nil, "down.example": to("down.example", "127.0.0.1:1")},
		AllowTransfer: []netip.Prefix{netip.MustParsePrefix("::/0")}, RateLimit: 1000,
	})
	registry := prometheus.NewRegistry()
	if err := s.Register(registry); err != nil {
		t.Fatal(err)
	}
	endpoint := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer endpoint.Close()
	scrape := func(when string) string {
		t.Helper()
		r, err := http.Get(endpoint.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, _ := io.ReadAll(r.Body)
		if r.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s\n%s", when, r.Status, body)
		}
		return string(body)
	}
	scrape("before use")
	overTLS := func(m *dns.Msg, addr string) (*dns.Msg, error) {
		c := dns.Client{Net: "tcp-tls", TLSConfig: &tls.Config{RootCAs: pool}, Timeout: 10 * time.Second}
		r, _, err := c.Exchange(m, addr)
		return r, err
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
	defer transport.CloseIdleConnections()
	overHTTPS := func(m *dns.Msg, addr string) (*dns.Msg, error) {
		raw, _ := m.Pack()
		r, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Post("https://"+addr+"/dns-query", "application/dns-message", bytes.NewReader(raw))
		if err != nil {
			return nil, err
		}
		defer r.Body.Close()
		body, _ := io.ReadAll(r.Body)
		got := new(dns.Msg)
		return got, got.Unpack(body)
	}
	plain := func(network string) func(*dns.Msg, string) (*dns.Msg, error) {
		return func(m *dns.Msg, addr string) (*dns.Msg, error) {
			c := dns.Client{Net: network, Timeout: 10 * time.Second}
			r, _, err := c.Exchange(m, addr)
			return r, err
		}
	}
	ways := []struct {
		addr string
		ask  func(*dns.Msg, string) (*dns.Msg, error)
	}{
		{s.Addrs()[0].String(), plain("udp")}, {s.Addrs()[0].String(), plain("tcp")}, {s.Addrs()[1].String(), plain("udp")}, {s.Addrs()[1].String(), plain("tcp")},
		{s.streams[2].l.Addr().String(), overTLS}, {s.https[0].l.Addr().String(), overHTTPS},
	}
	seen := map[int]bool{}
	for _, way := range ways {
		for _, m := range everyKind() {
			r, err := way.ask(m, way.addr)
			if err != nil {
				t.Fatalf("%v: %v", m, err)
			}
			seen[r.Rcode] = true
		}
	}
	for _, rcode := range []int{dns.RcodeSuccess, dns.RcodeFormatError, dns.RcodeServerFailure, dns.RcodeNameError, dns.RcodeNotImplemented, dns.RcodeRefused, dns.RcodeBadVers} {
		if !seen[rcode] {
			t.Errorf("no query was answered with %s", dns.RcodeToString[rcode])
		}
	}
	text := scrape("after use")
	for _, want := range []string{`proto="udp"`, `proto="tcp"`, `proto="https"`, `family="1"`, `family="2"`, `zone="other.local."`, `rcode="BADVERS"`, `zones="lan.example."`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
}

// A response over TCP counts once, and is logged once, however long it is.
func TestLongResponsesCountOnce(t *testing.T) {
	c := small()
	c.SetService(&intent.Service{Key: namespaced("shop", "big"), Headless: true})
	slice := &intent.Slice{Key: namespaced("shop", "big-1"), Service: "big", Family: intent.IPv4}
	for i := range 400 {
		slice.Endpoints = append(slice.Endpoints, intent.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}), Condition: intent.Ready})
	}
	c.SetSlice(slice)
	var log bytes.Buffer
	s, addr := started(t, c, Options{QueryLog: &log})
	if r := ask(t, addr, "tcp", "big.shop.svc.cluster.local.", dns.TypeA); len(r.Answer) != 400 {
		t.Fatalf("%d answers", len(r.Answer))
	}
	if n := s.metrics.sums()[protoTCP].inSize.total(); n != 1 {
		t.Errorf("counted %d times", n)
	}
	s.queries.flush()
	s.queries.mu.Lock()
	defer s.queries.mu.Unlock()
	if n := bytes.Count(log.Bytes(), []byte("\n")); n != 1 {
		t.Errorf("logged:\n%s", log.Bytes())
	}
}

// everyKind are queries that get each response code, from each source.
func everyKind() (out []*dns.Msg) {
	for _, name := range []string{
		"web.shop.svc.cluster.local.", "no.shop.svc.cluster.local.", "web.shop.svc.other.local.", "out.shop.svc.cluster.local.", "10.0.96.10.in-addr.arpa.",
		"www.example.com.", "www.example.com.", "no.example.com.", "a.lan.example.", "a.shut.example.", "a.down.example.", "a.down.example.",
	} {
		for _, typ := range []uint16{dns.TypeA, dns.TypeSRV, dns.TypePTR, dns.TypeNAPTR, dns.TypeAXFR, 65280} {
			if typ == dns.TypeAXFR && name == "cluster.local." {
				continue
			}
			m := new(dns.Msg)
			m.SetQuestion(name, typ)
			m.SetEdns0(1232, true)
			out = append(out, m)
		}
	}
	notify, version, twice, chaos := new(dns.Msg), new(dns.Msg), new(dns.Msg), new(dns.Msg)
	notify.SetNotify("cluster.local.")
	version.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	version.SetEdns0(1232, false)
	version.IsEdns0().SetVersion(1)
	twice.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	twice.Extra = append(twice.Extra, version.Extra[0], version.Extra[0])
	chaos.SetQuestion("version.bind.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	return append(out, notify, version, twice, chaos)
}

func TestMetricsUnderCoreDNSNames(t *testing.T) {
	s, addr := started(t, small(), Options{Forward: upstream(t)})
	registry := prometheus.NewRegistry()
	if err := s.Register(registry); err != nil {
		t.Fatal(err)
	}
	ask(t, addr, "udp", "web.shop.svc.cluster.local.", dns.TypeA)
	ask(t, addr, "tcp", "no.shop.svc.cluster.local.", dns.TypeA)
	ask(t, addr, "udp", "www.example.com.", dns.TypeA)
	ask(t, addr, "udp", "www.example.com.", dns.TypeA)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			key := f.GetName()
			for _, l := range m.Label {
				if l.GetName() == "rcode" || l.GetName() == "proto" || l.GetName() == "zone" && l.GetValue() != "" {
					key += " " + l.GetValue()
				}
			}
			got[key] += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for key, want := range map[string]float64{
		"coredns_dns_requests_total udp cluster.local.": 1, "coredns_dns_requests_total tcp cluster.local.": 1, "coredns_dns_requests_total udp .": 2,
		"coredns_dns_responses_total NXDOMAIN cluster.local.": 1, "coredns_dns_responses_total NOERROR .": 2,
		"coredns_cache_hits_total": 1, "coredns_proxy_request_duration_seconds NOERROR": 1,
	} {
		if got[key] != want {
			t.Errorf("%s = %v, want %v", key, got[key], want)
		}
	}
	if got["coredns_dns_request_duration_seconds ."] < 4 {
		t.Errorf("durations of %v requests", got["coredns_dns_request_duration_seconds ."])
	}
	if t.Failed() {
		t.Log(got)
	}
}
