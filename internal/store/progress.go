package store

import (
	"context"
	"sync"
	"time"
)

// progress asks etcd to tell a resource's watches how far they are, when reads wait for that.
type progress struct {
	ask  func(context.Context) error
	ctx  context.Context
	stop context.CancelFunc
	done sync.WaitGroup

	mu sync.Mutex
	// asking says that a goroutine is at it, and again that it has to ask once more.
	asking, again bool
}

const (
	// atMostEvery bounds how often etcd is asked, however many reads wait for it.
	atMostEvery = time.Millisecond
	// restFor is how many times longer than a request the pause after it is: a slow etcd is asked less often.
	restFor = 4
)

func newProgress(ask func(context.Context) error) *progress {
	p := &progress{ask: ask}
	p.ctx, p.stop = context.WithCancel(context.Background())
	return p
}

// request makes etcd be asked at a moment later than this one, soon.
func (p *progress) request() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return
	}
	if p.asking {
		p.again = true
		return
	}
	p.asking = true
	p.done.Go(p.run)
}

func (p *progress) run() {
	for {
		start := time.Now()
		_ = p.ask(p.ctx) // the cache asks again by itself
		select {
		case <-p.ctx.Done():
		case <-time.After(max(atMostEvery, restFor*time.Since(start))):
		}
		p.mu.Lock()
		if !p.again || p.ctx.Err() != nil {
			p.asking = false
			p.mu.Unlock()
			return
		}
		p.again = false
		p.mu.Unlock()
	}
}

func (p *progress) close() {
	p.mu.Lock()
	p.stop()
	p.mu.Unlock()
	p.done.Wait()
}
