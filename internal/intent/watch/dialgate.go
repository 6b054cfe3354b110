package watch

import (
	"context"
	"net/http/httptrace"
	"sync"
	"time"
)

// dialGate lets one request make the connection that all use: HTTP/2 carries them side by side, but requests that come while
// there is no connection yet each begin one, and a handshake takes both sides milliseconds.
type dialGate struct {
	mu sync.Mutex
	// taken: somebody is on the way; through: there has been a connection, and nobody waits any more.
	taken, through bool
	opened         chan struct{}
}

// dialWait bounds how long anybody waits for a connection that is being made.
const dialWait = time.Second

func newDialGate() *dialGate { return &dialGate{opened: make(chan struct{})} }

// take says that a request is about to be made, if none is yet; done says that it is over, whatever came of it.
func (d *dialGate) take() (done func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.taken {
		return func() {}
	}
	d.taken = true
	return func() { d.open(false) }
}

// traced returns a context for a request that opens the gate as soon as it has a connection.
func (d *dialGate) traced(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { d.open(true) }})
}

// open lets those pass who wait: for good, or, if there is no connection, until somebody else tries.
func (d *dialGate) open(through bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.through {
		return
	}
	close(d.opened)
	d.taken, d.through, d.opened = through, through, make(chan struct{})
}

// wait waits for a connection that is being made.
func (d *dialGate) wait(ctx context.Context) {
	d.mu.Lock()
	waits, opened := d.taken && !d.through, d.opened
	d.mu.Unlock()
	if !waits {
		return
	}
	limit := time.NewTimer(dialWait)
	defer limit.Stop()
	select {
	case <-opened:
	case <-ctx.Done():
	case <-limit.C:
	}
}
