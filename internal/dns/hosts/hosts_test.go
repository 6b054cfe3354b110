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
	"portal/internal/nettest"
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

// TestFileChanges: every change of the file is noticed, whatever its size and times say, and one that could not be read is
// read later.
func TestFileChanges(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "hosts")
	h, err := New(Options{File: file, Zones: []string{"."}, TTL: 60})
	if err != nil {
		t.Fatal(err)
	}
	then := time.Unix(1e9, 0)
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, then, then); err != nil {
			t.Fatal(err)
		}
	}
	has := func(when, name string) {
		t.Helper()
		h.load()
		for _, n := range []string{"a.", "b.", "c.", "d.", "e."} {
			if _, ok := ask(t, h, n, dns.TypeA, 512); ok != (n == name) {
				t.Errorf("%s: %s is there: %v", when, n, ok)
			}
		}
	}
	has("no file yet", "")
	write(file, "10.0.0.1 a\n")
	has("it appears", "a.")
	write(file, "10.0.0.1 b\n")
	has("the same size and time", "b.")
	write(file+".new", "10.0.0.1 c\n")
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
	has("replaced", "c.")
	if err := os.Rename(file, file+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(file, 0o700); err != nil {
		t.Fatal(err)
	}
	has("it can't be read", "c.")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	// As a ConfigMap's file is: a link to a folder that is replaced.
	for _, name := range []string{"d", "e"} {
		folder := filepath.Join(dir, "data-"+name)
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		write(filepath.Join(folder, "hosts"), "10.0.0.1 "+name+"\n")
		if err := os.Symlink(folder, filepath.Join(dir, "tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "tmp"), filepath.Join(dir, "data")); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(file); err != nil {
			if err := os.Symlink(filepath.Join("data", "hosts"), file); err != nil {
				t.Fatal(err)
			}
		}
		has("linked anew", name+".")
	}
}

// TestFileUnreadable: a file that could not be read for a while is read when it can be, also if it is the same.
func TestFileUnreadable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hosts")
	h, err := New(Options{File: file, Zones: []string{"."}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("10.0.0.1 a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	release := nettest.Exhaust(t)
	h.load()
	if _, ok := ask(t, h, "a.", dns.TypeA, 512); ok {
		t.Fatal("read without a descriptor")
	}
	release()
	h.load()
	if _, ok := ask(t, h, "a.", dns.TypeA, 512); !ok {
		t.Error("not read though it can be")
	}
}
