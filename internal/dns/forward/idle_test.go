package forward

import (
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// TestForgottenConnections: an idle connection on which nothing comes back any more costs some time, and no answer.
func TestForgottenConnections(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	path := newPath(t, s.addr)
	f, _ := forwarder(t, nil, Upstream{Addr: path.addr, Transport: TCP})
	var wg sync.WaitGroup
	for _, name := range []string{"a.example.", "b.example.", "c.example.", "d.example."} {
		wg.Go(func() {
			if m, err := resolve(t, f, name); err != nil || len(m.Answer) != 1 {
				t.Errorf("%v %v", m, err)
			}
		})
	}
	wg.Wait()
	path.forget()
	if m, err := resolve(t, f, "later.example."); err != nil || len(m.Answer) != 1 {
		t.Errorf("over connections that the path has forgotten: %v %v", m, err)
	}
}

// TestIdleConnectionsEnd: connections don't wait for ever for a next query.
func TestIdleConnectionsEnd(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	f, _ := forwarder(t, nil, Upstream{Addr: s.addr, Transport: TCP})
	if _, err := resolve(t, f, "a.example."); err != nil {
		t.Fatal(err)
	}
	u := f.upstreams[0]
	u.expireIdle(time.Now().Add(idleFor / 2))
	if len(u.idle) != 1 {
		t.Errorf("%d idle connections after half of the time, want 1", len(u.idle))
	}
	idle := u.idle[0].Conn
	u.expireIdle(time.Now().Add(idleFor))
	if len(u.idle) != 0 {
		t.Errorf("%d idle connections after the time", len(u.idle))
	}
	if _, err := idle.Write([]byte{0}); err == nil {
		t.Error("the connection is still open")
	}
}

// path passes connections on to a server, until it forgets those that it has, as a firewall does: they stay open, and
// nothing gets through.
type path struct {
	addr  netip.AddrPort
	mu    sync.Mutex
	conns []net.Conn // to the server
	held  []net.Conn // from clients
}

func newPath(t *testing.T, to netip.AddrPort) *path {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &path{addr: netip.MustParseAddrPort(l.Addr().String())}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to.String())
			if err != nil {
				client.Close()
				continue
			}
			p.mu.Lock()
			p.conns, p.held = append(p.conns, server), append(p.held, client)
			p.mu.Unlock()
			wg.Go(func() { pass(server, client) })
			wg.Go(func() { pass(client, server) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.forget()
		for _, c := range p.held {
			c.Close()
		}
		wg.Wait()
	})
	return p
}

// pass copies until an end is closed, and closes neither.
func pass(to, from net.Conn) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// forget cuts the way to the server; clients notice nothing.
func (p *path) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}
