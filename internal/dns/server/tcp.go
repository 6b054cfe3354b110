package server

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	idleTimeout  = 10 * time.Second
	writeTimeout = 5 * time.Second
	// pending is how many queries of one connection may wait for upstreams.
	pending = 64
)

// stream serves DNS over connections: TCP, or TLS on top of it.
type stream struct {
	s     *Server
	l     net.Listener
	proto proto

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

func (s *Server) newStream(l net.Listener, p proto) *stream {
	return &stream{s: s, l: l, proto: p, conns: map[net.Conn]struct{}{}}
}

// serve accepts connections until the context ends, and returns when all are closed.
func (t *stream) serve(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() {
		t.l.Close()
		t.mu.Lock()
		defer t.mu.Unlock()
		for c := range t.conns {
			c.Close()
		}
	})
	defer stop()
	for {
		c, err := t.l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		t.keep(ctx, c)
		wg.Go(func() {
			defer t.forget(c)
			t.converse(c)
		})
	}
}

func (t *stream) keep(ctx context.Context, c net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.conns[c] = struct{}{}
	if ctx.Err() != nil {
		c.Close()
	}
}

func (t *stream) forget(c net.Conn) {
	c.Close()
	t.mu.Lock()
	delete(t.conns, c)
	t.mu.Unlock()
}

// conversation is one connection. Queries are answered as soon as their answers are known, not in order.
type conversation struct {
	t    *stream
	c    net.Conn
	w    *worker
	from netip.Addr
	mu   sync.Mutex // of writes
	wait chan struct{}
}

func (t *stream) converse(c net.Conn) {
	from, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return
	}
	conv := &conversation{t: t, c: c, w: t.s.newWorker(t.proto), from: from.Addr().Unmap(), wait: make(chan struct{}, pending)}
	defer t.s.metrics.merge(t.proto, conv.w.count)
	r := bufio.NewReaderSize(c, 2048)
	buf := make([]byte, 0, 1024)
	for {
		// A whole query must arrive within the time: a byte now and then does not keep a connection open.
		c.SetReadDeadline(time.Now().Add(idleTimeout))
		var head [2]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(head[:]))
		if n == 0 || n > inSize {
			return
		}
		if cap(buf) < n {
			buf = make([]byte, n)
		}
		buf = buf[:n]
		if _, err := io.ReadFull(r, buf); err != nil {
			return
		}
		if err := conv.handle(buf); err != nil {
			return
		}
	}
}

// bigBuffers are for responses of any length; a connection without a query holds none.
var bigBuffers = sync.Pool{New: func() any { return new([bigSize]byte) }}

func (v *conversation) handle(msg []byte) error {
	buf := bigBuffers.Get().(*[bigSize]byte)
	defer bigBuffers.Put(buf)
	v.w.now = time.Now()
	v.w.count.mu.Lock()
	got, verdict := v.w.handle(buf[:0], msg, v.from)
	v.w.count.spent(1, time.Since(v.w.now))
	v.w.count.mu.Unlock()
	switch verdict {
	case reply:
		return v.write(got)
	case transfer:
		return v.t.s.transfer(&v.w.q, v.write)
	case later:
		v.wait <- struct{}{}
		v.t.s.resolve(msg, v.from, v.t.proto, func(answer []byte) {
			<-v.wait
			v.write(answer)
		})
	}
	return nil
}

func (v *conversation) write(msg []byte) error {
	if len(msg) == 0 {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.c.SetWriteDeadline(time.Now().Add(writeTimeout))
	head := [2]byte{byte(len(msg) >> 8), byte(len(msg))}
	b := net.Buffers{head[:], msg}
	_, err := b.WriteTo(v.c)
	if err != nil {
		v.c.Close()
	}
	return err
}
