package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// Kernel is the table of the network namespace that the process is in.
type Kernel struct{}

// again is how often a dump is repeated that the kernel interrupted, because the table grew under it.
const again = 5

// Attributes of ctnetlink that the driver has no names for, and bits of a flow's status.
const (
	ctaFilter, ctaStatusMask = 25, 26
	filterOrigFlags          = 1      // in ctaFilter: which parts of the original tuple count
	filterProtocol           = 1 << 3 // its protocol
	seenReply                = 1 << 1 // IPS_SEEN_REPLY
)

// Delete reads the table over netlink and deletes one by one what matches.
func (Kernel) Delete(family intent.Family, protocol intent.Protocol, match func(Flow) bool) (total int, err error) {
	s, err := open(family)
	if err != nil {
		return 0, err
	}
	defer s.Socket.Close()
	for range again {
		found, e := s.list(protocol, match)
		if e != nil && !errors.Is(e, nl.ErrDumpInterrupted) {
			return total, e
		}
		n, failed := s.remove(found)
		total, err = total+n, errors.Join(e, failed)
		if !errors.Is(e, nl.ErrDumpInterrupted) {
			break
		}
	}
	return total, err
}

// list returns the attributes by which the kernel knows the flows that match. The kernel leaves out those of other protocols, and of
// TCP those that were answered; an older one ignores what it is asked for, and lists all.
func (s *socket) list(protocol intent.Protocol, match func(Flow) bool) (found [][]byte, err error) {
	req := s.request(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
	tuple := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_ORIG, nil)
	tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil).AddRtAttr(nl.CTA_PROTO_NUM, []byte{byte(protocol)})
	req.AddData(tuple)
	filter := nl.NewRtAttr(unix.NLA_F_NESTED|ctaFilter, nil)
	filter.AddRtAttr(filterOrigFlags, nl.Uint32Attr(filterProtocol))
	req.AddData(filter)
	if protocol == intent.TCP {
		req.AddData(nl.NewRtAttr(nl.CTA_STATUS, nl.BEUint32Attr(0)))
		req.AddData(nl.NewRtAttr(ctaStatusMask, nl.BEUint32Attr(seenReply)))
	}
	err = req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
		attrs := msg[min(nl.SizeofNfgenmsg, len(msg)):]
		if f, ok := flow(attrs, protocol); ok && match(f) {
			found = append(found, identity(attrs))
		}
		return true
	})
	return found, err
}

// remove deletes flows. One that has ended meanwhile counts too.
func (s *socket) remove(flows [][]byte) (n int, err error) {
	failures := 0
	for _, f := range flows {
		req := s.request(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK)
		req.AddRawData(f)
		if _, e := req.Execute(unix.NETLINK_NETFILTER, 0); e != nil && !errors.Is(e, fs.ErrNotExist) {
			failures, err = failures+1, e
			continue
		}
		n++
	}
	if failures > 0 {
		err = fmt.Errorf("%d flows could not be deleted, the last one: %w", failures, err)
	}
	return n, err
}

// socket asks about flows of a family.
type socket struct {
	nl.SocketHandle
	af uint8
}

// open opens a socket. It is used for all of a pass: whoever closes one may have to wait until nf_tables has freed what was deleted
// before.
func open(family intent.Family) (*socket, error) {
	s := &socket{af: unix.AF_INET}
	if family == intent.IPv6 {
		s.af = unix.AF_INET6
	}
	var err error
	if s.Socket, err = nl.Subscribe(unix.NETLINK_NETFILTER); err != nil {
		return nil, fmt.Errorf("open a netlink socket to conntrack: %w", err)
	}
	if err := errors.Join(s.Socket.SetSendTimeout(&nl.SocketTimeoutTv), s.Socket.SetReceiveTimeout(&nl.SocketTimeoutTv)); err != nil {
		s.Socket.Close()
		return nil, fmt.Errorf("set up a netlink socket to conntrack: %w", err)
	}
	return s, nil
}

func (s *socket) request(what, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|what, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: &s.SocketHandle}
	req.AddData(&nl.Nfgenmsg{NfgenFamily: s.af, Version: nl.NFNETLINK_V0})
	return req
}

// flow reads one; false: it is of another protocol, or it is of TCP and was answered.
func flow(attrs []byte, protocol intent.Protocol) (Flow, bool) {
	orig, reply := attr(attrs, nl.CTA_TUPLE_ORIG), attr(attrs, nl.CTA_TUPLE_REPLY)
	if p := attr(attr(orig, nl.CTA_TUPLE_PROTO), nl.CTA_PROTO_NUM); len(p) != 1 || intent.Protocol(p[0]) != protocol {
		return Flow{}, false
	}
	if status := attr(attrs, nl.CTA_STATUS); protocol == intent.TCP && (len(status) != 4 || binary.BigEndian.Uint32(status)&seenReply != 0) {
		return Flow{}, false
	}
	dst, ok1 := addrPort(orig, nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST, nl.CTA_PROTO_DST_PORT)
	from, ok2 := addrPort(reply, nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC, nl.CTA_PROTO_SRC_PORT)
	return Flow{protocol, dst, from}, ok1 && ok2
}

// addrPort reads one side of a tuple.
func addrPort(tuple []byte, v4, v6, number uint16) (netip.AddrPort, bool) {
	ip := attr(tuple, nl.CTA_TUPLE_IP)
	raw := attr(ip, v4)
	if raw == nil {
		raw = attr(ip, v6)
	}
	a, ok := netip.AddrFromSlice(raw)
	port := attr(attr(tuple, nl.CTA_TUPLE_PROTO), number)
	if !ok || len(port) != 2 {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(port)), true
}

// identity is what of a flow the kernel needs to find it again, and no other that has taken its place.
func identity(attrs []byte) (out []byte) {
	for kind, whole := range attributes(attrs) {
		switch kind {
		case nl.CTA_TUPLE_ORIG, nl.CTA_ID, nl.CTA_ZONE:
			out = append(out, whole...)
		}
	}
	return out
}

// attr is what an attribute of a list holds, nil where there is none.
func attr(list []byte, want uint16) []byte {
	for kind, whole := range attributes(list) {
		if kind == want {
			return whole[4:binary.NativeEndian.Uint16(whole)]
		}
	}
	return nil
}

// attributes walks over a list, each with its header and padding.
func attributes(list []byte) func(yield func(uint16, []byte) bool) {
	return func(yield func(uint16, []byte) bool) {
		for len(list) >= 4 {
			n := int(binary.NativeEndian.Uint16(list))
			if n < 4 || n > len(list) {
				return
			}
			end := min((n+3)&^3, len(list))
			if !yield(binary.NativeEndian.Uint16(list[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), list[:end]) {
				return
			}
			list = list[end:]
		}
	}
}
