package l2

import (
	"log/slog"
	"net/netip"
	"testing"
)

// responder is one without sockets, on two links of one segment, that announces addresses.
func responder(addrs ...netip.Addr) *Responder {
	links := []*link{{index: 1, name: "first", mac: own}, {index: 2, name: "second", mac: MAC{2, 0, 0, 0, 1, 1}}}
	r := &Responder{Options: Options{Log: slog.New(slog.DiscardHandler)}, all: links, links: links, announce: map[netip.Addr]*announced{}, wake: make(chan struct{}, 1)}
	for _, a := range addrs {
		r.announce[a] = &announced{links: links}
	}
	return r
}

// TestContested: what another machine announces is contested; what came from another link of this machine is not, chosen or not.
func TestContested(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, c := range []struct {
		what string
		from MAC
		want int
	}{{"this link", own, 0}, {"the other link", MAC{2, 0, 0, 0, 1, 1}, 0}, {"a link that is not chosen", MAC{2, 0, 0, 0, 1, 2}, 0}, {"another machine", other, 3}} {
		var got []netip.Addr
		r := responder(v4, v6)
		r.all = append(r.all, &link{index: 3, name: "third", mac: MAC{2, 0, 0, 0, 1, 2}})
		r.Contested = func(a netip.Addr) bool { got = append(got, a); return false }
		for _, p := range AnnounceARP(v4, c.from) {
			r.handleARP(p.Append(nil), 1, c.from)
		}
		r.handleNDP(AnnounceNDP(v6, c.from, netip.MustParseAddr("fe80::1")).Append(nil), 1, c.from)
		if _, _, contests := r.Counts(); len(got) != c.want || contests != uint64(c.want) {
			t.Errorf("from %s: contested %v, counted %d, want %d", c.what, got, contests, c.want)
		}
	}
}

// TestWithoutIPv6: on a kernel without IPv6 there are no groups to join and leave, and IPv4 addresses come and go as ever.
func TestWithoutIPv6(t *testing.T) {
	r := responder(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"))
	r.groups.join(netip.MustParseAddr("2001:db8::1"), r.links, r.Log)
	r.Set([]netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")})
	if got := r.Addresses(); len(got) != 1 || got[0] != netip.MustParseAddr("192.0.2.2") {
		t.Errorf("announcing %v", got)
	}
}
