// Package capture leads packets for a balancer's addresses to the sockets of the balancing process on this machine, although no interface
// has the address, and keeps out those who may not use it: rules of nf_tables and a routing rule. It knows neither Services nor what the
// process does with connections.
//
// A port is captured only while a transparent socket listens at it. Without one, packets go the way that they would go without this
// package, unless the port is strict: then they are refused.
package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// State is what the machine should do.
type State struct {
	Ports   []Port
	Filters []Filter
	NLB     []NodePorts
}

// Port is a TCP port that is led to the balancing process.
type Port struct {
	Address netip.AddrPort
	// Strict: while nobody listens, connections are refused. What must not pass in clear never does.
	Strict bool
}

// Filter is who may use an address, in either way; packets of others are dropped.
type Filter struct {
	Address  netip.Addr
	Protocol byte // IPPROTO_*
	Port     uint16
	// Allowed may be empty: nobody.
	Allowed []netip.Prefix
}

// NodePorts are the node's firewall rules for a network load balancer.
type NodePorts struct {
	// Name is in the comments.
	Name string
	// Ports are the Service's node ports, HealthPort that of its health checks; 0: the node ports are checked.
	Ports      []NodePort
	HealthPort uint16
	// Balancers are the addresses that health checks come from, Clients who may use the node ports; empty: everybody. A family of which Clients has no prefix
	// is closed.
	Balancers []netip.Addr
	Clients   []netip.Prefix
}

// NodePort is a port of the node.
type NodePort struct {
	Protocol byte
	Port     uint16
}

// Capture keeps the rules.
type Capture struct {
	mu     sync.Mutex
	socket *nf.Socket
	tables []*table
	// last is the state that was programmed; nil: not known.
	last *State
}

// New returns a Capture; Sync programs the kernel.
func New() *Capture { return &Capture{} }

// Name is that of the tables.
const Name = "portal-lb"

// Sync makes the kernel do what the state says, and repairs what others have changed. While nothing has changed, here or there, it costs a few questions.
func (c *Capture) Sync(s State) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.socket == nil {
		socket, err := nf.Dial()
		if err != nil {
			if s.empty() && errors.Is(err, unix.EPROTONOSUPPORT) {
				return nil // nothing to do, and nothing that could be left
			}
			return fmt.Errorf("leading packets to the balancer needs nf_tables: %w", err)
		}
		c.socket, c.tables = socket, []*table{newTable(nf.IPv4), newTable(nf.IPv6)}
	}
	s = s.sorted()
	wanted := c.declarations(&s)
	if c.last == nil || !reflect.DeepEqual(*c.last, s) || c.socket.CheckDeclared(wanted) != nil {
		if err := c.program(&s, wanted); err != nil {
			c.last = nil
			return err
		}
		c.last = &s
	}
	var errs []error
	for _, t := range c.tables {
		errs = append(errs, t.route(len(t.ports(&s)) > 0))
	}
	return errors.Join(errs...)
}

func (c *Capture) declarations(s *State) (out []nf.Declaration) {
	for _, t := range c.tables {
		out = append(out, nf.Declaration{Table: t.at, Needed: t.needed(s), Declare: func(b *nf.Batch, present *nf.Present) { t.declare(b, s, present) }})
	}
	return out
}

func (c *Capture) program(s *State, wanted []nf.Declaration) error {
	err := c.socket.Declare(wanted)
	switch {
	case errors.Is(err, unix.ENOENT) && len(s.Ports) > 0 && !supported():
		return errors.New("the kernel has no nft_socket (CONFIG_NFT_SOCKET) or no notrack (CONFIG_NFT_CT), without which packets can't be led to the balancer: TLS, HTTP and the PROXY protocol are not served on this machine")
	case err != nil:
		return fmt.Errorf("program the table %s: %w", Name, err)
	}
	return nil
}

// supported tries the expressions that not every kernel has, in a table that is gone at once.
func supported() bool {
	socket, err := nf.Dial()
	if err != nil {
		return false
	}
	defer socket.Close()
	probe := &nf.Table{Family: unix.NFPROTO_IPV4, Name: Name + "-probe"}
	b := nf.NewBatch()
	b.Replace(probe, nil)
	b.AddChain(probe, nf.Chain{Name: "probe", Hook: nf.Hook{Type: "filter", Point: unix.NF_INET_PRE_ROUTING, Priority: early}, Rules: []nf.Rule{
		{nf.Transparent{Dst: nf.Reg0}, nf.NoTrack{}},
	}})
	b.DeleteTableLast(probe)
	return socket.Commit(b) == nil
}

// Close leaves everything as it is, for the next process.
func (c *Capture) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.socket != nil {
		c.socket.Close()
	}
	c.socket, c.last = nil, nil
}

// Remove takes everything away that any process of this machine has programmed.
func Remove() error {
	var errs []error
	for _, t := range []*table{newTable(nf.IPv4), newTable(nf.IPv6)} {
		errs = append(errs, t.route(false))
	}
	socket, err := nf.Dial()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	defer socket.Close()
	return errors.Join(append(errs, socket.Remove(newTable(nf.IPv4).at, newTable(nf.IPv6).at))...)
}

func (s *State) empty() bool { return len(s.Ports)+len(s.Filters)+len(s.NLB) == 0 }

// sorted is a copy in which order says nothing, so that two states that mean the same are equal.
func (s *State) sorted() State {
	out := State{Ports: slices.Clone(s.Ports), Filters: slices.Clone(s.Filters), NLB: slices.Clone(s.NLB)}
	slices.SortFunc(out.Ports, func(a, b Port) int { return a.Address.Compare(b.Address) })
	slices.SortFunc(out.Filters, func(a, b Filter) int { return a.key().compare(b.key()) })
	slices.SortFunc(out.NLB, func(a, b NodePorts) int { return strings.Compare(a.Name, b.Name) })
	return out
}
