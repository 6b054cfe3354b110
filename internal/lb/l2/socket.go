package l2

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// socket sends and receives packets of one protocol on all links, without their Ethernet headers.
type socket struct {
	file     *os.File
	protocol uint16
	once     sync.Once
}

func openARP() (*socket, error) { return open(unix.ETH_P_ARP, nil) }

// openNDP receives solicitations and advertisements. A packet socket sees them wherever they are sent to: to a group, or, when a neighbour
// verifies what it knows, to the announced address itself, which is none of this machine's.
func openNDP() (*socket, error) {
	return open(unix.ETH_P_IPV6, []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 6}, // the next header
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 58, Jf: 4},
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: headerSize}, // the ICMPv6 type
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: solicitation, Jt: 1},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: advertisement, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	})
}

func networkOrder(v uint16) uint16 { return v<<8 | v>>8 }

func open(protocol uint16, filter []unix.SockFilter) (*socket, error) {
	// Without a protocol it receives nothing until the filter is there.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if len(filter) > 0 {
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: networkOrder(protocol)})
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &socket{file: os.NewFile(uintptr(fd), "packets"), protocol: protocol}, nil
}

func (s *socket) close() { s.once.Do(func() { _ = s.file.Close() }) }

// receive calls a function for each packet of another machine until the socket is closed.
func (s *socket) receive(handle func(packet []byte, index int, from MAC)) error {
	conn, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	buffer := make([]byte, 2048)
	for {
		var n int
		var from unix.Sockaddr
		var failed error
		err := conn.Read(func(fd uintptr) bool {
			n, from, failed = unix.Recvfrom(int(fd), buffer, 0)
			return !errors.Is(failed, unix.EAGAIN)
		})
		if err != nil {
			return nil // closed
		}
		if failed != nil {
			// An interface that went down says so once; the others go on.
			if errors.Is(failed, unix.ENETDOWN) || errors.Is(failed, unix.EINTR) || errors.Is(failed, unix.ENOBUFS) {
				continue
			}
			return failed
		}
		sender, ok := from.(*unix.SockaddrLinklayer)
		if !ok || sender.Pkttype == unix.PACKET_OUTGOING || sender.Halen != 6 {
			continue
		}
		handle(buffer[:n], sender.Ifindex, MAC(sender.Addr[:6]))
	}
}

func (s *socket) send(index int, to MAC, packet []byte) error {
	conn, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	address := &unix.SockaddrLinklayer{Protocol: networkOrder(s.protocol), Ifindex: index, Halen: 6}
	copy(address.Addr[:], to[:])
	var failed error
	// What does not fit into the queue is lost, as packets may be.
	if err := conn.Control(func(fd uintptr) { failed = unix.Sendto(int(fd), packet, 0, address) }); err != nil {
		return err
	}
	return failed
}

// groups are the multicast groups that solicitations go to. The kernel joins them for an ordinary socket, so that interfaces let their
// packets in and switches send them here.
type groups struct {
	fd     int
	joined map[membership]int
}

type membership struct {
	group netip.Addr
	index int
}

func openGroups() (*groups, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &groups{fd: fd, joined: map[membership]int{}}, nil
}

func (g *groups) close() {
	if g.fd >= 0 {
		_ = unix.Close(g.fd)
		g.fd = -1
	}
}

// join joins the group of an address; several addresses may have one.
func (g *groups) join(a netip.Addr, links []*link, log *slog.Logger) {
	if g == nil || a.Is4() {
		return
	}
	for _, l := range links {
		m := membership{solicitedNode(a), l.index}
		if g.joined[m]++; g.joined[m] > 1 {
			continue
		}
		err := unix.SetsockoptIPv6Mreq(g.fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, &unix.IPv6Mreq{Multiaddr: m.group.As16(), Interface: uint32(l.index)})
		if err != nil {
			log.Warn("could not join the group of an address: solicitations may not arrive", "address", a, "interface", l.name, "err", err)
		}
	}
}

func (g *groups) leave(a netip.Addr, links []*link) {
	if g == nil || a.Is4() {
		return
	}
	for _, l := range links {
		m := membership{solicitedNode(a), l.index}
		if g.joined[m]--; g.joined[m] > 0 {
			continue
		}
		delete(g.joined, m)
		_ = unix.SetsockoptIPv6Mreq(g.fd, unix.IPPROTO_IPV6, unix.IPV6_LEAVE_GROUP, &unix.IPv6Mreq{Multiaddr: m.group.As16(), Interface: uint32(l.index)}) // the interface may be gone
	}
}
