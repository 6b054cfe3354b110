package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
)

// The network of a lab, the same in each: no two of them can see each other.
//
//	         router ── switch ── server, node1 … nodeN
//	client ──┘
const (
	routerName = "router"
	serverName = "server"
	// ClientName is the machine outside of the cluster.
	ClientName = "client"

	uplink     = "eth0"
	switchName = "switch"
	apiPort    = 6443
)

// MaxNodes is how many nodes a lab's network has room for.
const MaxNodes = 200

// network is one of the two: that of the cluster's machines, or the outside.
type network struct{ v4, v6 netip.Prefix }

var (
	inside  = network{netip.MustParsePrefix("192.168.100.0/24"), netip.MustParsePrefix("fd00:100::/64")}
	outside = network{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("fd00:113::/64")}
)

// The hosts of the networks: the router is the first of both.
const (
	routerHost    = 1
	serverHost    = 2
	clientHost    = 10
	firstNodeHost = 10 // and the node's number
)

// host is the address with a number, of each family.
func (n network) host(number int) []netip.Addr {
	var out []netip.Addr
	for _, p := range []netip.Prefix{n.v4, n.v6} {
		if p.Addr().Is6() && !hasIPv6() {
			continue
		}
		raw := p.Addr().AsSlice()
		raw[len(raw)-1] = byte(number)
		a, _ := netip.AddrFromSlice(raw)
		out = append(out, a)
	}
	return out
}

// hasIPv6 says whether the kernel has it.
func hasIPv6() bool {
	_, err := os.Stat("/proc/net/if_inet6")
	return err == nil
}

func (n network) bits(a netip.Addr) int {
	if a.Is4() {
		return n.v4.Bits()
	}
	return n.v6.Bits()
}

// in is netlink in a machine's network namespace.
func (m *Machine) in(f func(*netlink.Handle) error) error {
	ns, err := netns.GetFromPid(m.PID)
	if err != nil {
		return fmt.Errorf("the machine %s has ended: %w", m.Name, err)
	}
	defer ns.Close()
	h, err := hostnet.OpenNetlink(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("the network of the machine %s: %w", m.Name, err)
	}
	defer h.Close()
	return f(h)
}

// setupRouter makes the switch, which all machines of the cluster are connected to, and has the router forward.
func setupRouter(router *Machine) error {
	err := router.in(func(h *netlink.Handle) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = switchName
		if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
			return fmt.Errorf("make the switch: %w", err)
		}
		if err := address(h, "lo", network{}, nil); err != nil {
			return err
		}
		return address(h, switchName, inside, inside.host(routerHost))
	})
	if err != nil {
		return err
	}
	return router.Do(func() error {
		// A switch looks at no packets, also where br_netfilter would have it do so.
		for path, value := range map[string]string{
			"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1", "bridge/bridge-nf-call-iptables": "0", "bridge/bridge-nf-call-ip6tables": "0",
		} {
			if err := os.WriteFile("/proc/sys/net/"+path, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("have the router forward: %w", err)
			}
		}
		return nil
	})
}

// connect plugs a machine into the switch, or, if it is outside, into the router.
func connect(router, m *Machine, n network, number int) error {
	ns, err := netns.GetFromPid(m.PID)
	if err != nil {
		return err
	}
	defer ns.Close()
	err = router.in(func(h *netlink.Handle) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = m.Name
		if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: uplink, PeerNamespace: netlink.NsFd(ns)}); err != nil {
			return fmt.Errorf("connect the machine %s: %w", m.Name, err)
		}
		if n == outside {
			return address(h, m.Name, n, n.host(routerHost))
		}
		port, err := h.LinkByName(m.Name)
		if err != nil {
			return err
		}
		bridge, err := h.LinkByName(switchName)
		if err != nil {
			return err
		}
		if err := h.LinkSetMaster(port, bridge); err != nil {
			return fmt.Errorf("connect the machine %s: %w", m.Name, err)
		}
		return h.LinkSetUp(port)
	})
	if err != nil {
		return err
	}
	return m.in(func(h *netlink.Handle) error {
		if err := address(h, "lo", network{}, nil); err != nil {
			return err
		}
		if err := address(h, uplink, n, n.host(number)); err != nil {
			return err
		}
		for _, via := range n.host(routerHost) {
			if err := route(h, netip.PrefixFrom(zero(via), 0), via); err != nil {
				return err
			}
		}
		return nil
	})
}

func zero(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// route leads to a prefix through another machine.
func route(h *netlink.Handle, to netip.Prefix, via netip.Addr) error {
	dst := &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())}
	if err := h.RouteReplace(&netlink.Route{Dst: dst, Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route to %s by %s: %w", to, via, err)
	}
	return nil
}

// address gives an interface addresses and turns it on.
func address(h *netlink.Handle, name string, n network, addrs []netip.Addr) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, a := range addrs {
		own := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(n.bits(a), a.BitLen())}
		// There is nobody else who could have it, so it need not be waited for.
		if err := h.AddrAdd(link, &netlink.Addr{IPNet: own, Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("add %s to %s: %w", a, name, err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("turn %s on: %w", name, err)
	}
	return nil
}

// cut unplugs a machine, or plugs it in again.
func cut(router *Machine, name string, off bool) error {
	return router.in(func(h *netlink.Handle) error {
		port, err := h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("the cable of %s: %w", name, err)
		}
		if off {
			return h.LinkSetDown(port)
		}
		return h.LinkSetUp(port)
	})
}

// Quality is what a machine's link does to packets, in each direction.
type Quality struct {
	Latency, Jitter time.Duration
	// Loss is the part of packets that are lost, in percent.
	Loss float64
}

// setQuality applies it at both ends of the cable; the zero value makes the link as good as new.
func setQuality(router, m *Machine, q Quality) error {
	set := func(where *Machine, name string) error {
		return where.in(func(h *netlink.Handle) error {
			link, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			attrs := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
			if q == (Quality{}) {
				list, err := h.QdiscList(link)
				if err != nil {
					return err
				}
				for _, d := range list {
					if d.Type() == "netem" {
						return h.QdiscDel(d)
					}
				}
				return nil
			}
			netem := netlink.NewNetem(attrs, netlink.NetemQdiscAttrs{
				Latency: uint32(q.Latency.Microseconds()), Jitter: uint32(q.Jitter.Microseconds()), Loss: float32(q.Loss),
			})
			return h.QdiscReplace(netem)
		})
	}
	err := errors.Join(set(router, m.Name), set(m, uplink))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("this kernel has no netem (CONFIG_NET_SCH_NETEM, module sch_netem), so latency and loss can't be set; `portal lab cut` works without")
	}
	return err
}
