package accesslog

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"path"
	"sync"
	"sync/atomic"
	"time"

	"gocloud.dev/blob"
	_ "gocloud.dev/blob/fileblob" // file://
	_ "gocloud.dev/blob/s3blob"   // s3://

	"portal/internal/lb/config"
)

// Options are what Logs need. All have defaults.
type Options struct {
	// Account, Region and Address are parts of objects' names; Address is this machine's.
	Account, Region string
	Address         netip.Addr
	// Failed is called with every failure to write to a bucket, which is tried again; by several goroutines at once.
	Failed func(balancer, url string, err error)
	// MaxBytes is how much is kept in memory, for all balancers together: beyond it the destination that has the most loses its oldest lines, which are counted.
	MaxBytes int64
	Now      func() time.Time
}

// The defaults, and how often is looked for what is due.
const (
	defaultMaxBytes = 64 << 20
	objectBytes     = 8 << 20  // an object is written before its time if it gets larger
	smallestObject  = 64 << 10 // of those that are written early because memory is scarce
	tickInterval    = time.Second
	firstBackoff    = time.Second
	longestBackoff  = time.Minute
	stopTimeout     = 10 * time.Second
	putTimeout      = 30 * time.Second // for the objects of one bucket
	parallelPuts    = 16
	parallelRetries = 4              // of buckets that have failed
	roomShare       = 64             // of MaxBytes this part is made free at a time
	forgetAfter     = 24 * time.Hour // without a line
)

// Logs gather lines and put them into buckets.
type Logs struct {
	options Options
	held    atomic.Int64 // bytes in memory
	// first and again have room for as many puts as run at a time. Buckets that have failed wait for each other, and not others for them.
	first, again chan struct{}
	timeout      time.Duration // of an attempt

	mu     sync.Mutex
	byName map[destination]*log
}

// destination is where lines go: those of several listeners go together.
type destination struct {
	url, prefix, format, balancer string
	interval                      time.Duration
}

// log is one destination.
type log struct {
	to    destination
	stats Stats

	mu    sync.Mutex
	lines []byte
	ends  time.Time // of the present interval
	quiet time.Time // since when there is no line; zero: there are some
	gone  bool      // it is forgotten, and takes no lines any more

	pending []object // in order
	sending bool     // the first of pending is on its way to the bucket
	busy    bool     // an attempt is under way, or waits for its turn
	failed  bool     // the last attempt did
	backoff time.Duration
	after   time.Time // of the next attempt
}

// Stats count what became of lines.
type Stats struct {
	Lines, Dropped, Objects, Failures atomic.Uint64
}

type object struct {
	name string
	data []byte
}

// New makes Logs that write nothing before Run runs.
func New(o Options) *Logs {
	if o.Account == "" {
		o.Account = "000000000000"
	}
	if o.Region == "" {
		o.Region = "portal"
	}
	if !o.Address.IsValid() {
		o.Address = netip.IPv4Unspecified()
	}
	if o.MaxBytes <= 0 {
		o.MaxBytes = defaultMaxBytes
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Logs{options: o, byName: map[destination]*log{}, first: make(chan struct{}, parallelPuts), again: make(chan struct{}, parallelRetries), timeout: putTimeout}
}

// Write adds a line to a listener's log. It never waits for a bucket.
func (l *Logs) Write(listener *config.Listener, r *Record) {
	c := listener.AccessLog
	if c == nil {
		return
	}
	to := destination{c.URL, c.Prefix, c.Format, c.Balancer, c.Interval}
	if l.held.Add(l.add(to, r)) > l.options.MaxBytes {
		l.makeRoom()
	}
}

// add adds a line to a destination, and says how long it is.
func (l *Logs) add(to destination, r *Record) int64 {
	one := l.locked(to)
	defer one.mu.Unlock()
	one.quiet = time.Time{}
	if one.ends.IsZero() {
		one.ends = l.options.Now().Truncate(max(to.interval, time.Minute)).Add(max(to.interval, time.Minute))
	}
	before := len(one.lines)
	if to.format == "json" {
		one.lines = r.AppendJSON(one.lines)
	} else {
		one.lines = r.AppendELB(one.lines)
	}
	one.stats.Lines.Add(1)
	return int64(len(one.lines) - before)
}

// locked returns the log of a destination, whose mu the caller holds then.
func (l *Logs) locked(to destination) *log {
	for {
		l.mu.Lock()
		one := l.byName[to]
		if one == nil {
			one = &log{to: to, backoff: firstBackoff}
			l.byName[to] = one
		}
		l.mu.Unlock()
		one.mu.Lock()
		if !one.gone {
			return one
		}
		one.mu.Unlock()
	}
}

// forget drops a log that has had nothing to write for long: its balancer is perhaps gone.
func (l *Logs) forget(one *log, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	one.mu.Lock()
	defer one.mu.Unlock()
	if !one.quiet.IsZero() && now.Sub(one.quiet) >= forgetAfter && len(one.pending) == 0 && !one.busy {
		one.gone = true
		delete(l.byName, one.to)
	}
}

// Stats are those of a balancer, over all its destinations.
func (l *Logs) Stats(balancer string) (lines, dropped, objects, failures uint64) {
	for _, one := range l.all() {
		if one.to.balancer == balancer {
			lines += one.stats.Lines.Load()
			dropped += one.stats.Dropped.Load()
			objects += one.stats.Objects.Load()
			failures += one.stats.Failures.Load()
		}
	}
	return
}

func (l *Logs) all() []*log {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]*log, 0, len(l.byName))
	for _, one := range l.byName {
		out = append(out, one)
	}
	return out
}

