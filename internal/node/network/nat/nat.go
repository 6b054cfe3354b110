// Package nat rewrites addresses between a node's Pods and everybody else: what Pods send outside of the cluster leaves with the node's
// address, and ports of the node (hostPort) lead to Pods. All of it is in one table of nf_tables for each family, with rules that don't
// grow: prefixes and ports are elements of sets. It knows nothing of Services and nothing of the API.
//
// Its chains come after those of any proxy mode: a Service's node port wins over a hostPort, and what the proxy has marked to be
// rewritten is rewritten by the proxy, which takes the mark off again.
package nat

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// State is what the node should do.
type State struct {
	// Masquerade: what Pods send to addresses outside of Inside gets the node's address.
	Masquerade bool
	// Pods are the prefixes of this node's Pods.
	Pods []netip.Prefix
	// Inside are the addresses to which Pods are known by their own.
	Inside []netip.Prefix
	// Bridge is the interface by which Pods reach the node.
	Bridge string
	// Ports are ports of the node, by the Pod that has them.
	Ports map[string][]Port
}

// Port is a port of the node that leads to a Pod.
type Port struct {
	Protocol byte // IPPROTO_*
	// Host is the node's address that it is served at; the zero Addr and unspecified ones: all of the Pod's family.
	Host     netip.Addr
	HostPort uint16
	Pod      netip.AddrPort
	// Interface is the node's by which packets go to the Pod; empty: not known, and the port is not served at 127.0.0.1.
	Interface string
}

// key is the address in the set, which is zero for all.
func (p Port) key() netip.Addr {
	if p.Host.IsUnspecified() {
		return netip.Addr{}
	}
	return p.Host
}

// NAT keeps the tables.
type NAT struct {
	mu     sync.Mutex
	socket *nf.Socket
	tables []*table
	// last is the state that was programmed; nil: not known.
	last *State
}

// New returns a NAT; Sync programs the kernel.
func New() *NAT { return &NAT{} }

// name is that of the tables.
const name = "portal-node"

// Sync makes the kernel do what the state says. While nothing has changed, here or there, that costs one question.
func (n *NAT) Sync(s State) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.socket == nil {
		socket, err := nf.Dial()
		if errors.Is(err, unix.EPROTONOSUPPORT) && !newTable(nf.IPv4).needed(&s) && !newTable(nf.IPv6).needed(&s) {
			return nil // nothing to do, and nothing that could be left
		}
		if err != nil {
			return fmt.Errorf("rewriting addresses needs nf_tables: %w", err)
		}
		n.socket = socket
		n.tables = []*table{newTable(nf.IPv4), newTable(nf.IPv6)}
	}
	var wanted []nf.Declaration
	for _, t := range n.tables {
		wanted = append(wanted, nf.Declaration{Table: t.at, Needed: t.needed(&s), Declare: func(b *nf.Batch, present *nf.Present) { t.declare(b, &s, present) }})
	}
	same := n.last != nil && reflect.DeepEqual(*n.last, s)
	if same && n.socket.CheckDeclared(wanted) == nil {
		return localnet(&s)
	}
	if err := n.socket.Declare(wanted); err != nil {
		n.last = nil
		return fmt.Errorf("program the table %s: %w", name, err)
	}
	before := n.last
	n.last = s.clone()
	// With the rules that keep Pods from it in place.
	return errors.Join(localnet(&s), forgetFlows(before, &s))
}

func (s *State) clone() *State {
	out := *s
	out.Pods, out.Inside, out.Ports = slices.Clone(s.Pods), slices.Clone(s.Inside), map[string][]Port{}
	for pod, list := range s.Ports {
		out.Ports[pod] = slices.Clone(list)
	}
	return &out
}

// Remove takes the tables away.
func (n *NAT) Remove() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	socket, err := nf.Dial()
	if err != nil {
		return err
	}
	defer socket.Close()
	n.last = nil
	return socket.Remove(newTable(nf.IPv4).at, newTable(nf.IPv6).at)
}

// localnet lets processes of the node reach hostPorts at 127.0.0.1: the kernel sends such packets to a Pod, and takes the answers from the
// bridge, only if this setting says so. The same setting lets packets for 127.0.0.1 in from the bridge, which the table drops.
func localnet(s *State) error {
	if s.Bridge == "" {
		return nil
	}
	value := map[string]string{s.Bridge: "0"}
	for _, list := range s.Ports {
		for _, p := range list {
			if p.Pod.Addr().Is4() && p.Interface != "" {
				value[s.Bridge], value[p.Interface] = "1", "1"
			}
		}
	}
	for name, want := range value {
		path := "/proc/sys/net/ipv4/conf/" + name + "/route_localnet"
		data, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || err == nil && strings.TrimSpace(string(data)) == want {
			continue
		}
		if err := os.WriteFile(path, []byte(want), 0); err != nil {
			return fmt.Errorf("set %s: %w", path, err)
		}
	}
	return nil
}

// Protocol is a transport protocol by its name in a Pod.
func Protocol(name string) (byte, bool) {
	switch name {
	case "TCP", "":
		return unix.IPPROTO_TCP, true
	case "UDP":
		return unix.IPPROTO_UDP, true
	case "SCTP":
		return unix.IPPROTO_SCTP, true
	}
	return 0, false
}
