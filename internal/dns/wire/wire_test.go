package wire

import (
	"bytes"
	"encoding/binary"
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

// message is a query for web.shop.svc.cluster.local A, with counts and bytes after the question as given.
func message(an, ns, ar byte, rest string) []byte {
	return []byte("\x12\x34\x01\x00\x00\x01\x00" + string(an) + "\x00" + string(ns) + "\x00" + string(ar) +
		"\x03web\x04shop\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01" + rest)
}

// shapes are the ways in which a message can be right or wrong beyond its question.
var shapes = map[string]struct {
	msg  []byte
	want Verdict
}{
	"plain":                               {message(0, 0, 0, ""), OK},
	"OPT":                                 {message(0, 0, 1, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"), OK},
	"OPT with an option":                  {message(0, 0, 1, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x07\x00\x0a\x00\x03abc"), OK},
	"OPT with an empty option":            {message(0, 0, 1, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x04\x00\x0b\x00\x00"), OK},
	"option past the end of OPT":          {message(0, 0, 1, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x07\x00\x0a\x00\x04abc"), Reject},
	"option past OPT, not past message":   {message(0, 0, 2, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x04\x00\x0a\x00\x0b\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), Reject},
	"option without its length":           {message(0, 0, 1, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x03\x00\x0a\x00"), Reject},
	"OPT past the end":                    {message(0, 0, 1, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x32"), Reject},
	"OPT cut off":                         {message(0, 0, 1, "\x00\x00\x29\x04\xd0"), Reject},
	"two OPT":                             {message(0, 0, 2, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"), Reject},
	"OPT not owned by the root":           {message(0, 0, 1, "\x01a\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"), Reject},
	"OPT among the answers":               {message(1, 0, 0, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"), Reject},
	"OPT in the authority section":        {message(0, 1, 0, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"), Reject},
	"bytes after the question":            {message(0, 0, 0, "\x00"), Reject},
	"bytes after OPT":                     {message(0, 0, 1, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00\xff"), Reject},
	"counts an answer, has none":          {message(1, 0, 0, ""), Reject},
	"counts an additional, has none":      {message(0, 0, 1, ""), Reject},
	"counts three additional":             {message(0, 0, 3, ""), Reject},
	"record owned by the question's name": {message(0, 0, 1, "\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), OK},
	"owner points at itself":              {message(0, 0, 1, "\xc0\x2c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), Reject},
	"owner points forward":                {message(0, 0, 1, "\xc0\x36\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), Reject},
	"owner is a label and points at it":   {message(0, 0, 1, "\x01a\xc0\x2c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), Reject},
	"owner points into the header":        {message(0, 0, 1, "\xc0\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), Reject},
	"owner with a label of 64 bytes":      {message(0, 0, 1, "\x40a\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), Reject},
	"owner longer than a name may be":     {message(0, 0, 1, strings.Repeat("\x3f"+strings.Repeat("a", 63), 4)+"\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00"), Reject},
	"TSIG at the end":                     {message(0, 0, 2, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00\x01k\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x00"), OK},
	"TSIG before OPT":                     {message(0, 0, 2, "\x01k\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x00\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"), Reject},
	"TSIG among the answers":              {message(1, 0, 0, "\x01k\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x00"), Reject},
	"SIG(0) and TSIG":                     {message(0, 0, 2, "\x00\x00\x18\x00\xff\x00\x00\x00\x00\x00\x00\x01k\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x00"), Reject},
	"no question":                         {[]byte("\x12\x34\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00"), Reject},
	"two questions":                       {[]byte("\x12\x34\x01\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01\x00\x00\x01\x00\x01"), Reject},
	"question cut off":                    {[]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00"), Reject},
	"question points at itself":           {[]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01"), Reject},
	"a response":                          {[]byte("\x12\x34\x81\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01"), Drop},
	"shorter than a header":               {[]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00"), Drop},
}

func TestShapes(t *testing.T) {
	for name, c := range shapes {
		var q Query
		got := q.Parse(c.msg)
		if got != c.want || got == Reject && q.Rcode != FormErr {
			t.Errorf("%s: verdict %d, rcode %d; want verdict %d", name, got, q.Rcode, c.want)
		}
	}
	for opcode := byte(1); opcode < 16; opcode++ {
		msg := message(0, 0, 0, "")
		msg[2] |= opcode << 3
		var q Query
		if got := q.Parse(msg); got != Reject || q.Rcode != NotImp {
			t.Errorf("opcode %d: verdict %d, rcode %d", opcode, got, q.Rcode)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, c := range shapes {
		f.Add(c.msg)
	}
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
			checkLikeLibrary(t, msg, &q)
		case Reject:
			if out := q.Error(make([]byte, 0, 512), int(q.Rcode), false, false); len(out) < HeaderLen {
				t.Fatal("no header")
			}
		}
	})
}

// checkLikeLibrary walks an accepted message with the library's functions: the records must be as many as the header says, and
// end with the message.
func checkLikeLibrary(t *testing.T, msg []byte, q *Query) {
	name, at, err := dns.UnpackDomainName(msg, HeaderLen)
	if err != nil || at+4 != q.End {
		t.Fatalf("the library can't read the question: %v %q", err, name)
	}
	at += 4
	for range int(msg[7]) + int(msg[9]) + int(msg[11]) {
		if _, at, err = dns.UnpackDomainName(msg, at); err != nil {
			t.Fatalf("the library can't read the owner of a record: %v\n%x", err, msg)
		}
		at += 10 + int(binary.BigEndian.Uint16(msg[at+8:]))
	}
	if at != len(msg) {
		t.Fatalf("the records end at %d of %d", at, len(msg))
	}
}
