package backendtest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// host is a network namespace with a thread that lives in it. All of it is gone when its owner ends: the namespace has
// no name, and nothing outside it refers to it.
type host struct {
	name  string
	ns    netns.NsHandle
	calls chan func()
	addrs []netip.Addr
	// in is the interface of the node by which its packets come; empty for the node itself.
	in string
	// ports counts those that flows have taken.
	ports atomic.Uint32
}

func newHost(name string) (*host, error) {
	h := &host{name: name, calls: make(chan func())}
	ready := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine, and nobody gets one in a strange namespace.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			h.ns, err = netns.Get()
		}
		ready <- err
		if err != nil {
			return
		}
		for f := range h.calls {
			f()
		}
	}()
	if err := <-ready; err != nil {
		return nil, err
	}
	return h, nil
}

// do runs a function in the namespace.
func (h *host) do(f func() error) error {
	done := make(chan error)
	h.calls <- func() { done <- f() }
	return <-done
}

func (h *host) close() {
	close(h.calls)
	_ = h.ns.Close()
}

// sysctl sets what exists.
func sysctl(value string, names ...string) error {
	for _, name := range names {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// world is a node with Pods, a Pod's host elsewhere and a client outside:
//
//	outside ── eth0 ┐            ┌ pod1 … pod3 (servers), client
//	                node ── cbr0 ┤
//	   far ── eth1 ┘             └
//
// far has the addresses of three Pods of another node; the node is everybody's way to Services.
type world struct {
	node, outside, far, client *host
	pods                       []*host
	all                        []*host
	closers                    []func()
}

const (
	servicePrefix4 = "10.96.0.0/16"
	servicePrefix6 = "fd00:96::/112"
	// serverPort is where every Pod listens; otherPort too.
	serverPort = 8080
	otherPort  = 8081
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// newWorld builds the network; the test's end removes it.
func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	w := &world{}
	t.Cleanup(w.close)
	if err := w.build(); err != nil {
		t.Fatalf("building the test network: %v", err)
	}
	return w
}

func (w *world) close() {
	for _, f := range w.closers {
		f()
	}
	for _, h := range w.all {
		h.close()
	}
}

func (w *world) build() error {
	for _, d := range []struct {
		to   **host
		name string
	}{{&w.node, "node"}, {&w.outside, "outside"}, {&w.far, "far"}, {&w.client, "client"}} {
		h, err := w.add(d.name)
		if err != nil {
			return err
		}
		*d.to = h
	}
	if err := w.node.do(nodeBase); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	for i := range 3 {
		h, err := w.add(fmt.Sprintf("pod%d", i+1))
		if err != nil {
			return err
		}
		w.pods = append(w.pods, h)
		if err := w.pod(h, 11+i); err != nil {
			return fmt.Errorf("%s: %w", h.name, err)
		}
	}
	if err := w.pod(w.client, 21); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	if err := w.uplinks(); err != nil {
		return err
	}
	for _, h := range append([]*host{w.far}, w.pods...) {
		if err := w.serve(h); err != nil {
			return fmt.Errorf("serving on %s: %w", h.name, err)
		}
	}
	return nil
}

func (w *world) add(name string) (*host, error) {
	h, err := newHost(name)
	if err != nil {
		return nil, err
	}
	w.all = append(w.all, h)
	return h, h.do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		// Refusals are counted by the suite, not by the kernel.
		err = sysctl("0", "ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit", "ipv4/conf/all/rp_filter", "ipv4/conf/default/rp_filter",
			"ipv6/conf/all/accept_dad", "ipv6/conf/default/accept_dad")
		return errors.Join(err, netlink.LinkSetUp(lo))
	})
}

func nodeBase() error {
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cbr0"}}
	return errors.Join(
		sysctl("1", "ipv4/ip_forward", "ipv6/conf/all/forwarding"),
		netlink.LinkAdd(bridge),
		address("cbr0", "10.244.1.1/24", "fd00:244:1::1/64"),
	)
}

// address gives a link addresses and sets it up.
func address(link string, addrs ...string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		parsed, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		if parsed.IP.To4() == nil {
			parsed.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(l, parsed); err != nil {
			return fmt.Errorf("adding %s: %w", a, err)
		}
	}
	return netlink.LinkSetUp(l)
}

