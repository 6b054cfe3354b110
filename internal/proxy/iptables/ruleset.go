package iptables

import (
	"bufio"
	"encoding/binary"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// ruleset is what one family's tables hold of ours, and what has yet to be written.
type ruleset struct {
	*encoding
	services map[intent.Key]*service
	trees    [trees]*tree
	nat      section
	filter   section
	// there are the chains in each table.
	there map[string]map[string]chainDigest
}

// chainDigest tells the rules of a chain from others without keeping them.
type chainDigest struct {
	rules int
	// sum is over the rules in their order; 0: not known.
	sum uint64
}

var seed = maphash.MakeSeed()

// plus is what a chain holds when a rule has been added, which is described in the same way each time.
func (c chainDigest) plus(rule []byte) chainDigest {
	before := binary.NativeEndian.AppendUint64(nil, c.sum)
	return chainDigest{c.rules + 1, maphash.Bytes(seed, append(before, rule...))}
}

// service is what a Service's rules were made of.
type service struct {
	frontends []*plan.Frontend // in order
	check     *plan.HealthCheck
}

// section collects the changes of one table.
type section struct {
	whole map[string][]rule // chains that are written anew
	more  map[string][]rule // rules that are added to what is there
	gone  map[string]bool
	// enter are the rules by which packets come from built-in chains to ours; leave is the text of those that are deleted.
	enter []jumpRule
	leave []string
}

func newSection() section {
	return section{whole: map[string][]rule{}, more: map[string][]rule{}, gone: map[string]bool{}}
}

func (s *section) empty() bool {
	return len(s.whole)+len(s.more)+len(s.gone)+len(s.enter)+len(s.leave) == 0
}

func (s *section) set(chain string, rules []rule) {
	delete(s.gone, chain)
	delete(s.more, chain)
	s.whole[chain] = rules
}

// extend adds rules to a chain that is there, or is about to be.
func (s *section) extend(chain string, rules []rule) {
	if have, written := s.whole[chain]; written {
		s.whole[chain] = append(have, rules...)
	} else {
		s.more[chain] = append(s.more[chain], rules...)
	}
}

// rules calls do with all that are added, chain by chain.
func (s *section) rules(do func(chain string, r *rule)) {
	for _, list := range []map[string][]rule{s.whole, s.more} {
		for _, name := range slices.Sorted(maps.Keys(list)) {
			for i := range list[name] {
				do(name, &list[name][i])
			}
		}
	}
}

func (s *section) remove(chain string) {
	delete(s.whole, chain)
	delete(s.more, chain)
	s.gone[chain] = true
}

// written notes what a table holds when the changes have been made, and begins anew.
// Without a description of rules their number is all that is known.
func (s *section) written(there map[string]chainDigest, describe func(*rule) []byte) {
	for name := range s.whole {
		there[name] = chainDigest{}
	}
	s.rules(func(name string, r *rule) {
		have := there[name]
		if unknown := have.rules > 0 && have.sum == 0; describe == nil || unknown {
			there[name] = chainDigest{rules: have.rules + 1}
		} else {
			there[name] = have.plus(describe(r))
		}
	})
	for name := range s.gone {
		delete(there, name)
	}
	*s = newSection()
}

// print writes the changes as iptables-restore reads them. Naming a chain empties or creates it; all of them come before
// the rules that lead to them, and chains are removed when nothing leads to them any more.
func (s *section) print(b *bufio.Writer, table string) {
	if s.empty() {
		return
	}
	b.WriteString("*" + table + "\n")
	removed := slices.Sorted(maps.Keys(s.gone))
	// The nft variant keeps a sorted list of chains and looks for each one's place from the beginning.
	declared := slices.Concat(slices.Collect(maps.Keys(s.whole)), removed)
	slices.Sort(declared)
	for _, name := range slices.Backward(declared) {
		b.WriteString(":" + name + " - [0:0]\n")
	}
	var line []byte
	s.rules(func(name string, r *rule) {
		line = append(append(append(line[:0], "-A "...), name...), ' ')
		b.Write(append(r.appendText(line), '\n'))
	})
	for _, j := range s.enter {
		b.WriteString("-I " + j.String() + "\n")
	}
	for _, text := range s.leave {
		b.WriteString(text + "\n")
	}
	for _, name := range removed {
		b.WriteString("-X " + name + "\n")
	}
	b.WriteString("COMMIT\n")
}

// newRuleset encodes all of a snapshot. With liberal the kernel takes TCP packets outside the window for valid.
func newRuleset(f intent.Family, m mark, next *plan.Snapshot, liberal bool) *ruleset {
	r := &ruleset{encoding: newEncoding(f, m, next.Facts), services: map[intent.Key]*service{}, nat: newSection(), filter: newSection()}
	r.there = map[string]map[string]chainDigest{"nat": {}, "filter": {}}
	for i := range r.trees {
		r.trees[i] = newTree(treeChains[i])
	}
	for key, f := range next.Frontends {
		if key.Family == r.family {
			r.add(f)
		}
	}
	var spots [trees][]spot
	made := outputs{}
	for key, s := range r.services {
		s.check = check(next, key)
		out := r.encode(s)
		made[key] = out
		for i := range spots {
			for _, p := range out.spots[i] {
				spots[i] = append(spots[i], p.spot)
			}
		}
		for name, rules := range out.nat {
			r.nat.set(name, rules)
		}
		for name, rules := range out.filter {
			r.filter.set(name, rules)
		}
	}
	for i, t := range r.trees {
		t.fill(spots[i], leafSize)
	}
	r.base(next.Facts, liberal)
	r.collect(next, made)
	return r
}

// outputs are those that have been made in the course of a change.
type outputs map[intent.Key]*output

func (r *ruleset) encode(s *service) *output { return r.compile(s.frontends, s.check) }

func check(next *plan.Snapshot, k intent.Key) *plan.HealthCheck {
	if s := next.Services[k]; s != nil {
		return s.HealthCheck
	}
	return nil
}

func (r *ruleset) add(f *plan.Frontend) {
	s := r.services[f.ID.Service]
	if s == nil {
		s = &service{}
		r.services[f.ID.Service] = s
	}
	i, _ := slices.BinarySearchFunc(s.frontends, f, inOrder)
	s.frontends = slices.Insert(s.frontends, i, f)
}

func (r *ruleset) drop(f *plan.Frontend) {
	if s := r.services[f.ID.Service]; s != nil {
		s.frontends = slices.DeleteFunc(s.frontends, func(o *plan.Frontend) bool { return o.FrontendKey == f.FrontendKey })
	}
}

// update encodes what changed.
func (r *ruleset) update(next *plan.Snapshot, delta *plan.Delta) {
	var changes []plan.FrontendChange
	before := outputs{}
	for _, ch := range delta.Frontends {
		if ch.Family != r.family {
			continue
		}
		changes = append(changes, ch)
		for _, f := range []*plan.Frontend{ch.Old, ch.New} {
			if f == nil || before[f.ID.Service] != nil {
				continue
			}
			before[f.ID.Service] = &output{}
			if s := r.services[f.ID.Service]; s != nil {
				before[f.ID.Service] = r.encode(s)
			}
		}
	}
	for _, ch := range changes {
		if ch.Old != nil {
			r.drop(ch.Old)
		}
		if ch.New != nil {
			r.add(ch.New)
		}
	}
	// A spot that moves from one Service to another is removed before it is set.
	now := outputs{}
	for key, old := range before {
		now[key] = r.again(next, key)
		for i, t := range r.trees {
			for _, p := range old.spots[i] {
				if now[key].at(i, p.spot) == nil {
					t.remove(p.spot)
				}
			}
		}
		replace(&r.nat, old.nat, now[key].nat)
		replace(&r.filter, old.filter, now[key].filter)
	}
	var come [trees][]spot
	for key, out := range now {
		for i := range r.trees {
			for _, p := range out.spots[i] {
				if !slices.Equal(before[key].at(i, p.spot), p.rules) {
					come[i] = append(come[i], p.spot)
				}
			}
		}
	}
	for i, t := range r.trees {
		t.add(come[i])
	}
	r.collect(next, now)
}

// again encodes a Service as it is now.
func (r *ruleset) again(next *plan.Snapshot, key intent.Key) *output {
	s := r.services[key]
	if s == nil {
		return &output{}
	}
	if len(s.frontends) == 0 {
		delete(r.services, key)
		return &output{}
	}
	s.check = check(next, key)
	return r.encode(s)
}

// replace records how a Service's own chains have changed.
func replace(s *section, before, now chains) {
	for name, rules := range now {
		if !slices.Equal(before[name], rules) {
			s.set(name, rules)
		}
	}
	for name := range before {
		if _, stays := now[name]; !stays {
			s.remove(name)
		}
	}
}

// collect takes the trees' changes over. Beside the rules that have changed, a leaf has those of its neighbours, which are
// made again.
func (r *ruleset) collect(next *plan.Snapshot, made outputs) {
	for i, t := range r.trees {
		s := &r.filter
		if i == vips || i == nodePorts {
			s = &r.nat
		}
		t.changes(r.family, func(at spot) []rule { return r.rules(next, made, i, at) }, s)
	}
}

// rules are those of a spot in a tree.
func (r *ruleset) rules(next *plan.Snapshot, made outputs, tree int, at spot) []rule {
	if tree == health {
		return healthRules(at)
	}
	f := next.Frontends[plan.FrontendKey{Addr: at.addr, Family: r.family, Protocol: at.proto, Port: at.port}]
	if f == nil {
		return nil
	}
	out := made[f.ID.Service]
	if out == nil {
		out = r.encode(r.services[f.ID.Service])
		made[f.ID.Service] = out
	}
	return out.at(tree, at)
}

// print is the text of one restore, nil where nothing changes.
func (r *ruleset) print() script {
	if r.nat.empty() && r.filter.empty() {
		return nil
	}
	return func(b *bufio.Writer) {
		r.nat.print(b, "nat")
		r.filter.print(b, "filter")
	}
}

// written notes that the changes have been made. What the kernel will list of rules that were sent over netlink is known in
// advance; how commands write them depends on their version.
func (r *ruleset) written(overNetlink bool) {
	var describe func(*rule) []byte
	if overNetlink {
		var exprs, meaning []byte
		describe = func(one *rule) []byte {
			exprs = one.appendExprs(exprs[:0], r.family)
			meaning = nf.AppendMeaning(meaning[:0], exprs)
			return meaning
		}
	}
	for _, table := range tables {
		r.section(table).written(r.there[table], describe)
	}
}

// base are the chains that are there whatever Services there are.
func (r *ruleset) base(facts *plan.Facts, liberal bool) {
	ports := r.portMatches(facts)
	var mark []rule
	if r.usual[plan.FromOutside] {
		if !r.usual[plan.FromPod] {
			for _, m := range r.pods {
				mark = append(mark, m.with(returns))
			}
		}
		mark = append(mark, rule{to: r.mark.set()})
	}
	state := func(states uint16, t target) rule { return rule{state: stateMatch{states: states}, to: t} }
	services := []rule{{to: jump("PORTAL-MARK")}, {to: jump(treeChains[vips])}, {to: r.mark.clear()}}
	for _, m := range ports {
		services = append(services, m.with(jump("PORTAL-NODEPORTS")))
	}
	nat := chains{
		canaryChain:        nil,
		"PORTAL-MARK":      mark,
		"PORTAL-SERVICES":  services,
		"PORTAL-NODEPORTS": {{to: r.mark.set()}, {to: jump(treeChains[nodePorts])}, {to: r.mark.clear()}},
		"PORTAL-POSTROUTING": {
			// An endpoint that reached itself would answer itself without the node's seeing it.
			{state: stateMatch{states: stateDNAT}, hairpin: r.family, to: r.mark.set()},
			r.mark.isNot().with(returns),
			// A packet that passes here twice (through a tunnel) must not be rewritten twice.
			{to: r.mark.clear()},
			{to: masquerades},
		},
	}
	for name, rules := range nat {
		r.nat.set(name, rules)
	}
	guard := r.guard(facts)
	fresh := []rule{state(stateDNAT, returns), {to: jump(treeChains[denied])}, {to: jump(treeChains[refused])}}
	for _, m := range ports {
		fresh = append(fresh, m.with(jump(treeChains[refusedPorts])))
	}
	forward := []rule{state(stateNew, jump("PORTAL-NEW"))}
	if !liberal {
		// What conntrack doesn't understand would reach the client with the endpoint's address, which answers with a reset.
		forward = append(forward, state(stateInvalid, drops))
	}
	// Where the policy is to forward nothing, what Services need is forwarded nevertheless.
	forward = append(forward, r.mark.is().with(accepts), state(stateRelated|stateEstablished, accepts))
	deniedOut := state(stateNew, jump(treeChains[denied]))
	deniedOut.state2 = stateMatch{states: stateDNAT, not: true}
	filter := chains{
		canaryChain:      nil,
		"PORTAL-FORWARD": forward,
		"PORTAL-NEW":     fresh,
		"PORTAL-INPUT":   append(slices.Clone(guard), state(stateNew, jump(treeChains[health])), state(stateNew, jump("PORTAL-NEW"))),
		"PORTAL-OUTPUT":  append(slices.Clone(guard), deniedOut),
	}
	for name, rules := range filter {
		r.filter.set(name, rules)
	}
}

var (
	loopback4 = netip.MustParsePrefix("127.0.0.0/8")
	loopback6 = netip.MustParseAddr("::1")
)

// portMatches are what packets to an address look like on which node ports are served.
func (r *ruleset) portMatches(facts *plan.Facts) []rule {
	np := &facts.NodePorts
	if np.All {
		any := rule{local: localDestination}
		switch {
		case r.family == intent.IPv6:
			// The kernel has no route_localnet for IPv6.
			any.dst = outside(netip.PrefixFrom(loopback6, 128))
		case !np.Loopback4:
			any.dst = outside(loopback4)
		}
		return []rule{any}
	}
	var out []rule
	for _, a := range np.Addrs {
		if intent.FamilyOf(a) == r.family && !a.IsLoopback() {
			out = append(out, rule{dst: host(a)})
		}
	}
	if loopback(r.family, facts) {
		out = append(out, rule{dst: within(loopback4)})
	}
	return out
}

// loopback says whether node ports are served at 127.0.0.1.
func loopback(f intent.Family, facts *plan.Facts) bool {
	return f == intent.IPv4 && facts.NodePorts.Loopback4
}

// guard closes the hole that route_localnet opens: neighbours could send packets to services that listen on 127.0.0.1.
func (r *ruleset) guard(facts *plan.Facts) []rule {
	if !loopback(r.family, facts) {
		return nil
	}
	return []rule{{
		dst: within(loopback4), src: outside(loopback4),
		state: stateMatch{states: stateRelated | stateEstablished | stateDNAT, not: true}, to: drops,
	}}
}
