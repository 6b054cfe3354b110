package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
)

// balancer is the mode at work.
type balancer struct {
	Options
	kernel *kernel
	facts  *plan.Facts

	// What is wanted, and what the kernel has of ours as far as we know.
	desired *desired
	have    map[key]*server
	held    map[netip.Addr]bool // addresses on our device
	foreign map[netip.Addr]bool // cluster IPs that another device has
	// draining are servers with endpoints, or the whole of them, that wait for their last connection to end.
	draining map[key]bool
	// leaving are addresses on our device that no Service has any more but living connections, and until when.
	leaving map[netip.Addr]time.Time
	flows   flows
	now     func() time.Time
	// next is the snapshot of the Apply that is going on.
	next *plan.Snapshot
	// lost: something went wrong half-way, and what the kernel has must be read again.
	lost bool
	turn int // of the server whose endpoints are checked next
}

func newBackend(o Options, k *kernel) *balancer {
	return &balancer{Options: o, kernel: k, lost: true, now: time.Now, flows: newFlows()}
}

// Close ends our connections to the kernel.
func (b *balancer) Close() error {
	b.kernel.close()
	return nil
}

// work is what an Apply touches.
type work struct {
	// rebuild: the table is made anew; otherwise add and del are changes of its elements.
	rebuild  bool
	add, del map[intent.Family]map[element]bool
	servers  map[key]bool
	// on and off are addresses that come to the device and leave it.
	on, off map[netip.Addr]bool
	refused map[plan.FrontendKey]error
}

func newWork() *work {
	return &work{
		add: map[intent.Family]map[element]bool{}, del: map[intent.Family]map[element]bool{},
		servers: map[key]bool{}, on: map[netip.Addr]bool{}, off: map[netip.Addr]bool{}, refused: map[plan.FrontendKey]error{},
	}
}

// change notes an element that comes or goes. There and back again is nothing.
func (w *work) change(f intent.Family, e element, comes bool) {
	in, opposite := w.add, w.del
	if !comes {
		in, opposite = opposite, in
	}
	if opposite[f][e] {
		delete(opposite[f], e)
		return
	}
	if in[f] == nil {
		in[f] = map[element]bool{}
	}
	in[f][e] = true
}

// Apply programs the kernel. New facts are rare and may concern everything.
func (b *balancer) Apply(_ context.Context, next *plan.Snapshot, delta *plan.Delta) error {
	w := newWork()
	var err error
	b.next = next
	defer func() { b.next = nil }()
	if delta.Full || delta.Facts || b.lost {
		err = b.all(w, next)
	} else {
		err = b.some(w, delta)
	}
	if err == nil {
		err = b.program(w)
	}
	if err != nil {
		b.lost = true
		return err
	}
	// What was refused is in the next delta again; all else is known.
	b.lost = false
	if len(w.refused) > 0 {
		return &backend.Refused{Frontends: w.refused}
	}
	return nil
}

// all begins with what the kernel has, and touches everything.
func (b *balancer) all(w *work, next *plan.Snapshot) error {
	if err := configure(b.kernel.sysctl, b.settings()); err != nil {
		return err
	}
	if err := b.kernel.director.configure(b.Options); err != nil {
		return fmt.Errorf("set the timeouts of IPVS: %w", err)
	}
	if err := b.kernel.device.ensure(next.Facts.Families); err != nil {
		return err
	}
	before, err := b.read()
	if err != nil {
		return err
	}
	b.readFlows(before)
	slots := b.desired.slots
	b.facts, b.desired = next.Facts, newDesired()
	b.desired.slots = slots
	w.rebuild = true
	for a := range b.held {
		if next.ClusterIPs[a] == 0 {
			w.off[a] = true
		}
	}
	for a := range next.ClusterIPs {
		if err := b.place(w, a); err != nil {
			return err
		}
	}
	for _, f := range next.Frontends {
		if err := b.put(w, f, before[f.FrontendKey]); err != nil {
			return err
		}
	}
	for at := range b.have {
		b.findOwner(at)
		w.servers[at] = true
	}
	b.note(w)
	b.noteFlows(w)
	return nil
}

