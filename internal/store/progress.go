package store

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/storage"
)

// prompt makes consistent reads from the watch cache quick. Such a read asks etcd for its revision and waits until the
// cache's watch has come that far; when nothing of its kind was written lately the watch only says so when asked, which
// the cache does every 100 ms. prompt asks at once.
type prompt struct {
	storage.Interface
	progress *progress
}

func (p prompt) GetCurrentResourceVersion(ctx context.Context) (uint64, error) {
	revision, err := p.Interface.GetCurrentResourceVersion(ctx)
	if err == nil {
		p.progress.request()
	}
	return revision, err
}

// progress asks etcd to tell its watches how far they are, for all resources at once: their watches share a stream.
type progress struct {
	ask    atomic.Pointer[func(context.Context) error]
	wanted chan struct{}
	stop   context.CancelFunc
	done   sync.WaitGroup
}

// atMostEvery bounds how often etcd is asked, however many reads wait for it.
const atMostEvery = time.Millisecond

func newProgress() *progress {
	ctx, stop := context.WithCancel(context.Background())
	p := &progress{wanted: make(chan struct{}, 1), stop: stop}
	p.done.Go(func() { p.run(ctx) })
	return p
}

// use says how to ask; any resource's storage will do.
func (p *progress) use(ask func(context.Context) error) { p.ask.CompareAndSwap(nil, &ask) }

func (p *progress) request() {
	select {
	case p.wanted <- struct{}{}:
	default: // one is on its way already, and will be later than this moment
	}
}

func (p *progress) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wanted:
		}
		if ask := p.ask.Load(); ask != nil {
			_ = (*ask)(ctx) // the cache asks again by itself
		}
		time.Sleep(atMostEvery)
	}
}

func (p *progress) close() {
	p.stop()
	p.done.Wait()
}
