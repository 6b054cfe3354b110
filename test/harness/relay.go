package harness

import (
	"io"
	"net"
	"sync"
)

// Relay hands connections on to a server. It is the way to it from another network namespace, and a cable that can be
// pulled.
type Relay struct {
	listener net.Listener
	to       string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
}

// NewRelay hands on to an address what comes to a listener, until it is closed.
func NewRelay(l net.Listener, to string) *Relay {
	r := &Relay{listener: l, to: to, conns: map[net.Conn]bool{}}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go r.serve(c)
		}
	}()
	return r
}

func (r *Relay) serve(c net.Conn) {
	defer r.drop(c)
	if !r.keep(c) {
		return
	}
	server, err := net.Dial("tcp", r.to)
	if err != nil {
		return
	}
	defer r.drop(server)
	if !r.keep(server) {
		return
	}
	go func() {
		_, _ = io.Copy(server, c)
		r.drop(server)
	}()
	_, _ = io.Copy(c, server)
}

// keep notes a connection, and says whether it may live.
func (r *Relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns[c] = true
	return !r.cut
}

// drop resets a connection.
func (r *Relay) drop(c net.Conn) {
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}

// Cut resets all connections, and every further one, until Mend.
func (r *Relay) Cut() {
	r.mu.Lock()
	r.cut = true
	var all []net.Conn
	for c := range r.conns {
		all = append(all, c)
	}
	r.mu.Unlock()
	for _, c := range all {
		r.drop(c)
	}
}

// Mend hands connections on again.
func (r *Relay) Mend() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = false
}

// Close ends it all.
func (r *Relay) Close() {
	_ = r.listener.Close()
	r.Cut()
}
