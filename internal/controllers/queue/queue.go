// Package queue syncs keys: at most one sync of a key at a time, any number of additions in between coalesced into one,
// failures retried key by key. It knows nothing of what a key means.
package queue

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Key names the object that the work is about.
type Key = types.NamespacedName

// KeyOf is the key of an object.
func KeyOf(obj metav1.Object) Key { return Key{Namespace: obj.GetNamespace(), Name: obj.GetName()} }

// Result is what a sync reports.
type Result struct {
	// Writes is how many objects the sync wrote: what the key's write budget is charged with.
	Writes int
	// Again asks for another sync after this time, without counting this one as a failure. Zero: none.
	Again time.Duration
}

// Sync brings the world to what the key asks for.
type Sync func(ctx context.Context, key Key) (Result, error)

// Options are a queue's name, which metrics carry, and its delays.
type Options struct {
	Name string
	// FirstBackOff and MaxBackOff bound the backoff after failures of one key. A key is retried until it succeeds, also
	// when the API server was unavailable for an hour.
	FirstBackOff, MaxBackOff time.Duration
	// WritePause is how long a key is paused for each object that its sync wrote, up to MaxWritePause. The first change
	// of a quiet key is never delayed; changes during the pause are coalesced into one sync.
	WritePause, MaxWritePause time.Duration
	// Clock is the wall clock if nil.
	Clock clock.WithTicker
}

// Queue holds the keys to sync.
type Queue struct {
	opts Options
	sync Sync
	work workqueue.TypedRateLimitingInterface[Key]
	lane *lanes

	mu     sync.Mutex
	pauses map[Key]time.Time // until when a key is paused
	sweep  int               // the size at which pauses that are over are removed
}

const firstSweep = 1024

var (
	panics = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: "portal", Subsystem: "controllers", Name: "panics_total", StabilityLevel: metrics.ALPHA,
		Help: "Number of syncs that panicked: each is an error in a controller.",
	}, []string{"name"})
	registerMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(panics) })
)

// New makes a queue; Run starts it. Keys may be added before.
func New(opts Options, fn Sync) *Queue {
	if opts.FirstBackOff == 0 {
		opts.FirstBackOff = 10 * time.Millisecond
	}
	if opts.MaxBackOff == 0 {
		opts.MaxBackOff = 15 * time.Second
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	registerMetrics()
	lane := newLanes()
	order := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[Key]{Name: opts.Name, Clock: opts.Clock, Queue: lane})
	delaying := workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[Key]{Name: opts.Name, Clock: opts.Clock, Queue: order})
	return &Queue{
		opts: opts,
		sync: fn,
		lane: lane,
		work: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[Key](opts.FirstBackOff, opts.MaxBackOff),
			workqueue.TypedRateLimitingQueueConfig[Key]{Name: opts.Name, Clock: opts.Clock, DelayingQueue: delaying},
		),
		pauses: map[Key]time.Time{},
		sweep:  firstSweep,
	}
}

// Add queues a key.
func (q *Queue) Add(key Key) { q.work.Add(key) }

// AddAfter queues a key after a while.
func (q *Queue) AddAfter(key Key, after time.Duration) { q.work.AddAfter(key, after) }

// Listed says that the informers have synced and everything that existed is queued: from now on, changes go first.
func (q *Queue) Listed() { q.lane.setListed() }

// Deprioritize says that another process seems to have synced a key. It stays queued, but behind keys that have changed.
func (q *Queue) Deprioritize(key Key) { q.lane.deprioritize(key) }

// Len is how many keys wait for a worker now.
func (q *Queue) Len() int { return q.work.Len() }

// Run syncs keys until ctx ends, and returns when every sync that it started has returned.
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
	if left := q.paused(key); left > 0 {
		q.work.AddAfter(key, left)
		return true
	}
	result, err := q.try(ctx, key)
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
		// A try or two fails now and then; what keeps failing is logged at growing intervals.
		if tries := q.work.NumRequeues(key); tries >= 4 && tries&(tries-1) == 0 {
			klog.FromContext(ctx).Info("sync keeps failing, retrying", "queue", q.opts.Name, "key", key.String(), "failures", tries, "err", err)
		}
		q.work.AddRateLimited(key)
	}
	return true
}

// try syncs a key. A sync that panics has failed: what is wrong with one object must not end the whole process.
func (q *Queue) try(ctx context.Context, key Key) (result Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			panics.WithLabelValues(q.opts.Name).Inc()
			klog.FromContext(ctx).Error(err, "sync panicked, retrying", "queue", q.opts.Name, "key", key.String(), "stack", string(debug.Stack()))
		}
	}()
	return q.sync(ctx, key)
}

// paused is how much longer a key is paused.
func (q *Queue) paused(key Key) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	until, ok := q.pauses[key]
	if !ok {
		return 0
	}
	left := until.Sub(q.opts.Clock.Now())
	if left <= 0 {
		delete(q.pauses, key)
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
	q.pauses[key] = now.Add(pause)
	if len(q.pauses) < q.sweep {
		return
	}
	for k, until := range q.pauses {
		if !until.After(now) {
			delete(q.pauses, k)
		}
	}
	q.sweep = max(firstSweep, 2*len(q.pauses))
}
