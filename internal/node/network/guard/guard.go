// Package guard keeps Pods to their own addresses: what comes from a Pod's port of the node's bridge with another's address is dropped,
// before it reaches the node. Root in a container may send any packet (CAP_NET_RAW is one of the usual capabilities), so that a Pod could speak
// in another's name. All of it is in one table of nf_tables for bridges, with rules that don't grow. It knows nothing of the API and nothing
// of routes.
package guard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"sync"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// Allowed are the addresses of each port of the bridge that is guarded.
type Allowed map[string][]netip.Addr

// ErrUnsupported says that the kernel can't filter what passes a bridge.
var ErrUnsupported = errors.New("the kernel has no nf_tables for bridges (nf_tables_bridge): root in a Pod can send packets with other Pods' addresses")

// Guard keeps the table.
type Guard struct {
	mu     sync.Mutex
	socket *nf.Socket
	table  *nf.Table
	// ports are those that are guarded, and v4 and v6 what they may send, with the port.
	ports, v4, v6 *nf.Set
	last          Allowed
}

// name is that of the table.
const name = "portal-node"

// New returns a Guard; Sync programs the kernel.
func New() *Guard {
	g := &Guard{table: newTable()}
	g.ports = &nf.Set{Table: g.table, Name: "ports", Key: []nf.Field{nf.InterfaceField}}
	g.v4 = &nf.Set{Table: g.table, Name: "addresses-ipv4", Key: []nf.Field{nf.InterfaceField, nf.IPv4Field}}
	g.v6 = &nf.Set{Table: g.table, Name: "addresses-ipv6", Key: []nf.Field{nf.InterfaceField, nf.IPv6Field}}
	return g
}

func newTable() *nf.Table {
	return &nf.Table{Family: unix.NFPROTO_BRIDGE, Name: name, Comment: "portal node: Pods keep to their addresses"}
}

// Sync makes the kernel allow what allowed says, which is asked while nobody else syncs. While nothing has changed, here or there, that costs
// one question.
func (g *Guard) Sync(allowed func() (Allowed, error)) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	want, err := allowed()
	if err != nil {
		return err
	}
	if g.socket == nil {
		if g.socket, err = nf.Dial(); err != nil {
			g.socket = nil
			return fmt.Errorf("%w: %w", ErrUnsupported, err)
		}
	}
	if g.last != nil && reflect.DeepEqual(g.last, want) && g.socket.Check(g.table) == nil {
		return nil
	}
	g.last = nil
	err = g.socket.Sync(func(b *nf.Batch) error {
		present, err := g.socket.Read(g.table)
		if err != nil {
			return err
		}
		g.declare(b, want, present)
		return nil
	})
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EPROTONOSUPPORT):
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	case err != nil:
		return fmt.Errorf("program the table %s of bridges: %w", name, err)
	}
	g.last = want
	return nil
}

// early is before what others may do with a packet.
const early = -300

func (g *Guard) declare(b *nf.Batch, want Allowed, present *nf.Present) {
	b.Replace(g.table, present)
	for _, s := range []*nf.Set{g.ports, g.v4, g.v6} {
		b.AddSet(s)
	}
	b.AddChain(g.table, nf.Chain{Name: "from-pods", Hook: nf.Hook{Type: "filter", Point: unix.NF_INET_PRE_ROUTING, Priority: early}, Rules: g.rules()})
	for port, addrs := range want {
		key := interfaceName(port)
		b.Add(g.ports, nf.Element{Key: key})
		for _, a := range addrs {
			if a.Is4() {
				b.Add(g.v4, nf.Element{Key: nf.IPv4.AppendAddr(key[:len(key):len(key)], a)})
			} else {
				b.Add(g.v6, nf.Element{Key: nf.IPv6.AppendAddr(key[:len(key):len(key)], a)})
			}
		}
	}
	b.Prune(g.table)
}

func interfaceName(name string) []byte {
	out := make([]byte, unix.IFNAMSIZ)
	copy(out, name)
	return out
}

// rules let through what is not guarded, and what has an address of its port. In IPv6, neighbours find each other by link-local addresses and
// the unspecified one: those mean nothing beyond the link, on which a Pod has no neighbour but the node.
func (g *Guard) rules() []nf.Rule {
	const (
		port    = uint32(nf.Reg0)
		address = port + unix.IFNAMSIZ/4
		// Where an ARP packet has its sender's address.
		arpSender = 14
	)
	cameBy := nf.Meta{Key: unix.NFT_META_IIFNAME, Dst: port}
	sender := nf.Payload{Dst: address, Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: arpSender, Len: 4}
	linkLocal := netip.MustParsePrefix("fe80::/10")
	unspecified := netip.PrefixFrom(netip.IPv6Unspecified(), 128)
	return []nf.Rule{
		{cameBy, nf.IsIn{Set: g.ports, Key: port, Not: true}, nf.Accept},
		nf.Concat(protocol(unix.ETH_P_IP), nf.Rule{cameBy, nf.IPv4.Source(address), nf.IsIn{Set: g.v4, Key: port}, nf.Accept}),
		nf.Concat(protocol(unix.ETH_P_ARP), nf.Rule{cameBy, sender, nf.IsIn{Set: g.v4, Key: port}, nf.Accept}),
		nf.Concat(protocol(unix.ETH_P_IPV6), nf.Rule{cameBy, nf.IPv6.Source(address), nf.IsIn{Set: g.v6, Key: port}, nf.Accept}),
		nf.Concat(protocol(unix.ETH_P_IPV6), nf.Rule{nf.IPv6.Source(nf.Reg0)}, nf.IPv6.Within(linkLocal, false), nf.Rule{nf.Accept}),
		nf.Concat(protocol(unix.ETH_P_IPV6), nf.Rule{nf.IPv6.Source(nf.Reg0)}, nf.IPv6.Within(unspecified, false), nf.Rule{nf.Accept}),
		{nf.Counter{}, nf.Drop},
	}
}

// protocol matches what a frame carries.
func protocol(kind uint16) nf.Rule {
	return nf.Rule{nf.Meta{Key: unix.NFT_META_PROTOCOL, Dst: nf.Reg0}, nf.Cmp{Reg: nf.Reg0, Data: binary.BigEndian.AppendUint16(nil, kind)}}
}

// Remove takes the table away.
func (g *Guard) Remove() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	socket, err := nf.Dial()
	if err != nil {
		return err
	}
	defer socket.Close()
	g.last = nil
	return socket.Remove(newTable())
}
