package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"portal/internal/dns/zone"
	"portal/internal/shortage"
)

const (
	batch = 64
	// inSize is the longest query that is read; those of ordinary clients take a tenth of it.
	inSize  = 4096
	outSize = 4096
	// bigSize is for the rare response over UDP that does not fit outSize, and for streams.
	bigSize = 65535
	// sendTimeout is how long to wait for room in a socket's send buffer.
	sendTimeout = 100 * time.Millisecond
)

// mmsghdr is the kernel's struct of that name.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
	_   [4]byte
}

// udpSocket is one of several sockets on the same address, among which the kernel distributes clients. It receives and sends
// in batches. It waits in the runtime's poller and its system calls, which never block, bypass the scheduler: a call that
// the scheduler knows of wakes its monitor thread in an idle process, which costs as much as the answer.
type udpSocket struct {
	*packets // while the socket is read
	s        *Server
	fd       int
	file     *os.File // owns fd
	w        *worker
	pktinfo  bool

	mu     sync.Mutex // guards sends after close
	closed bool
}

// packets hold a batch of messages and the responses to them. Sockets share them: those that have nothing to read need none.
type packets struct {
	in, out [batch]mmsghdr
	names   [batch]unix.RawSockaddrInet6
	control [batch][64]byte
	iovIn   [batch]unix.Iovec
	iovOut  [batch]unix.Iovec
	bufIn   []byte
	bufOut  []byte
	big     []byte
}

// newPackets points the kernel's structures at the buffers.
func newPackets() *packets {
	p := &packets{bufIn: make([]byte, batch*inSize), bufOut: make([]byte, batch*outSize)}
	for i := range batch {
		p.iovIn[i].Base = &p.bufIn[i*inSize]
		p.iovIn[i].SetLen(inSize)
		h := &p.in[i].hdr
		h.Name = (*byte)(unsafe.Pointer(&p.names[i]))
		h.Iov, h.Iovlen = &p.iovIn[i], 1
		p.out[i].hdr.Iov, p.out[i].hdr.Iovlen = &p.iovOut[i], 1
	}
	return p
}

// packetStack has the packets that no socket reads into. The last ones to come are the first to go: they are in the processor's cache.
type packetStack struct {
	mu   sync.Mutex
	free []*packets
}

func (s *packetStack) take() *packets {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.free)
	if n == 0 {
		return newPackets()
	}
	p := s.free[n-1]
	s.free = s.free[:n-1]
	return p
}

func (s *packetStack) give(p *packets) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, p)
}

// listenUDP opens n sockets on an address.
func (s *Server) listenUDP(addr netip.AddrPort, n int) ([]*udpSocket, error) {
	var out []*udpSocket
	for range n {
		u, err := s.openUDP(addr)
		if err != nil {
			for _, o := range out {
				o.close()
			}
			return nil, err
		}
		out = append(out, u)
	}
	return out, nil
}

func (s *Server) openUDP(addr netip.AddrPort) (*udpSocket, error) {
	domain := unix.AF_INET6
	if addr.Addr().Is4() {
		domain = unix.AF_INET
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("udp socket: %w", err)
	}
	u := &udpSocket{s: s, fd: fd, w: s.newWorker(protoUDP), pktinfo: addr.Addr().IsUnspecified()}
	set := func(level, opt, value int) {
		if e := unix.SetsockoptInt(fd, level, opt, value); e != nil && err == nil {
			err = e
		}
	}
	set(unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	if s.opts.Device != "" {
		err = unix.BindToDevice(fd, s.opts.Device)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20) // as much of it as the system allows
	if domain == unix.AF_INET6 {
		only := 1
		if u.pktinfo {
			only = 0
		}
		set(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only)
		if u.pktinfo {
			set(unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		}
	} else if u.pktinfo {
		set(unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
	}
	if err == nil {
		err = unix.Bind(fd, sockaddr(addr))
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen on udp %s: %w", addr, err)
	}
	u.file = os.NewFile(uintptr(fd), "udp "+addr.String())
	return u, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	sa := &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	if i, err := net.InterfaceByName(a.Addr().Zone()); err == nil {
		sa.ZoneId = uint32(i.Index)
	}
	return sa
}

func (u *udpSocket) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.closed {
		u.closed = true
		u.file.Close()
	}
}

// serve answers until the context ends.
func (u *udpSocket) serve(ctx context.Context) error {
	defer u.close()
	raw, err := u.file.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, u.close)
	defer stop()
	var failed error
	// Read calls the function whenever there is something to read. The function must have emptied the socket before it returns
	// false: the poller reports only what comes after that.
	err = raw.Read(func(uintptr) bool {
		u.packets = u.s.packets.take()
		defer func() {
			u.s.packets.give(u.packets)
			u.packets = nil
		}()
		for ctx.Err() == nil {
			n, err := u.receive()
			switch {
			case errors.Is(err, unix.EAGAIN):
				return false
			case errors.Is(err, unix.EINTR):
				continue
			case shortage.Is(err):
				time.Sleep(minAcceptNap)
				continue
			case err != nil:
				failed = fmt.Errorf("receive: %w", err)
				return true
			}
			u.answerAll(n)
			if n < batch {
				return false
			}
			runtime.Gosched() // under load, others need the processor, too
		}
		return true
	})
	if ctx.Err() != nil {
		return nil
	}
	return errors.Join(failed, err)
}

// answerAll answers a batch of n messages.
func (u *udpSocket) answerAll(n int) {
	u.w.now = time.Now()
	u.w.count.mu.Lock()
	defer u.w.count.mu.Unlock()
	sent := 0
	for i := range n {
		sent = u.answer(i, sent)
	}
	u.send(sent)
	u.w.count.spent(n, time.Since(u.w.now))
}

func (u *udpSocket) receive() (int, error) {
	for i := range batch {
		h := &u.in[i].hdr
		h.Namelen = uint32(unsafe.Sizeof(u.names[i]))
		if u.pktinfo {
			h.Control = &u.control[i][0]
			h.SetControllen(len(u.control[i]))
		}
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(u.fd), uintptr(unsafe.Pointer(&u.in[0])), batch, unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// answer handles the i-th message of a batch, queueing its response behind those queued already.
func (u *udpSocket) answer(i, queued int) int {
	msg := u.bufIn[i*inSize : i*inSize+int(u.in[i].n)]
	if u.in[i].hdr.Flags&unix.MSG_TRUNC != 0 {
		return queued // longer than any query
	}
	from := u.from(i)
	slot := u.bufOut[queued*outSize : queued*outSize : (queued+1)*outSize]
	out, v := u.w.handle(slot, msg, from.Addr())
	switch v {
	case later:
		u.askLater(i, msg, from)
		return queued
	case silent:
		return queued
	}
	if u.w.r.Cut && u.w.udpLimit() > outSize { // because of the buffer, not of the client
		if queued > 0 {
			// The response at hand lies behind those queued: it is copied to the front if it must be queued after all.
			u.send(queued)
			out = append(u.bufOut[:0], out...)
			queued = 0
		}
		if big := u.whole(); big != nil {
			u.queue(0, i, big)
			u.send(1) // there is one such buffer
			return 0
		}
	}
	u.queue(queued, i, out)
	return queued + 1
}

// from reads the address of the i-th sender.
func (u *udpSocket) from(i int) netip.AddrPort {
	sa := &u.names[i]
	port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&sa.Port))[:])
	if sa.Family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(sa)).Addr), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), port)
}

