package zone

import (
	"portal/internal/dns/wire"
)

// Walk calls do with a message for each set of records in a zone except SOA: for a transfer. Of a zone within it that is served by itself, only the
// delegation is among them (RFC 5936, section 2.2).
func (z *Zones) Walk(origin string, do func(message []byte) error) (err error) {
	z.each(func(n *Name) bool {
		if of := z.zoneOf(n.owner); of != origin {
			for _, s := range z.delegation(origin, of, n) {
				if err = do(n.message(s.typ, s)); err != nil {
					return false
				}
			}
			return true
		}
		for _, s := range n.all() {
			if err = do(n.message(s.typ, s)); err != nil {
				return false
			}
		}
		for _, t := range n.targets() {
			cname := append(appendRR(nil, toQuestion, wire.TypeCNAME, z.opts.TTL, len(t)), t...)
			if err = do(n.message(wire.TypeCNAME, set{an: 1, data: cname})); err != nil {
				return false
			}
		}
		return true
	})
	return err
}

// zoneOf is the longest zone that a name is in, empty for none.
func (z *Zones) zoneOf(name string) (found string) {
	for _, g := range z.origins {
		if len(g.wire) > len(found) && within(name, g.wire) {
			found = g.wire
		}
	}
	return found
}

// delegation is what a zone has of a name in another one: where that is the next below it, the name servers of its apex and their addresses.
func (z *Zones) delegation(origin, of string, n *Name) (out []set) {
	if of == "" || z.zoneOf(of[1+int(of[0]):]) != origin {
		return nil
	}
	for _, s := range n.all() {
		address := s.typ == wire.TypeA || s.typ == wire.TypeAAAA
		if n.owner == of && s.typ == wire.TypeNS || n.owner == nameServer+of && address {
			out = append(out, s)
		}
	}
	return out
}

// each calls do with every name and its records until it returns false.
func (z *Zones) each(do func(*Name) bool) {
	on := true
	z.table.each(func(n *Name) bool { on = do(n); return on })
	seen := map[string]struct{}{}
	z.services.each(func(s *service) bool {
		if e := z.cluster.Entry(s.key()); e != nil && !s.is(hidden) {
			for _, n := range z.build(e) {
				on = on && do(n)
			}
		}
		s.eachAddr(func(a string) {
			if _, dup := seen[a]; on && !dup {
				seen[a] = struct{}{}
				if n := z.pointerName(a); n != nil {
					on = do(n)
				}
			}
		})
		return on
	})
}

// message wraps a set in a message, so that its pointers are valid.
func (n *Name) message(typ uint16, s set) []byte {
	msg := make([]byte, wire.HeaderLen, wire.HeaderLen+len(n.owner)+4+len(s.data))
	msg[2], msg[5] = 0x80, 1
	msg[6], msg[7] = byte(s.an>>8), byte(s.an)
	msg[10], msg[11] = byte(s.ar>>8), byte(s.ar)
	msg = append(append(msg, n.owner...), byte(typ>>8), byte(typ), 0, wire.ClassIN)
	return append(msg, s.data...)
}
