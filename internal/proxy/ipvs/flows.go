package ipvs

import (
	"maps"
	"net/netip"
	"slices"

	"portal/internal/intent"
	"portal/internal/plan"
)

// flow is a way that flows of UDP may have taken. They go on with it as connections of TCP do, whatever the plan says by now,
// for as long as IPVS has the endpoint: then rules look at them again.
type flow struct {
	from plan.FrontendKey
	to   netip.AddrPort
}

// flows are the ways that rules let pass, by server. Several servers may have one.
type flows struct {
	of    map[key]map[flow]bool
	count map[flow]int
}

func newFlows() flows { return flows{map[key]map[flow]bool{}, map[flow]int{}} }

// add notes a way to a server, and says whether it is the first of its kind.
func (s flows) add(at key, f flow) bool {
	if s.of[at][f] {
		return false
	}
	if s.of[at] == nil {
		s.of[at] = map[flow]bool{}
	}
	s.of[at][f] = true
	s.count[f]++
	return s.count[f] == 1
}

// remove forgets a way to a server, and says whether it was the last of its kind.
func (s flows) remove(at key, f flow) bool {
	if !s.of[at][f] {
		return false
	}
	if delete(s.of[at], f); len(s.of[at]) == 0 {
		delete(s.of, at)
	}
	if s.count[f]--; s.count[f] > 0 {
		return false
	}
	delete(s.count, f)
	return true
}

// noteFlows notes the ways to servers that are touched.
func (b *balancer) noteFlows(w *work) {
	for at := range w.servers {
		t := b.desired.targets[at]
		if t == nil || at.protocol != intent.UDP {
			continue
		}
		for from := range t.users {
			for _, e := range t.pool.Endpoints {
				if f := (flow{from, e.Addr}); b.flows.add(at, f) {
					w.change(at.family, goingElement(f), true)
				}
			}
		}
	}
}

// endFlows has rules look again at flows to endpoints of a server.
func (b *balancer) endFlows(at key, to []netip.AddrPort) error {
	late := newWork()
	for f := range maps.Clone(b.flows.of[at]) {
		if slices.Contains(to, f.to) && b.flows.remove(at, f) {
			late.change(at.family, goingElement(f), false)
		}
	}
	if len(late.del) == 0 {
		return nil
	}
	return b.kernel.rules.change(late.del, nil)
}

// readFlows begins anew with the ways to servers that the kernel has: those that were known, and those of the frontends that
// had their marks or have their addresses.
func (b *balancer) readFlows(marks map[plan.FrontendKey][plan.Origins]uint32) {
	led := map[key]map[plan.FrontendKey]bool{}
	for k, list := range marks {
		for _, mark := range list {
			if at := marked(mark, k.Family); mark != 0 {
				if led[at] == nil {
					led[at] = map[plan.FrontendKey]bool{}
				}
				led[at][k] = true
			}
		}
	}
	before := b.flows
	b.flows = newFlows()
	for at, s := range b.have {
		if at.protocol != intent.UDP {
			continue
		}
		from := map[plan.FrontendKey]bool{{Addr: at.addr, Family: at.family, Protocol: at.protocol, Port: at.port}: true}
		if at.mark != 0 {
			pool := at
			if sticky(at.mark) {
				pool.mark &^= maxSlot
			}
			from = led[pool]
		}
		for to := range s.dests {
			for k := range from {
				b.flows.add(at, flow{k, to})
			}
		}
		for f := range before.of[at] {
			if s.dests[f.to] != nil {
				b.flows.add(at, f)
			}
		}
	}
}

// findOwner finds the port of a server that an earlier process made: that of a frontend that led there.
func (b *balancer) findOwner(at key) {
	s := b.have[at]
	if s.id != (plan.PortID{}) {
		return
	}
	for f := range b.flows.of[at] {
		if now := b.next.Frontends[f.from]; now != nil {
			s.id = now.ID
			return
		}
	}
}
