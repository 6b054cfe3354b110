// Package conntrack ends flows that the kernel remembers although they lead nowhere any more. UDP and SCTP have no end
// that the kernel could see, and a client that keeps sending would keep reaching an endpoint that is gone. A TCP connection
// that was answered is left to those who have it; one that nobody has answered, because its endpoint is dead, is remembered for
// two minutes, and takes along every SYN that its client sends from that port. The package follows what has been acknowledged,
// works on its own time, and never flushes: a flow that still leads somewhere is left alone.
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// Flow is a flow as the kernel remembers it: what the client addressed, and who answers.
type Flow struct {
	Protocol  intent.Protocol
	Dst, From netip.AddrPort
}

// Table is the kernel's table of flows. Delete ends those of a family and a protocol that match, and says how many they were. Of
// TCP it knows only flows that nobody has answered.
type Table interface {
	Delete(family intent.Family, protocol intent.Protocol, match func(Flow) bool) (int, error)
}

// Report is called after each pass over the table of a family: how many flows were ended, how long it took, and what failed.
type Report func(family intent.Family, deleted int, took time.Duration, err error)

// Cleaner ends stale flows.
type Cleaner struct {
	table Table
	log   *slog.Logger
	done  Report

	wake chan struct{}
	mu   sync.Mutex
	// wanted are the frontends to look at, with the endpoints to which flows may go on.
	wanted map[plan.FrontendKey]plan.Serving
	// tcp has the frontends that have lost endpoints, earliest is when the first of them did, and passed when flows to them
	// were looked at last.
	tcp              map[plan.FrontendKey]*departures
	earliest, passed time.Time
	// newer are the TCP frontends that have changed since the pass began that is under way; nil: none is.
	newer map[plan.FrontendKey]*plan.Frontend
	local map[netip.Addr]struct{}
	here  bool
}

// New returns a cleaner; done may be nil. It starts nothing.
func New(table Table, log *slog.Logger, done Report) *Cleaner {
	return &Cleaner{table: table, log: log, done: done, wake: make(chan struct{}, 1),
		wanted: map[plan.FrontendKey]plan.Serving{}, tcp: map[plan.FrontendKey]*departures{}}
}

// Acknowledged notes the frontends of changed plans. What goes to an endpoint that still serves is left alone, also when
// policies no longer choose it, and so is what a Service that is gone had: as with TCP. snap is what was acknowledged: flows
// to an address that several Services ask for are judged by the one that has it. local are the node's addresses;
// here says that the mode ends flows at this process: it looks after them itself, but for those from before it had them.
func (c *Cleaner) Acknowledged(changes []plan.ServiceChange, snap *plan.Snapshot, local []netip.Addr, here bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	some, now := false, time.Now()
	for i := range changes {
		some = c.noteSuccessors(changes[i].Old, changes[i].New, snap, now) || some
		if n := changes[i].New; n != nil {
			some = c.note(changes[i].Old, n, snap) || some
			some = c.noteTCP(changes[i].Old, n, snap, now) || some
		}
	}
	if !some {
		return
	}
	c.local, c.here = map[netip.Addr]struct{}{}, here
	for _, a := range local {
		c.local[a] = struct{}{}
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// noteSuccessors adds the frontends that a Service has given up to another one, whose plan need not have changed. One that it asks
// for as before can only have gone to a Service that has changed, and is noted with that.
func (c *Cleaner) noteSuccessors(old, now *plan.Service, snap *plan.Snapshot, at time.Time) (some bool) {
	if old == nil {
		return false
	}
	for _, f := range old.Frontends {
		if n := now.Frontend(f.FrontendKey); n != nil && n.Kind == f.Kind {
			continue
		}
		next := snap.Frontends[f.FrontendKey]
		if next == nil || next.ID.Service == f.ID.Service {
			continue
		}
		if next.Protocol == intent.TCP {
			c.comes(next, at)
			some = true
		} else if s, ok := snap.Services[next.ID.Service].StillServing(next.ID); ok {
			c.wanted[next.FrontendKey], some = s, true
		}
	}
	return some
}

// note adds the frontends of those ports whose endpoints or frontends have changed.
func (c *Cleaner) note(old, now *plan.Service, snap *plan.Snapshot) (some bool) {
	for _, s := range now.Serving {
		if same(old, now, s) {
			continue
		}
		for _, f := range now.Frontends {
			if f.ID == s.ID && snap.Holds(f) {
				c.wanted[f.FrontendKey], some = s, true
			}
		}
	}
	return some
}

// same says whether a port has the same endpoints and frontends as before: nothing can have become stale. A frontend of another kind
// may have been another Service's before.
func same(old, now *plan.Service, s plan.Serving) bool {
	before, had := old.StillServing(s.ID)
	return had && slices.Equal(before.Endpoints, s.Endpoints) && slices.Equal(asked(old, s.ID), asked(now, s.ID))
}

// claim is a frontend that a Service asks for; its kind decides who gets it.
type claim struct {
	plan.FrontendKey
	plan.Kind
}

func asked(s *plan.Service, id plan.PortID) (out []claim) {
	for _, f := range s.Frontends {
		if f.ID == id {
			out = append(out, claim{f.FrontendKey, f.Kind})
		}
	}
	return out
}

const (
	// restFactor is how much longer than a pass the pause after it is: reading a large table must not become all that a
	// processor does.
	restFactor = 10
	maxRest    = 2 * time.Second
	// A pass that failed is repeated until it succeeds: a flow that leads nowhere would stay as long as its client sends.
	minRetry, maxRetry = 500 * time.Millisecond, 30 * time.Second
)

// Run ends flows as changes are noted, until the context ends.
func (c *Cleaner) Run(ctx context.Context) {
	timer, failures := time.NewTimer(time.Hour), 0
	timer.Stop()
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-timer.C:
		}
		start := time.Now()
		next, err := c.pass()
		switch {
		case err != nil:
			failures++
			wait := min(minRetry<<min(failures-1, 10), maxRetry)
			c.log.Warn("conntrack cleanup failed, retrying", "err", err, "failures", failures, "in", wait)
			next = time.Now().Add(wait)
		case failures > 0:
			c.log.Info("conntrack cleanup succeeded", "failures", failures)
			failures = 0
		}
		if timer.Stop(); !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(restFactor*time.Since(start), maxRest)):
		}
	}
}

