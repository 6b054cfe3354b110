package ipvs

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

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

// Our marks begin with four bits of their own, by which a server is known to be ours. Two bits are for the protocol, so
// that a process that did not make a server knows what it is for. One says that clients stay with their
// endpoint: then the last bits are the endpoint's slot in its pool, zero for the pool as a whole. The rest is a number.
const (
	markBase      = 0x5 << 28
	markMask      = 0xf << 28
	protocolShift = 26
	stickyBit     = 1 << 25
	slotBits      = 9
	maxSlot       = 1<<slotBits - 1
	probeMark     = markBase | 3<<protocolShift
	// ledMark is on packets of a connection that IPVS has; no server has it.
	ledMark = probeMark | 1
)

var markProtocols = []intent.Protocol{intent.TCP, intent.UDP, intent.SCTP}

func ourMark(mark uint32) bool { return mark&markMask == markBase }

// marked is the key of a server by mark.
func marked(mark uint32, f intent.Family) key {
	k := key{mark: mark, family: f}
	if i := int(mark >> protocolShift & 3); ourMark(mark) && i < len(markProtocols) {
		k.protocol = markProtocols[i]
	}
	return k
}

// markOf makes the mark of a pool.
func markOf(p intent.Protocol, sticky bool, number uint32) uint32 {
	mark := markBase | uint32(slices.Index(markProtocols, p))<<protocolShift
	if sticky {
		return mark | stickyBit | number<<slotBits
	}
	return mark | number
}

// maxNumber is the highest number of a pool.
func maxNumber(sticky bool) uint32 {
	if sticky {
		return stickyBit>>slotBits - 1
	}
	return stickyBit - 1
}

func sticky(mark uint32) bool { return ourMark(mark) && mark&stickyBit != 0 }

// server is a virtual server as the kernel has it.
type server struct {
	scheduler string
	// ports: the scheduler's hash includes the client's port. persistent: IPVS itself keeps clients with their endpoint.
	ports, persistent bool
	dests             map[netip.AddrPort]*dest
	// id is whose port of UDP or SCTP it is; noIPVS's where that is not known.
	id plan.PortID
}

// same says whether two servers differ in their endpoints at most.
func (s *server) same(o *server) bool {
	return s.scheduler == o.scheduler && s.ports == o.ports && s.persistent == o.persistent
}

// dest is an endpoint of a virtual server. One of weight zero gets no new connections.
type dest struct {
	weight int
	// connections are all that IPVS remembers; living those of them that have not been closed.
	connections, living int
}

// target is what is wanted of a virtual server.
type target struct {
	pool *plan.Pool
	// affinity is for how long clients stay with their endpoint, which has a server of its own then.
	affinity time.Duration
	slots    map[netip.AddrPort]uint32
	// users are the frontends that lead to it.
	users map[plan.FrontendKey]struct{}
}

// server is a server without its endpoints. Maglev's hash would send all of a client's connections to one endpoint, as
// sh does, if it did not include the port.
func (o *Options) server() *server {
	return &server{scheduler: o.Scheduler, ports: o.Scheduler == "mh", dests: map[netip.AddrPort]*dest{}}
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
