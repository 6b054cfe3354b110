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

// eachAddr calls do with each address that leads back to a Service: its cluster IPs and its ready endpoints', whether
// the Service itself is there or not.
func (s *service) eachAddr(do func(a string)) {
	if s == nil || s.is(secret) {
		return
	}
	for _, b := range [...]block{s.front(), s.ends()} {
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

// allAddrs lists what the table of addresses holds.
func (z *Zones) allAddrs(add func(uint64, *service)) {
	z.services.each(func(s *service) bool {
		s.eachAddr(func(a string) { add(z.hashAddr(a), s) })
		return true
	})
}

// updateReverse lets the addresses of a Service lead to its new state in place of the old one. Those that are in both
// lead somewhere at every moment.
func (z *Zones) updateReverse(was, now *service) {
	now.eachAddr(func(a string) {
		z.reverse.put(z.hashAddr(a), now, func(s *service) bool { return s == was || s == now })
	})
	was.eachAddr(func(a string) {
		z.reverse.remove(z.hashAddr(a), func(s *service) bool { return s == was })
	})
}

// pointers appends the Services that an address leads back to, in an order that does not depend on how it came about.
// One that has it as its cluster IP comes alone, before endpoints that share it.
func (z *Zones) pointers(out []*service, a string) (found []*service, front bool) {
	z.reverse.find(z.hashAddr(a), func(s *service) bool {
		inFront := s.front().has(a)
		switch {
		case inFront && !front:
			out, front = append(out[:0], s), true
		case inFront || !front && s.ends().has(a) && !slices.Contains(out, s):
			out = append(out, s)
		}
		return false
	})
	slices.SortFunc(out, func(a, b *service) int {
		return cmp.Or(cmp.Compare(a.namespace(), b.namespace()), cmp.Compare(a.name(), b.name()))
	})
	if front {
		out = out[:1]
	}
	return out, front
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
	found, front := z.pointers(few[:0], a)
	w := writer{Request: r, dst: r.Begin(dst), ttl: z.opts.TTL, room: r.Limit}
	if r.EDNS {
		w.room -= wire.OPTLen
	}
	any := false
	for _, s := range found {
		z.eachTarget(s, a, front, func(t target) {
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

// eachTarget calls do with the names that an address of a Service leads to.
func (z *Zones) eachTarget(s *service, a string, front bool, do func(target)) {
	t := target{labels: s.labels(), zone: z.origins[0].bytes}
	b := s.ends()
	if front {
		b = s.front()
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

// pointerName writes out what an address leads to, nil for nothing.
func (z *Zones) pointerName(a string) *Name {
	found, front := z.pointers(nil, a)
	n := &Name{kind: ptrOnly}
	p := set{typ: wire.TypePTR}
	for _, s := range found {
		z.eachTarget(s, a, front, func(t target) {
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

// reverseName is the name that leads from an address to its names.
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
