package zone

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"portal/internal/intent"
)

// service is everything that the names of one Service resolve to, in every zone, in packed form: answering is a lookup by the
// Service's labels and a walk over a few bytes. A cluster has many endpoints, most of whose names are never queried, and
// full records would be several times as large. A service is replaced, never changed.
type service struct {
	// data is a byte of flags, the Service's two labels (its name and its namespace), and two blocks: its cluster IPs and
	// its ready endpoints.
	data string
	// written are names with full records, by owner: of an ExternalName Service, and of one whose endpoints do not fit the
	// packed form.
	written map[string]*Name
	names   int
}

const (
	ownClusterIPs = 1 << iota // the Service's own name resolves to its cluster IPs
	ownEndpoints              // to its endpoints
	endpointNames             // endpoints have names
	hidden                    // the namespace is not served
	noReverse                 // nor are there PTR records
)

func (s *service) is(flag byte) bool { return s.data[0]&flag != 0 }

// labels are the Service's name and namespace in wire form.
func (s *service) labels() string { return s.data[1:s.blocksAt()] }

func (s *service) name() string { return s.data[2 : 2+int(s.data[1])] }

func (s *service) namespace() string { return s.data[3+int(s.data[1]) : s.blocksAt()] }

func (s *service) blocksAt() int {
	at := 2 + int(s.data[1])
	return at + 1 + int(s.data[at])
}

func (s *service) clusterIPs() block {
	n, at := uvarint(s.data, s.blocksAt())
	return readBlock(s.data[at : at+n])
}

func (s *service) endpoints() block {
	n, at := uvarint(s.data, s.blocksAt())
	return readBlock(s.data[at+n:])
}

func (s *service) key() intent.Key { return intent.Key{Namespace: s.namespace(), Name: s.name()} }

// serviceLabels is the key of a Service, empty if it can't have a name.
func serviceLabels(k intent.Key) string {
	if len(k.Name) > 63 || len(k.Namespace) > 63 || k.Name == "" || k.Namespace == "" {
		return ""
	}
	b := make([]byte, 0, len(k.Name)+len(k.Namespace)+2)
	b = append(append(b, byte(len(k.Name))), strings.ToLower(k.Name)...)
	return string(append(append(b, byte(len(k.Namespace))), strings.ToLower(k.Namespace)...))
}

// prepare packs what a Service's names resolve to.
func (z *Zones) prepare(k intent.Key, labels string, e *intent.Entry) *service {
	clusterIPs, endpoints := newPacker(), newPacker()
	if e.Service != nil {
		set := clusterIPs.portSet(servicePorts(e.Service))
		for _, a := range e.Service.ClusterIPs {
			clusterIPs.add("", a.Unmap(), set)
		}
	}
	if !z.opts.NoEndpoints {
		z.packEndpoints(endpoints, e)
	}
	s := &service{names: len(clusterIPs.byAddr) + len(endpoints.byAddr)}
	flags, plain := z.shows(k, e, clusterIPs, endpoints)
	switch {
	case flags&hidden != 0:
	case !plain:
		s.written = map[string]*Name{}
		for _, n := range z.build(e) {
			s.written[n.owner] = n
		}
		s.names += len(s.written)
	case flags&endpointNames != 0:
		s.names += len(z.opts.Zones) * (1 + len(endpoints.members))
	}
	first := clusterIPs.pack()
	b := append([]byte{flags}, labels...)
	b = append(binary.AppendUvarint(b, uint64(len(first))), first...)
	s.data = string(append(b, endpoints.pack()...))
	return s
}

// shows decides which names a Service has, and whether they fit the packed form.
func (z *Zones) shows(k intent.Key, e *intent.Entry, clusterIPs, endpoints *packer) (flags byte, plain bool) {
	if !z.exposed(k.Namespace) {
		flags |= hidden
		if z.only != nil {
			flags |= noReverse
		}
	}
	switch own := e.Service; {
	case own == nil:
		return flags, true
	case own.Type == intent.ExternalName || clusterIPs.unpackable || endpoints.unpackable:
		return flags, false
	case own.Headless:
		return flags | ownEndpoints | endpointNames, true
	case z.opts.IgnoreEmpty && len(endpoints.members) == 0:
		return flags, true
	}
	return flags | ownClusterIPs | endpointNames, true
}

// servicePorts are a Service's ports in the form of an endpoint's.
func servicePorts(s *intent.Service) []intent.EndpointPort {
	out := make([]intent.EndpointPort, len(s.Ports))
	for i, p := range s.Ports {
		out[i] = intent.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port}
	}
	return out
}

func (z *Zones) packEndpoints(p *packer, e *intent.Entry) {
	for _, sl := range e.Slices {
		set := p.portSet(sl.Ports)
		for i := range sl.Endpoints {
			end := &sl.Endpoints[i]
			switch {
			case !end.Is(intent.Ready):
			case sl.Family == 0:
				p.unpackable = true
			case end.Addr.IsValid():
				p.add(z.hostname(sl, i), end.Addr.Unmap(), set)
			}
		}
	}
}

