package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

var protocols = map[intent.Protocol]string{intent.TCP: "tcp", intent.UDP: "udp", intent.SCTP: "sctp"}

// The trees that frontends are found by. The first two are in the nat table, the others in filter.
const (
	vips = iota
	nodePorts
	denied       // cluster IPs that nobody may or can reach, and whom source ranges keep out
	refused      // external and load-balancer IPs that can't be reached
	refusedPorts // the same for node ports
	health       // ports of health checks, which a firewall must not close
	trees
)

var treeChains = [trees]string{"PORTAL-VIPS", "PORTAL-PORTS", "PORTAL-DENIED", "PORTAL-REFUSED", "PORTAL-REFPORTS", "PORTAL-HEALTH"}

// pattern says for each origin whether its source is rewritten.
type pattern [plan.Origins]bool

var everyone = pattern{true, true, true}

// encoding is what all rules depend on: the family and the node's facts.
type encoding struct {
	family intent.Family
	mark   mark
	// pods are the matches for packets from Pods; none where Pods can't be told from others.
	pods []rule
	// usual is what cluster IPs do with the source. It is marked before the tree is entered, so that a frontend that does
	// the usual thing needs no rule for it.
	usual pattern
}

func newEncoding(f intent.Family, m mark, facts *plan.Facts) *encoding {
	e := &encoding{family: f, mark: m, pods: podMatches(f, &facts.Pods)}
	switch {
	case facts.MasqueradeAll:
		e.usual = everyone
	case len(e.pods) > 0:
		e.usual = pattern{plan.FromNode: true, plan.FromOutside: true}
	}
	return e
}

func podMatches(f intent.Family, d *plan.Detector) []rule {
	var out []rule
	for _, p := range d.Prefixes {
		if intent.FamilyOf(p.Addr()) == f {
			out = append(out, rule{src: within(p)})
		}
	}
	if d.Interface != "" {
		out = append(out, rule{in: d.Interface})
	}
	if d.InterfacePrefix != "" {
		out = append(out, rule{in: d.InterfacePrefix + "+"})
	}
	return out
}

// output is all that a Service adds to the tables of a family. It is made when it is needed and not kept: the rules of
// thousands of Services would take more memory than all else that is known of them.
type output struct {
	nat, filter chains // of its own
	spots       [trees][]place
}

// chains are rules by the name of their chain.
type chains = map[string][]rule

// place is a spot with its rules.
type place struct {
	spot
	rules []rule
}

// at returns the rules of a spot, nil where there are none.
func (o *output) at(tree int, s spot) []rule {
	for _, p := range o.spots[tree] {
		if p.spot == s {
			return p.rules
		}
	}
	return nil
}

// compiler encodes one Service.
type compiler struct {
	*encoding
	out   output
	pools map[plan.PortID][]*plan.Pool // a chain each; its place here is part of the chain's name
	names map[plan.PortID]string
	own   map[plan.PortID]int
}

// compile encodes the frontends of one Service.
func (e *encoding) compile(frontends []*plan.Frontend, check *plan.HealthCheck) *output {
	c := &compiler{encoding: e}
	for _, f := range frontends {
		s := spotOf(f)
		tree := vips
		if f.Kind == plan.NodePort {
			tree = nodePorts
		}
		c.put(tree, s, c.forward(f))
		where := refused
		switch f.Kind {
		case plan.ClusterIP:
			where = denied
		case plan.NodePort:
			where = refusedPorts
		}
		out, no := c.keepOut(f), c.reject(f)
		if where == denied {
			c.put(denied, s, append(out, no...))
			continue
		}
		c.put(denied, s, out)
		c.put(where, s, no)
	}
	if check != nil {
		s := spot{proto: intent.TCP, port: check.Port}
		c.put(health, s, healthRules(s))
	}
	return &c.out
}

func (c *compiler) put(tree int, s spot, rules []rule) {
	if len(rules) > 0 {
		c.out.spots[tree] = append(c.out.spots[tree], place{s, rules})
	}
}

func healthRules(s spot) []rule {
	return []rule{{proto: intent.TCP, ports: onePort(s.port), to: accepts}}
}

// match is what the packets to a frontend look like.
func match(f *plan.Frontend) rule {
	r := rule{proto: f.Protocol, ports: onePort(f.Port)}
	if f.Addr.IsValid() {
		r.dst = host(f.Addr)
	}
	return r
}

var fromNode = rule{local: localSource}

// mark is the bit of a packet's mark that says that its source is to be rewritten.
type mark uint32

func (m mark) set() target {
	return target{kind: setMark, mark: markMatch{uint32(m), uint32(m), false}}
}
func (m mark) clear() target { return target{kind: setMark, mark: markMatch{0, uint32(m), false}} }
func (m mark) is() rule      { return rule{mark: markMatch{uint32(m), uint32(m), false}} }
func (m mark) isNot() rule   { return rule{mark: markMatch{uint32(m), uint32(m), true}} }

