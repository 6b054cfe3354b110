package nftables

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// set is a set or map in a table.
type set struct {
	family          byte
	table, name     string
	key, data       []field
	flags, size     uint32
	id              uint32
	verdicts        bool
	keyLen, dataLen uint32
}

// field is a part of a key or of data; it takes up whole registers of four bytes.
type field struct {
	// magic is the number of the type in the nft tool, so that it can print what is in a set.
	magic uint32
	size  uint32
}

var (
	ipv4Field  = field{7, 4}
	ipv6Field  = field{8, 16}
	protoField = field{12, 1}
	portField  = field{13, 2}
	// A number without a meaning to others: nft prints a mark in hexadecimal.
	numberField = field{19, 4}
)

func length(fields []field) (n uint32) {
	for _, f := range fields {
		n += uint32(nf.Align(int(f.size)))
	}
	return n
}

func magic(fields []field) (n uint32) {
	for _, f := range fields {
		n = n<<6 | f.magic
	}
	return n
}

// layout is the names and forms of everything in a table of one family.
type layout struct {
	family byte
	table  string
	width  int // bytes of an address

	services, backends, shapes, clusterIPs, nodeIPs, same, sources *set
	// Of affinity: choices are backends with data as in affinity.
	affinity, choices, members *set
}

// affinityLimit is how many clients are remembered in a family; the kernel reserves 16 bytes for each.
const affinityLimit = 1 << 18

// setConcat is NFT_SET_CONCAT, which package unix lacks: the set knows where the fields of its intervals are.
const setConcat = 0x80

func layoutOf(f intent.Family, table string) *layout {
	l := &layout{family: unix.NFPROTO_IPV4, table: table, width: 4}
	addr := ipv4Field
	if f == intent.IPv6 {
		l.family, l.width, addr = unix.NFPROTO_IPV6, 16, ipv6Field
	}
	frontend := []field{addr, protoField, portField}
	endpoint := []field{addr, portField}
	id := []field{numberField, numberField}
	n := uint32(0)
	made := func(name string, flags uint32, key, data []field) *set {
		n++
		s := &set{family: l.family, table: table, name: name, key: key, data: data, flags: flags, id: n}
		s.keyLen, s.dataLen = length(key), length(data)
		return s
	}
	l.services = made("services", unix.NFT_SET_MAP, frontend, append([]field{numberField, numberField}, id...))
	l.backends = made("backends", unix.NFT_SET_MAP, append(id[:2:2], numberField), endpoint)
	l.shapes = made("shapes", unix.NFT_SET_MAP, []field{numberField}, nil)
	l.shapes.verdicts = true
	l.clusterIPs = made("cluster-ips", 0, []field{addr}, nil)
	l.nodeIPs = made("node-ips", 0, []field{addr}, nil)
	l.same = made("same", 0, []field{numberField, numberField}, nil)
	l.sources = made("sources", unix.NFT_SET_INTERVAL|setConcat, append(frontend[:3:3], addr), nil)
	l.affinity = made("affinity", unix.NFT_SET_MAP|unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL, append([]field{addr}, id...), append([]field{numberField}, endpoint...))
	l.affinity.size = affinityLimit
	l.choices = made("choices", unix.NFT_SET_MAP, l.backends.key, l.affinity.data)
	l.members = made("members", 0, append(append(id[:2:2], numberField), endpoint...), nil)
	return l
}

// slot is a small number of its own for elements that come to a set of either family, or go.
func (s *set) slot(del bool) (n uint32) {
	n = s.id << 2
	if s.family == unix.NFPROTO_IPV6 {
		n |= 2
	}
	if del {
		n |= 1
	}
	return n
}

// always are the sets that are there from the beginning; affinity and members come with the first Service that wants
// them.
func (l *layout) always() []*set {
	return []*set{l.services, l.backends, l.shapes, l.clusterIPs, l.nodeIPs, l.same, l.sources}
}

