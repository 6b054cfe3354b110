package balance

import (
	"slices"
	"time"

	"portal/internal/lb/config"
)

// mostEjections bounds how many times its first length an ejection gets.
const mostEjections = 10

// failed counts a failure in use, and ejects the endpoint if these are too many in a row and enough others stay.
func (p *Pool) failed(e *Endpoint) {
	rule := p.table.Load().cfg.Outlier
	if rule == nil || rule.Failures <= 0 || e.failures.Add(1) < int64(rule.Failures) {
		return
	}
	now := p.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.left.Load() != 0 || now.Before(e.ejectedUntil) {
		return
	}
	if len(p.out(now))+1 > mayBeOut(rule, len(p.endpoints)) {
		return
	}
	// After it worked for as long as it was out, the row begins anew.
	if served := now.Sub(e.ejectedUntil); served > time.Duration(e.ejections)*rule.Ejection {
		e.ejections = 0
	}
	e.ejections = min(e.ejections+1, mostEjections)
	e.ejectedUntil = now.Add(time.Duration(e.ejections) * rule.Ejection)
	e.ejected.Store(true)
	e.failures.Store(0)
	e.Counters.Ejections.Add(1)
	p.build(now)
}

// limitEjections ends ejections that the configuration no longer allows, those first that would end first. The caller holds mu.
func (p *Pool) limitEjections(now time.Time) {
	out := p.out(now)
	slices.SortStableFunc(out, func(a, b *Endpoint) int { return a.ejectedUntil.Compare(b.ejectedUntil) })
	for _, e := range out[:max(0, len(out)-mayBeOut(p.cfg.Outlier, len(p.endpoints)))] {
		e.ejectedUntil = now
	}
}

// out are the ejected endpoints.
func (p *Pool) out(now time.Time) (out []*Endpoint) {
	for _, e := range p.endpoints {
		if now.Before(e.ejectedUntil) {
			out = append(out, e)
		}
	}
	return out
}

func mayBeOut(rule *config.Outlier, endpoints int) int {
	if rule == nil {
		return 0
	}
	return rule.MostEjected * endpoints / 100
}