// member is a label below a Service, with its addresses; the Service itself has none.
type member struct {
	label  string
	set    int
	v4, v6 []netip.Addr
}

type port struct {
	number uint16 // 0: none
	// repeat: another port of the set has the same number.
	repeat bool
	// pair is _name._protocol in wire form, empty for a port without a name.
	pair string
}

type portSet struct {
	ports []port
	addrs int // addresses that have these ports
}

// packer builds a block. It is unpackable if the form can't express everything: full records are used instead.
type packer struct {
	members    []member
	sets       []portSet
	byLabel    map[string]int
	byAddr     map[netip.Addr]int
	unpackable bool
}

func newPacker() *packer {
	return &packer{byLabel: map[string]int{}, byAddr: map[netip.Addr]int{}}
}

// portSet returns the index of a set of ports, which it adds if it is new.
func (p *packer) portSet(list []intent.EndpointPort) int {
	ports := []port{{}} // an address without ports is still an address
	if len(list) > 0 {
		ports = make([]port, 0, len(list))
	}
	for _, l := range list {
		one := port{number: l.Port, pair: portPair(strings.ToLower(l.Name), strings.ToLower(l.Protocol.String()))}
		for _, other := range ports {
			one.repeat = one.repeat || other.number == one.number
			p.unpackable = p.unpackable || one.pair != "" && other.pair == one.pair
		}
		ports = append(ports, one)
	}
	for i := range p.sets {
		if slices.Equal(p.sets[i].ports, ports) {
			return i
		}
	}
	p.sets = append(p.sets, portSet{ports: ports})
	p.unpackable = p.unpackable || len(p.sets) > 255
	return len(p.sets) - 1
}

func portPair(label, proto string) string {
	if label == "" || proto == "" || len(label) > 62 {
		return ""
	}
	b := append([]byte{byte(1 + len(label)), '_'}, label...)
	return string(append(append(b, byte(1+len(proto)), '_'), proto...))
}

func (p *packer) add(label string, a netip.Addr, set int) {
	at, known := p.byLabel[label]
	if !known {
		at = len(p.members)
		p.byLabel[label] = at
		p.members = append(p.members, member{label: label, set: set})
	}
	m := &p.members[at]
	p.unpackable = p.unpackable || m.set != set
	if other, taken := p.byAddr[a]; taken {
		if other == at {
			return
		}
		p.unpackable = true
	}
	p.byAddr[a] = at
	list := &m.v6
	if a.Is4() {
		list = &m.v4
	}
	if slices.Contains(*list, a) {
		return
	}
	if len(*list) == 255 {
		// A member can't hold more: a second one with the same label keeps the PTR records.
		p.unpackable = true
		p.byLabel[label] = len(p.members)
		p.members = append(p.members, member{label: label, set: set})
		p.add(label, a, set)
		return
	}
	*list = append(*list, a)
	p.sets[set].addrs++
}

// pack writes the block:
//
//	counts of IPv4 and IPv6 addresses, members, sets; length of the sets
//	each set: its length, the count of its addresses, its ports: number, length of the pair and whether a repeat, pair
//	members sorted by label, as offsets from the first one, if there are many
//	each member: label, number of its set, counts of its addresses, addresses
func (p *packer) pack() []byte {
	if len(p.members) == 0 {
		return nil
	}
	var sets, members []byte
	for _, s := range p.sets {
		one := binary.AppendUvarint(nil, uint64(s.addrs))
		for _, q := range s.ports {
			n := byte(len(q.pair))
			if q.repeat {
				n |= 0x80
			}
			one = append(append(binary.BigEndian.AppendUint16(one, q.number), n), q.pair...)
		}
		sets = append(binary.AppendUvarint(sets, uint64(len(one))), one...)
	}
	n4, n6 := 0, 0
	offsets := make([]int, len(p.members))
	for i, m := range p.members {
		offsets[i] = len(members)
		members = append(append(members, byte(len(m.label))), m.label...)
		members = append(members, byte(m.set), byte(len(m.v4)), byte(len(m.v6)))
		for _, a := range m.v4 {
			v := a.As4()
			members = append(members, v[:]...)
		}
		for _, a := range m.v6 {
			v := a.As16()
			members = append(members, v[:]...)
		}
		n4, n6 = n4+len(m.v4), n6+len(m.v6)
	}
	var b []byte
	for _, v := range [...]int{n4, n6, len(p.members), len(p.sets), len(sets)} {
		b = binary.AppendUvarint(b, uint64(v))
	}
	b = append(b, sets...)
	if len(p.members) > fewMembers {
		order := make([]int, len(p.members))
		for i := range order {
			order[i] = i
		}
		slices.SortFunc(order, func(i, j int) int { return strings.Compare(p.members[i].label, p.members[j].label) })
		for _, i := range order {
			b = binary.BigEndian.AppendUint32(b, uint32(offsets[i]))
		}
	}
	return append(b, members...)
}

// fewMembers are searched one by one.
const fewMembers = 8
