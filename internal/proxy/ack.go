package proxy

import (
	"cmp"
	"context"
	"slices"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
)

// acknowledge records that the kernel is in sync with the snapshot, but for what was refused, and tells those who follow.
func (p *Proxy) acknowledge(ctx context.Context, delta *plan.Delta, refused *backend.Refused, start time.Time) {
	now := time.Now()
	first := !p.status.Synced
	changes := p.changes()
	p.mu.Lock()
	again := p.noteRefused(refused)
	for _, c := range changes {
		if r, ok := p.known[c.Key]; ok && r.acked == 0 {
			r.acked = now.UnixNano()
			p.known[c.Key] = r
		}
	}
	p.status.Synced, p.status.LastSync, p.status.LastSyncTook = true, now, now.Sub(start)
	p.status.Syncs++
	if b, ok := p.back.(backend.FallsBack); ok {
		if n := b.Fallbacks(); n > p.status.Fallbacks {
			p.metrics.fallbacks.Add(float64(n - p.status.Fallbacks))
			p.status.Fallbacks = n
		}
	}
	if delta.Full {
		p.status.FullSyncs++
		p.status.LastFullSync, p.status.LastFullSyncTook = now, now.Sub(start)
	}
	p.mu.Unlock()
	p.Health.Updated(p.families(), now)
	p.metrics.synced(delta, p.snap, p.families(), start, now, p.triggers)
	p.triggers = p.triggers[:0]
	if len(changes) > 0 || delta.Facts || first || again {
		if p.Checks != nil {
			p.Checks.Acknowledged(changes, p.snap.Facts, p.refusedServices())
		}
		if p.Flows != nil {
			p.Flows.Acknowledged(changes, p.snap, p.local.Local, p.traits.Relays)
		}
	}
	if first || delta.Facts {
		p.checkNetwork()
	}
	if first {
		p.Log.Info("first sync done", "services", len(p.snap.Services), "frontends", len(p.snap.Frontends), "took", now.Sub(start))
		mode := p.status.Mode
		p.cleanup.Go(func() { p.cleanOthers(ctx, mode) })
	}
}

// changes lists the plans that changed since the last acknowledgement, in order.
func (p *Proxy) changes() []plan.ServiceChange {
	var out []plan.ServiceChange
	for k, old := range p.changed {
		if now := p.snap.Services[k]; now != nil || old != nil {
			out = append(out, plan.ServiceChange{Key: k, Old: old, New: now})
		}
	}
	p.changed = map[intent.Key]*plan.Service{} // one that was emptied would keep its room
	slices.SortFunc(out, func(a, b plan.ServiceChange) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// noteRefused reports whether anything is refused or was.
func (p *Proxy) noteRefused(refused *backend.Refused) bool {
	var keys []plan.FrontendKey
	was := p.status.Refused
	p.status.Refused = nil
	if refused != nil {
		p.status.Refused = refused.Frontends
		for k, err := range refused.Frontends {
			keys = append(keys, k)
			if was[k] == nil {
				p.Log.Error("frontend was refused, the others are served", "frontend", k.String(), "err", err)
			}
		}
		p.dueBy(time.Now().Add(refusedInterval))
	}
	p.metrics.refused.Set(float64(len(keys)))
	p.snap.Acknowledge(keys...)
	return len(was)+len(keys) > 0
}

// refusedServices are those of which the kernel does not have a frontend.
func (p *Proxy) refusedServices() map[intent.Key]bool {
	out := map[intent.Key]bool{}
	for k := range p.status.Refused {
		if f := p.snap.Frontends[k]; f != nil {
			out[f.ID.Service] = true
		}
	}
	return out
}

// cleanOthers removes the rules of other modes, now that this one is in sync: a change of modes leaves no gap. What can't be removed is tried
// again until it is gone: such rules lead to endpoints of long ago.
func (p *Proxy) cleanOthers(ctx context.Context, mode string) {
	left := slices.DeleteFunc(slices.Clone(p.Modes), func(m backend.Mode) bool { return m.Name() == mode })
	failed := map[string]string{}
	for failures := 1; ; failures++ {
		left = slices.DeleteFunc(left, func(m backend.Mode) bool {
			err := m.Cleanup(ctx)
			switch {
			case ctx.Err() != nil:
			case err != nil && failed[m.Name()] != err.Error():
				failed[m.Name()] = err.Error()
				p.Log.Warn("could not remove the rules of another proxy mode, retrying", "mode", m.Name(), "err", err)
			case err == nil && failed[m.Name()] != "":
				p.Log.Info("removed the rules of another proxy mode", "mode", m.Name(), "failures", failures-1)
			}
			return err == nil
		})
		if len(left) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(jitter(backoff(failures))):
		}
	}
}
