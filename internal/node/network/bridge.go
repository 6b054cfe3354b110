package network

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
	"portal/internal/node/network/guard"
)

// BridgeOptions are a Bridge's.
type BridgeOptions struct {
	// Dir keeps which addresses are in use.
	Dir    string
	Bridge string
	CIDRs  []netip.Prefix // at most one of each family
	// Unguarded is called if the kernel can't keep Pods to their addresses, with the reason.
	Unguarded func(error)
}

// Bridge is the network of one node's Pods, in the network namespace that it is used in: a bridge with an address of each of the node's
// Pod CIDRs, and a pair of interfaces for each Pod.
//
// Pods share the bridge but no network: an address is a Pod's alone (/32, /128), and ports of the bridge are isolated from each other.
// All that a Pod sends goes to the node, which routes it. So replies to Services' addresses pass the node's connection tracking on
// the same machine too, without br_netfilter, and a Pod can't answer in the place of another.
type Bridge struct {
	BridgeOptions
	addresses addresses
	guard     *guard.Guard
	mtu       atomic.Int32
	lasting   atomic.Int32 // index of the bridge whose hardware address was set
}

var _ Network = (*Bridge)(nil)

// DefaultBridge is the bridge's name unless another is given.
const DefaultBridge = "portal0"

// NewBridge makes a Bridge; Setup programs the kernel.
func NewBridge(o BridgeOptions) (*Bridge, error) {
	if o.Bridge == "" {
		o.Bridge = DefaultBridge
	}
	for i, p := range o.CIDRs {
		if p != p.Masked() {
			return nil, fmt.Errorf("the Pod CIDR %s must be %s", p, p.Masked())
		}
		if i > 0 && o.CIDRs[0].Addr().Is4() == p.Addr().Is4() {
			return nil, fmt.Errorf("the Pod CIDRs %s and %s must not be of the same family", o.CIDRs[0], p)
		}
	}
	return &Bridge{BridgeOptions: o, addresses: addresses{o.Dir}, guard: guard.New()}, nil
}

// SetMTU is for Pods that are attached from now on; 0: the kernel's. The bridge's own follows that of the Pods.
func (n *Bridge) SetMTU(mtu int) { n.mtu.Store(int32(mtu)) }

// Setup makes the bridge, or repairs it.
func (n *Bridge) Setup() error {
	link, err := netlink.LinkByName(n.Bridge)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = n.Bridge
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
			return fmt.Errorf("make the bridge %s: %w", n.Bridge, err)
		}
		link, err = netlink.LinkByName(n.Bridge)
	}
	if err != nil {
		return fmt.Errorf("the bridge %s: %w", n.Bridge, err)
	}
	if link.Type() != "bridge" {
		return fmt.Errorf("the interface %s is a %s, not a bridge: choose another name", n.Bridge, link.Type())
	}
	if index := int32(link.Attrs().Index); n.lasting.Load() != index {
		// A bridge whose hardware address nobody has set takes the lowest of its ports': it would change as Pods come and go, and the Pods
		// would send to the one before for a while.
		if err := netlink.LinkSetHardwareAddr(link, link.Attrs().HardwareAddr); err != nil {
			return fmt.Errorf("keep the hardware address of %s: %w", n.Bridge, err)
		}
		n.lasting.Store(index)
	}
	if err := n.sysctls(); err != nil {
		return err
	}
	if err := n.bridgeAddresses(link); err != nil {
		return err
	}
	if err := n.keepToAddresses(); err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

// keepToAddresses has Pods use their own addresses and no others. A kernel that can't is reported.
func (n *Bridge) keepToAddresses() error {
	err := n.guard.Sync(func() (guard.Allowed, error) {
		all, err := n.addresses.all()
		out := guard.Allowed{}
		for pod, addrs := range all {
			slices.SortFunc(addrs, netip.Addr.Compare)
			out[HostInterface(pod)] = addrs
		}
		return out, err
	})
	if errors.Is(err, guard.ErrUnsupported) {
		if n.Unguarded != nil {
			n.Unguarded(err)
		}
		return nil
	}
	return err
}