// queue prepares a response to the i-th sender, from the address that it sent its query to.
func (u *udpSocket) queue(slot, i int, out []byte) {
	h := &u.out[slot].hdr
	h.Name, h.Namelen = u.in[i].hdr.Name, u.in[i].hdr.Namelen
	u.iovOut[slot].Base = &out[0]
	u.iovOut[slot].SetLen(len(out))
	h.Control, h.Controllen = nil, 0
	if u.pktinfo && u.in[i].hdr.Controllen > 0 {
		replyFrom(u.control[i][:u.in[i].hdr.Controllen])
		h.Control, h.Controllen = &u.control[i][0], u.in[i].hdr.Controllen
	}
}

// replyFrom turns the packet information of a query into that of its response, in place: same address, any interface.
func replyFrom(control []byte) {
	if len(control) < unix.SizeofCmsghdr {
		return
	}
	h := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
	data := control[unix.CmsgLen(0):]
	switch {
	case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
		(*unix.Inet4Pktinfo)(unsafe.Pointer(&data[0])).Ifindex = 0
	case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
		p := (*unix.Inet6Pktinfo)(unsafe.Pointer(&data[0]))
		if !netip.AddrFrom16(p.Addr).IsLinkLocalUnicast() {
			p.Ifindex = 0
		}
	}
}

func (u *udpSocket) send(n int) {
	for at := 0; at < n; {
		sent, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(u.fd), uintptr(unsafe.Pointer(&u.out[at])), uintptr(n-at), unix.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == unix.EINTR, errno == unix.EAGAIN && u.writable():
			continue
		case errno != 0:
			sent = 1 // this one cannot be delivered; the others may
			u.w.count.unsent++
		}
		at += int(sent)
	}
}

// writable waits until there is room in the send buffer.
func (u *udpSocket) writable() bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(u.fd), Events: unix.POLLOUT}}, int(sendTimeout.Milliseconds()))
	return n > 0 || errors.Is(err, unix.EINTR)
}

// whole answers the current query again, with a buffer that holds any message; nil if that needs upstreams.
func (u *udpSocket) whole() []byte {
	if u.big == nil {
		u.big = make([]byte, bigSize)
	}
	u.w.r.Limit = u.w.udpLimit()
	out, outcome := u.s.zones.Answer(u.big[:0], &u.w.r)
	if outcome != zone.Answered {
		return nil
	}
	return out
}

// askLater passes a query to the resolver, which answers from another goroutine.
func (u *udpSocket) askLater(i int, msg []byte, from netip.AddrPort) {
	var control []byte
	if u.pktinfo && u.in[i].hdr.Controllen > 0 {
		control = append(control, u.control[i][:u.in[i].hdr.Controllen]...)
		replyFrom(control)
	}
	name := u.names[i]
	length := u.in[i].hdr.Namelen
	u.s.resolve(msg, from.Addr(), protoUDP, func(out []byte) { u.sendTo(out, &name, length, control) })
}

// sendTo sends one response, from any goroutine.
func (u *udpSocket) sendTo(out []byte, name *unix.RawSockaddrInet6, length uint32, control []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.closed || len(out) == 0 {
		return
	}
	var iov unix.Iovec
	iov.Base = &out[0]
	iov.SetLen(len(out))
	h := unix.Msghdr{Name: (*byte)(unsafe.Pointer(name)), Namelen: length, Iov: &iov, Iovlen: 1}
	if len(control) > 0 {
		h.Control = &control[0]
		h.SetControllen(len(control))
	}
	_, _, _ = unix.RawSyscall(unix.SYS_SENDMSG, uintptr(u.fd), uintptr(unsafe.Pointer(&h)), syscall.MSG_DONTWAIT)
}