// Run writes what is due until ctx ends, and then everything else.
func (l *Logs) Run(ctx context.Context) {
	ticker := time.NewTicker(tickInterval)
	defer ticker.Stop()
	var puts sync.WaitGroup
	for {
		select {
		case <-ticker.C:
			l.start(ctx, &puts, false)
		case <-ctx.Done():
			puts.Wait()
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
			defer cancel()
			l.write(last, true)
			return
		}
	}
}

// write puts what is due into buckets, or all of it, and waits for that.
func (l *Logs) write(ctx context.Context, all bool) {
	var puts sync.WaitGroup
	l.start(ctx, &puts, all)
	puts.Wait()
}

// start begins to put what is due into buckets, or all of it. A bucket that does not answer holds nobody else up: each has one attempt under way at a time,
// and those that have failed take no turns of those that have not.
func (l *Logs) start(ctx context.Context, puts *sync.WaitGroup, all bool) {
	now, logs := l.options.Now(), l.all()
	for _, one := range logs {
		most := int64(objectBytes)
		if l.held.Load() > l.options.MaxBytes/2 {
			// Memory becomes scarce: what can be written is written before its share is used up.
			most = min(most, max(smallestObject, l.options.MaxBytes/int64(2*len(logs))))
		}
		turn := l.cut(one, now, most, all)
		if turn == nil {
			l.forget(one, now)
			continue
		}
		puts.Go(func() {
			select {
			case turn <- struct{}{}:
				l.attempt(ctx, one)
				<-turn
			case <-ctx.Done():
			}
			one.mu.Lock()
			one.busy = false
			one.mu.Unlock()
		})
	}
}

// attempt writes what is pending of one destination, and notes when to try again.
func (l *Logs) attempt(ctx context.Context, one *log) {
	limited, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	err := l.put(limited, one)
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return // it is no fault of the bucket's, and written again at the end
	}
	one.mu.Lock()
	if one.failed = err != nil; one.failed {
		one.after = l.options.Now().Add(one.backoff)
		one.backoff = min(2*one.backoff, longestBackoff)
	} else {
		one.backoff, one.after = firstBackoff, time.Time{}
	}
	one.mu.Unlock()
	if err != nil {
		one.stats.Failures.Add(1)
		if l.options.Failed != nil {
			l.options.Failed(one.to.balancer, one.to.url, err)
		}
	}
}

// cut makes an object of the lines, if their interval is over or there are many. If something is to be written, it says whose turn to wait for.
func (l *Logs) cut(one *log, now time.Time, most int64, all bool) (turn chan struct{}) {
	one.mu.Lock()
	defer one.mu.Unlock()
	switch {
	case len(one.lines) == 0:
		one.ends = time.Time{} // the next line begins an interval
		if one.quiet.IsZero() {
			one.quiet = now
		}
	case all || int64(len(one.lines)) >= most || !now.Before(one.ends):
		ends := one.ends
		if now.Before(ends) {
			ends = now
		}
		one.pending = append(one.pending, object{l.name(one.to, ends), one.lines})
		one.lines = nil
		if !now.Before(one.ends) {
			one.ends = time.Time{}
		}
	}
	if one.busy || len(one.pending) == 0 || now.Before(one.after) && !all {
		return nil
	}
	one.busy = true
	if one.failed {
		return l.again
	}
	return l.first
}

// name is an object's, as ELB makes them.
func (l *Logs) name(to destination, ends time.Time) string {
	o := &l.options
	ends = ends.UTC()
	var random [5]byte
	rand.Read(random[:])
	file := fmt.Sprintf("%s_elasticloadbalancing_%s_%s_%s_%s_%s.log", o.Account, o.Region, to.balancer, ends.Format("20060102T1504Z"), o.Address, hex.EncodeToString(random[:]))
	return path.Join(to.prefix, "AWSLogs", o.Account, "elasticloadbalancing", o.Region, ends.Format("2006/01/02"), file)
}

// put writes the pending objects of a destination, the oldest first.
func (l *Logs) put(ctx context.Context, one *log) error {
	bucket, err := open(ctx, one.to.url)
	if err != nil {
		return err
	}
	defer bucket.Close()
	for {
		first, found := one.send()
		if !found {
			return nil
		}
		err := bucket.WriteAll(ctx, first.name, first.data, &blob.WriterOptions{ContentType: "text/plain"})
		one.sent(err == nil)
		if err != nil {
			return err
		}
		one.stats.Objects.Add(1)
		l.held.Add(-int64(len(first.data)))
	}
}

// open opens a bucket. A folder is made if there is none, and holds nothing but the logs.
func open(ctx context.Context, address string) (*blob.Bucket, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	switch u.Scheme {
	case "s3":
	case "file":
		q := u.Query()
		q.Set("create_dir", "true")
		q.Set("no_tmp_dir", "true")
		q.Set("metadata", "skip")
		u.RawQuery = q.Encode()
	default:
		return nil, errors.New("neither s3:// nor file://")
	}
	return blob.OpenBucket(ctx, u.String())
}