// note finds out what changes for the pools with affinity that were touched.
func (b *balancer) note(w *work) {
	for at := range w.servers {
		if !sticky(at.mark) || at.mark&maxSlot != 0 {
			continue
		}
		old, now := b.desired.programmed[at], b.desired.targets[at].elements(at)
		for e := range old {
			if !now[e] {
				w.change(at.family, e, false)
			}
		}
		for e := range now {
			if !old[e] {
				w.change(at.family, e, true)
			}
		}
		if b.desired.programmed[at] = now; len(now) == 0 {
			delete(b.desired.programmed, at)
			delete(b.desired.slots, at)
		}
	}
}

// read learns what the kernel has of ours, and the marks that frontends had.
func (b *balancer) read() (marks map[plan.FrontendKey][plan.Origins]uint32, err error) {
	if b.held, err = b.kernel.device.list(); err != nil {
		return nil, err
	}
	found, err := b.kernel.rules.read()
	if err != nil {
		return nil, err
	}
	maps.Copy(found.addrs, b.held)
	if b.have, err = b.kernel.ours(found.addrs); err != nil {
		return nil, err
	}
	b.foreign, b.draining, b.leaving = map[netip.Addr]bool{}, map[key]bool{}, map[netip.Addr]time.Time{}
	if b.desired == nil {
		b.desired = newDesired()
		b.desired.slots = found.slots
	}
	return found.marks, nil
}

// leaves says whether an address is on its way from the device.
func (b *balancer) leaves(w *work, a netip.Addr) bool {
	_, already := b.leaving[a]
	return already || w.off[a]
}

// place sees to it that an address is on our device, unless another device has it.
func (b *balancer) place(w *work, a netip.Addr) error {
	delete(w.off, a)
	if _, leaves := b.leaving[a]; leaves {
		delete(b.leaving, a)
		w.change(intent.FamilyOf(a), goneElement(a), false)
	}
	if b.held[a] || b.foreign[a] || w.on[a] {
		return nil
	}
	elsewhere, err := b.kernel.device.elsewhere(a)
	if err != nil {
		return fmt.Errorf("look for the address %v: %w", a, err)
	}
	if elsewhere {
		b.foreign[a] = true
	} else {
		w.on[a] = true
	}
	return nil
}

// put adds a frontend.
func (b *balancer) put(w *work, f *plan.Frontend, before [plan.Origins]uint32) error {
	if err := encodable(f); err != nil {
		w.refused[f.FrontendKey] = err
		return nil
	}
	e := b.desired.put(f, (b.held[f.Addr] || w.on[f.Addr]) && !b.leaves(w, f.Addr), before, func(at key) bool { return b.have[at] != nil })
	b.touch(w, e, true)
	return nil
}

// touch notes what a frontend that came or went has to do with.
func (b *balancer) touch(w *work, e *encoded, comes bool) {
	for _, at := range b.desired.serversOf(e) {
		w.servers[at] = true
	}
	for _, el := range e.elements() {
		w.change(e.Family, el, comes)
	}
}

