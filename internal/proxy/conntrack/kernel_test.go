package conntrack

import (
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// inNamespace runs a test in a network namespace that ends with it: the thread is never given back.
func inNamespace(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make a network namespace")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("make a network namespace: %v", err)
			return
		}
		test(t)
	}()
	<-done
}

// put adds a flow from a client to dst that from answers.
func put(t *testing.T, protocol intent.Protocol, client, dst, from string) {
	t.Helper()
	c, d, f := ap(client), ap(dst), ap(from)
	family := netlink.InetFamily(unix.AF_INET)
	if c.Addr().Is6() {
		family = unix.AF_INET6
	}
	tuple := func(src, dst netip.AddrPort) netlink.IPTuple {
		return netlink.IPTuple{Protocol: uint8(protocol), SrcIP: net.IP(src.Addr().AsSlice()), SrcPort: src.Port(), DstIP: net.IP(dst.Addr().AsSlice()), DstPort: dst.Port()}
	}
	flow := &netlink.ConntrackFlow{FamilyType: uint8(family), Forward: tuple(c, d), Reverse: tuple(f, c), TimeOut: 100}
	if protocol == intent.TCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: 3}
	}
	if err := netlink.ConntrackCreate(netlink.ConntrackTable, family, flow); err != nil {
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

// TestKernel: exactly what matches goes, of UDP alone, and in its family.
func TestKernel(t *testing.T) {
	inNamespace(t, func(t *testing.T) {
		put(t, intent.UDP, "10.0.0.1:1000", "10.96.0.10:53", "10.244.0.1:5353")
		put(t, intent.UDP, "10.0.0.2:1000", "10.96.0.10:53", "10.244.0.2:5353")
		put(t, intent.TCP, "10.0.0.3:1000", "10.96.0.10:53", "10.244.0.1:5353")
		put(t, intent.UDP, "[fd00::1]:1000", "[fd00:96::a]:53", "[fd00:244::1]:5353")
		var seen []Flow
		n, err := (Kernel{}).Delete(intent.IPv4, func(f Flow) bool {
			seen = append(seen, f)
			return f == Flow{intent.UDP, ap("10.96.0.10:53"), ap("10.244.0.1:5353")}
		})
		if err != nil || n != 1 || len(seen) != 2 {
			t.Errorf("deleted %d of %v: %v", n, seen, err)
		}
		if got := clients(t, unix.AF_INET); !slices.Equal(got, []string{"10.0.0.2", "10.0.0.3"}) {
			t.Errorf("left: %v", got)
		}
		n, err = (Kernel{}).Delete(intent.IPv6, func(f Flow) bool { return f.From == ap("[fd00:244::1]:5353") })
		if err != nil || n != 1 || len(clients(t, unix.AF_INET6)) != 0 {
			t.Errorf("IPv6: deleted %d: %v", n, err)
		}
	})
}
