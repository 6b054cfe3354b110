package lb

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lb/pool"
)

// TestMachineAddresses: the addresses of this machine's interfaces are known.
func TestMachineAddresses(t *testing.T) {
	got := machineAddresses()
	if got[netip.MustParseAddr("127.0.0.1")] == "" {
		t.Errorf("127.0.0.1 is missing: %v", got)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		prefix := netip.MustParsePrefix(a.String())
		if found := got[prefix.Addr()] != ""; found == prefix.IsSingleIP() {
			t.Errorf("%s: %v", prefix, found)
		}
	}
}

// TestReservedRanges: the ranges of Services and Pods are reserved as far as pools have addresses of them, and reported once.
func TestReservedRanges(t *testing.T) {
	var log strings.Builder
	b := unstarted(t)
	b.Log = slog.New(slog.NewTextHandler(&log, nil))
	p, err := pool.ParseFlag("flag=10.1.0.0/24,10.96.5.0-10.96.5.9")
	if err != nil {
		t.Fatal(err)
	}
	b.pools = pool.Set{p}
	expect := func(want ...string) {
		t.Helper()
		for range 2 {
			if got := fmt.Sprint(b.reservedRanges()); got != fmt.Sprint(want) {
				t.Errorf("%s, want %s", got, want)
			}
		}
	}
	expect()
	cidr := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16", "fd00:96::/112"}}}
	if err := b.ranges.Add(cidr); err != nil {
		t.Fatal(err)
	}
	expect("the Service range 10.96.0.0/16")
	node := func(name string, ranges ...string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: ranges}}
	}
	for _, n := range []*corev1.Node{node("inside", "10.1.0.128/25", "fd00::/64"), node("outside", "10.2.0.0/24")} {
		if err := b.nodes.Add(n); err != nil {
			t.Fatal(err)
		}
	}
	expect("the Pod range of Node inside 10.1.0.128/25", "the Service range 10.96.0.0/16")
	for _, want := range []string{`pool=flag why="10.96.5.0-10.96.5.9 overlaps the Service range 10.96.0.0/16`, `pool=flag why="10.1.0.0-10.1.0.255 overlaps the Pod range of Node inside 10.1.0.128/25`} {
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("%s: logged %d times:\n%s", want, n, log.String())
		}
	}
	// A Node that gets another range is looked at again.
	before := node("inside", "10.1.0.128/25")
	if same(before, node("inside", "10.3.0.0/24")) || !same(before, node("inside", "10.1.0.128/25")) {
		t.Error("a Node's Pod range is not compared")
	}
	if err := b.nodes.Update(node("inside", "10.3.0.0/24")); err != nil {
		t.Fatal(err)
	}
	expect("the Service range 10.96.0.0/16")
}
