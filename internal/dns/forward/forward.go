// Package forward answers for names that are not the cluster's: it asks upstream servers, keeps what they say for as long
// as they say, and shields them from asking the same twice at a time. It knows nothing of the cluster.
package forward

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/dns/wire"
)

// Options say whom to ask and how long to keep answers.
type Options struct {
	Upstreams []Upstream
	Entries   int // of the cache; 0: no cache
	Bytes     int
	// MinTTL and MaxTTL bound how long answers are kept, whatever they say themselves.
	MinTTL, MaxTTL, MaxNegativeTTL time.Duration
	// Stale is how long past its time an answer may be given while no upstream can be reached.
	Stale time.Duration
	// Prefetch renews popular answers shortly before their time is over.
	Prefetch bool
	Timeout  time.Duration // for all attempts together
	Clock    func() time.Time
}

// Defaults are CoreDNS' where it has any.
func Defaults() Options {
	return Options{
		Entries: 20000, Bytes: 32 << 20, MinTTL: 5 * time.Second, MaxTTL: time.Hour, MaxNegativeTTL: 30 * time.Minute,
		Stale: time.Hour, Prefetch: true, Timeout: 5 * time.Second, Clock: time.Now,
	}
}

// Hit is how the cache knew an answer.
type Hit uint8

const (
	Miss Hit = iota
	Fresh
	Stale
)

// Forwarder asks upstream servers.
type Forwarder struct {
	o         Options
	cache     *cache
	upstreams []*upstream
	turn      atomic.Uint32

	mu    sync.Mutex
	calls map[string]*call

	ctx     context.Context // of work that outlives the question that caused it
	stop    context.CancelFunc
	running sync.WaitGroup

	hits, denials, misses, prefetched, stales atomic.Uint64
	duration                                  *prometheus.HistogramVec
	failures                                  *prometheus.CounterVec
	broken                                    prometheus.Counter
}

// call is a question on its way, for which several may wait.
type call struct {
	done chan struct{}
	e    *entry
	msg  []byte
	err  error
}

// New returns a forwarder. It starts nothing.
func New(o Options) *Forwarder {
	f := &Forwarder{o: o, calls: map[string]*call{}}
	f.ctx, f.stop = context.WithCancel(context.Background())
	if o.Entries > 0 {
		f.cache = newCache(o.Entries, o.Bytes, o.Stale)
	}
	for _, u := range o.Upstreams {
		f.upstreams = append(f.upstreams, &upstream{Upstream: u})
	}
	f.initMetrics()
	return f
}

// Run keeps an eye on upstreams that failed, and ends what is on its way when the context does.
func (f *Forwarder) Run(ctx context.Context) {
	tick := time.NewTicker(500 * time.Millisecond)
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
		case <-tick.C:
			f.probe()
		}
	}
}

// Cached answers from the cache if it can, without allocating.
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

// renew asks again, in the background, for an answer that is wanted often and near its end.
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
	f.begin(string(k), question(q), q.DO, q.Flags&0x10 != 0)
}

var errStopped = errors.New("the forwarder has been stopped")

// Resolve answers by asking upstream, or by waiting for somebody who does. The response is written into dst.
func (f *Forwarder) Resolve(ctx context.Context, dst []byte, q *wire.Query, limit int) ([]byte, error) {
	k := string(key(nil, q))
	c := f.begin(k, question(q), q.DO, q.Flags&0x10 != 0)
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.done:
	}
	now := f.o.Clock()
	switch {
	case c.e != nil:
		return c.e.write(dst, q, limit, now), nil
	case c.err == nil:
		e := &entry{msg: c.msg, life: 1, stored: now}
		return e.write(dst, q, limit, now), nil
	}
	if f.cache != nil {
		if e := f.cache.get([]byte(k)); e != nil && now.Sub(e.expires()) <= f.o.Stale {
			f.stales.Add(1)
			return e.write(dst, q, limit, now), nil
		}
	}
	return nil, c.err
}

// question is a query's, in lower case, with room for a header before it.
func question(q *wire.Query) []byte {
	b := make([]byte, wire.HeaderLen, wire.HeaderLen+len(q.Name())+4)
	return append(append(b, q.Name()...), byte(q.QType>>8), byte(q.QType), 0, wire.ClassIN)
}

// tidy packs a response anew: without OPT, and with names as pointers to the question, so that they take on the case in
// which each client asks.
func tidy(msg []byte) []byte {
	m := new(dns.Msg)
	if m.Unpack(msg) != nil {
		return msg
	}
	m.Extra = slices.DeleteFunc(m.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
	m.Compress = true
	if m.Rcode > 15 {
		m.Rcode = dns.RcodeServerFailure // an extended code has no place without its OPT
	}
	packed, err := m.Pack()
	if err != nil {
		return msg
	}
	return packed
}

// begin asks a question, or joins one that is on its way.
func (f *Forwarder) begin(k string, question []byte, do, cd bool) *call {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.calls[k]; c != nil {
		return c
	}
	c := &call{done: make(chan struct{})}
	if f.ctx.Err() != nil {
		c.err = errStopped
		close(c.done)
		return c
	}
	f.calls[k] = c
	f.running.Go(func() {
		c.msg, c.err = f.ask(question, do, cd)
		if c.err == nil {
			c.msg = tidy(c.msg)
			if c.e = newEntry(c.msg, f.o.Clock(), &f.o); c.e != nil && f.cache != nil {
				f.cache.put(k, c.e)
			}
		}
		f.mu.Lock()
		delete(f.calls, k)
		f.mu.Unlock()
		close(c.done)
	})
	return c
}
