package proxy

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/foreign"
)

// networkInterval is how often the machine's settings and routes are looked at. Others change them while the proxy runs, and whoever asks why packets are lost should be given
// that as the reason.
const networkInterval = 2 * time.Second

// checkNetwork looks for settings and routes because of which packets are lost, and changes settings if it may.
func (p *Proxy) checkNetwork() {
	if p.Network == nil || !p.status.Synced {
		return
	}
	needs := p.needs()
	found := p.Network(needs)
	if p.Sysctls != nil && slices.ContainsFunc(found, hostnet.Problem.Configurable) {
		changed, err := p.Sysctls.Configure(found)
		if len(changed) > 0 {
			p.Log.Info("configured sysctls", "changed", changed)
		}
		if err != nil {
			p.Log.Error("could not configure sysctls", "err", err)
		}
		found = p.Network(needs)
	}
	was := p.status.Problems
	for _, problem := range found {
		if !slices.ContainsFunc(was, func(o hostnet.Problem) bool { return o.Message == problem.Message }) {
			p.Log.Warn("packets to Services are lost on this machine", "problem", problem.Message, "fix", problem.Fix, "always", problem.Lost)
		}
	}
	if len(was) > 0 && len(found) == 0 {
		p.Log.Info("nothing in this machine's network is in the way of Services any more")
	}
	p.mu.Lock()
	p.status.Problems = found
	p.mu.Unlock()
	p.metrics.problems.Set(float64(len(found)))
	p.Health.SetProblems(found)
}

// needs are what this node's Services need of its network. In a family of which the machine has no address, nothing works
// and nothing is missed.
func (p *Proxy) needs() (out hostnet.Needs) {
	for _, family := range p.families() {
		if !slices.ContainsFunc(p.local.Node, func(a netip.Addr) bool { return intent.FamilyOf(a) == family }) {
			continue
		}
		forwards := !p.traits.Relays && p.forwards(family)
		if family == intent.IPv6 {
			out.Forward6 = forwards
		} else {
			out.Forward4 = forwards
		}
		if a, ok := p.anyClusterIP(family); ok {
			out.Reach = append(out.Reach, a)
		}
	}
	return out
}

// forwards says whether a Service of the family has an endpoint that is not at one of this machine's own addresses.
func (p *Proxy) forwards(family intent.Family) bool {
	for _, f := range p.snap.Frontends {
		if f.Family != family {
			continue
		}
		for _, r := range f.Routes {
			if r.Pool != nil && slices.ContainsFunc(r.Pool.Endpoints, func(e plan.Endpoint) bool { return !slices.Contains(p.local.Local, e.Addr.Addr()) }) {
				return true
			}
		}
	}
	return false
}

// anyClusterIP is the same one as long as it is a Service's.
func (p *Proxy) anyClusterIP(family intent.Family) (netip.Addr, bool) {
	if a := p.reached[family]; p.snap.ClusterIPs[a] > 0 {
		return a, true
	}
	for a := range p.snap.ClusterIPs {
		if intent.FamilyOf(a) == family {
			p.reached[family] = a
			return a, true
		}
	}
	return netip.Addr{}, false
}

// noteForeign publishes what was found, logs it unless it is as much as last time, and returns how much it is.
func (p *Proxy) noteForeign(found []foreign.Leftover, last int) (total int) {
	for _, l := range found {
		total += l.Count
	}
	if total != last {
		for _, l := range found {
			p.Log.Warn("found rules of kube-proxy, which may answer before Portal's", "found", l.String(), "fix", "stop kube-proxy and run portal proxy --cleanup-foreign")
		}
	}
	p.metrics.foreign.Set(float64(total))
	p.mu.Lock()
	p.status.Foreign = found
	p.mu.Unlock()
	return total
}

// foreignInterval is how often rules that another proxy left are looked for again, as long as there are some.
const foreignInterval = 15 * time.Second

// findForeign looks for rules that another proxy left: they answer beside ours, as of when it ended. It looks again until they are gone.
func (p *Proxy) findForeign(ctx context.Context) {
	for last := -1; ; {
		found, err := p.Foreign(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil { // what was found before still holds
			p.Log.Warn("could not look for rules of another proxy, retrying", "err", err, "in", foreignInterval)
		} else if last = p.noteForeign(found, last); last == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(foreignInterval):
		}
	}
}
