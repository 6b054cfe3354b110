package iptables

import (
	"bytes"
	"maps"
	"net/netip"
	"slices"

	"portal/internal/intent"
	"portal/internal/plan"
)

// ruleset is what one family's tables hold of ours, and what has yet to be written.
type ruleset struct {
	*encoding
	services map[intent.Key]*service
	trees    [trees]*tree
	nat      section
	filter   section
}

// service is a Service as it was encoded.
type service struct {
	frontends map[plan.FrontendKey]*plan.Frontend
	out       *output
}

// section collects the changes of one table.
type section struct {
	write map[string][]string
	gone  map[string]bool
	// jumps are the lines that lead from the built-in chains to ours.
	jumps []string
}

func newSection() section { return section{write: map[string][]string{}, gone: map[string]bool{}} }

func (s *section) set(chain string, rules []string) {
	delete(s.gone, chain)
	s.write[chain] = rules
}

func (s *section) remove(chain string) {
	delete(s.write, chain)
	s.gone[chain] = true
}

// print writes the changes as iptables-restore reads them. Naming a chain empties or creates it; all of them come before
// the rules that lead to them, and removed ones go when nothing leads to them any more.
func (s *section) print(b *bytes.Buffer, table string) {
	if len(s.write)+len(s.gone)+len(s.jumps) == 0 {
		return
	}
	b.WriteString("*" + table + "\n")
	names := slices.Sorted(maps.Keys(s.write))
	removed := slices.Sorted(maps.Keys(s.gone))
	// The nft variant keeps a sorted list of chains and looks for each one's place from the beginning.
	declared := slices.Concat(names, removed)
	slices.Sort(declared)
	for _, name := range slices.Backward(declared) {
		b.WriteString(":" + name + " - [0:0]\n")
	}
	for _, name := range names {
		for _, rule := range s.write[name] {
			b.WriteString("-A ")
			b.WriteString(name)
			b.WriteByte(' ')
			b.WriteString(rule)
			b.WriteByte('\n')
		}
	}
	for _, line := range s.jumps {
		b.WriteString(line + "\n")
	}
	for _, name := range removed {
		b.WriteString("-X " + name + "\n")
	}
	b.WriteString("COMMIT\n")
	*s = newSection()
}

func (s *section) text(table string) []byte {
	var b bytes.Buffer
	s.print(&b, table)
	return b.Bytes()
}

// newRuleset encodes all of a snapshot. With liberal the kernel takes TCP packets outside the window for valid.
func newRuleset(f intent.Family, m mark, next *plan.Snapshot, liberal bool) *ruleset {
	r := &ruleset{encoding: newEncoding(f, m, next.Facts), services: map[intent.Key]*service{}, nat: newSection(), filter: newSection()}
	for i := range r.trees {
		r.trees[i] = newTree(treeChains[i])
	}
	for key, f := range next.Frontends {
		if key.Family == r.family {
			r.add(key, f)
		}
	}
	var spots [trees]map[spot][]string
	for i := range spots {
		spots[i] = map[spot][]string{}
	}
	for key, s := range r.services {
		s.out = r.compile(sorted(s.frontends), check(next, key))
		for i := range spots {
			maps.Copy(spots[i], s.out.spots[i])
		}
		for name, rules := range s.out.nat {
			r.nat.set(name, rules)
		}
		for name, rules := range s.out.filter {
			r.filter.set(name, rules)
		}
	}
	for i, t := range r.trees {
		t.fill(spots[i])
	}
	r.base(next.Facts, liberal)
	r.collect()
	return r
}

func check(next *plan.Snapshot, k intent.Key) *plan.HealthCheck {
	if s := next.Services[k]; s != nil {
		return s.HealthCheck
	}
	return nil
}

func (r *ruleset) add(key plan.FrontendKey, f *plan.Frontend) {
	s := r.services[f.ID.Service]
	if s == nil {
		s = &service{frontends: map[plan.FrontendKey]*plan.Frontend{}, out: &output{}}
		r.services[f.ID.Service] = s
	}
	s.frontends[key] = f
}

// update encodes what changed.
func (r *ruleset) update(next *plan.Snapshot, delta *plan.Delta) {
	dirty := map[intent.Key]bool{}
	for _, ch := range delta.Frontends {
		if ch.Family != r.family {
			continue
		}
		if ch.Old != nil {
			dirty[ch.Old.ID.Service] = true
			if s := r.services[ch.Old.ID.Service]; s != nil {
				delete(s.frontends, ch.FrontendKey)
			}
		}
		if ch.New != nil {
			dirty[ch.New.ID.Service] = true
			r.add(ch.FrontendKey, ch.New)
		}
	}
	// A spot that moves from one Service to another is removed before it is set.
	fresh := map[intent.Key]*output{}
	for key := range dirty {
		s := r.services[key]
		if s == nil {
			continue
		}
		if len(s.frontends) > 0 {
			fresh[key] = r.compile(sorted(s.frontends), check(next, key))
		} else {
			fresh[key] = &output{}
			delete(r.services, key)
		}
		for i, t := range r.trees {
			for at := range s.out.spots[i] {
				if _, stays := fresh[key].spots[i][at]; !stays {
					t.remove(at)
				}
			}
		}
		replace(&r.nat, s.out.nat, fresh[key].nat)
		replace(&r.filter, s.out.filter, fresh[key].filter)
		s.out = fresh[key]
	}
	for _, out := range fresh {
		for i, t := range r.trees {
			for at, rules := range out.spots[i] {
				t.set(at, rules)
			}
		}
	}
	r.collect()
}

