package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// raise makes a server, and what is wanted of its endpoints. An endpoint that was leaving is welcome again; one that the
// kernel does not take keeps no other away.
func (b *balancer) raise(at key, t *target) error {
	have, err := b.raiseServer(at, b.server())
	if err != nil {
		return err
	}
	have.id = t.pool.ID
	var errs []error
	for _, e := range t.pool.Endpoints {
		d := have.dests[e.Addr]
		var err error
		switch {
		case d == nil:
			err = b.kernel.director.addDest(at, e.Addr, 1)
		case d.weight != 1:
			err = b.kernel.director.setDest(at, e.Addr, 1)
		default:
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("add the endpoint %v: %w", e.Addr, err))
			continue
		}
		have.dests[e.Addr] = &dest{weight: 1}
	}
	return errors.Join(errs...)
}

// raiseServer makes a server, or finds it, and makes it as wanted but for its endpoints.
func (b *balancer) raiseServer(at key, want *server) (*server, error) {
	have := b.have[at]
	if have == nil {
		err := b.kernel.director.addServer(at, want)
		if err == nil {
			b.have[at] = want
			return want, nil
		}
		if !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("add it: %w", err)
		}
		// Somebody has made one on an address that is a Service's now.
		have = &server{}
		if have.dests, err = b.kernel.director.dests(at); err != nil {
			return nil, fmt.Errorf("list its endpoints: %w", err)
		}
	}
	if !have.same(want) {
		if err := b.kernel.director.setServer(at, want); err != nil {
			return nil, fmt.Errorf("change it: %w", err)
		}
	}
	want.dests, want.id = have.dests, have.id
	b.have[at] = want
	return want, nil
}

// lower takes away what is not wanted of a server, when its last connection has ended. UDP has no connections: its flows
// are moved at once when their endpoint no longer serves, and go on otherwise.
func (b *balancer) lower(at key) error {
	have, t := b.have[at], b.desired.targets[at]
	if have == nil {
		return nil
	}
	unwanted := false
	for to, d := range have.dests {
		if t.wants(to) {
			continue
		}
		unwanted = true
		if d.weight == 0 {
			continue
		}
		// First no more new ones, then count: none can come in between.
		if err := b.kernel.director.setDest(at, to, 0); err != nil {
			return fmt.Errorf("drain %v of %v: %w", to, at, err)
		}
		d.weight = 0
	}
	if unwanted || t == nil {
		return b.reap(at, t)
	}
	delete(b.draining, at)
	return nil
}

// reap removes the endpoints of a server that drain and have no more connections, and the server with the last of them
// if it is not wanted.
func (b *balancer) reap(at key, t *target) error {
	have := b.have[at]
	now, err := b.kernel.director.dests(at)
	if err != nil {
		return fmt.Errorf("count the connections of %v: %w", at, err)
	}
	left := 0
	var leave []netip.AddrPort
	for to, d := range have.dests {
		if d.weight > 0 || t.wants(to) {
			continue
		}
		if n := now[to]; n != nil && b.waitsFor(at, to, n) {
			left++
			continue
		}
		leave = append(leave, to)
	}
	// Rules look at its flows again before it is gone: IPVS will choose another for them, and may need a mark for that.
	if err := b.endFlows(at, leave); err != nil {
		return err
	}
	for _, to := range leave {
		if err := b.kernel.director.delDest(at, to); err != nil {
			return fmt.Errorf("remove %v from %v: %w", to, at, err)
		}
		delete(have.dests, to)
	}
	switch {
	case left > 0:
		b.draining[at] = true
	case t == nil:
		return b.end(at)
	default:
		delete(b.draining, at)
	}
	return nil
}

// waitsFor says whether an endpoint's connections are worth keeping it. Those that are closed are remembered by IPVS for
// minutes, in case a packet comes late; for that alone an address isn't kept.
func (b *balancer) waitsFor(at key, to netip.AddrPort, d *dest) bool {
	if !drains(at) && !b.serves(b.have[at].id, to) {
		return false
	}
	if until, leaves := b.leaving[at.addr]; leaves {
		return b.now().Before(until) && (d.living > 0 || d.connections > 0 && !drains(at))
	}
	return d.connections > 0
}

// serves says whether an endpoint of a UDP or SCTP port that was chosen before still serves, as far as is known: between
// snapshots nothing is, nor of a port that is no longer there.
func (b *balancer) serves(id plan.PortID, to netip.AddrPort) bool {
	if b.next == nil {
		return true
	}
	s := b.next.Services[id.Service]
	if s == nil {
		return true
	}
	i := slices.IndexFunc(s.Serving, func(x plan.Serving) bool { return x.ID == id })
	return i < 0 || slices.Contains(s.Serving[i].Endpoints, to)
}

// leaveWithin is how long living connections keep an address that no Service has any more. It may be needed elsewhere.
const leaveWithin = 5 * time.Minute

// leave takes addresses from the device that have no servers any more.
func (b *balancer) leave(addrs map[netip.Addr]bool) error {
	busy := map[netip.Addr]bool{}
	for at := range b.have {
		busy[at.addr] = true
	}
	late := newWork()
	for a := range addrs {
		if busy[a] {
			continue
		}
		if err := b.kernel.device.del(a); err != nil {
			return fmt.Errorf("take %v from %s: %w", a, deviceName, err)
		}
		delete(b.held, a)
		delete(b.leaving, a)
		late.change(intent.FamilyOf(a), vipElement(a), false)
		late.change(intent.FamilyOf(a), goneElement(a), false)
	}
	return b.kernel.rules.change(late.del, late.add)
}

// drains says whether a server's connections are waited for.
func drains(at key) bool { return at.protocol == intent.TCP }

// end removes a server, with all of its endpoints.
func (b *balancer) end(at key) error {
	var all []netip.AddrPort
	for f := range b.flows.of[at] {
		all = append(all, f.to)
	}
	if err := b.endFlows(at, all); err != nil {
		return err
	}
	if err := b.kernel.director.delServer(at); err != nil {
		return fmt.Errorf("remove the virtual server %v: %w", at, err)
	}
	delete(b.have, at)
	delete(b.draining, at)
	return nil
}

// sweep looks after what drains.
func (b *balancer) sweep() error {
	var errs []error
	for at := range b.draining {
		errs = append(errs, b.reap(at, b.desired.targets[at]))
	}
	if len(b.leaving) > 0 {
		addrs := map[netip.Addr]bool{}
		for a := range b.leaving {
			addrs[a] = true
		}
		errs = append(errs, b.leave(addrs))
	}
	return errors.Join(errs...)
}
