package zone

import (
	"cmp"
	"hash/maphash"
	"net/netip"
	"slices"
	"strconv"

	"portal/internal/dns/wire"
)

// hashAddr hashes an address in the form of a block.
func (z *Zones) hashAddr(a string) uint64 { return maphash.String(z.seed, a) }

// eachAddr calls do with each address that a Service has a PTR record for: its cluster IPs and those of its ready endpoints, even
// if only the endpoints exist.
func (s *service) eachAddr(do func(a string)) {
	if s == nil || s.is(noReverse) {
		return
	}
	for _, b := range [...]block{s.clusterIPs(), s.endpoints()} {
		for at, i := 0, 0; i < b.count; i++ {
			var h host
			h, at = b.host(at)
			for list := h.v4; list != ""; list = list[4:] {
				do(list[:4])
			}
			for list := h.v6; list != ""; list = list[16:] {
				do(list[:16])
			}
		}
	}
}

// allAddrs lists the contents of the table of addresses.
func (z *Zones) allAddrs(add func(uint64, *service)) {
	z.services.each(func(s *service) bool {
		s.eachAddr(func(a string) { add(z.hashAddr(a), s) })
		return true
	})
}

// updateReverse replaces the old state of a Service by the new one in the table of addresses. Addresses of both are in the
// table at every moment.
func (z *Zones) updateReverse(was, now *service) {
	now.eachAddr(func(a string) {
		z.reverse.put(z.hashAddr(a), now, func(s *service) bool { return s == was || s == now })
	})
	was.eachAddr(func(a string) {
		z.reverse.remove(z.hashAddr(a), func(s *service) bool { return s == was })
	})
}

// pointers appends the Services that have an address, in an order that does not depend on history. If the address is a
// cluster IP, only its Service is returned, even if endpoints have it, too.
func (z *Zones) pointers(out []*service, a string) (found []*service, virtual bool) {
	z.reverse.find(z.hashAddr(a), func(s *service) bool {
		isClusterIP := s.clusterIPs().has(a)
		switch {
		case isClusterIP && !virtual:
			out, virtual = append(out[:0], s), true
		case isClusterIP || !virtual && s.endpoints().has(a) && !slices.Contains(out, s):
			out = append(out, s)
		}
		return false
	})
	slices.SortFunc(out, func(a, b *service) int {
		return cmp.Or(cmp.Compare(a.namespace(), b.namespace()), cmp.Compare(a.name(), b.name()))
	})
	if virtual {
		out = out[:1]
	}
	return out, virtual
}

func (b block) has(a string) bool {
	for at, i := 0, 0; i < b.count; i++ {
		var h host
		if h, at = b.host(at); h.has(a) {
			return true
		}
	}
	return false
}

// pointer answers for the name of an address, false if nothing has it.
func (z *Zones) pointer(dst []byte, r *Request, g *origin, a string) ([]byte, Outcome, bool) {
	var few [8]*service
	found, virtual := z.pointers(few[:0], a)
	w := writer{Request: r, dst: r.Begin(dst), ttl: z.opts.TTL, room: r.Limit}
	if r.EDNS {
		w.room -= wire.OPTLen
	}
	any := false
	for _, s := range found {
		z.eachTarget(s, a, virtual, func(t target) {
			any = true
			if r.QType == wire.TypePTR && w.fits(12+t.len()) {
				w.dst = t.append(appendRR(w.dst, toQuestion, wire.TypePTR, w.ttl, t.len()))
				w.an++
			}
		})
	}
	switch {
	case !any:
		return dst, Denied, false
	case w.an > 0 || w.cut:
		return w.finish(), Answered, true
	case r.QType == wire.TypeSOA:
		return z.negative(dst, r, g, wire.NoError), Answered, true
	}
	return z.negative(dst, r, g, wire.NXDomain), Denied, true
}

// eachTarget calls do with the targets of the PTR records of a Service's address.
func (z *Zones) eachTarget(s *service, a string, virtual bool, do func(target)) {
	t := target{labels: s.labels(), zone: z.origins[0].bytes}
	b := s.endpoints()
	if virtual {
		b = s.clusterIPs()
	}
	for at, i := 0, 0; i < b.count; i++ {
		var h host
		if h, at = b.host(at); h.has(a) {
			if t.label = h.label; t.len() <= wire.MaxName {
				do(t)
			}
		}
	}
}

// pointerName makes the reverse name of an address with its PTR records, nil if it has none.
func (z *Zones) pointerName(a string) *Name {
	found, virtual := z.pointers(nil, a)
	n := &Name{kind: ptrOnly}
	p := set{typ: wire.TypePTR}
	for _, s := range found {
		z.eachTarget(s, a, virtual, func(t target) {
			p.data = t.append(appendRR(p.data, toQuestion, wire.TypePTR, z.opts.TTL, t.len()))
			p.an++
		})
	}
	if p.an == 0 {
		return nil
	}
	addr, _ := netip.AddrFromSlice([]byte(a))
	n.owner = reverseName(addr)
	n.add(p)
	return n
}

const (
	arpa4 = "\x07in-addr\x04arpa\x00"
	arpa6 = "\x03ip6\x04arpa\x00"
)

// reverseName is the name below in-addr.arpa or ip6.arpa for an address.
func reverseName(a netip.Addr) string {
	var b []byte
	if a.Is4() {
		v := a.As4()
		for i := 3; i >= 0; i-- {
			at := len(b)
			b = strconv.AppendUint(append(b, 0), uint64(v[i]), 10)
			b[at] = byte(len(b) - at - 1)
		}
		return string(b) + arpa4
	}
	const hex = "0123456789abcdef"
	v := a.As16()
	for i := 15; i >= 0; i-- {
		b = append(b, 1, hex[v[i]&15], 1, hex[v[i]>>4])
	}
	return string(b) + arpa6
}
