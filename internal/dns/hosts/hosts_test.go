package hosts

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
)

func ask(t *testing.T, h *Hosts, name string, typ uint16, limit int) (*dns.Msg, bool) {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	raw, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var q wire.Query
	if q.Parse(raw) != wire.OK {
		t.Fatal("bad query")
	}
	if h.Zone(&q) == 0 {
		return nil, false
	}
	out, ok := h.Answer(make([]byte, 0, 4096), &q, limit, true)
	if !ok {
		return nil, false
	}
	r := new(dns.Msg)
	if err := r.Unpack(out); err != nil {
		t.Fatal(err)
	}
	return r, true
}

func TestAnswers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(file, []byte("# nodes\n10.0.0.1 node-a Node-A.example\nfd00::1 node-a # two families\nbroken line\n10.0.0.2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := New(Options{File: file, Inline: []string{"10.0.0.9 printer.example"}, Zones: []string{"."}, TTL: 60, Reload: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { h.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	for _, c := range []struct {
		name string
		typ  uint16
		want string // "-": not there
	}{
		{"node-a.", dns.TypeA, "10.0.0.1"}, {"NODE-a.", dns.TypeAAAA, "fd00::1"}, {"node-a.example.", dns.TypeA, "10.0.0.1"}, {"node-a.example.", dns.TypeAAAA, ""},
		{"node-a.", dns.TypeTXT, ""}, {"printer.example.", dns.TypeA, "10.0.0.9"}, {"node-b.", dns.TypeA, "-"}, {"x.node-a.", dns.TypeA, "-"},
		{"1.0.0.10.in-addr.arpa.", dns.TypePTR, "node-a."}, {"2.0.0.10.in-addr.arpa.", dns.TypePTR, "-"},
	} {
		r, ok := ask(t, h, c.name, c.typ, 512)
		if !ok {
			if c.want != "-" {
				t.Errorf("%s %s: not there", c.name, dns.TypeToString[c.typ])
			}
			continue
		}
		got := ""
		if len(r.Answer) > 0 {
			got = map[uint16]func() string{
				dns.TypeA: func() string { return r.Answer[0].(*dns.A).A.String() }, dns.TypeAAAA: func() string { return r.Answer[0].(*dns.AAAA).AAAA.String() },
				dns.TypePTR: func() string { return r.Answer[0].(*dns.PTR).Ptr },
			}[c.typ]()
			if ttl := r.Answer[0].Header().Ttl; ttl != 60 {
				t.Errorf("TTL %d", ttl)
			}
		}
		if got != c.want || r.Rcode != dns.RcodeSuccess || !r.Authoritative {
			t.Errorf("%s %s: %q, want %q", c.name, dns.TypeToString[c.typ], got, c.want)
		}
	}
	if r, _ := ask(t, h, "node-a.", dns.TypeA, 30); !r.Truncated || len(r.Answer) != 0 {
		t.Errorf("no room: %v", r)
	}
	if err := os.WriteFile(file, []byte("10.0.0.3 node-b\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		_, b := ask(t, h, "node-b.", dns.TypeA, 512)
		_, a := ask(t, h, "node-a.", dns.TypeA, 512)
		_, inline := ask(t, h, "printer.example.", dns.TypeA, 512)
		if b && !a && inline {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the changed file is not served: %v %v %v", a, b, inline)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
	if _, ok := ask(t, h, "node-b.", dns.TypeA, 512); !ok {
		t.Error("a file that went away took its names with it")
	}
}

func TestZones(t *testing.T) {
	h, err := New(Options{Inline: []string{"10.0.0.1 a.example b.other"}, Zones: []string{"example"}, NoReverse: true})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"a.example.": true, "b.other.": false} {
		if _, ok := ask(t, h, name, dns.TypeA, 512); ok != want {
			t.Errorf("%s: %v", name, ok)
		}
	}
	if _, ok := ask(t, h, "1.0.0.10.in-addr.arpa.", dns.TypePTR, 512); ok {
		t.Error("a reverse lookup though there should be none")
	}
}
