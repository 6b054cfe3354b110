package proxy

import (
	"context"
	"time"
)

// drift paces the repair of rules that somebody else changes: the first one is repaired at once, and whoever changes them
// again and again is not fought with all of a processor.
type drift struct {
	backoff time.Duration
	last    time.Time
	repair  time.Time // when a full sync repairs what was found; zero: nothing was
}

const (
	minDriftBackoff, maxDriftBackoff = time.Second, time.Minute
	// driftForgotten is how long nothing must have drifted for the next repair to be made at once.
	driftForgotten = 10 * time.Minute
)

// next is how long to wait before a repair.
func (d *drift) next(now time.Time) time.Duration {
	switch {
	case d.last.IsZero() || now.Sub(d.last) > driftForgotten:
		d.backoff = 0
	case d.backoff == 0:
		d.backoff = minDriftBackoff
	default:
		d.backoff = min(2*d.backoff, maxDriftBackoff)
	}
	d.last = now
	return d.backoff
}

// check looks whether the kernel still has what was acknowledged, and if not, plans a full sync. Until then changes are
// applied as ever.
func (p *Proxy) check(ctx context.Context) {
	if !p.status.Synced || p.failures > 0 || !p.drift.repair.IsZero() {
		return
	}
	err := p.back.Check(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.status.LastCheck = now
	if err == nil || ctx.Err() != nil {
		return
	}
	wait := p.drift.next(now)
	p.Log.Warn("rules were changed by somebody else, resyncing", "found", err, "in", wait)
	p.status.Drifts++
	p.status.LastDrift, p.status.LastDriftAt = err.Error(), now
	p.metrics.drifts.Inc()
	p.drift.repair = now.Add(wait)
}

// repairDrift makes the next sync a full one, if it is time.
func (p *Proxy) repairDrift(now time.Time) {
	if !p.drift.repair.IsZero() && !now.Before(p.drift.repair) {
		p.drift.repair = time.Time{}
		p.snap.Forget()
	}
}

// nextSync is when the next sync is due; zero: nothing is.
func (p *Proxy) nextSync() time.Time {
	if p.due.IsZero() || !p.drift.repair.IsZero() && p.drift.repair.Before(p.due) {
		return p.drift.repair
	}
	return p.due
}
