package zone

import (
	"encoding/binary"
	"net/netip"

	"portal/internal/dns/wire"
)

// Name is a name with all its records in wire form. Their owner is a pointer to the question, so that an answer is a header,
// the question as received, and a copy.
type Name struct {
	owner string // wire form, lower case
	kind  kind
	n     uint8
	sets  [2]set // enough for nearly every name
	more  *more
}

// more is what only few names have.
type more struct {
	sets []set
	// targets are what the name is an alias of: those of an ExternalName Service.
	targets []string
}

// kind is how a name answers for types that it has no records of.
type kind uint8

const (
	plain  kind = iota
	bare        // a node of the tree without records of its own
	server      // the name of the name server
	txtOnly
	ptrOnly
)

// set is the records of one type.
type set struct {
	typ    uint16
	an, ar uint16
	// stride is the length of a record if all have the same and may be rotated.
	stride uint8
	data   []byte // answers, then additional records
}

func (n *Name) find(typ uint16) *set {
	for i := range n.sets {
		if n.sets[i].typ == typ && n.sets[i].an > 0 {
			return &n.sets[i]
		}
	}
	if n.more != nil {
		for i := range n.more.sets {
			if n.more.sets[i].typ == typ {
				return &n.more.sets[i]
			}
		}
	}
	return nil
}

func (n *Name) add(s set) {
	if int(n.n) < len(n.sets) {
		n.sets[n.n] = s
		n.n++
		return
	}
	if n.more == nil {
		n.more = &more{}
	}
	n.more.sets = append(n.more.sets, s)
}

// all are the sets of a name.
func (n *Name) all() []set {
	out := append([]set(nil), n.sets[:n.n]...)
	if n.more != nil {
		out = append(out, n.more.sets...)
	}
	return out
}

func (n *Name) targets() []string {
	if n.more == nil {
		return nil
	}
	return n.more.targets
}

const (
	toQuestion = 0xC000 | wire.HeaderLen // a pointer to the question's name
	maxPointer = 0x3FFF
)

func appendRR(b []byte, owner uint16, typ uint16, ttl uint32, rdlen int) []byte {
	b = binary.BigEndian.AppendUint16(b, owner)
	b = binary.BigEndian.AppendUint16(b, typ)
	b = binary.BigEndian.AppendUint16(b, wire.ClassIN)
	b = binary.BigEndian.AppendUint32(b, ttl)
	return binary.BigEndian.AppendUint16(b, uint16(rdlen))
}

func appendAddr(b []byte, owner uint16, ttl uint32, a netip.Addr) []byte {
	if a.Is4() {
		v := a.As4()
		return append(appendRR(b, owner, wire.TypeA, ttl, 4), v[:]...)
	}
	v := a.As16()
	return append(appendRR(b, owner, wire.TypeAAAA, ttl, 16), v[:]...)
}

// record is an address or a domain name that a name resolves to, with a port or none.
type record struct {
	host   string // endpoint's own label; empty: the Service itself
	addr   netip.Addr
	target string // a domain name in wire form, in place of an address
	port   int    // -1: none
	label  string // the port's name
	proto  string
}

// newName makes a name of what it resolves to. base is the Service's own name.
func newName(owner, base string, ttl uint32, records []record) *Name {
	n := &Name{owner: owner}
	n.addAddresses(ttl, records)
	n.addServices(base, ttl, records)
	for _, r := range records {
		if r.target != "" {
			if n.more == nil {
				n.more = &more{}
			}
			n.more.targets = append(n.more.targets, r.target)
		}
	}
	return n
}

func (n *Name) addAddresses(ttl uint32, records []record) {
	var v4, v6 []byte
	seen := make(map[netip.Addr]struct{}, len(records))
	for _, r := range records {
		if !r.addr.IsValid() {
			continue
		}
		if _, dup := seen[r.addr]; dup {
			continue
		}
		seen[r.addr] = struct{}{}
		if r.addr.Is4() {
			v4 = appendAddr(v4, toQuestion, ttl, r.addr)
		} else {
			v6 = appendAddr(v6, toQuestion, ttl, r.addr)
		}
	}
	if len(v4) > 0 {
		n.add(set{typ: wire.TypeA, an: uint16(len(v4) / 16), stride: 16, data: exact(v4)})
	}
	if len(v6) > 0 {
		n.add(set{typ: wire.TypeAAAA, an: uint16(len(v6) / 28), stride: 28, data: exact(v6)})
	}
}

// exact copies a buffer without spare capacity.
func exact(b []byte) []byte { return append(make([]byte, 0, len(b)), b...) }

// addServices prepares SRV records, and the addresses of their targets as additional ones.
func (n *Name) addServices(base string, ttl uint32, records []record) {
	total := 0
	for _, r := range records {
		if r.addr.IsValid() {
			total++
		}
	}
	if total == 0 {
		return
	}
	weight := weightOf(total)
	var answers, extra []byte
	s := set{typ: wire.TypeSRV}
	start := wire.HeaderLen + len(n.owner) + 4
	type hostPort struct {
		host string
		port int
	}
	type hostAddr struct {
		host string
		addr netip.Addr
	}
	ports, addrs, at := map[hostPort]bool{}, map[hostAddr]bool{}, map[string]int{}
	for _, r := range records {
		if !r.addr.IsValid() || r.port < 0 || ports[hostPort{r.host, r.port}] {
			continue
		}
		ports[hostPort{r.host, r.port}] = true
		length := len(base)
		if r.host != "" {
			length += 1 + len(r.host)
		}
		answers = appendRR(answers, toQuestion, wire.TypeSRV, ttl, 6+length)
		answers = binary.BigEndian.AppendUint16(answers, 0)
		answers = binary.BigEndian.AppendUint16(answers, weight)
		answers = binary.BigEndian.AppendUint16(answers, uint16(r.port))
		if _, ok := at[r.host]; !ok {
			at[r.host] = start + len(answers)
		}
		answers = appendTarget(answers, r.host, base)
		s.an++
	}
	for _, r := range records {
		if !r.addr.IsValid() || r.port < 0 || addrs[hostAddr{r.host, r.addr}] {
			continue
		}
		addrs[hostAddr{r.host, r.addr}] = true
		// RFC 2782 forbids a pointer in the target, not one to it.
		if p := at[r.host]; p <= maxPointer {
			extra = appendAddr(extra, 0xC000|uint16(p), ttl, r.addr)
		} else {
			full := appendAddr(nil, 0, ttl, r.addr)
			extra = append(appendTarget(extra, r.host, base), full[2:]...)
		}
		s.ar++
	}
	if s.an > 0 {
		s.data = append(append(make([]byte, 0, len(answers)+len(extra)), answers...), extra...)
		n.add(s)
	}
}

// weightOf is the weight of each of a number of SRV records, as CoreDNS computes it.
func weightOf(total int) uint16 { return max(1, uint16(100.0/float64(100*total)*100)) }

func appendTarget(b []byte, host, base string) []byte {
	if host != "" {
		b = append(append(b, byte(len(host))), host...)
	}
	return append(b, base...)
}
