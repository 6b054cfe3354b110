// Package disconnect ends a request's context when its client is gone, also after the connection was taken over by SPDY or WebSocket: then
// net/http no longer notices. It knows nothing of what the connection carries.
package disconnect

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Handler serves requests with a context that ends when the client is gone.
func Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hijacker, ok := w.(http.Hijacker)
		if !ok {
			next.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		next.ServeHTTP(&writer{ResponseWriter: w, hijacker: hijacker, ctx: ctx, gone: cancel}, r.WithContext(ctx))
	})
}

// writer hands out a connection that notices. It does not tell what it wraps: what unwraps it would miss that.
type writer struct {
	http.ResponseWriter
	hijacker http.Hijacker
	ctx      context.Context // of the request
	gone     func()
}

var (
	_ http.Hijacker = &writer{}
	_ http.Flusher  = &writer{}
)

// Flush sends what was written.
func (w *writer) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

// Hijack gives the connection to the caller.
func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	inner, buffered, err := w.hijacker.Hijack()
	if err != nil {
		return nil, nil, err
	}
	c := &conn{Conn: inner, gone: w.gone}
	// What has been read ahead comes first.
	if n := buffered.Reader.Buffered(); n > 0 {
		ahead, err := buffered.Reader.Peek(n)
		if err != nil {
			_ = inner.Close()
			return nil, nil, err
		}
		c.ahead = append([]byte(nil), ahead...)
	}
	reader := bufio.NewReader(c)
	if len(c.ahead) > 0 {
		_, _ = reader.Peek(len(c.ahead)) // so that callers that look for it find it
	}
	go c.watch(w.ctx)
	return c, bufio.NewReadWriter(reader, bufio.NewWriter(c)), nil
}

// conn notices when reading from it fails, or when its other side has gone and nobody reads.
type conn struct {
	net.Conn
	mu    sync.Mutex
	ahead []byte
	gone  func()
	reads atomic.Int64
}

// watchInterval is how long nobody may read from a connection before it is looked at whether the other side has gone.
const watchInterval = time.Second

// Close ends the connection, and with it the request: SPDY closes it by itself when the other side says that it is about to go.
func (c *conn) Close() error {
	defer c.gone()
	return c.Conn.Close()
}

// watch notices the end of a connection that nobody reads from any more.
func (c *conn) watch(ctx context.Context) {
	inner := c.Conn
	for {
		wrapper, ok := inner.(interface{ NetConn() net.Conn }) // TLS
		if !ok {
			break
		}
		inner = wrapper.NetConn()
	}
	socket, ok := inner.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return
	}
	ticks := time.NewTicker(watchInterval)
	defer ticks.Stop()
	for before := int64(-1); ; {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		now := c.reads.Load()
		if now == before && hungUp(raw) {
			c.gone()
			return
		}
		before = now
	}
}

// hungUp says whether the other side will send no more, also if not all that it sent was read.
func hungUp(raw syscall.RawConn) bool {
	out := false
	err := raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(poll, 0)
		out = err == nil && n > 0 && poll[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return err == nil && out
}

// Read reads what was read ahead, and then from the connection.
func (c *conn) Read(p []byte) (int, error) {
	c.mu.Lock()
	if len(c.ahead) > 0 {
		n := copy(p, c.ahead)
		c.ahead = c.ahead[n:]
		c.mu.Unlock()
		return n, nil
	}
	c.mu.Unlock()
	n, err := c.Conn.Read(p)
	c.reads.Add(1)
	if err != nil {
		c.gone()
	}
	return n, err
}

// CloseWrite ends one direction, where the connection can.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return io.ErrClosedPipe
}
