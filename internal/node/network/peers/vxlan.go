package peers

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/node/network"
)

const (
	// vni tells Portal's packets from those of others who use VXLAN on the same port.
	vni = 112
	// Port is where nodes send tunnelled packets to, by UDP: that of the standard (RFC 7348).
	Port = 4789
)

// devices are the tunnels over IPv4 and over IPv6. The kernel wants one for each.
var devices = [...]string{"portal-vxlan", "portal-vxlan6"}

func device(four bool) string {
	if four {
		return devices[0]
	}
	return devices[1]
}

// hardware is the hardware address of a node's end of the tunnel. It follows from the node's address, so that nobody has to ask.
func hardware(node netip.Addr) net.HardwareAddr {
	sum := sha256.Sum256(append([]byte("portal vxlan "), node.AsSlice()...))
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^3 | 2 // local, unicast
	return mac
}

// tunnels makes the devices of a plan, or repairs them, with what they must know of the other nodes. It returns the indexes of those that
// are there, by whether they carry IPv4.
func (p *Plan) tunnels() (map[bool]int, error) {
	out := map[bool]int{}
	var errs []error
	for _, t := range p.Tunnels {
		four := t.Local.Is4()
		link, err := t.device()
		if err == nil {
			out[four] = link.Attrs().Index
			gateways, remotes := p.ends(four)
			err = errors.Join(p.ownAddresses(link), applyNeighbours(out[four], gateways), applyRemotes(out[four], remotes))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("the tunnel %s: %w", device(four), err))
		}
	}
	return out, errors.Join(errs...)
}

// ends are the gateways behind a tunnel with their hardware addresses, and where each of those is.
func (p *Plan) ends(four bool) (gateways map[netip.Addr]string, remotes map[string]netip.Addr) {
	gateways, remotes = map[netip.Addr]string{}, map[string]netip.Addr{}
	for to, w := range p.Ways {
		if w.Kind == Tunnelled && w.Address.Is4() == four {
			mac := hardware(w.Address).String()
			gateways[network.Gateway(to)], remotes[mac] = mac, w.Address
		}
	}
	return gateways, remotes
}

// device finds or makes the device. One that can't be changed into what it should be is made anew.
func (t Tunnel) device() (netlink.Link, error) {
	name := device(t.Local.Is4())
	link, err := netlink.LinkByName(name)
	if err == nil && !t.like(link) {
		if link.Type() != "vxlan" {
			return nil, fmt.Errorf("the interface is a %s: rename or remove it", link.Type())
		}
		if err := netlink.LinkDel(link); err != nil {
			return nil, err
		}
		link, err = nil, netlink.LinkNotFoundError{}
	}
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = name, t.MTU, hardware(t.Local)
		if err := netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: vni, Port: Port, SrcAddr: t.Local.AsSlice()}); err != nil {
			return nil, err
		}
		link, err = netlink.LinkByName(name)
	}
	if err != nil {
		return nil, err
	}
	six, four := "net/ipv6/conf/"+name+"/", "net/ipv4/conf/"+name+"/"
	if err := set(map[string]string{
		// Nothing in the tunnel announces itself or asks; who is where is known.
		six + "addr_gen_mode": "1", six + "accept_ra": "0", six + "autoconf": "0", six + "accept_redirects": "0", six + "accept_dad": "0",
		four + "accept_redirects": "0", four + "send_redirects": "0",
		// The other node may have another mask, and so choose the tunnel where this node goes directly.
		four + "rp_filter": "2",
	}); err != nil {
		return nil, err
	}
	if link.Attrs().MTU != t.MTU {
		if err := netlink.LinkSetMTU(link, t.MTU); err != nil {
			return nil, err
		}
	}
	return link, netlink.LinkSetUp(link)
}

