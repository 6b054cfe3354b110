package userspace

import (
	"container/list"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/shortage"
)

const (
	datagramSize = 64 << 10
	// doubt is how long a client may be silent before its port could lead elsewhere: conntrack forgets a flow that was
	// never answered after 30 seconds.
	doubt = 10 * time.Second
)

// datagrams is a UDP socket for all frontends of a family and origin, with the sessions of its clients.
type datagrams struct {
	*server
	family intent.Family
	origin plan.Origin
	socket *net.UDPConn
	local  netip.AddrPort
	track  *tracker
	most   int // sessions of one port

	mu       sync.Mutex
	sessions map[flow]*session
	ports    map[uint64]*list.List // the sessions of each Service's port, those that a client used last in front
	closed   bool
}

// maxSessions is how many sessions a Service's port has at most; each needs a descriptor.
const maxSessions = 1 << 14

// sessionLimit leaves most of the process' descriptors to other Services and connections.
func sessionLimit() int { return max(1, int(min(fileLimit()/8, maxSessions))) }

// flow is a client as the socket sees it.
type flow struct{ client, us netip.AddrPort }

// session is one client's datagrams to one frontend, and the answers to them.
type session struct {
	flow
	to       netip.AddrPort
	front    *frontend
	endpoint netip.AddrPort
	up       *net.UDPConn
	from     []byte        // the control message that gives answers the right source
	place    *list.Element // in the list of its port

	mu   sync.Mutex
	last time.Time
}

func (s *server) datagrams(f intent.Family, o plan.Origin) (*datagrams, error) {
	network, level, name := "udp4", unix.SOL_IP, unix.IP_PKTINFO
	if f == intent.IPv6 {
		network, level, name = "udp6", unix.SOL_IPV6, unix.IPV6_RECVPKTINFO
	}
	// Which of the node's addresses a datagram came to is part of what conntrack knows it by.
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, name, 1) }); e != nil {
			return e
		}
		return err
	}}
	c, err := lc.ListenPacket(s.ctx, network, ":0")
	if err != nil {
		return nil, err
	}
	track, err := newTracker()
	if err != nil {
		c.Close()
		return nil, err
	}
	d := &datagrams{server: s, family: f, origin: o, socket: c.(*net.UDPConn), track: track, most: sessionLimit(), sessions: map[flow]*session{}, ports: map[uint64]*list.List{}}
	d.socket.SetReadBuffer(4 << 20)
	d.local = d.socket.LocalAddr().(*net.UDPAddr).AddrPort()
	return d, nil
}

func (d *datagrams) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	err := d.socket.Close()
	d.end(func(*session) bool { return true })
	return err
}

// receive carries clients' datagrams to endpoints until the socket is closed.
func (d *datagrams) receive() {
	defer d.track.close()
	buf, oob := make([]byte, datagramSize), make([]byte, 128)
	for {
		n, oobn, _, client, err := d.socket.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		us, ok := arrival(oob[:oobn])
		if !ok {
			continue
		}
		client = netip.AddrPortFrom(client.Addr().Unmap(), client.Port())
		d.carry(flow{client, netip.AddrPortFrom(us, d.local.Port())}, buf[:n])
	}
}

// carry sends a datagram to the client's endpoint. A refusal that an earlier datagram met makes it go to another one.
func (d *datagrams) carry(k flow, data []byte) {
	for range 2 {
		s := d.session(k)
		if s == nil {
			return
		}
		_, err := s.up.Write(data)
		switch {
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
			d.memory.failed(s.endpoint)
			d.drop(s)
		case errors.Is(err, net.ErrClosed): // cut in between
			d.drop(s)
		default:
			return
		}
	}
}

// session finds or begins a client's session.
func (d *datagrams) session(k flow) *session {
	d.mu.Lock()
	s := d.sessions[k]
	if s != nil {
		d.ports[s.front.port].MoveToFront(s.place)
	}
	d.mu.Unlock()
	if s != nil && !s.touch() {
		return s
	}
	to, err := d.track.originalUDP(k.us, k.client)
	if s != nil && err == nil && to == s.to {
		return s
	}
	if s != nil {
		d.drop(s)
	}
	if err != nil {
		return nil
	}
	return d.begin(k, to)
}

// touch notes that a session is in use, and says whether it was silent for long.
func (s *session) touch() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.last
	s.last = time.Now()
	return s.last.Sub(before) > doubt
}

func (d *datagrams) begin(k flow, to netip.AddrPort) *session {
	front := d.find(plan.FrontendKey{Addr: to.Addr(), Family: d.family, Protocol: intent.UDP, Port: to.Port()})
	if front == nil || front.Routes[d.origin].Verdict != plan.Forward {
		return nil
	}
	for _, e := range d.memory.order(nil, front, d.origin, k.client.Addr()) {
		up, err := d.dial.udp(d.ctx, front, d.origin, e, k.client)
		if shortage.Is(err) { // the client tries again
			d.evict()
			return nil
		}
		if err != nil {
			d.memory.failed(e.Addr)
			continue
		}
		d.memory.answered(front, k.client.Addr(), e.Addr)
		s := &session{flow: k, to: to, front: front, endpoint: e.Addr, up: up, from: departure(k.us.Addr()), last: time.Now()}
		d.mu.Lock()
		if d.closed {
			d.mu.Unlock()
			up.Close()
			return nil
		}
		d.admit(s)
		d.work.Go(func() { d.answer(s) })
		d.mu.Unlock()
		return s
	}
	return nil
}

