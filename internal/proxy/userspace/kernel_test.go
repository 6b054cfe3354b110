package userspace

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf/nftest"
)

// alone gives the test a network namespace of its own. The thread is never unlocked: it ends with the test.
func alone(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
}

// snapshot has some Services, all with affinity and some with source ranges.
func snapshot(services int) *plan.Snapshot {
	s := plan.NewSnapshot(&plan.Facts{
		Node: "a", Families: families, NodePorts: plan.NodePorts{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Loopback4: true},
	})
	for i := range services {
		key := intent.Key{Namespace: "default", Name: fmt.Sprint("web-", i)}
		e := &intent.Entry{Service: &intent.Service{
			Key: key, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i + 1)})}, Affinity: time.Hour,
			Ports: []intent.Port{{Protocol: intent.TCP, Port: 80, NodePort: uint16(30000 + i)}}, Type: intent.LoadBalancer,
			Ingress:      []intent.Ingress{{Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})}},
			SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("192.0.2.0/28")},
		}}
		slice := &intent.Slice{Key: key, Service: key.Name, Family: intent.IPv4, Ports: []intent.EndpointPort{{Protocol: intent.TCP, Port: 8080}}}
		for n := range i % 4 {
			slice.Endpoints = append(slice.Endpoints, intent.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 244, byte(i), byte(n)}), Condition: intent.Ready | intent.Serving})
		}
		e.Slices = []*intent.Slice{slice}
		s.Set(key, plan.For(e, s.Facts))
	}
	return s
}

func applied(t *testing.T, s *server, snap *plan.Snapshot) {
	t.Helper()
	if err := s.Apply(t.Context(), snap, snap.Delta()); err != nil {
		t.Fatal(err)
	}
	snap.Acknowledge()
}

// TestDrift: whatever is missing of ours is noticed and named, one element too; and what is as it should be is not written
// again.
func TestDrift(t *testing.T) {
	alone(t)
	s, snap := opened(t), snapshot(8)
	applied(t, s, snap)
	for harm, says := range map[string]string{
		"delete element ip portal-userspace vips { 10.96.0.2 . tcp . 80 }":    "the set vips has",
		"delete element ip portal-userspace node-ports { tcp . 30001 }":       "the set node-ports has",
		"delete element ip portal-userspace cluster-ips { 10.96.0.1 }":        "the set cluster-ips has 7 elements instead of 8",
		"flush chain ip portal-userspace in-outside":                          "the chain in-outside has 0 rules instead of 2",
		"insert rule ip portal-userspace take-out accept":                     "the chain take-out has 2 rules instead of 1",
		"delete table ip portal-userspace; delete table ip6 portal-userspace": "it is missing",
	} {
		if err := s.Check(t.Context()); err != nil {
			t.Fatalf("before %q: %v", harm, err)
		}
		if out, err := exec.Command("nft", harm).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", harm, err, out)
		}
		if err := s.Check(t.Context()); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("after %q: %v", harm, err)
		}
		snap.Forget()
		applied(t, s, snap)
	}
	faults := nftest.On(s.socket)
	snap.Forget()
	applied(t, s, snap)
	if faults.Transactions != 0 {
		t.Errorf("a full sync over right tables sent %d bytes", len(faults.Sent))
	}
	if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil {
		t.Errorf("the nft tool can't list it: %v %s", err, out)
	}
}

// TestAffinityIsSaved: a process that comes after one that was killed knows the endpoints of its clients, for as long as the
// first would have.
func TestAffinityIsSaved(t *testing.T) {
	alone(t)
	snap := snapshot(8)
	first := opened(t)
	applied(t, first, snap)
	front := first.known[snap.Services[intent.Key{Namespace: "default", Name: "web-3"}].Frontends[0].FrontendKey]
	to := front.Routes[plan.FromOutside].Pool.Endpoints[1].Addr
	first.memory.answered(front, alice, to)
	if err := first.save(); err != nil {
		t.Fatal(err)
	}
	if err := first.save(); err != nil { // nothing new
		t.Fatal(err)
	}
	second := opened(t) // while the first is still there: it was not asked to end
	for range 5 {
		if got := second.memory.order(nil, front, plan.FromOutside, alice)[0].Addr; got != to {
			t.Fatalf("the client gets %v, not %v", got, to)
		}
	}
	for _, at := range second.memory.sticky {
		if left := time.Until(at.Value.(*stuck).until); left < 59*time.Minute || left > time.Hour {
			t.Errorf("the client keeps its endpoint for %v", left)
		}
	}
	// It changes its endpoint, which is saved too.
	to = front.Routes[plan.FromOutside].Pool.Endpoints[0].Addr
	applied(t, second, func() *plan.Snapshot { snap.Forget(); return snap }())
	second.memory.answered(front, alice, to)
	if err := second.save(); err != nil {
		t.Fatal(err)
	}
	// Somebody flushes everything, and it is repaired.
	if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	second.memory.answered(front, bob, to)
	if err := second.save(); err == nil {
		t.Error("saved to a table that is gone")
	}
	snap.Forget()
	applied(t, second, snap)
	if err := second.save(); err != nil {
		t.Fatal(err)
	}
	third := opened(t)
	if got := third.memory.order(nil, front, plan.FromOutside, alice)[0].Addr; got != to {
		t.Errorf("the client gets %v, not %v", got, to)
	}
	if n := len(third.memory.sticky); n != 2 {
		t.Errorf("%d clients are known, not 2", n)
	}
}
