package zone

import (
	"encoding/binary"
	"hash/maphash"

	"portal/internal/dns/wire"
)

// view is the part of a Service that one of its names resolves to: all members of a block or one, with all ports or one.
type view struct {
	s     *service
	block block
	at, n int    // the first member, and how many
	pair  []byte // _name._protocol of the only port; nil: all of them
}

// service finds a Service by its labels in wire form.
func (z *Zones) service(labels []byte) *service {
	s := z.services.find(maphash.Bytes(z.seed, labels), func(s *service) bool { return s.labels() == string(labels) })
	if s == nil || s.is(hidden) {
		return nil
	}
	return s
}

// look returns what a name below a Service resolves to, false if it does not exist. below is the number of labels below the
// zone.
func (s *service) look(q *wire.Query, below int) (v view, ok bool) {
	v.s = s
	if below == 4 {
		if !s.is(endpointNames) {
			return v, false
		}
		v.block, v.n = s.endpoints(), 1
		v.at = v.block.find(q.Label(0))
		return v, v.at >= 0
	}
	switch {
	case s.is(ownClusterIPs):
		v.block = s.clusterIPs()
	case s.is(ownEndpoints):
		v.block = s.endpoints()
	}
	v.n = v.block.count
	if below == 3 || v.n == 0 {
		return v, v.n > 0
	}
	v.pair = q.Name()[:q.LabelAt(2)]
	return v, v.weigh() > 0
}

// wants reports whether a port belongs to the view.
func (v *view) wants(p *port) bool { return v.pair == nil || p.pair == string(v.pair) }

// shown counts the ports of a set in the view: all, and those with a SRV record.
func (v *view) shown(ports string) (all, srv int) {
	for ports != "" {
		var p port
		if p, ports = nextPort(ports); v.wants(&p) {
			all++
			if p.number > 0 && (v.pair != nil || !p.repeat) {
				srv++
			}
		}
	}
	return all, srv
}

// weigh counts the view's pairs of address and port.
func (v *view) weigh() (records int) {
	if v.n == 1 {
		h, _ := v.block.host(v.at)
		_, ports := v.block.set(h.set)
		all, _ := v.shown(ports)
		return (len(h.v4)/4 + len(h.v6)/16) * all
	}
	for i := range v.block.nsets {
		n, ports := v.block.set(i)
		all, _ := v.shown(ports)
		records += n * all
	}
	return records
}

// count is the number of addresses of a family.
func (v *view) count(size int) (n int) {
	if v.n == v.block.count && (v.pair == nil || v.block.nsets == 1) {
		if size == 4 {
			return v.block.n4
		}
		return v.block.n6
	}
	for at, i := v.at, 0; i < v.n; i++ {
		var h host
		h, at = v.block.host(at)
		n += len(v.addrs(&h, size)) / size
	}
	return n
}

// addrs are a member's addresses of a family in the view.
func (v *view) addrs(h *host, size int) string {
	if v.pair != nil && v.block.nsets > 1 {
		_, ports := v.block.set(h.set)
		if all, _ := v.shown(ports); all == 0 {
			return ""
		}
	}
	if size == 4 {
		return h.v4
	}
	return h.v6
}

// show answers from a view: header, question, records.
func (z *Zones) show(dst []byte, r *Request, g *origin, v *view) ([]byte, Outcome) {
	w := writer{Request: r, dst: r.Begin(dst), ttl: z.opts.TTL, room: r.Limit}
	if r.EDNS {
		w.room -= wire.OPTLen
	}
	switch r.QType {
	case wire.TypeA:
		w.addresses(v, wire.TypeA, 4)
	case wire.TypeAAAA:
		w.addresses(v, wire.TypeAAAA, 16)
	case wire.TypeSRV:
		w.services(v, g)
	}
	if w.an == 0 && !w.cut {
		return z.negative(dst, r, g, wire.NoError), Answered
	}
	return w.finish(), Answered
}

// writer writes the records of an answer until there is no more room.
type writer struct {
	*Request
	dst    []byte
	ttl    uint32
	room   int
	an, ar int
	cut    bool
}

func (w *writer) finish() []byte {
	ar := w.ar
	if w.EDNS {
		w.dst = w.AppendOPT(w.dst, 0, wire.Advertised)
		ar++
	}
	w.Cut = w.Cut || w.cut
	w.Header(w.dst, wire.NoError, true, w.Recursive, w.cut, 1, w.an, 0, ar)
	return w.dst
}

// fits reports whether a record of a length fits; the first that does not ends the answer.
func (w *writer) fits(n int) bool {
	w.cut = w.cut || len(w.dst)+n > w.room
	return !w.cut
}

