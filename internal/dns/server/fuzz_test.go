package server

import (
	"net/netip"
	"testing"

	"github.com/miekg/dns"
)

// FuzzMessages sends arbitrary messages through the server, and a good query after each.
func FuzzMessages(f *testing.F) {
	w, questions := hot(f)
	for _, q := range questions {
		f.Add(q)
	}
	for _, rest := range []string{ // malformed beyond the question: see the parser's own tests
		"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x07\x00\x0a\x00\x04abc", "\x00\x00\x29\x04\xd0\x00\x01\x00\x00\x00\x00", "\xc0\x2c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00",
		"\x01k\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x00", "",
	} {
		f.Add([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01\x03web\x04shop\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01" + rest))
	}
	f.Add([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01\x03web\x04shop\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x32"))
	good, buf := questions["A"], make([]byte, 0, outSize)
	from := netip.MustParseAddr("10.0.0.1")
	f.Fuzz(func(t *testing.T, msg []byte) {
		for _, p := range []proto{protoUDP, protoTCP} {
			w.proto = p
			out, v := w.handle(buf, msg, from)
			if v == reply {
				if len(out) < 12 || len(out) > outSize || out[2]&0x80 == 0 {
					t.Fatalf("%d bytes of response, %x", len(out), out[:min(12, len(out))])
				}
				if err := new(dns.Msg).Unpack(out); err != nil && w.q.QClass == 1 && out[3]&15 != 1 {
					t.Fatalf("the library cannot read the response: %v\n%x", err, out)
				}
			}
			w.proto = protoUDP
			if out, v := w.handle(buf, good, from); v != reply || out[7] != 1 {
				t.Fatal("a good question after it was not answered")
			}
		}
	})
}
