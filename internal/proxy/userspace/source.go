package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	// returnMark is on answers to clients' addresses that our sockets have; returnTable routes them to this process.
	returnMark  = 0x40000
	returnTable = 20377
)

// dialer reaches endpoints.
type dialer struct {
	source Source
	home   home
}

// poses says whether an endpoint is to see the client's address. Its answers must come back this way: those to a Pod on
// the same bridge would not, and those of an endpoint on another node neither.
func (d *dialer) poses(r *plan.Route, o plan.Origin, e plan.Endpoint) bool {
	return d.source == Preserve && o == plan.FromOutside && !r.Masquerade && e.Local
}

// tcp begins a connection, in the network namespace of the thread.
func (d *dialer) tcp(f *frontend, o plan.Origin, e plan.Endpoint, client netip.AddrPort) (int, error) {
	var from netip.Addr
	if d.poses(&f.Routes[o], o, e) {
		from = client.Addr()
	}
	return connect(e.Addr, from)
}

func (d *dialer) udp(ctx context.Context, f *frontend, o plan.Origin, e plan.Endpoint, client netip.AddrPort) (*net.UDPConn, error) {
	pose := d.poses(&f.Routes[o], o, e)
	var from netip.AddrPort
	if pose {
		from = netip.AddrPortFrom(client.Addr(), 0)
	}
	family := intent.FamilyOf(e.Addr.Addr())
	dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = prepare(int(fd), family, pose) }); e != nil {
			return e
		}
		return err
	}}
	var c *net.UDPConn
	err := d.home.do(func() (err error) {
		c, err = dialer.DialUDP(ctx, fmt.Sprint("udp", family), from, e.Addr)
		return err
	})
	return c, err
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
		if err != nil && !hostnet.Absent(err) {
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
