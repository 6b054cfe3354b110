package server

import (
	"net/netip"
	"testing"
)

// TestIsOwn: an upstream is the server itself at whatever address of the machine it listens.
func TestIsOwn(t *testing.T) {
	local := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("fe80::1")}
	for _, c := range []struct {
		upstream, listen string
		want             bool
	}{
		{"192.0.2.1:53", "192.0.2.1:53", true}, {"192.0.2.1:5353", "192.0.2.1:53", false}, {"192.0.2.2:53", "192.0.2.1:53", false},
		{"127.0.0.1:53", "0.0.0.0:53", true}, {"127.0.0.53:53", "0.0.0.0:53", true}, {"192.0.2.1:53", "0.0.0.0:53", true}, {"192.0.2.2:53", "0.0.0.0:53", false},
		{"[2001:db8::1]:53", "0.0.0.0:53", false}, {"[::1]:53", "0.0.0.0:53", false}, {"127.0.0.53:53", "127.0.0.1:53", false},
		{"192.0.2.1:53", "[::]:53", true}, {"[2001:db8::1]:53", "[::]:53", true}, {"[fe80::1%eth0]:53", "[::]:53", true}, {"[2001:db8::2]:53", "[::]:53", false},
		{"[::ffff:192.0.2.1]:53", "0.0.0.0:53", true}, {"[::ffff:192.0.2.1]:53", "192.0.2.1:53", true},
		{"0.0.0.0:53", "[::]:53", true}, {"0.0.0.0:53", "127.0.0.1:53", true}, {"0.0.0.0:53", "192.0.2.1:53", false}, {"[::]:53", "0.0.0.0:53", false}, {"[::]:53", "[::1]:53", true},
	} {
		if got := IsOwn(netip.MustParseAddrPort(c.upstream), []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:9999"), netip.MustParseAddrPort(c.listen)}, local); got != c.want {
			t.Errorf("%s of a server on %s: %v", c.upstream, c.listen, got)
		}
	}
}
