package watch

import (
	"context"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"
)

// door lets the first request make the connection that all use: HTTP/2 carries them side by side, but requests that come
// while there is no connection yet each begin one, and a handshake takes both sides milliseconds.
type door struct {
	taken  atomic.Bool
	once   sync.Once
	opened chan struct{}
}

// doorWait bounds how long anybody waits for the first: it may have met a server that doesn't answer, or speaks HTTP/1.
const doorWait = time.Second

func newDoor() *door { return &door{opened: make(chan struct{})} }

func (d *door) open() { d.once.Do(func() { close(d.opened) }) }

// enter is called with the context of a request, which is to be made with the one returned, and done afterwards.
func (d *door) enter(ctx context.Context) (_ context.Context, done func()) {
	if d.taken.CompareAndSwap(false, true) {
		return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { d.open() }}), d.open
	}
	d.wait(ctx)
	return ctx, func() {}
}

func (d *door) wait(ctx context.Context) {
	select {
	case <-d.opened:
		return
	default:
	}
	limit := time.NewTimer(doorWait)
	defer limit.Stop()
	select {
	case <-d.opened:
	case <-ctx.Done():
	case <-limit.C:
	}
}
