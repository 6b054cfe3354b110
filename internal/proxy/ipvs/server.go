package ipvs

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"portal/internal/intent"
	"portal/internal/plan"
)

// key names a virtual server: an address and port, or a mark that our rules put on packets.
type key struct {
	mark     uint32 // 0: by address
	family   intent.Family
	protocol intent.Protocol
	addr     netip.Addr
	port     uint16
}

func (k key) String() string {
	if k.mark != 0 {
		return fmt.Sprintf("mark %#x of IPv%d", k.mark, k.family)
	}
	return fmt.Sprintf("%s/%v", netip.AddrPortFrom(k.addr, k.port), k.protocol)
}

func (k key) compare(o key) int {
	return cmp.Or(cmp.Compare(k.mark, o.mark), cmp.Compare(k.family, o.family), k.addr.Compare(o.addr), cmp.Compare(k.protocol, o.protocol), cmp.Compare(k.port, o.port))
}

// Our marks have a first byte of their own, by which a server is known to be ours. Two bits are for the protocol, so that
// a server tells what it is for even to a process that did not make it; the rest is a number.
const (
	markBase    = 0x50 << 24
	markMask    = 0xff << 24
	markShift   = 22
	maxNumber   = 1<<markShift - 1
	probeNumber = 3 << markShift
)

var markProtocols = []intent.Protocol{intent.TCP, intent.UDP, intent.SCTP}

func ourMark(mark uint32) bool { return mark&markMask == markBase }

// marked is the key of a server by mark.
func marked(mark uint32, f intent.Family) key {
	k := key{mark: mark, family: f}
	if i := int(mark >> markShift & 3); ourMark(mark) && i < len(markProtocols) {
		k.protocol = markProtocols[i]
	}
	return k
}

func markOf(p intent.Protocol, number uint32) uint32 {
	return markBase | uint32(slices.Index(markProtocols, p))<<markShift | number
}

// server is a virtual server as the kernel has it.
type server struct {
	scheduler string
	// sticky is for how many seconds a client stays with its endpoint.
	sticky uint32
	// ports: the scheduler's hash includes the client's port.
	ports bool
	dests map[netip.AddrPort]*dest
}

// same says whether two servers differ in their endpoints at most.
func (s *server) same(o *server) bool {
	return s.scheduler == o.scheduler && s.sticky == o.sticky && s.ports == o.ports
}

// dest is an endpoint of a virtual server. One of weight zero gets no new connections.
type dest struct {
	weight, connections int
}

// target is what is wanted of a virtual server.
type target struct {
	pool   *plan.Pool
	sticky uint32
	// users are the frontends that lead to it.
	users map[plan.FrontendKey]struct{}
}

// server is the target without its endpoints. Maglev's hash would send all of a client's connections to one endpoint,
// as sh does, if it did not include the port.
func (o *Options) server(t *target) *server {
	return &server{scheduler: o.Scheduler, sticky: t.sticky, ports: o.Scheduler == "mh", dests: map[netip.AddrPort]*dest{}}
}

func (t *target) wants(at netip.AddrPort) bool {
	if t == nil {
		return false
	}
	for _, e := range t.pool.Endpoints {
		if e.Addr == at {
			return true
		}
	}
	return false
}
