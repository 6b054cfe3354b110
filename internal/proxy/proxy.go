package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/foreign"
)

// Flows is notified which plans are in sync, to delete flows that lead nowhere; snap says which Service has a frontend, and is to be read
// during the call only; here: the mode ends flows at this process. It must not block.
type Flows interface {
	Acknowledged(changes []plan.ServiceChange, snap *plan.Snapshot, local []netip.Addr, here bool)
}

// Checks is notified which plans are in sync, and of which Services something was refused, to answer balancers' health checks, and which
// checks are planned whose Services could not be written yet. Notes are what of Services it can't do. None may block.
type Checks interface {
	Planned(checks []*plan.HealthCheck, facts *plan.Facts)
	Acknowledged(changes []plan.ServiceChange, facts *plan.Facts, refused map[intent.Key]bool)
	Notes() map[intent.Key][]string
}

// Options are what a proxy is made of.
type Options struct {
	Cluster *intent.Cluster
	Config  Config
	// Modes are all that there are, in the order in which auto tries them; Mode is the name of one, or auto.
	Modes []backend.Mode
	Mode  string
	Local LocalAddrs
	// API is where the proxy reaches the API; nil: that is not known.
	API APIAddrs
	// Flows and Checks may be nil.
	Flows  Flows
	Checks Checks
	Health *Health
	// Foreign finds what another proxy left in the kernel; nil: nobody looks.
	Foreign func(context.Context) ([]foreign.Leftover, error)
	// Network looks for what is in the way of packets on this machine; nil: nobody does. Sysctls changes settings that are;
	// nil: they are only reported.
	Network func(hostnet.Needs) []hostnet.Problem
	Sysctls *hostnet.Configured
	Log     *slog.Logger
}

const (
	// coalesceDelay is how long a change waits for others that belong to it: a Service and its slices come by two watches.
	coalesceDelay = 3 * time.Millisecond
	// idleThreshold is for how long there must have been no sync for a change to be applied at once: most come alone.
	idleThreshold = 10 * coalesceDelay
	// restFactor is how much longer than a sync the pause after it is, up to maxRest, so that under churn syncs take a third of
	// a processor at most.
	restFactor = 2
	maxRest    = time.Second
	// checkInterval is how often the mode looks for drift, unless it says otherwise; half of it is jitter.
	checkInterval = 30 * time.Second
	// refusedInterval is how often refused frontends are tried again.
	refusedInterval        = 30 * time.Second
	minBackoff, maxBackoff = 100 * time.Millisecond, 30 * time.Second
)

// Proxy keeps a node's kernel in sync with intent.
type Proxy struct {
	Options
	metrics *metrics
	began   time.Time

	// The loop's own.
	back     backend.Backend
	local    hostnet.Addresses
	traits   backend.Traits // of the mode
	minSync  time.Duration  // of the mode
	node     *intent.Node
	newFacts bool
	dirty    map[intent.Key]struct{}
	changed  map[intent.Key]*plan.Service // what was acknowledged of plans that have changed since
	triggers []trigger
	due      time.Time // of the next sync; zero: none
	notUntil time.Time
	lastSync time.Time
	// restUntil keeps syncs from taking all of a processor: the next one waits in proportion to what the last one cost.
	restUntil time.Time
	failures  int
	unlisted  int // how often in a row this machine's addresses could not be listed
	drift     drift
	cleanup   sync.WaitGroup
	reached   map[intent.Family]netip.Addr // a cluster IP of each family, see anyClusterIP

	// mu lets people read what follows while the loop is not changing it.
	mu     sync.RWMutex
	snap   *plan.Snapshot
	known  map[intent.Key]record
	status status
}

// record is what the loop remembers of a Service name.
type record struct {
	newest  uint64 // version
	acked   int64  // time in nanoseconds; zero: something of it has not been
	slices  int32
	service bool
}

// recordOf remembers an entry of which nothing has been acknowledged.
func recordOf(e *intent.Entry) record {
	return record{newest: e.Newest(), slices: int32(len(e.Slices)), service: e.Service != nil}
}

// trigger is a change of endpoints whose way into the kernel is timed.
type trigger struct {
	at     time.Time
	family intent.Family
}

// New returns a proxy. It starts nothing.
func New(o Options) *Proxy {
	p := &Proxy{
		Options: o, metrics: newMetrics(o.Modes), began: time.Now(), newFacts: true,
		dirty: map[intent.Key]struct{}{}, changed: map[intent.Key]*plan.Service{}, known: map[intent.Key]record{},
		reached: map[intent.Family]netip.Addr{},
	}
	p.status.Wanted = o.Mode
	return p
}

