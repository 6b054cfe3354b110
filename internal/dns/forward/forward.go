// Package forward resolves names outside the cluster: it queries upstream servers, caches their responses, and combines
// identical queries into one. It knows nothing of the cluster.
package forward

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
	"portal/internal/shortage"
)

// Options configure a Forwarder.
type Options struct {
	// Zone is what the forwarder is for; it labels the metrics of its cache.
	Zone      string
	Upstreams []Upstream
	// Sequential asks the first upstream first each time. Otherwise they take turns.
	Sequential bool
	Entries    int // of the cache; 0: no cache
	Bytes      int
	// These bound how long responses are cached, and so the TTLs that clients see, whatever their records say. Of a least and a most that
	// contradict each other the most holds.
	MinTTL, MaxTTL, MinNegativeTTL, MaxNegativeTTL time.Duration
	// Stale is how long an expired response may be served while no upstream responds.
	Stale time.Duration
	// Prefetch refreshes popular entries shortly before they expire.
	Prefetch bool
	Timeout  time.Duration // for all attempts together
	Clock    func() time.Time
	// Metrics may be shared by several forwarders; nil: of its own.
	Metrics *Metrics
}

// Defaults are CoreDNS' where it has any.
func Defaults() Options {
	return Options{
		Zone: ".", Entries: 20000, Bytes: 32 << 20, MinTTL: 5 * time.Second, MaxTTL: time.Hour, MinNegativeTTL: 5 * time.Second, MaxNegativeTTL: 30 * time.Minute,
		Stale: time.Hour, Prefetch: true, Timeout: 5 * time.Second, Clock: time.Now,
	}
}

// Hit is the result of a cache lookup.
type Hit uint8

const (
	Miss Hit = iota
	Fresh
	Stale
)

// Forwarder queries upstream servers.
type Forwarder struct {
	o         Options
	cache     *cache
	upstreams []*upstream
	metrics   *Metrics
	turn      atomic.Uint32
	// lastTries bounds how many queries try upstreams that all failed their health check.
	lastTries chan struct{}

	mu       sync.Mutex
	calls    map[string]*call
	failures map[string]failure
	probes   map[string]*upstream // by the name that was asked for, see FindLoops

	ctx     context.Context // of calls, which may outlive the query that started them
	stop    context.CancelFunc
	running sync.WaitGroup

	hits, denials, misses, prefetched, stales atomic.Uint64
}

// call is a query to the upstreams that is under way. Several clients may wait for it; when none is left it is cancelled.
type call struct {
	done    chan struct{}
	cancel  context.CancelFunc
	waiters int // guarded by Forwarder.mu
	// second: the same query has timed out just now.
	second bool
	e      *entry
	err    error
}

// failure is a resolution that failed recently. RFC 9520 wants such failures cached, so that a name that does not resolve
// costs the upstreams and the clients as little as possible.
// A first time-out is only noted: datagrams get lost, and clients try again at once. A second one counts.
type failure struct {
	err   error
	until time.Time
	noted bool
}

const (
	failureTTL   = time.Second
	maxFailures  = 10000
	maxLastTries = 16
)

// New returns a forwarder. It starts nothing.
func New(o Options) *Forwarder {
	f := &Forwarder{o: o, calls: map[string]*call{}, failures: map[string]failure{}, lastTries: make(chan struct{}, maxLastTries), metrics: o.Metrics}
	f.ctx, f.stop = context.WithCancel(context.Background())
	if o.Entries > 0 {
		f.cache = newCache(o.Entries, o.Bytes)
	}
	known := map[string]bool{}
	for _, u := range o.Upstreams {
		if !known[u.String()] {
			known[u.String()] = true
			f.upstreams = append(f.upstreams, &upstream{Upstream: u})
		}
	}
	if f.metrics == nil {
		f.metrics = NewMetrics()
	}
	f.metrics.add(f)
	return f
}

// Metrics returns the collector of the forwarder's metrics.
func (f *Forwarder) Metrics() *Metrics { return f.metrics }

// Run expires cached failures and idle connections until the context ends, then cancels what is under way and waits for it.
func (f *Forwarder) Run(ctx context.Context) {
	tick := time.NewTicker(failureTTL)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			f.stop()
			f.mu.Lock() // nobody starts a call after this
			f.mu.Unlock()
			f.running.Wait()
			for _, u := range f.upstreams {
				u.closeIdle()
			}
			return
		case now := <-tick.C:
			f.expireFailures()
			for _, u := range f.upstreams {
				u.expireIdle(now)
			}
		}
	}
}

func (f *Forwarder) expireFailures() {
	now := f.o.Clock()
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, failed := range f.failures {
		if !now.Before(failed.until) {
			delete(f.failures, k)
		}
	}
}