// forward is how packets to a frontend find their pool, nil where nobody is forwarded.
func (c *compiler) forward(f *plan.Frontend) []rule {
	if !f.Forwards() {
		return nil
	}
	usual := c.usual
	if f.Kind == plan.NodePort {
		usual = everyone
	}
	m := match(f)
	pool, masquerade, same := c.uniform(f)
	var prelude target
	plain := same
	if same {
		prelude, plain = c.prelude(masquerade, usual)
	}
	marks := prelude.kind != 0
	if plain && f.Sources == nil {
		var rules []rule
		if marks {
			rules = append(rules, m.with(prelude))
		}
		if f.Affinity == 0 && len(pool.Endpoints) <= inlined {
			return append(rules, spread(m, pool, 0)...)
		}
		return append(rules, m.with(goes(c.pool(pool, f))))
	}
	var chain string
	switch {
	case plain && !marks:
		chain = c.pool(pool, f)
	case plain:
		chain = c.chain(&c.out.nat, f.ID, []rule{{to: prelude}, {to: goes(c.pool(pool, f))}})
	default:
		chain = c.routes(f, usual)
	}
	if f.Sources == nil {
		return []rule{m.with(goes(chain))}
	}
	var allowed []rule
	for _, p := range f.Sources {
		if intent.FamilyOf(p.Addr()) == c.family {
			allowed = append(allowed, rule{src: within(p), to: goes(chain)})
		}
	}
	return []rule{m.with(goes(c.chain(&c.out.nat, f.ID, allowed)))}
}

// inlined is the largest number of endpoints among which a leaf chooses itself. A chain for each pool would be tidier, but
// takes a rule and a chain more, and the commands take time that grows with the square of the number of chains.
const inlined = 4

// prelude is what must be done to the mark of packets that have the usual one, nothing for the zero value, and whether one
// rule can.
func (c *compiler) prelude(masquerade, usual pattern) (target, bool) {
	switch {
	case c.same(masquerade, usual):
		return target{}, true
	case c.same(masquerade, everyone):
		return c.mark.set(), true
	case c.same(masquerade, pattern{}):
		return c.mark.clear(), true
	}
	return target{}, false
}

// routes is a chain that sends packets to a pool by their origin.
func (c *compiler) routes(f *plan.Frontend, usual pattern) string {
	var rules []rule
	if !c.same(usual, pattern{}) {
		rules = append(rules, rule{to: c.mark.clear()})
	}
	rules = append(rules, c.byOrigin(func(o plan.Origin, from rule) []rule {
		r := f.Routes[o]
		switch {
		case r.Verdict != plan.Forward && from == rule{}:
			return nil
		case r.Verdict != plan.Forward:
			return []rule{from.with(returns)}
		case r.Masquerade:
			return []rule{from.with(c.mark.set()), from.with(goes(c.pool(r.Pool, f)))}
		}
		return []rule{from.with(goes(c.pool(r.Pool, f)))}
	})...)
	return c.chain(&c.out.nat, f.ID, rules)
}

// byOrigin writes rules for each origin, in the order in which the first that applies counts.
func (c *compiler) byOrigin(rules func(o plan.Origin, from rule) []rule) []rule {
	var out []rule
	for _, m := range c.pods {
		out = append(out, rules(plan.FromPod, m)...)
	}
	out = append(out, rules(plan.FromNode, fromNode)...)
	return append(out, rules(plan.FromOutside, rule{})...)
}

// origins that this node tells apart.
func (c *compiler) origins() []plan.Origin {
	if len(c.pods) == 0 {
		return []plan.Origin{plan.FromNode, plan.FromOutside}
	}
	return []plan.Origin{plan.FromPod, plan.FromNode, plan.FromOutside}
}

func (c *compiler) same(a, b pattern) bool {
	return !slices.ContainsFunc(c.origins(), func(o plan.Origin) bool { return a[o] != b[o] })
}

// uniform says whether everybody goes to one pool.
func (c *compiler) uniform(f *plan.Frontend) (*plan.Pool, pattern, bool) {
	var masquerade pattern
	pool := f.Routes[plan.FromOutside].Pool
	for _, o := range c.origins() {
		if f.Routes[o].Verdict != plan.Forward || f.Routes[o].Pool != pool {
			return nil, pattern{}, false
		}
		masquerade[o] = f.Routes[o].Masquerade
	}
	return pool, masquerade, true
}

