package top

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// Sample is what went through Services until a moment, and how fast in the last interval.
type Sample struct {
	At       time.Time     `json:"at"`
	Interval time.Duration `json:"intervalNanoseconds"`
	Services []Service     `json:"services"`
	// OneIn is how many connections each one that was counted stands for: 1 unless there were too many.
	OneIn uint32 `json:"oneIn"`
	// Dumped is when open connections and bytes were last looked at.
	Dumped time.Time `json:"dumped"`
	// Accounting: bytes are counted. Timestamps: the time until an answer is taken.
	Accounting bool `json:"accounting"`
	Timestamps bool `json:"timestamps"`
	// CPU is the part of a processor that this process used in the interval.
	CPU float64 `json:"cpu"`
	// Notes are what is missing in the figures, and what would help.
	Notes []string `json:"notes,omitempty"`
}

// Service are the counts of a port of a Service.
type Service struct {
	Namespace string     `json:"namespace"`
	Name      string     `json:"name"`
	Port      string     `json:"port,omitempty"`
	Protocol  string     `json:"protocol"`
	Counts    Counts     `json:"counts"`
	Endpoints []Endpoint `json:"endpoints"`
}

// Endpoint are the counts of one of its endpoints.
type Endpoint struct {
	// Address is zero for connections that no endpoint has answered: rejected ones, or those that the proxy relays.
	Address netip.AddrPort `json:"address,omitzero"`
	Counts  Counts         `json:"counts"`
}

// Counts are totals since the beginning, and rates a second in the last interval.
type Counts struct {
	New        uint64  `json:"new"`
	NewRate    float64 `json:"newRate"`
	Open       int     `json:"open"`
	Bytes      uint64  `json:"bytes"`
	ByteRate   float64 `json:"byteRate"`
	Resets     uint64  `json:"resets"`
	ResetsRate float64 `json:"resetsRate"`
	// Latency is how long connections of the last interval waited for the endpoint's first answer; nil: it is not known.
	Latency *Latency `json:"latency,omitempty"`
}

func (c *Counts) add(o Counts) {
	c.New, c.Open, c.Bytes, c.Resets = c.New+o.New, c.Open+o.Open, c.Bytes+o.Bytes, c.Resets+o.Resets
	c.NewRate, c.ByteRate, c.ResetsRate = c.NewRate+o.NewRate, c.ByteRate+o.ByteRate, c.ResetsRate+o.ResetsRate
	if o.Latency != nil {
		if c.Latency == nil {
			c.Latency = &Latency{}
		}
		c.Latency.Add(o.Latency)
	}
}

// idle: there is nothing to show.
func (c *Counts) idle() bool {
	return c.NewRate == 0 && c.Open == 0 && c.ByteRate == 0 && c.ResetsRate == 0
}

// Options are what a Top is made of.
type Options struct {
	Kernel *Kernel
	// Cluster is followed.
	Cluster *intent.Cluster
	Local   []netip.Addr
	// Interval is the time between two samples.
	Interval time.Duration
}

// Top makes samples.
type Top struct {
	Options
	meter  *Meter
	feed   *intent.Feed
	before map[rowKey]row
	oneIn  uint32
	lost   bool
	dumped time.Time
	cost   time.Duration // of the last dump, in processor time
	read   int           // events since the last sample
	used   time.Duration // of processor time, until the last sample
	last   time.Time
}

const (
	// drainInterval is how often events are read: seldom enough that there are many for each system call, and often enough that the
	// kernel has room for them.
	drainInterval = 20 * time.Millisecond
	// maxEvents is how many events a second are read before they are sampled: they cost about 2 % of a processor. Below minEvents, more
	// are taken again.
	maxEvents, minEvents = 8000, 3000
	maxOneIn             = 1 << 10
	// dumpShare bounds the part of a processor that dumps take: the next one waits so many times as long as the last one took.
	dumpShare = 60
)

// New returns a Top. It follows the cluster until Close.
func New(o Options) *Top {
	t := &Top{Options: o, meter: NewMeter(), feed: o.Cluster.Follow(), before: map[rowKey]row{}, oneIn: 1, last: time.Now(), used: processorTime(unix.RUSAGE_SELF)}
	t.meter.SetLocal(o.Local)
	return t
}

// Close ends it.
func (t *Top) Close() { t.feed.Close() }

// Next counts for an interval, and returns what there was.
func (t *Top) Next(ctx context.Context) (*Sample, error) {
	if t.dumped.IsZero() { // what is there already is not new
		t.update()
		if err := t.dump(); err != nil {
			return nil, err
		}
		t.remember()
		t.last = time.Now()
	}
	end := t.last.Add(t.Interval)
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for time.Now().Before(end) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
		t.update()
		lost, err := t.Kernel.ReadEvents(func(e *Entry, what Happened) {
			t.read++
			t.meter.event(e, what)
		})
		if err != nil {
			return nil, err
		}
		t.lost = t.lost || lost
	}
	if time.Since(t.dumped) > t.cost*dumpShare {
		if err := t.dump(); err != nil {
			return nil, err
		}
	}
	s := t.sample()
	t.adapt(float64(t.read) / s.Interval.Seconds())
	return s, nil
}