// buffers are for answers; a session without one on its way holds none.
var buffers = sync.Pool{New: func() any { b := make([]byte, datagramSize); return &b }}

// answer carries an endpoint's datagrams back until the session ends.
func (d *datagrams) answer(s *session) {
	raw, err := s.up.SyscallConn()
	if err != nil {
		return
	}
	for {
		var buf *[]byte
		var n int
		var failure error
		err := raw.Read(func(fd uintptr) bool {
			buf = buffers.Get().(*[]byte)
			n, _, failure = unix.Recvfrom(int(fd), *buf, unix.MSG_DONTWAIT)
			if failure == unix.EAGAIN || failure == unix.EINTR {
				buffers.Put(buf)
				buf = nil
				return false
			}
			return true
		})
		if err != nil {
			return // closed
		}
		if failure == nil {
			s.touch()
			d.socket.WriteMsgUDPAddrPort((*buf)[:n], s.from, s.client)
		}
		buffers.Put(buf)
		if failure != nil {
			if !shortage.Is(failure) {
				d.memory.failed(s.endpoint)
			}
			d.drop(s)
			return
		}
	}
}

// drop closes one session.
func (d *datagrams) drop(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.discard(s)
}

// admit adds a session. If its port has too many, or all together, it takes the place of the one that clients have not used for the longest time:
// of its port, or of the port that has the most.
func (d *datagrams) admit(s *session) {
	if own := d.ports[s.front.port]; own != nil && own.Len() >= d.most {
		d.discard(own.Back().Value.(*session))
	} else if len(d.sessions) >= d.mostSessions {
		d.discard(d.oldest())
	}
	own := d.ports[s.front.port]
	if own == nil {
		own = list.New()
		d.ports[s.front.port] = own
	}
	s.place = own.PushFront(s)
	d.sessions[s.flow] = s
}

// discard closes a session; d.mu is locked.
func (d *datagrams) discard(s *session) {
	if d.sessions[s.flow] == s {
		delete(d.sessions, s.flow)
		own := d.ports[s.front.port]
		if own.Remove(s.place); own.Len() == 0 {
			delete(d.ports, s.front.port)
		}
	}
	s.up.Close()
}

// evict closes the oldest session.
func (d *datagrams) evict() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.oldest(); s != nil {
		d.discard(s)
	}
}

// oldest is the session that clients have not used for the longest time, of the port that has the most; nil: there is none. d.mu is locked.
func (d *datagrams) oldest() *session {
	var most *list.List
	for _, l := range d.ports {
		if most == nil || l.Len() > most.Len() {
			most = l
		}
	}
	if most == nil {
		return nil
	}
	return most.Back().Value.(*session)
}

// end closes sessions.
func (d *datagrams) end(which func(*session) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.sessions {
		if which(s) {
			d.discard(s)
		}
	}
}

// forget ends sessions that nobody uses any more.
func (d *datagrams) forget() {
	old := time.Now().Add(-d.UDPIdle)
	d.end(func(s *session) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.last.Before(old)
	})
}

// cut ends the sessions whose endpoint is gone, so that the client's next datagram finds another, or is rejected. Those go on
// whose endpoint still serves, whatever policies say by now, and so do those of a frontend that is gone: as with
// connections. The end of an endpoint that was on its way out changes no frontend, so that it is looked for among all sessions.
// It returns those whose next datagram must be rejected.
func (s *server) cut(next *plan.Snapshot, full bool, delta *plan.Delta) (rejected []flow) {
	full = full || delta.Serving
	changed := map[plan.FrontendKey]bool{}
	for _, ch := range delta.Frontends {
		if ch.Protocol == intent.UDP {
			changed[ch.FrontendKey] = true
		}
	}
	if !full && len(changed) == 0 {
		return nil
	}
	for _, d := range s.udp {
		d.end(func(o *session) bool {
			if !full && !changed[o.front.FrontendKey] {
				return false
			}
			now := s.find(o.front.FrontendKey)
			if now == nil || hasEndpoint(now.Frontend, o.endpoint) || stillServes(next, now.ID, o.endpoint) {
				return false
			}
			if now.Routes[d.origin].Verdict != plan.Forward {
				rejected = append(rejected, o.flow)
			}
			return true
		})
	}
	return rejected
}

func hasEndpoint(f *plan.Frontend, a netip.AddrPort) bool {
	for _, r := range f.Routes {
		if r.Pool != nil && slices.ContainsFunc(r.Pool.Endpoints, func(e plan.Endpoint) bool { return e.Addr == a }) {
			return true
		}
	}
	return false
}

func stillServes(next *plan.Snapshot, id plan.PortID, a netip.AddrPort) bool {
	s := next.Services[id.Service]
	return s != nil && slices.ContainsFunc(s.Serving, func(o plan.Serving) bool { return o.ID == id && slices.Contains(o.Endpoints, a) })
}

// arrival is the address that a datagram came to.
func arrival(oob []byte) (netip.Addr, bool) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}, false
	}
	for _, m := range list {
		switch {
		case m.Header.Level == unix.SOL_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			return netip.AddrFrom4([4]byte(m.Data[8:12])), true
		case m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			return netip.AddrFrom16([16]byte(m.Data[:16])), true
		}
	}
	return netip.Addr{}, false
}

// departure makes a datagram leave from an address.
func departure(a netip.Addr) []byte {
	if a.Is4() {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()})
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()})
}
