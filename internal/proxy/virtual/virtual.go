// Package virtual is a client of IPVS over netlink: the kernel's virtual servers and their endpoints. It knows nothing of
// Services.
package virtual

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// Server is a virtual server, by firewall mark or by address, protocol and port.
type Server struct {
	Family    uint16 // AF_INET or AF_INET6
	Mark      uint32 // 0: by address
	Addr      netip.Addr
	Protocol  uint16
	Port      uint16
	Scheduler string
	Flags     uint32
}

// Dest is an endpoint of a virtual server.
type Dest struct {
	Addr   netip.AddrPort
	Weight int
	// Active and Inactive are the connections that IPVS counts. They are read only.
	Active, Inactive int
}

// Timeouts are how long the kernel remembers connections on which nothing passes, in whole seconds; 0: as it is.
type Timeouts struct{ TCP, TCPFin, UDP time.Duration }

// ErrNone means that the kernel has no IPVS, or has not loaded it.
var ErrNone = errors.New("this kernel has no IPVS")

// Table is the virtual servers of one network namespace.
type Table struct {
	client *nf.Client
	family uint16 // IPVS' number among the families of generic netlink
}

// Dial opens the table of the calling thread's network namespace. The error is ErrNone where there is no IPVS.
func Dial() (*Table, error) {
	c, err := nf.Connect(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket to IPVS: %w", err)
	}
	return New(c)
}

// New opens the table on a connection, which it closes if it fails.
func New(c nf.Conn) (*Table, error) {
	t := &Table{client: nf.NewClient(c, "IPVS")}
	err := t.find("IPVS")
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// Close closes it.
func (t *Table) Close() { _ = t.client.Close() }

// find asks for the number of a family of generic netlink.
func (t *Table) find(family string) error {
	request := nf.AppendAttr([]byte{unix.CTRL_CMD_GETFAMILY, 1, 0, 0}, unix.CTRL_ATTR_FAMILY_NAME, append([]byte(family), 0))
	err := t.client.Ask(unix.GENL_ID_CTRL, unix.NLM_F_ACK, request, func(attrs []byte) {
		if id := attributes(attrs)[unix.CTRL_ATTR_FAMILY_ID]; len(id) == 2 {
			t.family = binary.NativeEndian.Uint16(id)
		}
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return ErrNone
	case err != nil:
		return fmt.Errorf("looking for IPVS: %w", err)
	case t.family == 0:
		return errors.New("looking for IPVS: the kernel answered without a number")
	}
	return nil
}

// Servers lists all virtual servers.
func (t *Table) Servers() (out []Server, err error) {
	err = t.list(getService, nil, attrService, func(a attrs) error {
		s := Server{
			Family: a.uint16(svcFamily), Mark: a.uint32(svcMark), Protocol: a.uint16(svcProtocol), Port: a.port(svcPort), Scheduler: a.text(svcScheduler),
		}
		if flags := a[svcFlags]; len(flags) >= 4 {
			s.Flags = binary.NativeEndian.Uint32(flags)
		}
		if s.Mark == 0 {
			if s.Addr = a.addr(svcAddr, s.Family); !s.Addr.IsValid() {
				return errors.New("IPVS listed a virtual server without an address")
			}
		}
		out = append(out, s)
		return nil
	})
	return out, err
}

// Dests lists the endpoints of a virtual server; none where there is no such server.
func (t *Table) Dests(s Server) (out []Dest, err error) {
	err = t.list(getDest, appendServer(nil, s), attrDest, func(a attrs) error {
		addr := a.addr(destAddr, a.uint16(destFamily))
		if !addr.IsValid() {
			return errors.New("IPVS listed an endpoint without an address")
		}
		out = append(out, Dest{
			Addr: netip.AddrPortFrom(addr, a.port(destPort)), Weight: int(a.uint32(destWeight)), Active: int(a.uint32(destActive)), Inactive: int(a.uint32(destInactive)),
		})
		return nil
	})
	return out, err
}

// AddServer adds a virtual server; EEXIST where there is one.
func (t *Table) AddServer(s Server) error { return t.change(newService, appendServer(nil, s)) }

// SetServer changes a virtual server.
func (t *Table) SetServer(s Server) error { return t.change(setService, appendServer(nil, s)) }

// DelServer deletes a virtual server; ESRCH where there is none.
func (t *Table) DelServer(s Server) error { return t.change(delService, appendServer(nil, s)) }

// AddDest adds an endpoint to a virtual server; EEXIST where it has it.
func (t *Table) AddDest(s Server, d Dest) error {
	return t.change(newDest, appendDest(appendServer(nil, s), d))
}

// SetDest changes the weight of an endpoint.
func (t *Table) SetDest(s Server, d Dest) error {
	return t.change(setDest, appendDest(appendServer(nil, s), d))
}

// DelDest deletes an endpoint of a virtual server; ENOENT where it has none such.
func (t *Table) DelDest(s Server, d Dest) error {
	return t.change(delDest, appendDest(appendServer(nil, s), d))
}

// SetTimeouts changes how long connections are remembered.
func (t *Table) SetTimeouts(o Timeouts) error {
	var b []byte
	for typ, d := range map[uint16]time.Duration{attrTimeoutTCP: o.TCP, attrTimeoutTCPFin: o.TCPFin, attrTimeoutUDP: o.UDP} {
		b = appendUint32(b, typ, uint32(d/time.Second))
	}
	return t.change(setConfig, b)
}

// Flush deletes all virtual servers.
func (t *Table) Flush() error { return t.change(flush, nil) }

func (t *Table) change(command byte, attrs []byte) error {
	return t.client.Ask(t.family, unix.NLM_F_ACK, request(command, attrs), func([]byte) {})
}

// list passes on what is nested in the one attribute that each message of a list has.
func (t *Table) list(command byte, of []byte, nested uint16, each func(attrs) error) (err error) {
	asked := t.client.Ask(t.family, unix.NLM_F_DUMP, request(command, of), func(b []byte) {
		if err == nil {
			err = each(attributes(attributes(b)[nested]))
		}
	})
	if asked != nil {
		return asked
	}
	return err
}