// Cached responds from the cache if it can, without allocating.
func (f *Forwarder) Cached(dst []byte, q *wire.Query, limit int, now time.Time) ([]byte, Hit) {
	if f.cache == nil {
		return dst, Miss
	}
	var buf [wire.MaxName + 4]byte
	k := key(buf[:0], q)
	e := f.cache.get(k)
	if e == nil {
		f.misses.Add(1)
		return dst, Miss
	}
	hit := Fresh
	if !now.Before(e.expires()) {
		if now.Sub(e.expires()) > f.o.Stale || f.healthy() {
			f.misses.Add(1)
			return dst, Miss
		}
		hit = Stale
		f.stales.Add(1)
	}
	if e.denial {
		f.denials.Add(1)
	} else {
		f.hits.Add(1)
	}
	f.renew(k, e, q, now)
	return e.write(dst, q, limit, now), hit
}

// renew refreshes, in the background, a popular entry that is about to expire.
func (f *Forwarder) renew(k []byte, e *entry, q *wire.Query, now time.Time) {
	n := e.hits.Load()
	if n < 1<<20 {
		e.hits.Add(1)
	}
	if !f.o.Prefetch || n < 3 || e.life < 10 {
		return
	}
	left := e.expires().Sub(now)
	if left > time.Duration(e.life)*time.Second/10 || left <= 0 || !e.asked.CompareAndSwap(false, true) {
		return
	}
	f.prefetched.Add(1)
	f.join(string(k), q)
}

var errStopped = errors.New("the forwarder has been stopped")

// Resolve queries the upstreams, or joins an identical query that is under way. The response is written into dst.
func (f *Forwarder) Resolve(ctx context.Context, dst []byte, q *wire.Query, limit int) ([]byte, error) {
	k := string(key(nil, q))
	c := f.join(k, q)
	select {
	case <-ctx.Done():
		f.leave(k, c)
		return nil, ctx.Err()
	case <-c.done:
	}
	now := f.o.Clock()
	if c.err == nil {
		return c.e.write(dst, q, limit, now), nil
	}
	if f.cache != nil {
		if e := f.cache.get([]byte(k)); e != nil && now.Sub(e.expires()) <= f.o.Stale {
			f.stales.Add(1)
			return e.write(dst, q, limit, now), nil
		}
	}
	return nil, c.err
}

// question is a query's question section, in lower case, with room for a header before it.
func question(q *wire.Query) []byte {
	b := make([]byte, wire.HeaderLen, wire.HeaderLen+len(q.Name())+4)
	return append(append(b, q.Name()...), byte(q.QType>>8), byte(q.QType), 0, wire.ClassIN)
}

// join starts a query to the upstreams, or joins one that is under way or failed just now.
func (f *Forwarder) join(k string, q *wire.Query) *call {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.calls[k]; c != nil {
		c.waiters++
		return c
	}
	c := &call{done: make(chan struct{}), waiters: 1}
	if failed, ok := f.failures[k]; ok && f.o.Clock().Before(failed.until) {
		if c.second = failed.noted; !c.second {
			c.err = failed.err
		}
	}
	if f.ctx.Err() != nil {
		c.err = errStopped
	}
	if c.err != nil {
		close(c.done)
		return c
	}
	f.calls[k] = c
	ctx, cancel := context.WithTimeout(f.ctx, f.o.Timeout)
	c.cancel = cancel
	asked, do, cd := question(q), q.DO, q.Flags&0x10 != 0
	f.running.Go(func() {
		defer cancel()
		m, err := f.ask(ctx, asked, do, cd)
		f.finish(k, c, m, err, errors.Is(ctx.Err(), context.Canceled))
	})
	return c
}

// leave gives up waiting for a call; the last to leave cancels it.
func (f *Forwarder) leave(k string, c *call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.waiters--; c.waiters == 0 && c.cancel != nil {
		c.cancel()
		if f.calls[k] == c {
			delete(f.calls, k)
		}
	}
}

// finish passes a call's result to those who wait for it.
func (f *Forwarder) finish(k string, c *call, m *dns.Msg, err error, cancelled bool) {
	if err == nil {
		c.e, err = newEntry(m, f.o.Clock(), &f.o)
	}
	if err == nil && c.e.cacheable && f.cache != nil {
		f.cache.put(k, c.e)
	}
	f.mu.Lock()
	if f.calls[k] == c {
		delete(f.calls, k)
	}
	// That no upstream was asked says nothing about the name.
	if c.err = err; err != nil && !cancelled && !errors.Is(err, errAllUnhealthy) && !shortage.Is(err) && len(f.failures) < maxFailures {
		f.failures[k] = failure{err, f.o.Clock().Add(failureTTL), timedOut(err) && !c.second}
	}
	f.mu.Unlock()
	close(c.done)
}

func timedOut(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
}