// Run chooses a mode and keeps the kernel in sync until the context ends. Its rules stay.
func (p *Proxy) Run(ctx context.Context) error {
	mode, err := choose(ctx, &p.Options)
	if err != nil {
		return err
	}
	if p.back, err = mode.Open(ctx); err != nil {
		return fmt.Errorf("start the proxy mode %s: %w", mode.Name(), err)
	}
	defer p.back.Close()
	defer p.cleanup.Wait()
	p.mu.Lock()
	p.status.Mode, p.status.Limits = mode.Name(), mode.Limits()
	p.mu.Unlock()
	p.traits, p.minSync = mode.Traits(), p.Config.MinSync[mode.Name()]
	for _, prefix := range p.Config.NodePorts.Unserved(p.traits.Traits, p.Config.Families) {
		p.Log.Warn("the proxy mode can't serve node ports at these addresses", "mode", mode.Name(), "addresses", prefix.String())
	}
	for _, limit := range mode.Limits() {
		p.Log.Info("proxy mode has a limit", "mode", mode.Name(), "limit", limit)
	}
	if p.Foreign != nil {
		p.cleanup.Go(func() { p.findForeign(ctx) })
	}
	p.Log.Info("proxying Services", "mode", mode.Name(), "node", p.Config.Node)
	return p.loop(ctx)
}