// pass reads the table once for each family and protocol that has something to look at, and says when there will be more. What it
// could not clean it looks at again.
func (c *Cleaner) pass() (next time.Time, _ error) {
	c.mu.Lock()
	wanted, local, here := c.wanted, c.local, c.here
	c.wanted = map[plan.FrontendKey]plan.Serving{}
	now := time.Now()
	tcp, next := c.due(now)
	c.newer = map[plan.FrontendKey]*plan.Frontend{}
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.newer = nil
	}()
	type sort struct {
		intent.Family
		intent.Protocol
	}
	found := map[sort]bool{}
	for k := range wanted {
		found[sort{k.Family, k.Protocol}] = true
	}
	for k := range tcp {
		found[sort{k.Family, k.Protocol}] = true
	}
	var errs []error
	for _, family := range []intent.Family{intent.IPv4, intent.IPv6} {
		for _, protocol := range []intent.Protocol{intent.UDP, intent.SCTP, intent.TCP} {
			if !found[sort{family, protocol}] {
				continue
			}
			start := time.Now()
			n, err := c.table.Delete(family, protocol, func(f Flow) bool {
				return (!here || f.From == f.Dst) && stale(f, family, wanted, tcp, local)
			})
			switch {
			case err != nil:
				errs = append(errs, fmt.Errorf("IPv%d, %s, %d flows ended: %w", family, protocol, n, err))
				c.putBack(family, protocol, wanted, tcp)
			case protocol == intent.TCP:
				c.passed = now // nobody else has it
			}
			if c.done != nil {
				c.done(family, n, time.Since(start), err)
			}
		}
	}
	return next, errors.Join(errs...)
}

// putBack notes frontends of a family and protocol again, unless they have changed meanwhile.
func (c *Cleaner) putBack(family intent.Family, protocol intent.Protocol, wanted map[plan.FrontendKey]plan.Serving, tcp map[plan.FrontendKey]*departures) {
	if protocol == intent.TCP {
		c.putBackTCP(family, tcp)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, live := range wanted {
		if _, newer := c.wanted[k]; k.Family == family && k.Protocol == protocol && !newer {
			c.wanted[k] = live
		}
	}
}

// stale says whether a flow was addressed to a frontend that is looked at, and is answered by nobody who serves it. One
// from before the frontend had endpoints is answered by the frontend's own address, and is stale too.
func stale(f Flow, family intent.Family, wanted map[plan.FrontendKey]plan.Serving, tcp map[plan.FrontendKey]*departures, local map[netip.Addr]struct{}) bool {
	k := plan.FrontendKey{Addr: f.Dst.Addr(), Family: family, Protocol: f.Protocol, Port: f.Dst.Port()}
	if f.Protocol == intent.TCP {
		d, ok := at(tcp, k, local)
		return ok && d.stale(f.From)
	}
	live, ok := at(wanted, k, local)
	return ok && !live.Has(f.From)
}

// at finds the frontend of an address, which may be a node port.
func at[T any](fronts map[plan.FrontendKey]T, k plan.FrontendKey, local map[netip.Addr]struct{}) (T, bool) {
	found, ok := fronts[k]
	if _, here := local[k.Addr]; !ok && here {
		k.Addr = netip.Addr{}
		found, ok = fronts[k]
	}
	return found, ok
}