// update takes over changes of Services.
func (t *Top) update() {
	select {
	case <-t.feed.Wake():
		for k := range t.feed.Take().Services {
			t.meter.Set(k, t.Cluster.Entry(k))
		}
	default:
	}
}

func (t *Top) dump() error {
	runtime.LockOSThread() // what other parts of the process use meanwhile is not the dump's
	defer runtime.UnlockOSThread()
	before := processorTime(unix.RUSAGE_THREAD)
	err := t.meter.dump(t.Kernel.Dump)
	t.dumped = time.Now()
	t.cost = processorTime(unix.RUSAGE_THREAD) - before
	return err
}

func (t *Top) remember() {
	clear(t.before)
	for _, r := range t.meter.counts() {
		t.before[r.rowKey] = r
	}
	for _, r := range t.meter.rows {
		r.latency = Latency{} // of one interval
	}
}

// sample puts the counts together.
func (t *Top) sample() *Sample {
	now, used := time.Now(), processorTime(unix.RUSAGE_SELF)
	took := now.Sub(t.last)
	s := &Sample{At: now, Interval: took, OneIn: t.oneIn, Dumped: t.dumped, Accounting: t.Kernel.Accounting, Timestamps: t.Kernel.Timestamps, CPU: float64(used-t.used) / float64(took), Services: []Service{}}
	for _, r := range t.meter.counts() {
		was := t.before[r.rowKey]
		rate := func(now, before uint64) float64 { return float64(now-before) / took.Seconds() }
		c := Counts{
			New: r.begun, NewRate: rate(r.begun, was.begun), Open: r.open, Bytes: r.bytes, ByteRate: rate(r.bytes, was.bytes),
			Resets: r.resets, ResetsRate: rate(r.resets, was.resets),
		}
		if r.latency.Count > 0 {
			c.Latency = &r.latency
		}
		last := len(s.Services) - 1
		if last < 0 || s.Services[last].Namespace != r.service.Namespace || s.Services[last].Name != r.service.Name || s.Services[last].Port != r.port || s.Services[last].Protocol != r.protocol.String() {
			s.Services = append(s.Services, Service{Namespace: r.service.Namespace, Name: r.service.Name, Port: r.port, Protocol: r.protocol.String()})
			last++
		}
		s.Services[last].Counts.add(c)
		s.Services[last].Endpoints = append(s.Services[last].Endpoints, Endpoint{r.endpoint, c})
	}
	s.Notes = t.notes(now)
	t.remember()
	t.last, t.used = now, used
	return s
}

func (t *Top) notes(now time.Time) (out []string) {
	if !t.Kernel.Accounting {
		out = append(out, "bytes are not counted: turn accounting on with sysctl -w net.netfilter.nf_conntrack_acct=1; it counts connections that begin afterwards")
	}
	if !t.Kernel.Events {
		out = append(out, "new connections and resets are not counted: turn events on with sysctl -w net.netfilter.nf_conntrack_events=2")
	}
	if t.oneIn > 1 {
		out = append(out, fmt.Sprintf("sampled: 1 of %d connections was counted, and stands for all of them", t.oneIn))
	}
	if t.lost {
		out = append(out, "some connections were not counted: there were more than the kernel keeps between two readings")
	}
	if age := now.Sub(t.dumped); age > t.Interval/2 {
		out = append(out, fmt.Sprintf("open connections and bytes are of %s ago: reading the table took %s", age.Round(time.Second), t.cost.Round(time.Millisecond)))
	}
	return out
}

// adapt keeps the cost within bounds, by how many events a second were read.
func (t *Top) adapt(rate float64) {
	next := t.oneIn
	for ; (rate > maxEvents || t.lost) && next < maxOneIn; rate /= 2 {
		next, t.lost = next*2, false
	}
	if next == t.oneIn && rate < minEvents && next > 1 {
		next /= 2
	}
	t.lost, t.read = false, 0
	if next != t.oneIn && t.Kernel.Sample(next) == nil {
		t.oneIn, t.meter.oneIn = next, uint64(next)
	}
}

// processorTime is what this process, or this thread, has used so far.
func processorTime(who int) time.Duration {
	var u unix.Rusage
	if unix.Getrusage(who, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Sort orders Services by a column, the largest first: new, open, bytes or resets.
func (s *Sample) Sort(by string) error {
	value, ok := map[string]func(c *Counts) float64{
		"new":    func(c *Counts) float64 { return c.NewRate },
		"open":   func(c *Counts) float64 { return float64(c.Open) },
		"bytes":  func(c *Counts) float64 { return c.ByteRate },
		"resets": func(c *Counts) float64 { return c.ResetsRate },
	}[by]
	if !ok {
		return fmt.Errorf("%q is not one of new, open, bytes, resets", by)
	}
	slices.SortStableFunc(s.Services, func(a, b Service) int { return cmp.Compare(value(&b.Counts), value(&a.Counts)) })
	return nil
}