// fit decides how large the sets that grow with the Services are made. The kernel fills one whose size it knows in less
// than half the time that it takes where it doesn't; but such a set can't grow. One that has become too small is replaced
// under its other name, and is returned: whoever is inside the old rules still looks there, so it goes a little later.
// more: most elements are yet to come.
func (l *layout) fit(left *inventory, n *plan.Size, more bool) (late []string) {
	for _, x := range []struct {
		*set
		count int
	}{{l.services, n.Frontends}, {l.backends, n.Endpoints}, {l.clusterIPs, n.ClusterIPs}} {
		x.size = roomFor(x.count)
		if more {
			x.size = roomFor(max(4096, 4*x.count))
		}
		if left == nil {
			continue
		}
		names := []string{x.name, x.name + "-2"}
		latest := -1
		for i, name := range names {
			if k, there := left.sets[name]; there && (latest < 0 || k.size > left.sets[names[latest]].size) {
				latest = i
			}
		}
		if latest < 0 {
			continue
		}
		x.name = names[latest]
		fresh, k := x.size, left.sets[x.name]
		if x.size = k.size; k.like(x.set) && int(k.size) >= x.count+x.count/8 {
			continue
		}
		x.name, x.size = names[1-latest], fresh
		late = append(late, names[latest])
	}
	return late
}

// roomFor is the size of a set for some elements and as many that may come: the kernel makes a table of a power of two, and
// fills three quarters of it.
func roomFor(count int) uint32 {
	room := 4096
	for room < 2*count {
		room *= 2
	}
	return uint32(room / 4 * 3)
}

// sometimes are the sets that come with the first Service whose clients stay.
func (l *layout) sometimes() []*set { return []*set{l.affinity, l.choices, l.members} }

// setKeyByteOrder is NFTNL_UDATA_SET_KEYBYTEORDER.
const setKeyByteOrder = 0

func (b *batch) addSet(s *set) {
	b.message(structure, s.family, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, func(m []byte) []byte {
		m = nf.AppendString(m, unix.NFTA_SET_TABLE, s.table)
		m = nf.AppendString(m, unix.NFTA_SET_NAME, s.name)
		m = nf.AppendUint32(m, unix.NFTA_SET_FLAGS, s.flags)
		m = nf.AppendUint32(m, unix.NFTA_SET_KEY_TYPE, magic(s.key))
		m = nf.AppendUint32(m, unix.NFTA_SET_KEY_LEN, s.keyLen)
		m = nf.AppendUint32(m, unix.NFTA_SET_ID, s.id)
		switch {
		case s.verdicts:
			m = nf.AppendUint32(m, unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT)
		case s.data != nil:
			m = nf.AppendUint32(m, unix.NFTA_SET_DATA_TYPE, magic(s.data))
			m = nf.AppendUint32(m, unix.NFTA_SET_DATA_LEN, s.dataLen)
		}
		if len(s.key) == 1 && s.key[0] == numberField {
			// For the nft tool: numbers are the host's.
			m = nf.AppendAttr(m, unix.NFTA_SET_USERDATA, append([]byte{setKeyByteOrder, 4}, number(nil, 1)...))
		}
		return nf.AppendNested(m, unix.NFTA_SET_DESC, s.describe)
	})
}

func (s *set) describe(m []byte) []byte {
	if s.size != 0 {
		m = nf.AppendUint32(m, unix.NFTA_SET_DESC_SIZE, s.size)
	}
	if s.flags&setConcat == 0 {
		return m
	}
	const descConcat, fieldLen = 2, 1
	return nf.AppendNested(m, descConcat, func(m []byte) []byte {
		for _, f := range s.key {
			m = nf.AppendNested(m, unix.NFTA_LIST_ELEM, func(m []byte) []byte { return nf.AppendUint32(m, fieldLen, f.size) })
		}
		return m
	})
}

// frontendKey appends the key of a frontend in services. A node port's address is zero.
func (l *layout) frontendKey(b []byte, k plan.FrontendKey) []byte {
	if k.Addr.IsValid() {
		b = l.addr(b, k.Addr)
	} else {
		b = append(b, make([]byte, l.width)...)
	}
	b = append(b, byte(k.Protocol), 0, 0, 0)
	return append(b, byte(k.Port>>8), byte(k.Port), 0, 0)
}

func (l *layout) addr(b []byte, a netip.Addr) []byte {
	if l.width == 4 {
		v := a.Unmap().As4()
		return append(b, v[:]...)
	}
	v := a.As16()
	return append(b, v[:]...)
}

func (l *layout) endpoint(b []byte, a netip.AddrPort) []byte {
	b = l.addr(b, a.Addr())
	return append(b, byte(a.Port()>>8), byte(a.Port()), 0, 0)
}

// number appends a number as the kernel computes with it.
func number(b []byte, v uint32) []byte { return binary.NativeEndian.AppendUint32(b, v) }

func portID(b []byte, id uint64) []byte { return number(number(b, uint32(id>>32)), uint32(id)) }