// sysctls has the node route between Pods and the world, and tell nobody of shorter ways.
func (n *Bridge) sysctls() error {
	conf := func(family, name string) string { return "/proc/sys/net/" + family + "/conf/" + n.Bridge + "/" + name }
	settings := [][2]string{{conf("ipv4", "send_redirects"), "0"}, {"/proc/sys/net/ipv4/conf/all/send_redirects", "0"}, {conf("ipv4", "accept_redirects"), "0"}}
	if _, err := os.Stat("/proc/sys/net/ipv6/conf/" + n.Bridge); err == nil {
		// Pods must not tell the node about addresses and routes, even in a cluster that has no IPv6.
		for _, name := range []string{"accept_ra", "autoconf", "accept_redirects"} {
			settings = append(settings, [2]string{conf("ipv6", name), "0"})
		}
	}
	// Packets come from Pods by the bridge and go to them by their own interfaces: that is not what a strict filter expects.
	for _, name := range []string{"all", n.Bridge} {
		if data, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + name + "/rp_filter"); err == nil && strings.TrimSpace(string(data)) == "1" {
			settings = append(settings, [2]string{conf("ipv4", "rp_filter"), "2"})
		}
	}
	for _, p := range n.CIDRs {
		if p.Addr().Is6() {
			settings = append(settings, [2]string{conf("ipv6", "accept_dad"), "0"})
		}
	}
	if err := Forward(true, slices.ContainsFunc(n.CIDRs, func(p netip.Prefix) bool { return p.Addr().Is6() })); err != nil {
		return err
	}
	for _, s := range settings {
		if data, err := os.ReadFile(s[0]); err == nil && strings.TrimSpace(string(data)) == s[1] {
			continue
		}
		if err := os.WriteFile(s[0], []byte(s[1]), 0); err != nil {
			return fmt.Errorf("set %s: %w", s[0], err)
		}
	}
	return nil
}

// bridgeFile lists the addresses that the bridge was given.
const bridgeFile = "bridge"

// bridgeAddresses gives the bridge its addresses, and takes those of earlier Pod CIDRs away. Others that it has are somebody else's.
func (n *Bridge) bridgeAddresses(link netlink.Link) error {
	have, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	var want []netip.Prefix
	for _, p := range n.CIDRs {
		want = append(want, netip.PrefixFrom(Gateway(p), p.Bits()))
	}
	given, err := n.given()
	if err != nil {
		return err
	}
	// Before any is added: one that is not in the list would stay.
	if err := n.give(union(given, want)); err != nil {
		return err
	}
	all := slices.Clone(want)
	for _, a := range have {
		addr, _ := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		p := netip.PrefixFrom(addr.Unmap(), ones)
		if i := slices.Index(want, p); i >= 0 {
			want = slices.Delete(want, i, i+1)
		} else if slices.Contains(given, p) {
			if err := netlink.AddrDel(link, &a); err != nil {
				return fmt.Errorf("remove %s from %s: %w", p, n.Bridge, err)
			}
		}
	}
	for _, p := range want {
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(p), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("add %s to %s: %w", p, n.Bridge, err)
		}
	}
	return n.give(all)
}

