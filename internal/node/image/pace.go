package image

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

const (
	// stallTimeout is how long a registry may send nothing in the middle of an answer.
	stallTimeout = time.Minute
	// paceInterval is how often it is looked at how fast a pull is, and slowPull is what it gets in that time if it is slow.
	paceInterval = 10 * time.Second
	slowPull     = 1 << 20
	// maxSlow is how many slow pulls go on beside those that are counted.
	maxSlow = 32
)

// StalledError says that a registry stopped sending.
type StalledError struct {
	Host string
	For  time.Duration
}

func (e *StalledError) Error() string {
	return fmt.Sprintf("the registry at %s sent nothing for %s", e.Host, e.For)
}

// watched does a request whose answer must keep coming: a registry that stops sending would hold a pull, and what waits for it, forever.
func watched(t http.RoundTripper, r *http.Request, stall time.Duration) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(r.Context())
	answer, err := t.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	b := &watchedBody{ReadCloser: answer.Body, ctx: ctx, cancel: cancel, stall: stall, stalled: &StalledError{r.URL.Host, stall}}
	b.count, _ = r.Context().Value(countKey{}).(*atomic.Int64)
	answer.Body = b
	return answer, nil
}

type watchedBody struct {
	io.ReadCloser
	ctx     context.Context
	cancel  context.CancelCauseFunc
	stall   time.Duration
	stalled error
	count   *atomic.Int64
}

// Read reads, but not for longer than the registry may be silent. How long whoever reads takes in between does not count.
func (b *watchedBody) Read(p []byte) (int, error) {
	timer := time.AfterFunc(b.stall, func() { b.cancel(b.stalled) })
	n, err := b.ReadCloser.Read(p)
	timer.Stop()
	if b.count != nil {
		b.count.Add(int64(n))
	}
	if err != nil && err != io.EOF && context.Cause(b.ctx) == b.stalled {
		err = b.stalled
	}
	return n, err
}

// Close ends the answer.
func (b *watchedBody) Close() error {
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}

// countKey is where the context of a pull has what it received.
type countKey struct{}

// slots are the right to pull: only so many at a time, as they share the disk and the network. One that is slow takes little of either, and
// goes on without: registries that trickle must not keep others waiting.
type slots struct {
	fast, slow chan struct{}
	interval   time.Duration
}

func newSlots(n int) *slots {
	return &slots{fast: make(chan struct{}, n), slow: make(chan struct{}, maxSlow), interval: paceInterval}
}

// take waits for a slot. The pull is to use the context that it returns, and to release the slot.
func (s *slots) take(ctx context.Context) (context.Context, func(), error) {
	select {
	case s.fast <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	count := &atomic.Int64{}
	ended, left := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(left)
		s.watch(count, ended)
	}()
	return context.WithValue(ctx, countKey{}, count), func() { close(ended); <-left }, nil
}

// watch holds a slot until a pull has ended, or turns out to be slow.
func (s *slots) watch(count *atomic.Int64, ended <-chan struct{}) {
	held := s.fast
	defer func() { <-held }()
	ticks := time.NewTicker(s.interval)
	defer ticks.Stop()
	for last := int64(0); ; {
		select {
		case <-ended:
			return
		case <-ticks.C:
		}
		now := count.Load()
		if held == s.fast && now-last < slowPull {
			select {
			case s.slow <- struct{}{}:
				<-s.fast
				held = s.slow
			default: // too many are
			}
		}
		last = now
	}
}
