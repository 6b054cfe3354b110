package userspace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// originalTCP is where a connection was addressed to before the kernel led it here.
func originalTCP(fd int, f intent.Family) (netip.AddrPort, error) {
	const originalDst = 80
	if f == intent.IPv6 {
		var sa unix.RawSockaddrInet6
		err := getsockopt(fd, unix.SOL_IPV6, originalDst, unsafe.Pointer(&sa), unsafe.Sizeof(sa))
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), swap(sa.Port)), err
	}
	var sa unix.RawSockaddrInet4
	err := getsockopt(fd, unix.SOL_IP, originalDst, unsafe.Pointer(&sa), unsafe.Sizeof(sa))
	return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), swap(sa.Port)), err
}

func getsockopt(fd, level, name int, value unsafe.Pointer, size uintptr) error {
	length := uint32(size)
	if _, _, no := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name), uintptr(value), uintptr(unsafe.Pointer(&length)), 0); no != 0 {
		return no
	}
	return nil
}

// swap turns a port as the kernel keeps it, in the network's order, into a number.
func swap(p uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], p)
	return binary.BigEndian.Uint16(b[:])
}

// tracker asks the kernel's connection tracking where datagrams were addressed to: no socket option says that for UDP.
type tracker struct {
	fd  int
	seq uint32
}

func newTracker() (*tracker, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	// The kernel answers within the call; a limit keeps a lost answer from stopping the traffic.
	limit := unix.Timeval{Sec: 1}
	return &tracker{fd: fd}, errors.Join(unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
}

func (t *tracker) close() { unix.Close(t.fd) }

// The numbers of ctnetlink.
const (
	ctGet                        = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	ctDelete                     = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
	ctTupleOrig, ctTupleReply    = 1, 2
	ctTupleIP, ctTupleProto      = 1, 2
	ctIPv4Src, ctIPv4Dst         = 1, 2
	ctIPv6Src, ctIPv6Dst         = 3, 4
	ctProtoNum, ctSport, ctDport = 1, 2, 3
	nested                       = unix.NLA_F_NESTED
)

// originalUDP is where a client's datagrams were addressed to.
func (t *tracker) originalUDP(us, client netip.AddrPort) (netip.AddrPort, error) {
	answer, err := t.ask(ctGet, 0, us, client)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("asking conntrack about %v: %w", client, err)
	}
	dst := uint16(ctIPv4Dst)
	if us.Addr().Is6() {
		dst = ctIPv6Dst
	}
	tuple := find(answer, ctTupleOrig)
	addr, ok := netip.AddrFromSlice(find(find(tuple, ctTupleIP), dst))
	port := find(find(tuple, ctTupleProto), ctDport)
	if !ok || len(port) != 2 {
		return netip.AddrPort{}, fmt.Errorf("conntrack knows no destination of %v", client)
	}
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(port)), nil
}

// forget ends a flow: the client's next datagram is met by the rules like a first one.
func (t *tracker) forget(us, client netip.AddrPort) error {
	_, err := t.ask(ctDelete, unix.NLM_F_ACK, us, client)
	return err
}

// ask sends a request about one flow, which is known by what its answers look like: from us to the client. It returns the
// attributes of the kernel's answer.
func (t *tracker) ask(what, flags uint16, us, client netip.AddrPort) ([]byte, error) {
	family, src, dst := byte(unix.AF_INET), uint16(ctIPv4Src), uint16(ctIPv4Dst)
	if us.Addr().Is6() {
		family, src, dst = unix.AF_INET6, ctIPv6Src, ctIPv6Dst
	}
	ip := attr(ctTupleIP|nested, attr(src, us.Addr().AsSlice()), attr(dst, client.Addr().AsSlice()))
	proto := attr(ctTupleProto|nested, attr(ctProtoNum, []byte{unix.IPPROTO_UDP}),
		attr(ctSport, binary.BigEndian.AppendUint16(nil, us.Port())), attr(ctDport, binary.BigEndian.AppendUint16(nil, client.Port())))
	attrs := attr(ctTupleReply|nested, ip, proto)
	const head = unix.SizeofNlMsghdr + 4
	t.seq++
	msg := make([]byte, head, head+len(attrs))
	binary.NativeEndian.PutUint32(msg[0:], uint32(head+len(attrs)))
	binary.NativeEndian.PutUint16(msg[4:], what)
	binary.NativeEndian.PutUint16(msg[6:], unix.NLM_F_REQUEST|flags)
	binary.NativeEndian.PutUint32(msg[8:], t.seq)
	msg[unix.SizeofNlMsghdr] = family
	if err := unix.Sendto(t.fd, append(msg, attrs...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	buf := make([]byte, 4096)
	for {
		n, _, err := unix.Recvfrom(t.fd, buf, 0)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return nil, err
		case n < head:
			return nil, unix.EBADMSG
		case binary.NativeEndian.Uint32(buf[8:]) != t.seq:
			continue // of a request that we stopped waiting for
		case binary.NativeEndian.Uint16(buf[4:]) == unix.NLMSG_ERROR:
			if no := binary.NativeEndian.Uint32(buf[unix.SizeofNlMsghdr:]); no != 0 {
				return nil, unix.Errno(-int32(no))
			}
			return nil, nil
		}
		return buf[head:n], nil
	}
}

// attr encodes a netlink attribute.
func attr(kind uint16, parts ...[]byte) []byte {
	b := make([]byte, 4, 64)
	for _, p := range parts {
		b = append(b, p...)
	}
	binary.NativeEndian.PutUint16(b[0:], uint16(len(b)))
	binary.NativeEndian.PutUint16(b[2:], kind)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// find returns what an attribute of a list holds, nil where there is none.
func find(list []byte, kind uint16) []byte {
	for len(list) >= 4 {
		n := int(binary.NativeEndian.Uint16(list))
		if n < 4 || n > len(list) {
			return nil
		}
		if binary.NativeEndian.Uint16(list[2:])&^unix.NLA_F_NESTED == kind {
			return list[4:n]
		}
		list = list[min((n+3)&^3, len(list)):]
	}
	return nil
}
