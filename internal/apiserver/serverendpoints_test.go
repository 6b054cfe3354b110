package apiserver

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestSlicesOfServers(t *testing.T) {
	for _, c := range []struct{ members, want string }{
		{"", ""},
		{"192.0.2.1:6443 192.0.2.2:6443", "kubernetes IPv4 6443 [192.0.2.1 192.0.2.2]"},
		{"192.0.2.1:6443 192.0.2.1:6444", "kubernetes IPv4 6443 [192.0.2.1]; kubernetes-6444-ipv4 IPv4 6444 [192.0.2.1]"},
		{"[2001:db8::1]:6443", "kubernetes IPv6 6443 [2001:db8::1]"},
		{"192.0.2.1:6443 [2001:db8::1]:6443", "kubernetes IPv4 6443 [192.0.2.1]; kubernetes-6443-ipv6 IPv6 6443 [2001:db8::1]"},
	} {
		var members []netip.AddrPort
		for _, m := range strings.Fields(c.members) {
			members = append(members, netip.MustParseAddrPort(m))
		}
		var got []string
		for _, s := range slicesOf(members) {
			var addrs []string
			for _, e := range s.Endpoints {
				addrs = append(addrs, e.Addresses...)
			}
			got = append(got, fmt.Sprint(s.Name, " ", s.AddressType, " ", *s.Ports[0].Port, " ", addrs))
		}
		if text := strings.Join(got, "; "); text != c.want {
			t.Errorf("%s: got %s, want %s", c.members, text, c.want)
		}
	}
}