// addresses writes the addresses of a view, rotated if all fit.
func (w *writer) addresses(v *view, typ uint16, size int) {
	total := v.count(size)
	if total == 0 {
		return
	}
	length, start := 12+size, len(w.dst)
	fit, turn := total, 0
	if w.cut = start+total*length > w.room; w.cut {
		fit = max(0, (w.room-start)/length)
	} else {
		turn = int(w.Rotate % uint32(total))
	}
	w.dst, w.an = w.dst[:start+fit*length], fit
	slot := 0
	if turn > 0 {
		slot = total - turn
	}
	for at, i, done := v.at, 0, 0; i < v.n && done < fit; i++ {
		var h host
		h, at = v.block.host(at)
		for list := v.addrs(&h, size); list != "" && done < fit; list = list[size:] {
			b := w.dst[start+slot*length:]
			putRR(b, toQuestion, typ, w.ttl, size)
			copy(b[12:12+size], list)
			done++
			if slot++; slot == total {
				slot = 0
			}
		}
	}
}

func putRR(b []byte, owner, typ uint16, ttl uint32, rdlen int) {
	_ = b[11]
	binary.BigEndian.PutUint64(b, uint64(owner)<<48|uint64(typ)<<32|wire.ClassIN<<16|uint64(ttl>>16))
	binary.BigEndian.PutUint32(b[8:], ttl<<16|uint32(rdlen))
}

// services writes a view's SRV records, and the addresses of their targets as additional ones.
func (w *writer) services(v *view, g *origin) {
	total := v.weigh()
	if total == 0 {
		return
	}
	weight := weightOf(total)
	// The zone's name is in the case of the query, as with CoreDNS.
	base := target{labels: v.s.labels(), zone: w.Asked()[len(w.Name())-len(g.wire):]}
	start := len(w.dst)
	for at, i := v.at, 0; i < v.n; i++ {
		var h host
		h, at = v.block.host(at)
		base.label = h.label
		_, ports := v.block.set(h.set)
		for ports != "" {
			var p port
			if p, ports = nextPort(ports); !v.wants(&p) || p.number == 0 || v.pair == nil && p.repeat {
				continue
			}
			length := base.len()
			if !w.fits(18 + length) {
				return
			}
			w.dst = appendRR(w.dst, toQuestion, wire.TypeSRV, w.ttl, 6+length)
			w.dst = append(w.dst, 0, 0, byte(weight>>8), byte(weight), byte(p.number>>8), byte(p.number))
			w.dst = base.append(w.dst)
			w.an++
		}
	}
	w.targets(v, base, start)
}

// targets writes the addresses of SRV records that begin at start.
func (w *writer) targets(v *view, base target, start int) {
	first := start + 18 // where the target of the first is
	for at, i := v.at, 0; i < v.n; i++ {
		var h host
		h, at = v.block.host(at)
		base.label = h.label
		_, ports := v.block.set(h.set)
		_, srv := v.shown(ports)
		if srv == 0 {
			continue
		}
		for list := h.v4; list != ""; list = list[4:] {
			if !w.additional(base, first, wire.TypeA, list[:4]) {
				return
			}
		}
		for list := h.v6; list != ""; list = list[16:] {
			if !w.additional(base, first, wire.TypeAAAA, list[:16]) {
				return
			}
		}
		first += srv * (18 + base.len())
	}
}

// additional writes an address of a target whose name is at an offset.
func (w *writer) additional(t target, at int, typ uint16, addr string) bool {
	// RFC 2782 forbids a pointer in the target, not one to it.
	length := 12 + len(addr)
	if at > maxPointer {
		length += t.len() - 2
	}
	if !w.fits(length) {
		return false
	}
	if at <= maxPointer {
		w.dst = appendRR(w.dst, 0xC000|uint16(at), typ, w.ttl, len(addr))
	} else {
		w.dst = t.append(w.dst)
		n := len(w.dst)
		w.dst = w.dst[:n+10]
		binary.BigEndian.PutUint64(w.dst[n:], uint64(typ)<<48|wire.ClassIN<<32|uint64(w.ttl))
		binary.BigEndian.PutUint16(w.dst[n+8:], uint16(len(addr)))
	}
	w.dst = append(w.dst, addr...)
	w.ar++
	return true
}

// target is the name of a member: its label if it has one, the Service's labels, the zone.
type target struct {
	label, labels string
	zone          []byte
}

const (
	svc = "\x03svc"
	pod = "\x03pod"
)

func (t *target) len() int {
	n := len(t.labels) + len(svc) + len(t.zone)
	if t.label != "" {
		n += 1 + len(t.label)
	}
	return n
}

func (t *target) append(b []byte) []byte {
	if t.label != "" {
		b = append(append(b, byte(len(t.label))), t.label...)
	}
	return append(append(append(b, t.labels...), svc...), t.zone...)
}
