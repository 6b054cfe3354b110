// Package bgp announces addresses to routers by BGP: each is a host route, and who may serve it is not decided here. It keeps a session with
// each peer, by github.com/osrg/gobgp, takes in no routes, and accepts no connections.
package bgp

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// The defaults of peers.
const (
	DefaultAS       = 64512 // the first one for private use
	DefaultPort     = 179
	DefaultHoldTime = 9 * time.Second
	DefaultRestart  = 120 * time.Second
	DefaultBFD      = 300 * time.Millisecond

	// bfdMultiplier is how many BFD packets may be missing.
	bfdMultiplier = 3
)

// Password is that of a session. It is never logged.
type Password string

// String hides it.
func (p Password) String() string {
	if p == "" {
		return ""
	}
	return "(hidden)"
}

// GoString hides it.
func (p Password) GoString() string { return p.String() }

// MarshalText hides it in logs.
func (p Password) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Peer is a router that addresses are announced to.
type Peer struct {
	Address netip.Addr
	Port    uint16
	// AS is the peer's, and LocalAS what this side says it is in.
	AS, LocalAS uint32
	// Source is the address that the session comes from; zero: the one that the route to the peer has.
	Source netip.Addr
	// Password signs the session's segments (TCP MD5). PasswordKey is where it is in the Secret, if it comes from there.
	Password    Password
	PasswordKey string
	HoldTime    time.Duration
	// Multihop is how many hops away a peer of another AS may be; 0: it is a neighbour.
	Multihop uint8
	// Restart is how long the peer keeps routes while this process is restarted; 0: not at all.
	Restart time.Duration
	// BFD is the interval of BFD packets; 0: none.
	BFD time.Duration
	// Nodes are those that have this peer; nil: all.
	Nodes labels.Selector
}

// Attributes are what routes have beside their address.
type Attributes struct {
	Communities      []uint32
	LargeCommunities [][3]uint32
	// LocalPreference is for peers of the same AS only; nil: the default, 100.
	LocalPreference *uint32
	// HashByClient says that routers choose among next hops by the client's address alone: its connections come in by one node anyway.
	HashByClient bool
}

// Config is what is written of BGP: whom to announce to, and what to say of the addresses of a pool.
type Config struct {
	Peers []Peer
	Pools map[string]Attributes
}

// newPeer has the defaults.
func newPeer() Peer {
	return Peer{Port: DefaultPort, HoldTime: DefaultHoldTime, Restart: DefaultRestart}
}

// complete fills in what follows from other fields, and checks the rest. An error begins with the field as name spells it.
func (p *Peer) complete(name func(field string) string) error {
	wrong := func(field, format string, args ...any) error {
		return fmt.Errorf("%s: %s", name(field), fmt.Sprintf(format, args...))
	}
	if p.LocalAS == 0 {
		p.LocalAS = DefaultAS
	}
	if p.AS == 0 {
		p.AS = p.LocalAS
	}
	if p.Source.IsValid() && p.Source.Is4() != p.Address.Is4() {
		return wrong("source", "%s is not of the family of the peer, %s", p.Source, p.Address)
	}
	if s := p.HoldTime; s < 3*time.Second || s > 65535*time.Second || s%time.Second != 0 {
		return wrong("hold-time", "%s is not whole seconds from 3s to 65535s", s)
	}
	if s := p.Restart; s < 0 || s > 4095*time.Second || s%time.Second != 0 {
		return wrong("graceful-restart", "%s is not whole seconds from 0s (none) to 4095s", s)
	}
	if s := p.BFD; s != 0 && (s < 10*time.Millisecond || s > 10*time.Second) {
		return wrong("bfd", "%s is not from 10ms to 10s", s)
	}
	if p.Multihop > 0 && p.AS == p.LocalAS {
		return wrong("multihop", "it is for peers of another AS; peers of the same AS may be any number of hops away")
	}
	if p.Multihop > 0 && p.BFD > 0 {
		return wrong("bfd", "it works with neighbours only, not with multihop")
	}
	if len(p.Password) > 80 {
		return wrong("password", "it has %d bytes, and at most 80 can be used", len(p.Password))
	}
	return nil
}

func parseAddress(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(strings.TrimSpace(text))
	if err != nil {
		return a, fmt.Errorf("%q is not an address", text)
	}
	if a = a.Unmap(); a.Zone() != "" || a.IsMulticast() || a.IsUnspecified() || a.IsLinkLocalUnicast() {
		return a, fmt.Errorf("%s is not an address that a session can have: link-local ones can't be used either", a)
	}
	return a, nil
}

func parseAS(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n == 0 || n == 23456 || n == 65535 || n == 1<<32-1 {
		return 0, fmt.Errorf("%q is not the number of an AS: from 1 to 4294967294, but not 23456 or 65535", text)
	}
	return uint32(n), nil
}

// wellKnown are communities with a meaning that everybody agrees on.
var wellKnown = map[string]uint32{
	"graceful-shutdown": 0xFFFF0000, "blackhole": 0xFFFF029A,
	"no-export": 0xFFFFFF01, "no-advertise": 0xFFFFFF02, "no-export-subconfed": 0xFFFFFF03,
}

// addCommunity reads a community: a well-known one's name, two numbers of 16 bits, or three of 32.
func (a *Attributes) addCommunity(text string) error {
	if c, ok := wellKnown[text]; ok {
		a.Communities = append(a.Communities, c)
		return nil
	}
	parts := strings.Split(text, ":")
	bits := map[int]int{2: 16, 3: 32}[len(parts)]
	var numbers []uint32
	for _, part := range parts {
		n, err := strconv.ParseUint(part, 10, max(bits, 1))
		if bits == 0 || err != nil {
			return fmt.Errorf("%q is not a community: A:B with numbers up to 65535, A:B:C with numbers up to 4294967295, no-export, no-advertise, no-export-subconfed, graceful-shutdown or blackhole", text)
		}
		numbers = append(numbers, uint32(n))
	}
	if bits == 16 {
		a.Communities = append(a.Communities, numbers[0]<<16|numbers[1])
	} else {
		a.LargeCommunities = append(a.LargeCommunities, [3]uint32(numbers))
	}
	return nil
}

// Validate says what is wrong with several peers together.
func Validate(peers []Peer) error {
	for i, p := range peers {
		if slices.ContainsFunc(peers[:i], func(o Peer) bool { return o.Address == p.Address && overlap(o.Nodes, p.Nodes) }) {
			return fmt.Errorf("peer %s is there twice", p.Address)
		}
	}
	return nil
}

// overlap says whether two selectors could choose the same node. Which nodes there are is not known here: two selectors may.
func overlap(a, b labels.Selector) bool { return a == nil || b == nil || a.String() == b.String() }

// Selected are the peers of a node, by its labels. Of two entries for one router that both select the node the first is used, and the error says so.
func Selected(peers []Peer, node labels.Set) (out []Peer, err error) {
	for _, p := range peers {
		if p.Nodes != nil && !p.Nodes.Matches(node) {
			continue
		}
		if slices.ContainsFunc(out, func(o Peer) bool { return o.Address == p.Address }) {
			err = fmt.Errorf("peer %s: two entries with different node selectors select this node, the first is used", p.Address)
			continue
		}
		out = append(out, p)
	}
	return out, err
}