// some touches what the delta names.
func (b *balancer) some(w *work, d *plan.Delta) error {
	before := map[plan.FrontendKey][plan.Origins]uint32{}
	endpoints := map[netip.Addr]bool{} // whether they were there
	changed := map[plan.PortID]bool{}
	note := func(f *plan.Frontend) {
		for _, r := range f.Routes {
			if r.Pool == nil {
				continue
			}
			for _, e := range r.Pool.Endpoints {
				if _, noted := endpoints[e.Addr.Addr()]; !noted {
					endpoints[e.Addr.Addr()] = b.desired.endpoints[e.Addr.Addr()] > 0
				}
			}
		}
	}
	for _, a := range d.AddedIPs {
		if err := b.place(w, a); err != nil {
			return err
		}
	}
	for _, a := range d.RemovedIPs {
		delete(b.foreign, a)
		if b.held[a] && !b.leaves(w, a) {
			w.off[a] = true
		}
	}
	for _, c := range d.Frontends {
		if e := b.desired.frontends[c.FrontendKey]; e != nil {
			note(e.Frontend)
			before[c.FrontendKey] = e.marks()
			b.touch(w, e, false)
			b.desired.drop(c.FrontendKey)
		}
	}
	for _, c := range d.Frontends {
		if c.New == nil {
			continue
		}
		note(c.New)
		changed[c.New.ID] = true
		if err := b.put(w, c.New, before[c.FrontendKey]); err != nil {
			return err
		}
	}
	for at := range b.draining {
		if drains(at) {
			continue
		}
		b.findOwner(at)
		if d.Serving || changed[b.have[at].id] {
			w.servers[at] = true
		}
	}
	for a, was := range endpoints {
		if now := b.desired.endpoints[a] > 0; now != was {
			w.change(intent.FamilyOf(a), hairpinElement(a), now)
		}
	}
	b.note(w)
	b.noteFlows(w)
	return nil
}

// program makes the changes, in an order in which no wanted connection goes astray (servers are there before packets are
// sent to them, refusals before an address is, and nothing is taken away before its successor is in place) and in which
// whatever is ours can be recognised as such, should this process end at any point: an address is in our table from before it
// gets a server or is on the device until after both are gone.
func (b *balancer) program(w *work) error {
	b.raiseAll(w, func(at key) bool { return at.mark != 0 || b.held[at.addr] })
	if err := b.programRules(w); err != nil {
		return err
	}
	b.raiseAll(w, func(at key) bool { return w.on[at.addr] })
	for a := range w.on {
		if err := b.kernel.device.add(a); err != nil {
			return fmt.Errorf("put %v on %s: %w", a, deviceName, err)
		}
		b.held[a] = true
	}
	for a := range w.off {
		b.leaving[a] = b.now().Add(leaveWithin)
	}
	var errs []error
	for at := range w.servers {
		errs = append(errs, b.lower(at))
	}
	if err := errors.Join(errs...); err != nil || len(w.off) == 0 {
		return err
	}
	return b.leave(w.off)
}

// raiseAll raises those of the servers that pass.
func (b *balancer) raiseAll(w *work, pass func(key) bool) {
	for at := range w.servers {
		t := b.desired.targets[at]
		if t == nil || !pass(at) {
			continue
		}
		if err := b.raise(at, t); err != nil {
			t.refuse(w.refused, at, err)
		}
	}
}

// programRules changes the table: elements only, or all of it.
func (b *balancer) programRules(w *work) error {
	if !w.rebuild {
		for a := range w.on {
			w.change(intent.FamilyOf(a), vipElement(a), true)
		}
		for a := range w.off {
			w.change(intent.FamilyOf(a), goneElement(a), true)
		}
		return b.kernel.rules.change(w.del, w.add)
	}
	all := map[intent.Family]map[element]bool{}
	for _, f := range b.facts.Families {
		all[f] = map[element]bool{}
	}
	put := func(f intent.Family, e element) {
		if all[f] != nil {
			all[f][e] = true
		}
	}
	for _, e := range b.desired.frontends {
		for _, el := range e.elements() {
			put(e.Family, el)
		}
	}
	for a := range b.desired.endpoints {
		put(intent.FamilyOf(a), hairpinElement(a))
	}
	for at, list := range b.desired.programmed {
		for e := range list {
			put(at.family, e)
		}
	}
	for a := range w.off {
		put(intent.FamilyOf(a), goneElement(a))
	}
	for f := range b.flows.count {
		put(f.from.Family, goingElement(f))
	}
	for _, addrs := range []map[netip.Addr]bool{b.held, w.on} {
		for a := range addrs {
			put(intent.FamilyOf(a), vipElement(a))
		}
	}
	return b.kernel.rules.replace(b.facts, b.Mark, all)
}
