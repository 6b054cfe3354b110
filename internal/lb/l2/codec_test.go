package l2

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"strings"
	"testing"
)

func unhex(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(text), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	own   = MAC{2, 0, 0, 0, 0, 1}
	other = MAC{2, 0, 0, 0, 0, 2}
)

// TestARP: the answer to a request, byte for byte, and announcements that all kinds of neighbours take.
func TestARP(t *testing.T) {
	request := unhex(t, "0001 0800 06 04 0001 020000000002 c0a86401 000000000000 c0a864f0")
	a, err := ParseARP(append(request, make([]byte, 18)...)) // Ethernet pads
	if err != nil || a.Op != ARPRequest || a.Sender != netip.MustParseAddr("192.168.100.1") || a.Target != netip.MustParseAddr("192.168.100.240") {
		t.Fatalf("%+v, %v", a, err)
	}
	if got, want := AnswerARP(a, own).Append(nil), unhex(t, "0001 0800 06 04 0002 020000000001 c0a864f0 020000000002 c0a86401"); !bytes.Equal(got, want) {
		t.Errorf("got  %x\nwant %x", got, want)
	}
	for i, want := range []string{
		"0001 0800 06 04 0001 020000000001 c0a864f0 000000000000 c0a864f0",
		"0001 0800 06 04 0002 020000000001 c0a864f0 ffffffffffff c0a864f0",
	} {
		if got := AnnounceARP(a.Target, own)[i].Append(nil); !bytes.Equal(got, unhex(t, want)) {
			t.Errorf("announcement %d: %x", i, got)
		}
	}
	for _, bad := range []string{"", "0001 0800 06 04", "0006 0800 06 04 0001 020000000002 c0a86401 000000000000 c0a864f0", "0001 86dd 06 10 0001 020000000002 c0a86401 000000000000 c0a864f0"} {
		if got, err := ParseARP(unhex(t, bad)); err == nil {
			t.Errorf("%s: %+v", bad, got)
		}
	}
}

// solicit looks for fd00:100::f0, from fd00:100::1, with its link address; the checksum is to be filled in. That kernels agree on
// checksums is seen where they are asked: in the tests of labs.
const solicit = `6000 0000 0020 3a ff fd000100000000000000000000000001 ff0200000000000000000001ff0000f0
	87 00 0000 00000000 fd0001000000000000000000000000f0 01 01 020000000002`

func TestNDP(t *testing.T) {
	packet := sealed(unhex(t, solicit))
	n, err := ParseNDP(packet)
	router, vip, local := netip.MustParseAddr("fd00:100::1"), netip.MustParseAddr("fd00:100::f0"), netip.MustParseAddr("fe80::1")
	want := NDP{Source: router, To: solicitedNode(vip), Target: vip, LinkAddress: other, HasLinkAddress: true}
	if err != nil || n != want {
		t.Fatalf("%+v, %v", n, err)
	}
	if got := want.Append(nil); !bytes.Equal(got, packet) {
		t.Errorf("got  %x\nwant %x", got, packet)
	}
	answer := AnswerNDP(n, own, local)
	if want := (NDP{Advertisement: true, Source: local, To: router, Target: vip, LinkAddress: own, HasLinkAddress: true, Solicited: true, Override: true}); answer != want {
		t.Errorf("the answer is %+v", answer)
	}
	if again, err := ParseNDP(answer.Append(nil)); err != nil || again != answer {
		t.Errorf("the answer reads as %+v, %v", again, err)
	}
	// Who looks for a duplicate has no address yet: everybody gets the answer.
	probe := NDP{Source: netip.IPv6Unspecified(), To: solicitedNode(vip), Target: vip}
	if n, err := ParseNDP(probe.Append(nil)); err != nil {
		t.Error(err)
	} else if a := AnswerNDP(n, own, local); a.To != AllNodes || a.Solicited {
		t.Errorf("to who looks for a duplicate: %+v", a)
	}
	if a := AnnounceNDP(vip, own, local); a.To != AllNodes || a.Solicited || !a.Override {
		t.Errorf("%+v", a)
	}
	for name, change := range map[string]func([]byte) []byte{
		"a packet that was routed":     func(b []byte) []byte { b[7] = 254; return b },
		"a wrong checksum":             func(b []byte) []byte { b[60]++; return b },
		"less than its length":         func(b []byte) []byte { return b[:len(b)-1] },
		"another protocol":             func(b []byte) []byte { b[6] = 17; return b },
		"a code":                       func(b []byte) []byte { b[41] = 1; return sealed(b) },
		"a router solicitation":        func(b []byte) []byte { b[40] = 133; return sealed(b) },
		"an option without length":     func(b []byte) []byte { b[65] = 0; return sealed(b) },
		"an option that is too long":   func(b []byte) []byte { b[65] = 2; return sealed(b) },
		"a multicast target":           func(b []byte) []byte { b[48] = 0xff; return sealed(b) },
		"no source but a link address": func(b []byte) []byte { copy(b[8:24], make([]byte, 16)); return sealed(b) },
	} {
		if got, err := ParseNDP(change(bytes.Clone(packet))); err == nil {
			t.Errorf("%s is accepted: %+v", name, got)
		}
	}
}

// sealed makes the checksum right again.
func sealed(b []byte) []byte {
	b[42], b[43] = 0, 0
	sum := checksum(b)
	b[42], b[43] = byte(sum>>8), byte(sum)
	return b
}

func FuzzARP(f *testing.F) {
	f.Add(AnnounceARP(netip.MustParseAddr("192.0.2.1"), own)[0].Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := ParseARP(b)
		if err == nil && !bytes.Equal(a.Append(nil), b[:arpSize]) {
			t.Errorf("%x is not what it was read from", a.Append(nil))
		}
	})
}

func FuzzNDP(f *testing.F) {
	f.Add(AnnounceNDP(netip.MustParseAddr("fd00::1"), own, netip.MustParseAddr("fe80::1")).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := ParseNDP(b)
		if err != nil && len(b) >= ndpSize {
			n, err = ParseNDP(sealed(b)) // so that more than the checksum is looked at
		}
		if err != nil {
			return
		}
		if again, err := ParseNDP(n.Append(nil)); err != nil || again != n {
			t.Errorf("%+v reads as %+v, %v", n, again, err)
		}
	})
}
