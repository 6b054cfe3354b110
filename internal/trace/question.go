package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"portal/internal/intent"
)

// Question is what a person asks: which way does a packet go from here to there?
type Question struct {
	// From is a Pod (NAME or NAMESPACE/NAME), a node, the word client, or an address.
	From string
	// To is ADDRESS:PORT or NAME:PORT, each with /PROTOCOL or without.
	To string
	// Namespace is where a Pod is, and where names are looked up for a sender that is no Pod.
	Namespace string
	// Via is the node that a packet from outside comes to first; empty: the one that the address belongs to.
	Via string
}

// Client is the word for somebody outside of the cluster.
const Client = "client"

// clientAddrs are the sender's, if all that is known is that it is outside. A lab's client has the same.
var clientAddrs = []netip.Addr{netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("fd00:113::a")}

// MistakeError is a question that can't be answered, because a part of it is wrong.
type MistakeError struct {
	// Part is from, to or via.
	Part string
	Err  error
}

func (e *MistakeError) Error() string { return e.Part + ": " + e.Err.Error() }

// Unwrap returns what is wrong with the part.
func (e *MistakeError) Unwrap() error { return e.Err }

func mistake(part, format string, args ...any) error {
	return &MistakeError{part, fmt.Errorf(format, args...)}
}

// sender is who sends.
type sender struct {
	pod *pod
	// node is where the packet starts; nil: outside.
	node  *node
	addrs []netip.Addr
	// named: the address is what the sender was named by.
	named bool
}

func (s *sender) addr(f intent.Family) netip.Addr {
	for _, a := range s.addrs {
		if intent.FamilyOf(a) == f {
			return a
		}
	}
	return netip.Addr{}
}

// onNode says whether it uses the network of its node.
func (s *sender) onNode() bool { return s.node != nil && (s.pod == nil || s.pod.hostNetwork) }

func (s *sender) String() string {
	switch {
	case s.pod != nil && s.pod.hostNetwork:
		return fmt.Sprintf("Pod %s (network of node %s)", s.pod.Key, s.node.Name)
	case s.pod != nil:
		return fmt.Sprintf("Pod %s on node %s", s.pod.Key, s.node.Name)
	case s.node != nil:
		return "node " + s.node.Name
	}
	return "a client outside of the cluster"
}

// sender finds who sends.
func (w *World) sender(q *Question) (*sender, error) {
	if q.From == "" {
		return nil, mistake("from", "is required: a Pod, a node, %s, or an address", Client)
	}
	if a, err := netip.ParseAddr(q.From); err == nil {
		return w.senderAt(a.Unmap())
	}
	if q.From == Client {
		return &sender{addrs: clientAddrs}, nil
	}
	if n := w.node(q.From); n != nil {
		return &sender{node: n, addrs: n.addrs}, nil
	}
	p := w.pod(q.From, q.Namespace)
	if p == nil {
		return nil, mistake("from", "there is neither a node %q nor a Pod of this name in the namespace %s%s", q.From, q.Namespace, w.similar(q.From))
	}
	return w.senderPod(p)
}

// similar names Pods in other namespaces, for whoever forgot the namespace.
func (w *World) similar(name string) string {
	for _, p := range w.pods {
		if p.Name == name {
			return fmt.Sprintf(": did you mean %s?", p.Key)
		}
	}
	return ""
}

func (w *World) senderPod(p *pod) (*sender, error) {
	n := w.node(p.node)
	switch {
	case n == nil:
		return nil, mistake("from", "the Pod %s is on no node yet", p.Key)
	case p.hostNetwork:
		return &sender{pod: p, node: n, addrs: n.addrs}, nil
	case len(p.addrs) == 0:
		return nil, mistake("from", "the Pod %s has no address yet", p.Key)
	}
	return &sender{pod: p, node: n, addrs: p.addrs}, nil
}

func (w *World) senderAt(a netip.Addr) (*sender, error) {
	if p := w.podAt[a]; p != nil {
		return w.senderPod(p)
	}
	if n := w.nodeAt[a]; n != nil {
		return &sender{node: n, addrs: []netip.Addr{a}, named: true}, nil
	}
	if a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() {
		return nil, mistake("from", "%s is nobody's own: give a Pod, a node, %s, or an address that others see", a, Client)
	}
	return &sender{addrs: []netip.Addr{a}, named: true}, nil
}

// target is where the packet is to go.
type target struct {
	name     string // empty: addr is given
	addr     netip.Addr
	port     uint16
	protocol intent.Protocol
}

// parseTarget reads ADDRESS:PORT or NAME:PORT, each with /PROTOCOL or without.
func parseTarget(text string) (t target, err error) {
	t.protocol = intent.TCP
	rest := text
	if at := strings.LastIndexByte(rest, '/'); at >= 0 {
		if t.protocol = protocolNamed(rest[at+1:]); t.protocol == 0 || rest[at+1:] == "" {
			return t, mistake("to", "%q: the protocol %q must be TCP, UDP or SCTP", text, rest[at+1:])
		}
		rest = rest[:at]
	}
	if a, err := netip.ParseAddr(strings.Trim(rest, "[]")); err == nil {
		return t, mistake("to", "%q: the port is missing: %s", text, netip.AddrPortFrom(a, 80))
	}
	at := strings.LastIndexByte(rest, ':')
	if at < 0 {
		return t, mistake("to", "%q: must be ADDRESS:PORT or NAME:PORT, such as 10.96.0.10:53/UDP or web.shop:80", text)
	}
	n, err := strconv.ParseUint(rest[at+1:], 10, 16)
	if err != nil || n == 0 {
		return t, mistake("to", "%q: the port %q must be a number from 1 to 65535", text, rest[at+1:])
	}
	t.port = uint16(n)
	host := strings.Trim(rest[:at], "[]")
	if a, err := netip.ParseAddr(host); err == nil {
		if t.addr = a.Unmap(); a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() {
			return t, mistake("to", "%s is not the address of a single machine or Service", a)
		}
		return t, nil
	}
	if err := validHost(host); err != nil {
		return t, mistake("to", "%q: %w", host, err)
	}
	t.name = host
	return t, nil
}

func validHost(name string) error {
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > 253 {
		return errors.New("must be an address or a DNS name")
	}
	for _, label := range strings.Split(name, ".") {
		bad := func(r rune) bool {
			return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_')
		}
		if label == "" || len(label) > 63 || strings.ContainsFunc(label, bad) {
			return errors.New("must be an address or a DNS name; an IPv6 address is written [ADDRESS]:PORT")
		}
	}
	return nil
}

// via is the node that the question names.
func (w *World) via(q *Question) (*node, error) {
	if q.Via == "" {
		return nil, nil
	}
	n := w.node(q.Via)
	if n == nil {
		return nil, mistake("via", "there is no node %q, but %s", q.Via, strings.Join(w.nodeNames(), ", "))
	}
	return n, nil
}

func (w *World) nodeNames() (out []string) {
	for _, n := range w.nodes {
		out = append(out, n.Name)
	}
	slices.Sort(out)
	return out
}