func union(a, b []netip.Prefix) []netip.Prefix {
	out := slices.Clone(a)
	for _, p := range b {
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// given are the addresses that this or an earlier process gave to the bridge.
func (n *Bridge) given() ([]netip.Prefix, error) {
	data, err := os.ReadFile(filepath.Join(n.Dir, bridgeFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, line := range strings.Fields(string(data)) {
		bridge, text, _ := strings.Cut(line, "=")
		if p, err := netip.ParsePrefix(text); err == nil && bridge == n.Bridge {
			out = append(out, p)
		}
	}
	return out, nil
}

func (n *Bridge) give(list []netip.Prefix) error {
	var text strings.Builder
	for _, p := range list {
		fmt.Fprintf(&text, "%s=%s\n", n.Bridge, p)
	}
	if err := os.MkdirAll(n.Dir, 0o700); err != nil {
		return err
	}
	path := filepath.Join(n.Dir, bridgeFile)
	if data, err := os.ReadFile(path); err == nil && string(data) == text.String() {
		return nil
	}
	if err := os.WriteFile(path+".new", []byte(text.String()), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// InterfacePrefix is how the names of Pods' interfaces on the node begin.
const InterfacePrefix = "pod"

// HostInterface is the node's end of a Pod's pair.
func HostInterface(pod string) string {
	sum := sha256.Sum256([]byte(pod))
	return InterfacePrefix + hex.EncodeToString(sum[:])[:11]
}

const podInterface = "eth0"

// Attach gives a Pod addresses and connects its network namespace. What it has already it keeps.
func (n *Bridge) Attach(_ context.Context, pod Pod, namespace string) ([]netip.Addr, error) {
	addrs, err := n.addresses.acquire(pod.UID, n.CIDRs)
	if err != nil {
		return nil, err
	}
	if err := n.keepToAddresses(); err != nil {
		return nil, err
	}
	ns, err := netns.GetFromPath(namespace)
	if err != nil {
		return nil, fmt.Errorf("open the Pod's network namespace: %w", err)
	}
	defer ns.Close()
	inside, err := hostnet.OpenNetlink(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("enter the Pod's network namespace: %w", err)
	}
	defer inside.Close()
	if lo, err := inside.LinkByName("lo"); err == nil {
		if err := inside.LinkSetUp(lo); err != nil {
			return nil, err
		}
	}
	bridge, err := netlink.LinkByName(n.Bridge)
	if err != nil {
		return nil, fmt.Errorf("the bridge %s: %w", n.Bridge, err)
	}
	outer, err := n.pair(pod.UID, bridge, ns, inside)
	if err != nil {
		return nil, err
	}
	hardware, err := n.configure(inside, addrs)
	if err != nil {
		return nil, err
	}
	return addrs, n.pin(bridge, outer, hardware, addrs)
}

// pair makes the two interfaces and puts the node's on the bridge.
func (n *Bridge) pair(pod string, bridge netlink.Link, ns netns.NsHandle, inside *netlink.Handle) (netlink.Link, error) {
	name := HostInterface(pod)
	if _, err := inside.LinkByName(podInterface); err != nil {
		if old, err := netlink.LinkByName(name); err == nil {
			if err := netlink.LinkDel(old); err != nil { // of an earlier network namespace, on its way out
				return nil, err
			}
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = name, int(n.mtu.Load())
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: podInterface, PeerNamespace: netlink.NsFd(ns)}); err != nil {
			return nil, fmt.Errorf("make the Pod's interface: %w", err)
		}
	}
	outer, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("the node's end of the Pod's interface: %w", err)
	}
	// An address of this end is of no use, and would be announced to the bridge.
	for _, setting := range [][2]string{{"addr_gen_mode", "1"}, {"accept_ra", "0"}, {"autoconf", "0"}, {"accept_redirects", "0"}} {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/"+setting[0], []byte(setting[1]), 0)
	}
	for _, step := range []func() error{
		func() error { return netlink.LinkSetMaster(outer, bridge) },
		func() error { return netlink.LinkSetIsolated(outer, true) },
		func() error { return netlink.LinkSetLearning(outer, false) },
		func() error { return netlink.LinkSetUp(outer) },
	} {
		if err := step(); err != nil {
			return nil, fmt.Errorf("connect %s to %s: %w", name, n.Bridge, err)
		}
	}
	return outer, nil
}

// configure gives the Pod's end its addresses and routes.
func (n *Bridge) configure(inside *netlink.Handle, addrs []netip.Addr) (net.HardwareAddr, error) {
	eth, err := inside.LinkByName(podInterface)
	if err != nil {
		return nil, err
	}
	if err := inside.LinkSetUp(eth); err != nil {
		return nil, err
	}
	for i, a := range addrs {
		own := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, a.BitLen())), Flags: unix.IFA_F_NODAD}
		if err := inside.AddrReplace(eth, own); err != nil {
			return nil, fmt.Errorf("give the Pod the address %s: %w", a, err)
		}
		via := Gateway(n.CIDRs[i])
		index := eth.Attrs().Index
		if err := inside.RouteReplace(&netlink.Route{LinkIndex: index, Dst: ipNet(netip.PrefixFrom(via, via.BitLen())), Scope: netlink.SCOPE_LINK}); err != nil {
			return nil, fmt.Errorf("route to %s: %w", via, err)
		}
		if err := inside.RouteReplace(&netlink.Route{LinkIndex: index, Dst: anywhere(a), Gw: via.AsSlice()}); err != nil {
			return nil, fmt.Errorf("route by %s: %w", via, err)
		}
	}
	return eth.Attrs().HardwareAddr, nil
}

func anywhere(a netip.Addr) *net.IPNet {
	if a.Is4() {
		return ipNet(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
	}
	return ipNet(netip.PrefixFrom(netip.IPv6Unspecified(), 0))
}

// pin writes down where the Pod's addresses are, so that nobody else can claim them.
//
// Packets to a Pod are sent by its own interface, not by the bridge: with br_netfilter, what one Pod sends to another by the address of a
// Service or of the node would otherwise be forwarded by the bridge, which isolates them, as soon as its destination is rewritten.
func (n *Bridge) pin(bridge, outer netlink.Link, hardware net.HardwareAddr, addrs []netip.Addr) error {
	fdb := &netlink.Neigh{LinkIndex: outer.Attrs().Index, Family: unix.AF_BRIDGE, State: netlink.NUD_NOARP, Flags: netlink.NTF_MASTER, HardwareAddr: hardware}
	if err := netlink.NeighSet(fdb); err != nil {
		return fmt.Errorf("pin the Pod to its port of %s: %w", n.Bridge, err)
	}
	for i, a := range addrs {
		neighbour := &netlink.Neigh{LinkIndex: bridge.Attrs().Index, IP: a.AsSlice(), HardwareAddr: hardware, State: netlink.NUD_PERMANENT}
		if err := netlink.NeighSet(neighbour); err != nil {
			return fmt.Errorf("pin %s to the Pod: %w", a, err)
		}
		neighbour.LinkIndex = outer.Attrs().Index
		if err := netlink.NeighSet(neighbour); err != nil {
			return fmt.Errorf("pin %s to the Pod's interface: %w", a, err)
		}
		to := &netlink.Route{
			LinkIndex: outer.Attrs().Index, Dst: ipNet(netip.PrefixFrom(a, a.BitLen())), Src: Gateway(n.CIDRs[i]).AsSlice(), Scope: netlink.SCOPE_LINK, Protocol: unix.RTPROT_STATIC,
		}
		if err := netlink.RouteReplace(to); err != nil {
			return fmt.Errorf("route to the Pod at %s: %w", a, err)
		}
	}
	return nil
}

// Addresses are those that a Pod has.
func (n *Bridge) Addresses(pod string) ([]netip.Addr, error) {
	all, err := n.addresses.all()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, p := range n.CIDRs {
		if a, ok := owned(all[pod], p); ok {
			out = append(out, a)
		}
	}
	return out, nil
}

// Detach disconnects a Pod, if it is connected, and gives its addresses back.
func (n *Bridge) Detach(_ context.Context, pod string) error {
	if link, err := netlink.LinkByName(HostInterface(pod)); err == nil {
		// It may go by itself, with the Pod's network namespace.
		if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("remove the Pod's interface: %w", err)
		}
	}
	all, err := n.addresses.all()
	if err != nil {
		return err
	}
	if bridge, err := netlink.LinkByName(n.Bridge); err == nil {
		for _, a := range all[pod] {
			_ = netlink.NeighDel(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, IP: a.AsSlice(), State: netlink.NUD_PERMANENT})
		}
	}
	if err := n.addresses.release(pod); err != nil {
		return err
	}
	return n.keepToAddresses()
}
