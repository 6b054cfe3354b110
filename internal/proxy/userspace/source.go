package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	// returnMark is on answers to clients' addresses that our sockets have; returnTable routes them to this process.
	returnMark  = 0x40000
	returnTable = 20377
)

// dialer makes connections to endpoints.
type dialer struct {
	source Source
	home   home
	plain  net.Dialer
	posing net.Dialer
}

func newDialer(o Options, h home) *dialer {
	d := &dialer{source: o.Source, home: h}
	// Keep-alives are on the clients' side; a peer that is gone shows there or in what it is sent.
	d.plain = net.Dialer{Timeout: o.ConnectTimeout, KeepAlive: -1, Control: control(false)}
	d.posing = net.Dialer{Timeout: o.ConnectTimeout, KeepAlive: -1, Control: control(true)}
	return d
}

// control prepares a socket before it is bound.
func control(pose bool) func(string, string, syscall.RawConn) error {
	return func(network, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, ownMark)
			if err != nil || !pose {
				return
			}
			level, name := unix.SOL_IP, unix.IP_TRANSPARENT
			if network == "tcp6" || network == "udp6" {
				level, name = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
			}
			err = errors.Join(unix.SetsockoptInt(int(fd), level, name, 1),
				unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1))
		}), err)
	}
}

// poses says whether an endpoint is to see the client's address. One that calls itself must not see its own.
func (d *dialer) poses(r *plan.Route, e plan.Endpoint, client netip.Addr) bool {
	return d.source == Preserve && !r.Masquerade && e.Local && e.Addr.Addr() != client && !client.IsLoopback()
}

func (d *dialer) tcp(ctx context.Context, r *plan.Route, e plan.Endpoint, client, frontend netip.AddrPort) (*net.TCPConn, error) {
	use, from := &d.plain, netip.AddrPort{}
	if d.poses(r, e, client.Addr()) {
		use, from = &d.posing, netip.AddrPortFrom(client.Addr(), 0)
	}
	var c *net.TCPConn
	err := d.home.do(func() (err error) {
		c, err = use.DialTCP(ctx, "tcp"+version(e.Addr), from, e.Addr)
		return err
	})
	if err == nil && d.source == Announce {
		if _, err = c.Write(header(client, frontend)); err != nil {
			c.Close()
		}
	}
	return c, err
}

func (d *dialer) udp(ctx context.Context, r *plan.Route, e plan.Endpoint, client netip.AddrPort) (*net.UDPConn, error) {
	use, from := &d.plain, netip.AddrPort{}
	if d.poses(r, e, client.Addr()) {
		use, from = &d.posing, netip.AddrPortFrom(client.Addr(), 0)
	}
	var c *net.UDPConn
	err := d.home.do(func() (err error) {
		c, err = use.DialUDP(ctx, "udp"+version(e.Addr), from, e.Addr)
		return err
	})
	return c, err
}

func version(a netip.AddrPort) string {
	if a.Addr().Is4() {
		return "4"
	}
	return "6"
}

// header is a PROXY protocol header, version 2.
func header(client, frontend netip.AddrPort) []byte {
	const tcp4, tcp6 = 0x11, 0x21
	b := []byte("\r\n\r\n\x00\r\nQUIT\n\x21")
	if client.Addr().Is4() {
		b = append(b, tcp4, 0, 12)
	} else {
		b = append(b, tcp6, 0, 36)
	}
	b = append(append(b, client.Addr().AsSlice()...), frontend.Addr().AsSlice()...)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, client.Port()), frontend.Port())
}

// openReturn routes packets with the mark to this machine, whatever their address.
func openReturn(f intent.Family) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	route := &netlink.Route{Table: returnTable, LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST, Dst: everywhere(f)}
	if err := netlink.RouteReplace(route); err != nil {
		return err
	}
	if err := netlink.RuleAdd(returnRule(f)); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// closeReturn undoes it; it is no error where there is nothing.
func closeReturn(f intent.Family) error {
	for _, err := range []error{
		netlink.RuleDel(returnRule(f)),
		netlink.RouteDel(&netlink.Route{Table: returnTable, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST, Dst: everywhere(f)}),
	} {
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EAFNOSUPPORT) {
			return err
		}
	}
	return nil
}

func returnRule(f intent.Family) *netlink.Rule {
	r := netlink.NewRule()
	mask := uint32(returnMark)
	r.Family, r.Mark, r.Mask, r.Table, r.Priority = unix.AF_INET, returnMark, &mask, returnTable, 100
	if f == intent.IPv6 {
		r.Family = unix.AF_INET6
	}
	return r
}

func everywhere(f intent.Family) *net.IPNet {
	if f == intent.IPv6 {
		return &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
}
