package wire

import (
	"bytes"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"pgregory.net/rapid"
)

// A question must be read as the field's library reads it, in lower case.
func TestParseAgreesWithLibrary(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		label := rapid.StringMatching(`[-_a-zA-Z0-9]{1,20}`)
		name := strings.Join(rapid.SliceOfN(label, 0, 8).Draw(t, "labels"), ".") + "."
		m := new(dns.Msg)
		m.SetQuestion(name, rapid.Uint16().Draw(t, "type"))
		m.Question[0].Qclass = rapid.Uint16().Draw(t, "class")
		edns := rapid.Bool().Draw(t, "edns")
		if edns {
			m.SetEdns0(rapid.Uint16Range(512, 4096).Draw(t, "size"), rapid.Bool().Draw(t, "do"))
		}
		msg, err := m.Pack()
		if err != nil {
			t.Skip("not a name")
		}
		var q Query
		if v := q.Parse(msg); v != OK {
			t.Fatalf("verdict %v", v)
		}
		want, _ := PackName(name)
		if string(q.Name()) != want || q.Labels() != dns.CountLabel(name) || q.QType != m.Question[0].Qtype || q.QClass != m.Question[0].Qclass || q.EDNS != edns {
			t.Fatalf("%q: read %q, %d labels", name, q.Name(), q.Labels())
		}
		if UnpackName(q.Asked()) != name {
			t.Fatalf("asked %q, kept %q", name, UnpackName(q.Asked()))
		}
		if edns && (q.UDPSize != m.IsEdns0().UDPSize() || q.DO != m.IsEdns0().Do()) {
			t.Fatalf("size %d, DO %v", q.UDPSize, q.DO)
		}
	})
}

func TestLower(t *testing.T) {
	var all, want [256]byte
	for i := range all {
		all[i] = byte(i)
		want[i] = byte(i)
		if i >= 'A' && i <= 'Z' {
			want[i] += 'a' - 'A'
		}
	}
	for from := range 16 {
		got := make([]byte, 256)
		lower(got, all[from:])
		if !bytes.Equal(got[:256-from], want[from:]) {
			t.Fatalf("from %d: %v", from, got)
		}
	}
}

func TestLongestName(t *testing.T) {
	long := strings.Repeat("a23456789.", 25) + "abc."
	w, err := PackName(long)
	if err != nil || len(w) != 255 {
		t.Fatalf("%d bytes, %v", len(w), err)
	}
	msg := append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, w...)
	var q Query
	if v := q.Parse(append(msg, 0, 1, 0, 1)); v != OK || string(q.Name()) != w {
		t.Fatalf("the longest name: %v", v)
	}
	longer := append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 'x'}, w...)
	if v := q.Parse(append(longer, 0, 1, 0, 1)); v != Reject || q.Rcode != FormErr {
		t.Fatalf("a name that is too long: %v", v)
	}
	if _, err := PackName("x." + long); err == nil {
		t.Fatal("packed a name that is too long")
	}
}

func FuzzParse(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	m.SetEdns0(1232, true)
	good, _ := m.Pack()
	f.Add(good)
	f.Add([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01"))
	f.Fuzz(func(t *testing.T, msg []byte) {
		var q Query
		switch q.Parse(msg) {
		case OK:
			if q.End > len(msg) || len(q.Name()) > MaxName || len(q.Asked()) != len(q.Name()) {
				t.Fatalf("end %d of %d, name %d", q.End, len(msg), len(q.Name()))
			}
			for i := range q.Labels() {
				_ = q.Label(i)
			}
		case Reject:
			if out := q.Error(make([]byte, 0, 512), int(q.Rcode), false, false); len(out) < HeaderLen {
				t.Fatal("no header")
			}
		}
	})
}
