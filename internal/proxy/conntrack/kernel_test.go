package conntrack

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/nettest"
)

// inNamespace runs a test in a network namespace of its own.
func inNamespace[T testing.TB](t T, test func(t T)) {
	t.Helper()
	nettest.InNamespace(t, func() { test(t) })
}

// put adds a flow from a client to dst that from answers, or will if it is of TCP and has not yet been answered.
func put(t testing.TB, protocol intent.Protocol, client, dst, from string, answered bool) {
	t.Helper()
	c, d, f := ap(client), ap(dst), ap(from)
	s, err := open(intent.FamilyOf(c.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Socket.Close()
	req := s.request(nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_ACK|unix.NLM_F_CREATE)
	tuple := func(kind int, src, dst netip.AddrPort) {
		srcKind, dstKind := nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
		if src.Addr().Is6() {
			srcKind, dstKind = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
		}
		all := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
		ip := all.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
		ip.AddRtAttr(srcKind, src.Addr().AsSlice())
		ip.AddRtAttr(dstKind, dst.Addr().AsSlice())
		ports := all.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
		ports.AddRtAttr(nl.CTA_PROTO_NUM, []byte{byte(protocol)})
		ports.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(src.Port()))
		ports.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(dst.Port()))
		req.AddData(all)
	}
	tuple(nl.CTA_TUPLE_ORIG, c, d)
	tuple(nl.CTA_TUPLE_REPLY, f, c)
	req.AddData(nl.NewRtAttr(nl.CTA_TIMEOUT, nl.BEUint32Attr(100)))
	const confirmed = 1 << 3
	status, state := uint32(confirmed), uint8(1) // SYN_SENT
	if answered {
		status, state = confirmed|seenReply, 3 // ESTABLISHED
	}
	req.AddData(nl.NewRtAttr(nl.CTA_STATUS, nl.BEUint32Attr(status)))
	if protocol == intent.TCP {
		info := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO, nil)
		info.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_PROTOINFO_TCP, nil).AddRtAttr(nl.CTA_PROTOINFO_TCP_STATE, []byte{state})
		req.AddData(info)
	}
	if _, err := req.Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		t.Fatalf("add a flow to the kernel's table: %v", err)
	}
}

// clients lists who still has a flow.
func clients(t *testing.T, family netlink.InetFamily) (out []string) {
	t.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range flows {
		out = append(out, f.Forward.SrcIP.String())
	}
	slices.Sort(out)
	return out
}

// TestKernel: exactly what matches goes, in its family and protocol, and of TCP nothing that was answered.
func TestKernel(t *testing.T) {
	inNamespace(t, func(t *testing.T) {
		put(t, intent.UDP, "10.0.0.1:1000", "10.96.0.10:53", "10.244.0.1:5353", false)
		put(t, intent.UDP, "10.0.0.2:1000", "10.96.0.10:53", "10.244.0.2:5353", true)
		put(t, intent.TCP, "10.0.0.3:1000", "10.96.0.10:53", "10.244.0.1:5353", false)
		put(t, intent.TCP, "10.0.0.4:1000", "10.96.0.10:53", "10.244.0.1:5353", true)
		put(t, intent.TCP, "10.0.0.5:1000", "10.96.0.10:53", "10.244.0.2:5353", false)
		put(t, intent.UDP, "[fd00::1]:1000", "[fd00:96::a]:53", "[fd00:244::1]:5353", true)
		put(t, intent.TCP, "[fd00::2]:1000", "[fd00:96::a]:53", "[fd00:244::1]:5353", false)
		for _, c := range []struct {
			family    intent.Family
			protocol  intent.Protocol
			from      string
			seen      int
			af        netlink.InetFamily
			remaining []string
		}{
			{intent.IPv4, intent.UDP, "10.244.0.1:5353", 2, unix.AF_INET, []string{"10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"}},
			{intent.IPv4, intent.TCP, "10.244.0.1:5353", 2, unix.AF_INET, []string{"10.0.0.2", "10.0.0.4", "10.0.0.5"}},
			{intent.IPv6, intent.UDP, "[fd00:244::1]:5353", 1, unix.AF_INET6, []string{"fd00::2"}},
			{intent.IPv6, intent.TCP, "[fd00:244::1]:5353", 1, unix.AF_INET6, nil},
		} {
			var seen []Flow
			n, err := (Kernel{}).Delete(c.family, c.protocol, func(f Flow) bool {
				seen = append(seen, f)
				if f.Dst != ap("10.96.0.10:53") && f.Dst != ap("[fd00:96::a]:53") {
					t.Errorf("addressed to %v", f.Dst)
				}
				return f.From == ap(c.from)
			})
			if err != nil || n != 1 || len(seen) != c.seen {
				t.Errorf("%s: deleted %d of %v: %v", c.protocol, n, seen, err)
			}
			if got := clients(t, c.af); !slices.Equal(got, c.remaining) {
				t.Errorf("%s: left: %v, want %v", c.protocol, got, c.remaining)
			}
		}
	})
}

// BenchmarkDelete looks for unanswered flows among 100,000 that were answered.
func BenchmarkDelete(b *testing.B) {
	inNamespace(b, func(b *testing.B) {
		const flows = 100_000
		for i := range flows {
			put(b, intent.TCP, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 16), byte(i >> 8)}), uint16(1000+i%256)).String(), "10.96.0.10:80", "10.244.0.1:8080", true)
		}
		for b.Loop() {
			if n, err := (Kernel{}).Delete(intent.IPv4, intent.TCP, func(Flow) bool { return true }); n != 0 || err != nil {
				b.Fatalf("%d flows: %v", n, err)
			}
		}
	})
}