// replace records how a Service's own chains have changed.
func replace(s *section, before, now map[string][]string) {
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

// collect takes the trees' changes over.
func (r *ruleset) collect() {
	for i, t := range r.trees {
		s := &r.filter
		if i == vips || i == nodePorts {
			s = &r.nat
		}
		t.changes(r.family, s.set, s.remove)
	}
}

// print empties the list of changes into the text of one restore.
func (r *ruleset) print() []byte {
	var b bytes.Buffer
	r.nat.print(&b, "nat")
	r.filter.print(&b, "filter")
	return b.Bytes()
}

// base are the chains that are there whatever Services there are.
func (r *ruleset) base(facts *plan.Facts, liberal bool) {
	ports := r.portMatches(facts)
	var mark []string
	if r.usual[plan.FromOutside] {
		if !r.usual[plan.FromPod] {
			for _, m := range r.pods {
				mark = append(mark, m+" -j RETURN")
			}
		}
		mark = append(mark, r.mark.set())
	}
	services := []string{"-j PORTAL-MARK", "-j " + treeChains[vips], r.mark.clear()}
	for _, m := range ports {
		services = append(services, m+" -j PORTAL-NODEPORTS")
	}
	for name, rules := range map[string][]string{
		"PORTAL-CANARY":    nil,
		"PORTAL-MARK":      mark,
		"PORTAL-SERVICES":  services,
		"PORTAL-NODEPORTS": {r.mark.set(), "-j " + treeChains[nodePorts], r.mark.clear()},
		"PORTAL-POSTROUTING": {
			// An endpoint that reached itself would answer itself without the node's seeing it.
			`-m conntrack --ctstate DNAT -m bpf --bytecode "` + hairpin(r.family) + `" ` + r.mark.set(),
			r.mark.isNot() + " -j RETURN",
			// A packet that passes here twice (through a tunnel) must not be rewritten twice.
			r.mark.clear(),
			"-j MASQUERADE --random-fully",
		},
	} {
		r.nat.set(name, rules)
	}
	guard := r.guard(facts)
	fresh := []string{"-m conntrack --ctstate DNAT -j RETURN", "-j " + treeChains[denied], "-j " + treeChains[refused]}
	for _, m := range ports {
		fresh = append(fresh, m+" -j "+treeChains[refusedPorts])
	}
	forward := []string{"-m conntrack --ctstate NEW -j PORTAL-NEW"}
	if !liberal {
		// What conntrack doesn't understand would reach the client with the endpoint's address, which answers with a reset.
		forward = append(forward, "-m conntrack --ctstate INVALID -j DROP")
	}
	// Where the policy is to forward nothing, what Services need is forwarded nevertheless.
	forward = append(forward, r.mark.is()+" -j ACCEPT", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	for name, rules := range map[string][]string{
		"PORTAL-CANARY":  nil,
		"PORTAL-FORWARD": forward,
		"PORTAL-NEW":     fresh,
		"PORTAL-INPUT":   append(slices.Clone(guard), "-m conntrack --ctstate NEW -j "+treeChains[health], "-m conntrack --ctstate NEW -j PORTAL-NEW"),
		"PORTAL-OUTPUT":  append(slices.Clone(guard), "-m conntrack --ctstate NEW -m conntrack ! --ctstate DNAT -j "+treeChains[denied]),
	} {
		r.filter.set(name, rules)
	}
}

var (
	loopback4 = netip.MustParsePrefix("127.0.0.0/8")
	loopback6 = netip.MustParseAddr("::1")
)

// portMatches are what packets to an address look like on which node ports are served.
func (r *ruleset) portMatches(facts *plan.Facts) []string {
	np := &facts.NodePorts
	if np.All {
		switch {
		case r.family == intent.IPv6:
			// The kernel has no route_localnet for IPv6.
			return []string{"-m addrtype --dst-type LOCAL ! -d " + loopback6.String()}
		case !np.Loopback:
			return []string{"-m addrtype --dst-type LOCAL ! -d " + loopback4.String()}
		}
		return []string{"-m addrtype --dst-type LOCAL"}
	}
	var out []string
	for _, a := range np.Addrs {
		if intent.FamilyOf(a) == r.family && !a.IsLoopback() {
			out = append(out, "-d "+a.String())
		}
	}
	if loopback(r.family, facts) {
		out = append(out, "-d "+loopback4.String())
	}
	return out
}

// loopback says whether node ports are served at 127.0.0.1.
func loopback(f intent.Family, facts *plan.Facts) bool {
	return f == intent.IPv4 && facts.NodePorts.Loopback
}

// guard closes the hole that route_localnet opens: neighbours could send packets to services that listen on 127.0.0.1.
func (r *ruleset) guard(facts *plan.Facts) []string {
	if !loopback(r.family, facts) {
		return nil
	}
	return []string{"-d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"}
}
