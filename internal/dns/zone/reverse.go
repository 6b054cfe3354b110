package zone

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

// reverse knows which Services show an address. Nearly every address belongs to one; the others go to shared.
type reverse struct {
	owner  map[netip.Addr]intent.Key
	shared map[netip.Addr][]intent.Key // the further ones
	shown  map[intent.Key][]netip.Addr
}

func newReverse() reverse {
	return reverse{map[netip.Addr]intent.Key{}, map[netip.Addr][]intent.Key{}, map[intent.Key][]netip.Addr{}}
}

func (r *reverse) add(a netip.Addr, k intent.Key) {
	first, taken := r.owner[a]
	switch {
	case !taken:
		r.owner[a] = k
	case first != k && !slices.Contains(r.shared[a], k):
		r.shared[a] = append(r.shared[a], k)
	}
}

func (r *reverse) remove(a netip.Addr, k intent.Key) {
	more := r.shared[a]
	if r.owner[a] == k {
		if len(more) == 0 {
			delete(r.owner, a)
			return
		}
		r.owner[a], more = more[0], more[1:]
	} else if i := slices.Index(more, k); i >= 0 {
		more = slices.Delete(slices.Clone(more), i, i+1)
	}
	if len(more) == 0 {
		delete(r.shared, a)
	} else {
		r.shared[a] = more
	}
}

// of returns the Services that show an address, in an order that does not depend on how it came about.
func (r *reverse) of(a netip.Addr) []intent.Key {
	first, ok := r.owner[a]
	if !ok {
		return nil
	}
	keys := append([]intent.Key{first}, r.shared[a]...)
	slices.SortFunc(keys, func(a, b intent.Key) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return keys
}

// updateReverse renews the PTR records of all addresses that a Service shows or showed.
func (z *Zones) updateReverse(k intent.Key, e *intent.Entry) {
	was, now := z.reverse.shown[k], z.addresses(k, e)
	for _, a := range was {
		z.reverse.remove(a, k)
	}
	for _, a := range now {
		z.reverse.add(a, k)
	}
	if len(now) > 0 {
		z.reverse.shown[k] = now
	} else {
		delete(z.reverse.shown, k)
	}
	touched := make(map[netip.Addr]struct{}, len(was)+len(now))
	for _, list := range [][]netip.Addr{was, now} {
		for _, a := range list {
			touched[a] = struct{}{}
		}
	}
	for a := range touched {
		z.buildPointer(a)
	}
}

// addresses are those that lead back to a Service: its cluster IPs, and its ready endpoints', whether the Service is
// there or not.
func (z *Zones) addresses(k intent.Key, e *intent.Entry) []netip.Addr {
	if e == nil || z.only != nil && !z.exposed(k.Namespace) {
		return nil
	}
	var out []netip.Addr
	if e.Service != nil {
		out = append(out, e.Service.ClusterIPs...)
	}
	if z.opts.NoEndpoints {
		return out
	}
	for _, s := range e.Slices {
		for i := range s.Endpoints {
			if end := &s.Endpoints[i]; end.Is(intent.Ready) && end.Addr.IsValid() {
				out = append(out, end.Addr.Unmap())
			}
		}
	}
	return out
}

// buildPointer makes the PTR records of an address. A cluster IP's Service comes before endpoints that share it.
func (z *Zones) buildPointer(a netip.Addr) {
	owner := reverseName(a)
	var targets []string
	for _, k := range z.reverse.of(a) {
		e := z.cluster.Entry(k)
		if e == nil {
			continue
		}
		base := serviceName(k, z.origins[0].wire)
		if base == "" {
			continue
		}
		if e.Service != nil && slices.Contains(e.Service.ClusterIPs, a) {
			targets = []string{base}
			break
		}
		for _, s := range e.Slices {
			for i := range s.Endpoints {
				end := &s.Endpoints[i]
				if !end.Is(intent.Ready) || end.Addr.Unmap() != a {
					continue
				}
				if t := string(appendTarget(nil, z.hostname(s, i), base)); len(t) <= wire.MaxName && !slices.Contains(targets, t) {
					targets = append(targets, t)
				}
			}
		}
	}
	if len(targets) == 0 {
		z.table.remove(owner)
		return
	}
	n := &Name{owner: owner, kind: ptrOnly}
	var data []byte
	for _, t := range targets {
		data = append(appendRR(data, toQuestion, wire.TypePTR, z.opts.TTL, len(t)), t...)
	}
	n.add(set{typ: wire.TypePTR, an: uint16(len(targets)), data: exact(data)})
	z.table.put(n)
}

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
		return string(b) + "\x07in-addr\x04arpa\x00"
	}
	const hex = "0123456789abcdef"
	v := a.As16()
	for i := 15; i >= 0; i-- {
		b = append(b, 1, hex[v[i]&15], 1, hex[v[i]>>4])
	}
	return string(b) + "\x03ip6\x04arpa\x00"
}
