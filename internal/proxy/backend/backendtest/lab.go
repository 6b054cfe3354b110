package backendtest

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// Lab is the suite's network for a proxy that runs as a process of its own: somewhere to start it, Pods that answer,
// clients that ask, and the same judge.
type Lab struct {
	s *suite
	// Client is a Pod on the node, Outside a machine beside it.
	Node, Client, Outside *Host
}

// Host is somewhere to ask from.
type Host struct{ h *host }

// NewLab builds the network; the test's end removes it.
func NewLab(t testing.TB, o Options) *Lab {
	t.Helper()
	if o.Patience == 0 {
		o.Patience = 4 * time.Second
	}
	w := newWorld(t)
	l := &Lab{s: &suite{world: w, Options: o}}
	l.Node, l.Client, l.Outside = &Host{w.node}, &Host{w.client}, &Host{w.outside}
	return l
}

// Facts are the node's, for a proxy that serves node ports at the node's primary addresses.
func (l *Lab) Facts() *plan.Facts { return l.s.facts(l.s.Options) }

// ServerPort is where every Pod answers.
const ServerPort = serverPort

// LocalPods are the addresses of the Pods on the node; FarPods of those that were there from the beginning elsewhere.
func (l *Lab) LocalPods(f intent.Family) (out []netip.Addr) {
	for _, p := range l.s.pods {
		out = append(out, ofFamily(p.addrs, f)...)
	}
	return out
}

func (l *Lab) FarPods(f intent.Family) []netip.Addr { return ofFamily(l.s.far.addrs, f) }

func ofFamily(list []netip.Addr, f intent.Family) (out []netip.Addr) {
	for _, a := range list {
		if intent.FamilyOf(a) == f {
			out = append(out, a)
		}
	}
	return out
}

// MorePods adds Pods elsewhere, of IPv4.
func (l *Lab) MorePods(t testing.TB, n int) (out []netip.Addr) {
	t.Helper()
	var list []string
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 244, 2, byte(100 + i)})
		out, list = append(out, a), append(list, a.String()+"/32")
	}
	err := l.s.far.do(func() error { return address("lo", list...) })
	for _, a := range out {
		err = errors.Join(err, l.s.listen(l.s.far, netip.AddrPortFrom(a, serverPort)))
	}
	if err != nil {
		t.Fatalf("adding Pods: %v", err)
	}
	return out
}

// Clients are addresses of Outside, which gets as many as it lacks.
func (l *Lab) Clients(t testing.TB, n int) (out []netip.Addr) {
	t.Helper()
	var more []string
	for i := range n {
		out = append(out, clientAddr(i))
		if i >= clients {
			more = append(more, out[i].String()+"/24")
		}
	}
	if err := l.s.outside.do(func() error { return address("eth0", more...) }); err != nil {
		t.Fatalf("adding clients: %v", err)
	}
	return out
}

// Do runs a function in the host's network namespace.
func (h *Host) Do(f func() error) error { return h.h.do(f) }

// Namespace is a descriptor of the host's network namespace.
func (h *Host) Namespace() int { return int(h.h.ns) }

func (h *Host) String() string { return h.h.name }

// Ask makes one connection, or sends one datagram, from an address or from any, and returns who answered.
func (h *Host) Ask(p intent.Protocol, src netip.Addr, to netip.AddrPort, patience time.Duration) (netip.AddrPort, error) {
	got := h.h.try(p, src, to, patience)
	if got.what != answered {
		return netip.AddrPort{}, errors.New(got.what)
	}
	return got.endpoint, nil
}

// Flow is a connection that is kept.
type Flow struct {
	f        *flow
	patience time.Duration
	// Endpoint is who greeted.
	Endpoint string
}

// Hold opens a connection.
func (h *Host) Hold(p intent.Protocol, to netip.AddrPort, patience time.Duration) (*Flow, error) {
	f, err := h.h.open(p, netip.Addr{}, to)
	if err != nil {
		return nil, err
	}
	out := &Flow{f: f, patience: patience}
	line, err := f.greet(time.Now().Add(patience))
	if err != nil {
		f.close()
		return nil, err
	}
	_, err = fmt.Sscan(line, &out.Endpoint)
	return out, err
}

// Alive says why the connection doesn't go on with the one who greeted.
func (f *Flow) Alive() error {
	if err := f.f.say("?\n"); err != nil {
		return err
	}
	line, err := f.f.hear(time.Now().Add(f.patience))
	if err != nil {
		return err
	}
	// A connection echoes; whoever gets a datagram says who it is.
	var who string
	if _, err := fmt.Sscan(line, &who); err != nil || who != "?" && who != f.Endpoint {
		return fmt.Errorf("%s answers for %s", line, f.Endpoint)
	}
	return nil
}

// Close ends the connection.
func (f *Flow) Close() { f.f.close() }

// Retransmissions is how often something had to be sent again.
func (f *Flow) Retransmissions() int {
	info, err := unix.GetsockoptTCPInfo(f.f.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return 0
	}
	return int(info.Total_retrans)
}

// Judge asks a Pod, the node and a machine outside for every frontend of a snapshot, and for a port that none has, and
// demands of each answer what the oracle says.
func (l *Lab) Judge(t *testing.T, snap *plan.Snapshot) (probes int) {
	t.Helper()
	s := *l.s
	s.plan = snap
	var list []probe
	for k := range snap.Frontends {
		to := k.Addr
		if !to.IsValid() {
			to = s.node.addrs[0]
			if k.Family == intent.IPv6 {
				to = s.node.addrs[1]
			}
		}
		for _, from := range []*host{s.client, s.node, s.outside} {
			list = append(list, probe{from: from, to: netip.AddrPortFrom(to, k.Port), p: k.Protocol, tries: 4})
		}
	}
	for _, a := range []string{"10.96.255.254", "fd00:96::ffff"} { // most likely nobody has them
		for _, from := range []*host{s.client, s.node, s.outside} {
			list = append(list, probe{from: from, to: netip.AddrPortFrom(addr(a), 80), p: intent.TCP})
		}
	}
	for a := range snap.ClusterIPs {
		list = append(list, probe{from: s.client, to: netip.AddrPortFrom(a, 9), p: intent.TCP, tries: 1})
	}
	s.askAll(t, list)
	return len(list)
}
