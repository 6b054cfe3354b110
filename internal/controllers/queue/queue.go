// Package queue runs one function for each key that somebody called dirty: at most one run a key at a time, any
// number of calls in between folded into one, failures retried key by key. It knows nothing of what a key means.
package queue

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Key names the object that the work is about.
type Key = types.NamespacedName

// Result is what a run says about itself.
type Result struct {
	// Writes is how many objects the run wrote: what the key's write budget is charged with.
	Writes int
	// Again asks for another run after this time, without calling this one a failure. Zero: no need.
	Again time.Duration
}

// Sync brings the world to what the key asks for.
type Sync func(ctx context.Context, key Key) (Result, error)

// Options are a queue's name, which metrics carry, and its patience.
type Options struct {
	Name string
	// FirstBackOff and MaxBackOff bound the wait after failures of one key; it doubles in between. A key is never
	// given up: an API server that was away for an hour finds every key still waiting.
	FirstBackOff, MaxBackOff time.Duration
	// WritePause is how long a key rests for each object its run wrote, up to MaxWritePause. The first change of a
	// quiet key is never delayed; what comes during the rest is folded into one run.
	WritePause, MaxWritePause time.Duration
	// Clock is the wall clock if nil.
	Clock clock.WithTicker
}

// Queue holds dirty keys.
type Queue struct {
	opts Options
	sync Sync
	work workqueue.TypedRateLimitingInterface[Key]
	lane *lanes

	mu    sync.Mutex
	rests map[Key]time.Time // until when a key rests
	sweep int               // the size at which rests is swept of those that are over
}

const firstSweep = 1024

// New makes a queue; Run starts it. Keys may be added before.
func New(opts Options, run Sync) *Queue {
	if opts.FirstBackOff == 0 {
		opts.FirstBackOff = 10 * time.Millisecond
	}
	if opts.MaxBackOff == 0 {
		opts.MaxBackOff = 15 * time.Second
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	lane := newLanes()
	order := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[Key]{Name: opts.Name, Clock: opts.Clock, Queue: lane})
	delaying := workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[Key]{Name: opts.Name, Clock: opts.Clock, Queue: order})
	return &Queue{
		opts: opts,
		sync: run,
		lane: lane,
		work: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[Key](opts.FirstBackOff, opts.MaxBackOff),
			workqueue.TypedRateLimitingQueueConfig[Key]{Name: opts.Name, Clock: opts.Clock, DelayingQueue: delaying},
		),
		rests: map[Key]time.Time{},
		sweep: firstSweep,
	}
}

// Add calls a key dirty.
func (q *Queue) Add(key Key) { q.work.Add(key) }

// AddAfter calls a key dirty after a while.
func (q *Queue) AddAfter(key Key, after time.Duration) { q.work.AddAfter(key, after) }

// Listed says that all that was there when the informers began has been called dirty: from now on, what changes goes first.
func (q *Queue) Listed() { q.lane.setListed() }

// Settle says that somebody else has dealt with what made a key dirty, as far as one can see. It is looked at nevertheless,
// but after those that wait for something.
func (q *Queue) Settle(key Key) { q.lane.settle(key) }

// Len is how many keys wait for a worker now.
func (q *Queue) Len() int { return q.work.Len() }

// Run works on keys until ctx ends, and returns when every run it started has returned.
func (q *Queue) Run(ctx context.Context, workers int) {
	var done sync.WaitGroup
	for range workers {
		done.Go(func() {
			for q.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	q.work.ShutDown()
	done.Wait()
}

func (q *Queue) next(ctx context.Context) bool {
	key, over := q.work.Get()
	if over || ctx.Err() != nil {
		return false
	}
	defer q.work.Done(key)
	if rest := q.rest(key); rest > 0 {
		q.work.AddAfter(key, rest)
		return true
	}
	result, err := q.sync(ctx, key)
	q.charge(key, result.Writes)
	switch {
	case err == nil:
		q.work.Forget(key)
		if result.Again > 0 {
			q.work.AddAfter(key, result.Again)
		}
	case ctx.Err() != nil || errors.Is(err, context.Canceled):
		return ctx.Err() == nil
	default:
		// A try or two fails now and then; what keeps failing is told ever more rarely.
		if tries := q.work.NumRequeues(key); tries >= 4 && tries&(tries-1) == 0 {
			klog.FromContext(ctx).Info("Still failing, will try again", "queue", q.opts.Name, "key", key.String(), "tries", tries, "err", err)
		}
		q.work.AddRateLimited(key)
	}
	return true
}

// rest is how much longer a key rests.
func (q *Queue) rest(key Key) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	until, ok := q.rests[key]
	if !ok {
		return 0
	}
	left := until.Sub(q.opts.Clock.Now())
	if left <= 0 {
		delete(q.rests, key)
	}
	return left
}

func (q *Queue) charge(key Key, writes int) {
	pause := min(time.Duration(writes)*q.opts.WritePause, q.opts.MaxWritePause)
	if pause <= 0 {
		return
	}
	now := q.opts.Clock.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.rests[key] = now.Add(pause)
	if len(q.rests) < q.sweep {
		return
	}
	for k, until := range q.rests {
		if !until.After(now) {
			delete(q.rests, k)
		}
	}
	q.sweep = max(firstSweep, 2*len(q.rests))
}