// route adds routes through gateways, "prefix gateway" alternating.
func route(pairs ...string) error {
	for i := 0; i < len(pairs); i += 2 {
		_, dst, err := net.ParseCIDR(pairs[i])
		if err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(pairs[i+1])}); err != nil {
			return fmt.Errorf("route to %s: %w", pairs[i], err)
		}
	}
	return nil
}

// cable connects a host's eth0 to a new interface of the node.
func (w *world) cable(h *host, atNode string) error {
	return w.node.do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: atNode}, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(h.ns)),
		})
	})
}

// pod puts a host behind the node's bridge.
func (w *world) pod(h *host, number int) error {
	v4, v6 := fmt.Sprintf("10.244.1.%d", number), fmt.Sprintf("fd00:244:1::%d", number)
	h.addrs, h.in = []netip.Addr{addr(v4), addr(v6)}, "cbr0"
	port := "veth" + h.name
	if err := w.cable(h, port); err != nil {
		return err
	}
	err := w.node.do(func() error {
		bridge, err := netlink.LinkByName("cbr0")
		if err != nil {
			return err
		}
		l, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		// As CNI plugins do: with br_netfilter, a Pod's packet to itself never gets beyond the bridge.
		return errors.Join(netlink.LinkSetMaster(l, bridge), netlink.LinkSetHairpin(l, true), netlink.LinkSetUp(l))
	})
	if err != nil {
		return err
	}
	return h.do(func() error {
		return errors.Join(address("eth0", v4+"/24", v6+"/64"), route("0.0.0.0/0", "10.244.1.1", "::/0", "fd00:244:1::1"))
	})
}

// uplinks connect the node with the world.
func (w *world) uplinks() error {
	w.node.addrs = []netip.Addr{addr("172.31.0.11"), addr("fd00:31::11"), addr("172.31.0.21"), addr("10.244.1.1"), addr("fd00:244:1::1"), addr("192.0.2.1"), addr("fd00:77::1")}
	w.outside.addrs, w.outside.in = []netip.Addr{addr("172.31.0.100"), addr("fd00:31::100")}, "eth0"
	w.far.addrs, w.far.in = nil, "eth1"
	outside := []string{"172.31.0.100/24", "fd00:31::100/64"}
	for i := range clients {
		a := clientAddr(i)
		w.outside.addrs = append(w.outside.addrs, a)
		outside = append(outside, a.String()+"/24")
	}
	var far []string
	for i := range 3 {
		v4, v6 := fmt.Sprintf("10.244.2.%d", 11+i), fmt.Sprintf("fd00:244:2::%d", 11+i)
		w.far.addrs = append(w.far.addrs, addr(v4), addr(v6))
		far = append(far, v4+"/32", v6+"/128")
	}
	if err := errors.Join(w.cable(w.outside, "eth0"), w.cable(w.far, "eth1")); err != nil {
		return err
	}
	return errors.Join(
		w.node.do(func() error {
			return errors.Join(
				address("eth0", "172.31.0.11/24", "172.31.0.21/24", "fd00:31::11/64"),
				address("eth1", "192.0.2.1/30", "fd00:77::1/64"),
				route("0.0.0.0/0", "172.31.0.100", "::/0", "fd00:31::100", "10.244.2.0/24", "192.0.2.2", "fd00:244:2::/64", "fd00:77::2"),
			)
		}),
		w.outside.do(func() error {
			return errors.Join(address("eth0", outside...), route(
				servicePrefix4, "172.31.0.11", "203.0.113.0/24", "172.31.0.11", "198.51.100.0/24", "172.31.0.11",
				servicePrefix6, "fd00:31::11", "fd00:203::/64", "fd00:31::11", "fd00:198::/64", "fd00:31::11"))
		}),
		w.far.do(func() error {
			return errors.Join(address("lo", far...), address("eth0", "192.0.2.2/30", "fd00:77::2/64"),
				route("0.0.0.0/0", "192.0.2.1", "::/0", "fd00:77::1"))
		}),
	)
}

// clients is how many further addresses outside has, for affinity.
const clients = 48

func clientAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 31, 0, byte(120 + i)}) }