// keepOut drops those whom source ranges exclude. They have not been forwarded, which is all that can be told of a
// packet that arrives here, unless others were rejected too. Where everybody is, ranges make no difference.
func (c *compiler) keepOut(f *plan.Frontend) []rule {
	if f.Sources == nil || f.Rejected() {
		return nil
	}
	if !slices.ContainsFunc(f.Routes[:], func(r plan.Route) bool { return r.Verdict == plan.Reject }) {
		return []rule{match(f).with(drops)}
	}
	var rules []rule
	for _, p := range f.Sources {
		if intent.FamilyOf(p.Addr()) == c.family {
			rules = append(rules, rule{src: within(p), to: returns})
		}
	}
	return []rule{match(f).with(jump(c.chain(&c.out.filter, f.ID, append(rules, rule{to: drops}))))}
}

// reject is what becomes of the packets that no route forwards.
func (c *compiler) reject(f *plan.Frontend) []rule {
	verdicts := map[plan.Verdict]bool{}
	for _, o := range c.origins() {
		if v := f.Routes[o].Verdict; v != plan.Forward {
			verdicts[v] = true
		}
	}
	switch len(verdicts) {
	case 0:
		return nil
	case 1:
		// Packets that are forwarded have been, and don't come here.
		for v := range verdicts {
			return []rule{match(f).with(refusal(f, v))}
		}
	}
	return []rule{match(f).with(goes(c.chain(&c.out.filter, f.ID, c.byOrigin(func(o plan.Origin, from rule) []rule {
		if v := f.Routes[o].Verdict; v != plan.Forward {
			from.proto = f.Protocol
			return []rule{from.with(refusal(f, v))}
		}
		return []rule{from.with(returns)}
	}))))}
}

func refusal(f *plan.Frontend, v plan.Verdict) target {
	if v == plan.Drop {
		return drops
	}
	// An ICMP error that comes while connect holds the socket is lost; a reset is not.
	return target{kind: reject, reset: f.Protocol == intent.TCP}
}

// pool is the name of the chain that chooses among a pool's endpoints.
func (c *compiler) pool(p *plan.Pool, f *plan.Frontend) string {
	known := c.pools[p.ID]
	i := slices.IndexFunc(known, func(q *plan.Pool) bool { return q == p || slices.Equal(p.Endpoints, q.Endpoints) })
	if i < 0 {
		i = len(known)
		keep(&c.pools, p.ID, append(known, p))
		keep(&c.out.nat, c.poolName(p.ID, i), spread(rule{proto: p.ID.Protocol}, p, f.Affinity))
	}
	return c.poolName(p.ID, i)
}

func (c *compiler) poolName(id plan.PortID, i int) string { return fmt.Sprintf("%s-%d", c.name(id), i) }

// name is the beginning of the names of all chains of a Service's port.
func (c *compiler) name(id plan.PortID) string {
	if _, ok := c.names[id]; !ok {
		keep(&c.names, id, "PORTAL-"+digest(id.Service.Namespace, id.Service.Name, id.Port, protocols[id.Protocol]))
	}
	return c.names[id]
}

// chain gives a chain to rules, the same one to the same rules.
func (c *compiler) chain(table *chains, id plan.PortID, rules []rule) string {
	for name, have := range *table {
		if strings.HasPrefix(name, c.name(id)) && slices.Equal(have, rules) {
			return name
		}
	}
	name := fmt.Sprintf("%s-R%d", c.name(id), c.own[id])
	keep(&c.own, id, c.own[id]+1)
	keep(table, name, rules)
	return name
}

// keep puts something into a map, which most Services don't need and so don't have.
func keep[K comparable, V any](in *map[K]V, k K, v V) {
	if *in == nil {
		*in = map[K]V{}
	}
	(*in)[k] = v
}

// digest is short enough for a chain's name, which has 28 characters.
func digest(parts ...string) string {
	h := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return base32.StdEncoding.EncodeToString(h[:10])
}

// spread chooses an endpoint for the packets that match: the one that the client had before, or any with equal chance.
func spread(match rule, p *plan.Pool, affinity time.Duration) []rule {
	n := len(p.Endpoints)
	rules := make([]rule, 0, 2*n)
	lists := make([]string, n)
	if affinity > 0 {
		for i, ep := range p.Endpoints {
			lists[i] = "PORTAL-" + digest(p.ID.Service.Namespace, p.ID.Service.Name, p.ID.Port, protocols[p.ID.Protocol], ep.Addr.String())
			r := match.with(toEndpoint(ep.Addr))
			r.recent = recentMatch{lists[i], uint32(math.Ceil(affinity.Seconds()))}
			rules = append(rules, r)
		}
	}
	for i, ep := range p.Endpoints {
		r := match.with(toEndpoint(ep.Addr))
		if rest := n - i; rest > 1 {
			r.oneIn = rest
		}
		r.recent.list = lists[i]
		rules = append(rules, r)
	}
	return rules
}

// inOrder compares frontends: chains' names depend on it.
func inOrder(a, b *plan.Frontend) int {
	if a.Kind != b.Kind {
		return int(a.Kind) - int(b.Kind)
	}
	return spotOf(a).compare(spotOf(b))
}
