package nftables

import (
	"net/netip"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// layout is the names and forms of everything in a table of one family.
type layout struct {
	nf.IP
	at *nf.Table

	services, backends, shapes, clusterIPs, nodeIPs, same, sources *nf.Set
	// Of affinity: choices are backends with data as in affinity.
	affinity, choices, members *nf.Set
}

// affinityLimit is how many clients are remembered in a family; the kernel reserves 16 bytes for each.
const affinityLimit = 1 << 18

// comment is what the nft tool shows of our tables.
const comment = "written by portal over netlink, not for saving and loading: nft can't express all of it"

func layoutOf(f intent.Family, table string) *layout {
	l := &layout{IP: nf.IPv4}
	if f == intent.IPv6 {
		l.IP = nf.IPv6
	}
	l.at = &nf.Table{Family: l.Family, Name: table, Comment: comment}
	addr := l.AddrField()
	frontend := []nf.Field{addr, nf.ProtoField, nf.PortField}
	endpoint := []nf.Field{addr, nf.PortField}
	id := []nf.Field{nf.NumberField, nf.NumberField}
	join := func(parts ...[]nf.Field) (out []nf.Field) {
		for _, p := range parts {
			out = append(out, p...)
		}
		return out
	}
	number := []nf.Field{nf.NumberField}
	set := func(name string, key, data []nf.Field) *nf.Set {
		return &nf.Set{Table: l.at, Name: name, Key: key, Data: data}
	}
	l.services = set("services", frontend, join(id, id))
	l.backends = set("backends", join(id, number), endpoint)
	l.shapes = set("shapes", number, nil)
	l.shapes.Verdicts = true
	l.clusterIPs = set("cluster-ips", []nf.Field{addr}, nil)
	l.nodeIPs = set("node-ips", []nf.Field{addr}, nil)
	l.same = set("same", id, nil)
	l.sources = set("sources", join(frontend, []nf.Field{addr}), nil)
	l.sources.Intervals = true
	l.affinity = set("affinity", join([]nf.Field{addr}, id), join(number, endpoint))
	l.affinity.Dynamic, l.affinity.Size = true, affinityLimit
	l.choices = set("choices", l.backends.Key, l.affinity.Data)
	l.members = set("members", join(id, number, endpoint), nil)
	return l
}

// always are the sets that are there from the beginning.
func (l *layout) always() []*nf.Set {
	return []*nf.Set{l.services, l.backends, l.shapes, l.clusterIPs, l.nodeIPs, l.same, l.sources}
}

// withAffinity are the sets that come with the first Service that has session affinity.
func (l *layout) withAffinity() []*nf.Set { return []*nf.Set{l.affinity, l.choices, l.members} }

// fit decides how large the sets are made that grow with the Services. The kernel fills one whose size it knows in less
// than half the time that it takes where it doesn't; but such a set can't grow. One that has become too small is replaced
// under its other name, and is returned: a packet that is inside the old rules still looks there, so it is deleted a
// little later.
func (l *layout) fit(present *nf.Present, n *plan.Size) (late []string) {
	for _, x := range []struct {
		*nf.Set
		count int
	}{{l.services, n.Frontends}, {l.backends, n.Endpoints}, {l.clusterIPs, n.ClusterIPs}} {
		x.Size = roomFor(x.count)
		names := []string{x.Name, x.Name + "-2"}
		latest, largest := -1, uint32(0)
		for i, name := range names {
			if size, there := present.SetSize(name); there && (latest < 0 || size > largest) {
				latest, largest = i, size
			}
		}
		if latest < 0 {
			continue
		}
		fresh := x.Size
		x.Name, x.Size = names[latest], largest
		if present.Like(x.Set) && int(largest) >= x.count+x.count/8 {
			continue
		}
		x.Name, x.Size = names[1-latest], fresh
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

// frontendKey appends the key of a frontend in services. A node port's address is zero.
func (l *layout) frontendKey(b []byte, k plan.FrontendKey) []byte {
	return nf.AppendPort(nf.AppendProto(l.AppendAddr(b, k.Addr), byte(k.Protocol)), k.Port)
}

func (l *layout) endpoint(b []byte, a netip.AddrPort) []byte {
	return nf.AppendPort(l.AppendAddr(b, a.Addr()), a.Port())
}

func number(b []byte, v uint32) []byte { return nf.AppendNumber(b, v) }

func portID(b []byte, id uint64) []byte { return number(number(b, uint32(id>>32)), uint32(id)) }
