package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math"
	"slices"
	"strconv"
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
	// pods are the matches for packets from Pods; none where Pods can't be told.
	pods []string
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

func podMatches(f intent.Family, d *plan.Detector) []string {
	var out []string
	for _, p := range d.Prefixes {
		if intent.FamilyOf(p.Addr()) == f {
			out = append(out, "-s "+p.String())
		}
	}
	if d.Interface != "" {
		out = append(out, "-i "+d.Interface)
	}
	if d.InterfacePrefix != "" {
		out = append(out, "-i "+d.InterfacePrefix+"+")
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
type chains = map[string][]string

// place is a spot with its rules.
type place struct {
	spot
	rules []string
}

// at returns the rules of a spot, nil where there are none.
func (o *output) at(tree int, s spot) []string {
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
		out, no := c.keepOut(f), c.refuse(f)
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

func (c *compiler) put(tree int, s spot, rules []string) {
	if len(rules) > 0 {
		c.out.spots[tree] = append(c.out.spots[tree], place{s, rules})
	}
}

func healthRules(s spot) []string {
	return []string{fmt.Sprintf("-p tcp --dport %d -j ACCEPT", s.port)}
}

// match is what the packets to a frontend look like.
func match(f *plan.Frontend) string {
	b := make([]byte, 0, 64)
	if f.Addr.IsValid() {
		b = append(f.Addr.AppendTo(append(b, "-d "...)), ' ')
	}
	b = append(append(append(b, "-p "...), protocols[f.Protocol]...), " --dport "...)
	return string(strconv.AppendUint(b, uint64(f.Port), 10))
}

const fromNode = "-m addrtype --src-type LOCAL"

// mark is the bit of a packet's mark that says that its source is to be rewritten.
type mark uint32

func (m mark) set() string   { return fmt.Sprintf("-j MARK --set-xmark %#x/%#[1]x", uint32(m)) }
func (m mark) clear() string { return fmt.Sprintf("-j MARK --set-xmark 0x0/%#x", uint32(m)) }
func (m mark) is() string    { return fmt.Sprintf("-m mark --mark %#x/%#[1]x", uint32(m)) }
func (m mark) isNot() string { return fmt.Sprintf("-m mark ! --mark %#x/%#[1]x", uint32(m)) }

// forward is how packets to a frontend find their pool, nil where nobody is forwarded.
func (c *compiler) forward(f *plan.Frontend) []string {
	if !slices.ContainsFunc(f.Routes[:], func(r plan.Route) bool { return r.Verdict == plan.Forward }) {
		return nil
	}
	usual := c.usual
	if f.Kind == plan.NodePort {
		usual = everyone
	}
	m := match(f)
	pool, masquerade, same := c.uniform(f)
	prelude, plain := "", same
	if same {
		prelude, plain = c.prelude(masquerade, usual)
	}
	if plain && f.Sources == nil {
		var rules []string
		if prelude != "" {
			rules = append(rules, m+" "+prelude)
		}
		if f.Affinity == 0 && len(pool.Endpoints) <= inlined {
			return append(rules, spread(m, pool, 0)...)
		}
		return append(rules, m+" -g "+c.pool(pool, f))
	}
	var target string
	switch {
	case plain && prelude == "":
		target = c.pool(pool, f)
	case plain:
		target = c.chain(&c.out.nat, f.ID, []string{prelude, "-g " + c.pool(pool, f)})
	default:
		target = c.routes(f, usual)
	}
	if f.Sources == nil {
		return []string{m + " -g " + target}
	}
	var allowed []string
	for _, p := range f.Sources {
		if intent.FamilyOf(p.Addr()) == c.family {
			allowed = append(allowed, "-s "+p.String()+" -g "+target)
		}
	}
	return []string{m + " -g " + c.chain(&c.out.nat, f.ID, allowed)}
}

// inlined is the largest number of endpoints among which a leaf chooses itself. A chain for each pool would be tidier, but
// takes a rule and a chain more, and the commands take time that grows with the square of the number of chains.
const inlined = 4

// prelude is what must be done to the mark of packets that have the usual one, and whether one rule can.
func (c *compiler) prelude(masquerade, usual pattern) (string, bool) {
	switch {
	case c.same(masquerade, usual):
		return "", true
	case c.same(masquerade, everyone):
		return c.mark.set(), true
	case c.same(masquerade, pattern{}):
		return c.mark.clear(), true
	}
	return "", false
}

// routes is a chain that sends packets to a pool by their origin.
func (c *compiler) routes(f *plan.Frontend, usual pattern) string {
	var rules []string
	if !c.same(usual, pattern{}) {
		rules = append(rules, c.mark.clear())
	}
	rules = append(rules, c.byOrigin(func(o plan.Origin, from string) []string {
		r := f.Routes[o]
		switch {
		case r.Verdict != plan.Forward && from == "":
			return nil
		case r.Verdict != plan.Forward:
			return []string{from + "-j RETURN"}
		case r.Masquerade:
			return []string{from + c.mark.set(), from + "-g " + c.pool(r.Pool, f)}
		}
		return []string{from + "-g " + c.pool(r.Pool, f)}
	})...)
	return c.chain(&c.out.nat, f.ID, rules)
}

// byOrigin writes rules for each origin, in the order in which the first that applies counts.
func (c *compiler) byOrigin(rules func(o plan.Origin, from string) []string) []string {
	var out []string
	for _, m := range c.pods {
		out = append(out, rules(plan.FromPod, m+" ")...)
	}
	out = append(out, rules(plan.FromNode, fromNode+" ")...)
	return append(out, rules(plan.FromOutside, "")...)
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
// packet that arrives here, unless others were refused too. Where everybody is, ranges make no difference.
func (c *compiler) keepOut(f *plan.Frontend) []string {
	if f.Sources == nil || f.Refused() {
		return nil
	}
	if !slices.ContainsFunc(f.Routes[:], func(r plan.Route) bool { return r.Verdict == plan.Reject }) {
		return []string{match(f) + " -j DROP"}
	}
	var rules []string
	for _, p := range f.Sources {
		if intent.FamilyOf(p.Addr()) == c.family {
			rules = append(rules, "-s "+p.String()+" -j RETURN")
		}
	}
	return []string{match(f) + " -j " + c.chain(&c.out.filter, f.ID, append(rules, "-j DROP"))}
}

// refuse is what becomes of the packets that no route forwards.
func (c *compiler) refuse(f *plan.Frontend) []string {
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
		// Whoever is forwarded has been, and doesn't come here.
		for v := range verdicts {
			return []string{match(f) + " " + refusal(f, v)}
		}
	}
	return []string{match(f) + " -g " + c.chain(&c.out.filter, f.ID, c.byOrigin(func(o plan.Origin, from string) []string {
		if v := f.Routes[o].Verdict; v != plan.Forward {
			return []string{from + "-p " + protocols[f.Protocol] + " " + refusal(f, v)}
		}
		return []string{from + "-j RETURN"}
	}))}
}

func refusal(f *plan.Frontend, v plan.Verdict) string {
	switch {
	case v == plan.Drop:
		return "-j DROP"
	case f.Protocol == intent.TCP:
		// An ICMP error that comes while connect holds the socket is lost; a reset is not.
		return "-j REJECT --reject-with tcp-reset"
	}
	return "-j REJECT"
}

// pool is the name of the chain that chooses among a pool's endpoints.
func (c *compiler) pool(p *plan.Pool, f *plan.Frontend) string {
	known := c.pools[p.ID]
	i := slices.IndexFunc(known, func(q *plan.Pool) bool { return q == p || slices.Equal(p.Endpoints, q.Endpoints) })
	if i < 0 {
		i = len(known)
		keep(&c.pools, p.ID, append(known, p))
		keep(&c.out.nat, c.poolName(p.ID, i), spread("-p "+protocols[p.ID.Protocol], p, f.Affinity))
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
func (c *compiler) chain(table *chains, id plan.PortID, rules []string) string {
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
func spread(match string, p *plan.Pool, affinity time.Duration) []string {
	n := len(p.Endpoints)
	rules := make([]string, 0, 2*n)
	note := make([]string, n)
	if affinity > 0 {
		for i, ep := range p.Endpoints {
			list := "PORTAL-" + digest(p.ID.Service.Namespace, p.ID.Service.Name, p.ID.Port, protocols[p.ID.Protocol], ep.Addr.String())
			note[i] = " -m recent --name " + list + " --set"
			rules = append(rules, fmt.Sprintf("%s -m recent --name %s --update --seconds %d --reap -j DNAT --to-destination %s",
				match, list, int(math.Ceil(affinity.Seconds())), ep.Addr))
		}
	}
	for i, ep := range p.Endpoints {
		chance := ""
		if rest := n - i; rest > 1 {
			chance = " -m statistic --mode random --probability " + strconv.FormatFloat(1/float64(rest), 'f', 10, 64)
		}
		rules = append(rules, match+chance+note[i]+" -j DNAT --to-destination "+ep.Addr.String())
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

// hairpin is a program for the bpf match that accepts packets whose source is their destination.
func hairpin(f intent.Family) string {
	source, words := 12, 1
	if f == intent.IPv6 {
		source, words = 8, 4
	}
	const load, toX, equalX, ret = 32, 7, 29, 6
	code := []string{fmt.Sprint(4*words + 2)}
	for i := range words {
		at := source + 4*i
		toEnd := 4*(words-i-1) + 1
		code = append(code, fmt.Sprintf("%d 0 0 %d", load, at), fmt.Sprintf("%d 0 0 0", toX),
			fmt.Sprintf("%d 0 0 %d", load, at+4*words), fmt.Sprintf("%d 0 %d 0", equalX, toEnd))
	}
	return strings.Join(append(code, fmt.Sprintf("%d 0 0 65535", ret), fmt.Sprintf("%d 0 0 0", ret)), ",")
}
