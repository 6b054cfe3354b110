package zone

import (
	"bytes"
	"encoding/binary"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

// Outcome is the result of Answer.
type Outcome uint8

const (
	// Answered: the response is complete.
	Answered Outcome = iota
	// Foreign: the name is in none of the zones.
	Foreign
	// Denied is Answered with a denial: the server may resolve the name elsewhere instead.
	Denied
	// Chase: the name is an alias of one that is not in the zones; see Chain.
	Chase
)

// Request is a query and how it may be answered.
type Request struct {
	*wire.Query
	Limit     int    // of the response
	Rotate    uint32 // turns the order of addresses
	Recursive bool   // set RA
	// Cut is set when Limit cut off prepared records.
	Cut bool
	// Zone is set to the index of the name's zone, -1 for none.
	Zone int
	// Chain is set for Chase: what has been found so far, and the names that must be resolved elsewhere.
	Chain *Chain
}

// Origin returns the zone that a name is in, in wire form, and whether it is a reverse zone; false for none.
func (z *Zones) Origin(q *wire.Query) (name string, reverse, ok bool) {
	g, _ := z.origin(q)
	if g == nil {
		return "", false, false
	}
	return g.wire, g.reverse, true
}

// origin returns the longest zone that contains a name, nil for none.
func (z *Zones) origin(q *wire.Query) (found *origin, at int) {
	name, at := q.Name(), -1
	for i := range z.origins {
		g := &z.origins[i]
		if (found == nil || len(g.wire) > len(found.wire)) &&
			len(name) >= len(g.wire) && q.Labels() >= g.labels && string(name[len(name)-len(g.wire):]) == g.wire &&
			(q.Labels() == g.labels || q.LabelAt(q.Labels()-g.labels) == len(name)-len(g.wire)) {
			found, at = g, i
		}
	}
	return found, at
}

// Answer writes the response to a query into dst, which must have room for r.Limit bytes.
func (z *Zones) Answer(dst []byte, r *Request) ([]byte, Outcome) {
	g, at := z.origin(r.Query)
	r.Zone = at
	if g == nil {
		return dst, Foreign
	}
	if g.reverse {
		if a, ok := r.ReverseAddr(); ok {
			v := a.As16()
			raw := v[:]
			if a.Is4() {
				raw = v[12:]
			}
			if out, outcome, found := z.pointer(dst, r, g, string(raw)); found {
				return out, outcome
			}
		}
	}
	n, v := z.lookup(r.Query, g)
	if v.s != nil {
		return z.show(dst, r, g, &v)
	}
	if n == nil {
		// SOA is about the zone, which exists.
		if r.QType == wire.TypeSOA {
			return z.negative(dst, r, g, wire.NoError), Answered
		}
		if !z.ready.Load() {
			return r.Error(dst, wire.ServFail, true, r.Recursive), Answered
		}
		return z.negative(dst, r, g, wire.NXDomain), Denied
	}
	if s := n.find(r.QType); s != nil {
		return z.positive(dst, r, g, s), Answered
	}
	return z.without(dst, r, g, n)
}

// without answers for a name that has no records of the type.
func (z *Zones) without(dst []byte, r *Request, g *origin, n *Name) ([]byte, Outcome) {
	if r.QType == wire.TypeSOA {
		if len(n.owner) == len(g.wire) {
			return z.soa(dst, r, g), Answered
		}
		return z.negative(dst, r, g, wire.NoError), Answered
	}
	// If a name has records of some types only, CoreDNS answers NXDOMAIN for others; clients rely on it.
	absent := false
	switch n.kind {
	case bare:
		absent = r.QType == wire.TypeTXT
	case server:
		absent = r.QType == wire.TypeTXT || r.QType == wire.TypePTR
	case txtOnly, ptrOnly:
		absent = true
	}
	if absent {
		return z.negative(dst, r, g, wire.NXDomain), Denied
	}
	if len(n.targets()) > 0 && (r.QType == wire.TypeA || r.QType == wire.TypeAAAA || r.QType == wire.TypeCNAME) {
		return z.alias(dst, r, g, n)
	}
	return z.negative(dst, r, g, wire.NoError), Answered
}

// positive is the hot path: header, question, copy.
func (z *Zones) positive(dst []byte, r *Request, g *origin, s *set) []byte {
	dst = r.Begin(dst)
	start := len(dst)
	opt := 0
	if r.EDNS {
		opt = wire.OPTLen
	}
	an, ar, tc := int(s.an), int(s.ar), false
	if start+len(s.data)+opt > r.Limit {
		var n int
		n, an, ar = fit(s.data, an, ar, r.Limit-start-opt)
		dst, tc, r.Cut = append(dst, s.data[:n]...), true, true
	} else if s.stride > 0 && an > 1 {
		turn := int(r.Rotate%uint32(an)) * int(s.stride)
		dst = append(append(dst, s.data[turn:]...), s.data[:turn]...)
	} else {
		dst = append(dst, s.data...)
	}
	if s.typ == wire.TypeSRV {
		keepCase(dst, start, an+ar, r.Asked()[len(r.Name())-len(g.wire):], g.wire)
	}
	if opt > 0 {
		dst = r.AppendOPT(dst, 0, wire.Advertised)
		ar++
	}
	r.Header(dst, wire.NoError, true, r.Recursive, tc, 1, an, 0, ar)
	return dst
}

// fit returns how many bytes, answers and additional records fit into a number of bytes.
func fit(data []byte, an, ar, room int) (n, fitAN, fitAR int) {
	for i := range an + ar {
		end := recordEnd(data, n)
		if end < 0 || end > room {
			break
		}
		n = end
		if i < an {
			fitAN++
		} else {
			fitAR++
		}
	}
	return n, fitAN, fitAR
}

func recordEnd(data []byte, at int) int {
	if at = wire.SkipName(data, at); at < 0 || at+10 > len(data) {
		return -1
	}
	return at + 10 + int(binary.BigEndian.Uint16(data[at+8:]))
}

// keepCase writes the zone's name in SRV targets the way the client wrote it, as CoreDNS does.
func keepCase(msg []byte, at, records int, asked []byte, origin string) {
	if string(asked) == origin {
		return
	}
	for range records {
		end := recordEnd(msg, at)
		if end < 0 || end > len(msg) {
			return
		}
		fixed := wire.SkipName(msg, at)
		if fixed-at > 2 { // an owner written out
			copy(msg[fixed-len(asked):fixed], asked)
		}
		if binary.BigEndian.Uint16(msg[fixed:]) == wire.TypeSRV {
			copy(msg[end-len(asked):end], asked)
		}
		at = end
	}
}

// negative answers that there is no such name, or that it has no such records.
func (z *Zones) negative(dst []byte, r *Request, g *origin, rcode uint8) []byte {
	dst = z.appendSOA(r.Begin(dst), wire.HeaderLen+len(r.Name())-len(g.wire))
	ar := 0
	if r.EDNS {
		dst, ar = r.AppendOPT(dst, 0, wire.Advertised), 1
	}
	r.Header(dst, rcode, true, r.Recursive, false, 1, 0, 1, ar)
	return dst
}

func (z *Zones) soa(dst []byte, r *Request, g *origin) []byte {
	dst = z.appendSOA(r.Begin(dst), wire.HeaderLen)
	ar := 0
	if r.EDNS {
		dst, ar = r.AppendOPT(dst, 0, wire.Advertised), 1
	}
	r.Header(dst, wire.NoError, true, r.Recursive, false, 1, 1, 0, ar)
	return dst
}

// appendSOA appends a zone's SOA record; at is where the question names the zone.
func (z *Zones) appendSOA(b []byte, at int) []byte {
	p := 0xC000 | uint16(at)
	ttl := min(z.opts.TTL, 300)
	b = appendRR(b, p, wire.TypeSOA, ttl, 9+13+20)
	b = binary.BigEndian.AppendUint16(append(b, nameServer...), p)
	b = binary.BigEndian.AppendUint16(append(b, "\x0ahostmaster"...), p)
	b = binary.BigEndian.AppendUint32(b, z.serial.Load())
	for _, v := range [...]uint32{7200, 1800, 86400, z.opts.TTL} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return b
}

// lookup finds a name of a zone, with its records or as a view of a Service; neither if it does not exist.
func (z *Zones) lookup(q *wire.Query, g *origin) (*Name, view) {
	below := q.Labels() - g.labels
	if g.reverse || below < 3 {
		return z.get(q.Name()), view{}
	}
	if below > 5 {
		return nil, view{}
	}
	switch string(q.Label(below - 1)) {
	case "pod":
		return z.pod(q.Name(), q.Label(below-2), q.Label(below-3), *g), view{}
	case "svc":
		s := z.service(q.Name()[q.LabelAt(below-3):q.LabelAt(below-1)])
		switch {
		case s == nil:
		case below == 5 && (bareLabel(q.Label(0)) || bareLabel(q.Label(1))):
			return z.port(q, s, g), view{}
		case s.written != nil:
			return s.written[string(q.Name())], view{}
		default:
			if v, ok := s.look(q, below); ok {
				return nil, v
			}
		}
	}
	return nil, view{}
}

func bareLabel(l []byte) bool { return l[0] != '_' || len(l) == 1 }

// port answers for a port's name in an unusual form: without an underscore, or without the port.
func (z *Zones) port(q *wire.Query, s *service, g *origin) *Name {
	label, proto := bytes.TrimPrefix(q.Label(0), []byte("_")), bytes.TrimPrefix(q.Label(1), []byte("_"))
	e := z.cluster.Entry(s.key())
	if e == nil || e.Service == nil || e.Service.Type == intent.ExternalName && len(label)+len(proto) > 0 {
		return nil
	}
	own, _ := z.records(e)
	var match []record
	for _, r := range own {
		if (len(label) == 0 || r.label == string(label)) && (len(proto) == 0 || r.proto == string(proto)) {
			match = append(match, r)
		}
	}
	if len(match) == 0 {
		return nil
	}
	return newName(string(q.Name()), serviceName(e.Service.Key, g.wire), z.opts.TTL, match)
}

// Origins are the zones, in wire form: the cluster's domains first.
func (z *Zones) Origins() []string {
	var out []string
	for _, g := range z.origins {
		out = append(out, g.wire)
	}
	return out
}

// IsApex reports whether the queried name is a zone itself.
func (z *Zones) IsApex(q *wire.Query) bool {
	g, _ := z.origin(q)
	return g != nil && len(q.Name()) == len(g.wire)
}