// like says whether a device is the tunnel, but for what can be changed.
func (t Tunnel) like(link netlink.Link) bool {
	v, ok := link.(*netlink.Vxlan)
	if !ok {
		return false
	}
	local, _ := netip.AddrFromSlice(v.SrcAddr)
	return v.VxlanId == vni && v.Port == Port && !v.Learning && v.Group == nil && local.Unmap() == t.Local && bytes.Equal(v.HardwareAddr, hardware(t.Local))
}

// ownAddresses gives the device the node's addresses among its Pods, alone: what the node itself sends by the tunnel comes from there,
// and is answered by the tunnel.
func (p *Plan) ownAddresses(link netlink.Link) error {
	have, err := again(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	var want []netip.Prefix
	for _, own := range p.Own {
		a := network.Gateway(own)
		want = append(want, netip.PrefixFrom(a, a.BitLen()))
	}
	for _, a := range have {
		addr, _ := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		if i := slices.Index(want, netip.PrefixFrom(addr.Unmap(), ones)); i >= 0 {
			want = slices.Delete(want, i, i+1)
		} else if err := netlink.AddrDel(link, &a); err != nil {
			return fmt.Errorf("remove the address %s: %w", a.IPNet, err)
		}
	}
	for _, a := range want {
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(a), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("add the address %s: %w", a, err)
		}
	}
	return nil
}

// applyNeighbours has the device know the hardware addresses of gateways.
func applyNeighbours(index int, want map[netip.Addr]string) error {
	known := map[netip.Addr]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := again(func() ([]netlink.Neigh, error) { return netlink.NeighList(index, family) })
		if err != nil {
			return err
		}
		for _, n := range list {
			addr, _ := netip.AddrFromSlice(n.IP)
			addr = addr.Unmap()
			switch {
			case n.State != netlink.NUD_PERMANENT:
			case want[addr] == n.HardwareAddr.String():
				known[addr] = true
			case want[addr] == "":
				if err := netlink.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
					return fmt.Errorf("remove the neighbour %s: %w", addr, err)
				}
			}
		}
	}
	for addr, text := range want {
		if known[addr] {
			continue
		}
		mac, _ := net.ParseMAC(text)
		if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: index, IP: addr.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT}); err != nil {
			return fmt.Errorf("add the neighbour %s: %w", addr, err)
		}
	}
	return nil
}

// applyRemotes has the device know which node has which hardware address.
func applyRemotes(index int, want map[string]netip.Addr) error {
	list, err := again(func() ([]netlink.Neigh, error) { return netlink.NeighList(index, unix.AF_BRIDGE) })
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, n := range list {
		mac := n.HardwareAddr.String()
		addr, _ := netip.AddrFromSlice(n.IP)
		switch {
		case want[mac].IsValid() && want[mac] == addr.Unmap():
			known[mac] = true
		case !want[mac].IsValid():
			if err := netlink.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove the forwarding entry of %s: %w", mac, err)
			}
		}
	}
	for text, addr := range want {
		if known[text] {
			continue
		}
		mac, _ := net.ParseMAC(text)
		entry := &netlink.Neigh{LinkIndex: index, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT, Flags: netlink.NTF_SELF, IP: addr.AsSlice(), HardwareAddr: mac}
		if err := netlink.NeighSet(entry); err != nil {
			return fmt.Errorf("add the forwarding entry of %s: %w", addr, err)
		}
	}
	return nil
}

// prune removes devices that no way needs any more.
func (p *Plan) prune() error {
	var errs []error
	for _, four := range []bool{true, false} {
		if slices.ContainsFunc(p.Tunnels, func(t Tunnel) bool { return t.Local.Is4() == four }) {
			continue
		}
		// One with another number is somebody else's.
		if v, err := netlink.LinkByName(device(four)); err == nil && v.Type() == "vxlan" && v.(*netlink.Vxlan).VxlanId == vni {
			errs = append(errs, netlink.LinkDel(v))
		}
	}
	return errors.Join(errs...)
}