func (p *Proxy) loop(ctx context.Context) error {
	feed := p.Cluster.Follow()
	defer feed.Close()
	addrs := p.Local.Changes(ctx)
	var api <-chan struct{}
	if p.API != nil {
		api = p.API.Changed()
	}
	every := checkInterval
	if often, ok := p.back.(backend.CheckInterval); ok {
		every = often.CheckInterval()
	}
	check := time.NewTimer(jitter(every))
	defer check.Stop()
	network := time.NewTicker(networkInterval)
	defer network.Stop()
	syncing := time.NewTimer(time.Hour)
	defer syncing.Stop()
	for {
		if at := p.nextSync(); at.IsZero() {
			syncing.Stop()
		} else {
			syncing.Reset(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-feed.Wake():
			p.take(feed.Take())
		case <-api:
			p.newFacts = true
			p.queue()
		case <-addrs:
			p.newFacts = true
			p.queue()
		case <-syncing.C:
			// What came before everything was known to be listed may still be waiting, and must be in the first sync.
			p.take(feed.Take())
			p.due = time.Time{}
			p.sync(ctx)
		case <-network.C:
			p.checkNetwork()
		case <-check.C:
			p.check(ctx)
			check.Reset(jitter(every))
		}
	}
}

func jitter(d time.Duration) time.Duration { return d*3/4 + rand.N(d/2) }

// take notes what has changed.
func (p *Proxy) take(c *intent.Changes) {
	_, node := c.Nodes[p.Config.Node]
	p.newFacts = p.newFacts || node || len(c.ServiceCIDRs) > 0
	for k := range c.Services {
		if _, noted := p.dirty[k]; !noted {
			p.dirty[k] = struct{}{}
			p.metrics.pending(p.known[k].diff(p.Cluster.Entry(k)))
		}
	}
	p.queue()
}

// queue sees to it that there will be a sync: soon, but neither before everything has been listed nor sooner after the
// last one than configured.
func (p *Proxy) queue() {
	if !p.Cluster.Complete() || !p.newFacts && len(p.dirty) == 0 && p.status.Synced {
		return
	}
	now := time.Now()
	p.metrics.queued(p.families(), now)
	p.Health.Queued(now)
	at := now
	if now.Sub(p.lastSync) < idleThreshold {
		at = now.Add(coalesceDelay)
	}
	for _, least := range []time.Time{p.lastSync.Add(p.minSync), p.restUntil, p.notUntil} {
		if least.After(at) {
			at = least
		}
	}
	p.dueBy(at)
}

func (p *Proxy) families() []intent.Family { return p.Config.Families }

// sync plans what has changed and applies it.
func (p *Proxy) sync(ctx context.Context) {
	start := time.Now()
	p.lastSync = start
	defer func() { p.restUntil = time.Now().Add(min(restFactor*time.Since(start), maxRest)) }()
	p.replan(p.planAll)
	p.metrics.pending(-1, -1)
	delta := p.snap.Delta()
	var refused *backend.Refused
	if !delta.Empty() {
		if !p.status.Synced {
			p.planChecks()
		}
		err := p.back.Apply(ctx, p.snap, delta)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !errors.As(err, &refused) {
			p.failed(delta, err)
			return
		}
	}
	p.failures, p.notUntil = 0, time.Time{}
	p.acknowledge(ctx, delta, refused, start)
	if p.unlisted > 0 {
		p.dueBy(time.Now().Add(jitter(backoff(p.unlisted))))
	}
}

// dueBy sees to it that the next sync is no later than that.
func (p *Proxy) dueBy(at time.Time) {
	if p.due.IsZero() || at.Before(p.due) {
		p.due = at
	}
}

// backoff is how long to wait after so many failures in a row.
func backoff(failures int) time.Duration { return min(minBackoff<<min(failures-1, 10), maxBackoff) }

// failed schedules a retry: the same delta once more, since that is cheap; then a full sync.
func (p *Proxy) failed(delta *plan.Delta, err error) {
	p.failures++
	wait := backoff(p.failures)
	p.Log.Error("sync failed, retrying", "err", err, "failures", p.failures, "in", wait)
	p.mu.Lock()
	if p.failures > 1 {
		p.snap.Forget()
	}
	p.status.Failures++
	p.status.LastError, p.status.LastErrorAt = err.Error(), time.Now()
	p.mu.Unlock()
	p.metrics.syncFailed(p.traits, p.families(), delta.Full)
	p.Health.Queued(time.Now()) // also if nothing changed but the kernel
	p.planChecks()
	p.notUntil = time.Now().Add(jitter(wait))
	p.due = p.notUntil
}

// planChecks has balancers told that Services which have not been written are not served here.
func (p *Proxy) planChecks() {
	if p.Checks == nil {
		return
	}
	var list []*plan.HealthCheck
	for k := range p.changed {
		if s := p.snap.Services[k]; s != nil && s.HealthCheck != nil {
			list = append(list, s.HealthCheck)
		}
	}
	p.Checks.Planned(list, p.snap.Facts)
}

// replan brings the snapshot's facts up to date, and then its plans.
func (p *Proxy) replan(plans func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.newFacts {
		p.refreshFacts()
	}
	p.repairDrift(time.Now())
	plans()
}

func (p *Proxy) planAll() {
	for k := range p.dirty {
		p.planOne(k)
	}
	p.dirty = map[intent.Key]struct{}{} // one that was emptied would keep its room
}

// refreshFacts reads the node's facts again; if they differ, every plan may.
func (p *Proxy) refreshFacts() {
	// A Node that is away for a moment (it registers anew, say) is taken to be as it was.
	if n := p.Cluster.Node(p.Config.Node); n != nil {
		p.node = n
		p.Health.Known()
	} else if p.snap == nil {
		p.Log.Info("the API has no Node of this name, assuming the addresses of this machine", "node", p.Config.Node)
	}
	local, err := p.Local.List()
	if err != nil {
		p.unlisted++
		p.Log.Error("could not list the addresses of this machine, keeping the last known", "err", err, "failures", p.unlisted)
	} else {
		p.local, p.unlisted = local, 0
	}
	p.newFacts = err != nil
	facts := p.Config.facts(p.node, p.local, p.Cluster.ServicePrefixes(), p.traits.Traits)
	if p.API != nil {
		facts.Exempt = exempt(p.API.List(), p.local.Local)
	}
	if p.snap == nil {
		p.snap = plan.NewSnapshot(facts)
		return
	}
	before := p.snap.Facts
	p.snap.SetFacts(facts)
	if p.snap.Facts != before {
		p.Log.Info("node's facts changed, replanning all Services", "zone", facts.Zone, "addresses", fmt.Sprint(facts.Addrs), "nodePorts", fmt.Sprint(facts.NodePorts))
		for k := range p.known {
			p.dirty[k] = struct{}{}
		}
	}
}

func (p *Proxy) planOne(k intent.Key) {
	e, r := p.Cluster.Entry(k), p.known[k]
	p.metrics.changed(r.diff(e))
	p.time(r, e)
	old, next := p.snap.Services[k], plan.For(e, p.snap.Facts)
	now := record{}
	if e == nil {
		delete(p.known, k)
	} else {
		now = recordOf(e)
		now.acked = r.acked
		p.known[k] = now
	}
	if old == nil && next == nil {
		return
	}
	if _, noted := p.changed[k]; !noted {
		p.changed[k] = old
	}
	p.snap.Set(k, next)
	if next != nil && len(next.Notes) > 0 && (old == nil || !slices.Equal(old.Notes, next.Notes)) {
		p.Log.Warn("Service is not served as it asks", "service", k.String(), "notes", next.Notes)
	}
	if next != nil && (old == nil || !slices.Equal(old.Frontends, next.Frontends)) {
		now.acked = 0
		p.known[k] = now
	}
	p.metrics.lost.replace(old, next)
}

// diff counts what of a Service name changed: the Service itself, and slices.
func (r record) diff(e *intent.Entry) (services, slices int) {
	if e == nil {
		e = &intent.Entry{}
	}
	if r.service != (e.Service != nil) || r.service && e.Version > r.newest {
		services = 1
	}
	for _, v := range e.Versions {
		if v > r.newest {
			slices++
		}
	}
	return services, slices + max(0, int(r.slices)-len(e.Slices))
}

// time notes when new slices came to be, as far as that was since this process began.
func (p *Proxy) time(r record, e *intent.Entry) {
	if e == nil {
		return
	}
	for i, s := range e.Slices {
		if s.TriggerTime.After(p.began) && e.Versions[i] > r.newest {
			p.triggers = append(p.triggers, trigger{s.TriggerTime, s.Family})
		}
	}
}
