package zone

import (
	"encoding/binary"
	"strings"

	"portal/internal/dns/wire"
)

const (
	// maxChain bounds the length of a chain of CNAMEs.
	maxChain = 11
	// maxReached bounds how many names one response follows: EndpointSlices of FQDNs can name thousands, and each other.
	maxReached = 64
	// maxLinks are more records than fit a message.
	maxLinks = 4096
)

// link is a record of a CNAME chain.
type link struct {
	owner  string // wire form; empty: the queried name
	typ    uint16
	target string // of a CNAME
	data   []byte // of others: as in a set
}

// Chain is a CNAME chain that leads out of the zones.
type Chain struct {
	links []link
	// Outside are the names that must be resolved elsewhere, in wire form; their records end the response.
	Outside []string
	// reached are the names that have been followed, and whether they lead to addresses.
	reached map[string]bool
}

// alias answers for a name that is an alias of others.
func (z *Zones) alias(dst []byte, r *Request, g *origin, n *Name) ([]byte, Outcome) {
	c := &Chain{}
	if r.QType == wire.TypeCNAME {
		c.links = []link{{typ: wire.TypeCNAME, target: n.targets()[0]}}
		return z.Finish(dst, r, c, wire.NoError, nil), Answered
	}
	c.reached = map[string]bool{n.owner: false}
	if !z.follow(r, n, "", 1, c) {
		if !z.ready.Load() { // the target may not have been listed yet
			return r.Error(dst, wire.ServFail, true, r.Recursive), Answered
		}
		return z.negative(dst, r, g, wire.NoError), Answered
	}
	if len(c.Outside) == 0 {
		return z.Finish(dst, r, c, wire.NoError, nil), Answered
	}
	r.Chain = c
	return dst, Chase
}

// follow adds the links from a name to its addresses, and reports whether it leads to any.
func (z *Zones) follow(r *Request, n *Name, owner string, depth int, c *Chain) (leads bool) {
	if s := n.find(r.QType); s != nil {
		c.links = append(c.links, link{owner: owner, typ: r.QType, data: s.data})
		leads = true
	}
	for _, t := range n.targets() {
		at := len(c.links)
		if at >= maxLinks {
			break
		}
		c.links = append(c.links, link{owner: owner, typ: wire.TypeCNAME, target: t})
		if z.reach(r, t, depth, c) {
			leads = true
		} else {
			c.links = c.links[:at]
		}
	}
	return leads
}

// reach follows a target once, however many names lead to it, in the zone that it is in. A target that does not exist or is part of
// a loop leads nowhere.
func (z *Zones) reach(r *Request, target string, depth int, c *Chain) bool {
	if leads, ok := c.reached[target]; ok {
		return leads
	}
	if depth >= maxChain || len(c.reached) >= maxReached {
		return false
	}
	c.reached[target] = false // until it is known: what leads back here is a loop
	var q wire.Query
	if !question(&q, target) {
		return false
	}
	g, _ := z.origin(&q)
	outside := g == nil || g.reverse || z.opts.Elsewhere != nil && z.opts.Elsewhere(&q, true)
	var next *Name
	if !outside {
		next = z.name(&q, target, g)
		outside = next == nil && z.opts.Elsewhere != nil && z.opts.Elsewhere(&q, false)
	}
	switch {
	case outside:
		c.reached[target] = true
		c.Outside = append(c.Outside, target)
	case next != nil:
		c.reached[target] = z.follow(r, next, target, depth+1, c)
	}
	return c.reached[target]
}

// question makes a query for a name in wire form.
func question(q *wire.Query, name string) bool {
	msg := append(make([]byte, wire.HeaderLen, wire.HeaderLen+len(name)+4), name...)
	msg[5] = 1
	return q.Parse(append(msg, 0, wire.TypeA, 0, wire.ClassIN)) == wire.OK
}

// within reports whether a name is a zone's or below it.
func within(name, zone string) bool {
	for at := 0; ; at += 1 + int(name[at]) {
		if name[at:] == zone {
			return true
		}
		if name[at] == 0 {
			return false
		}
	}
}

// name returns a name of a zone with its records.
func (z *Zones) name(q *wire.Query, owner string, g *origin) *Name {
	n, v := z.lookup(q, g)
	if v.s == nil {
		return n
	}
	e := z.cluster.Entry(v.s.key())
	if e == nil || e.Service == nil {
		return nil
	}
	own, endpoints := z.records(e)
	prefix, from := "", own
	switch below := q.Labels() - g.labels; below {
	case 4:
		prefix, from = owner[:q.LabelAt(1)], endpoints
	case 5:
		prefix = owner[:q.LabelAt(2)]
	}
	var match []record
	for _, r := range from {
		if prefix == "" || r.portLabels() == prefix || r.hostLabel() == prefix {
			match = append(match, r)
		}
	}
	return newName(owner, owner[len(prefix):], z.opts.TTL, match)
}

// Finish writes the response of a chain, which ends with rcode. found are the records of its Outside names, in wire form without compression.
func (z *Zones) Finish(dst []byte, r *Request, c *Chain, rcode uint8, found [][]byte) []byte {
	dst = r.Begin(dst)
	opt := 0
	if r.EDNS {
		opt = wire.OPTLen
	}
	an, ar, tc := 0, 0, false
	add := func(rr []byte) {
		if len(dst)+len(rr)+opt > r.Limit {
			tc = true
			return
		}
		dst = append(dst, rr...)
		an++
	}
	for _, l := range c.links {
		for _, rr := range l.records(z.opts.TTL) {
			add(rr)
		}
	}
	for _, rr := range found {
		add(rr)
	}
	if opt > 0 {
		dst, ar = r.AppendOPT(dst, 0, wire.Advertised), 1
	}
	r.Header(dst, rcode, true, r.Recursive, tc, 1, an, 0, ar)
	return dst
}

// records returns a link's records, with the owner in full if it is not the queried name.
func (l link) records(ttl uint32) [][]byte {
	if l.typ == wire.TypeCNAME {
		rr := append(appendRR(nil, toQuestion, wire.TypeCNAME, ttl, len(l.target)), l.target...)
		return [][]byte{l.owned(rr)}
	}
	var out [][]byte
	for at := 0; at < len(l.data); {
		end := recordEnd(l.data, at)
		out = append(out, l.owned(l.data[at:end]))
		at = end
	}
	return out
}

func (l link) owned(rr []byte) []byte {
	if l.owner == "" || binary.BigEndian.Uint16(rr) != toQuestion {
		return rr
	}
	return append([]byte(strings.Clone(l.owner)), rr[2:]...)
}
