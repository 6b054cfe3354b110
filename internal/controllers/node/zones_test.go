package node

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestZones(t *testing.T) {
	for _, c := range []struct {
		ready, lost int
		state       zoneState
		pause       time.Duration // 0: nobody is evicted
	}{
		{0, 0, zoneNormal, evictEvery},
		{3, 0, zoneNormal, evictEvery},
		{2, 1, zoneNormal, evictEvery},
		{1, 2, zoneNormal, evictEvery}, // two can be a coincidence
		{0, 1, zoneFull, evictEvery},
		{1, 3, zonePartial, 0},
		{9, 11, zonePartial, 0},
		{10, 11, zoneNormal, evictEvery},
		{22, 28, zonePartial, 0},
		{22, 29, zonePartial, evictSlowly},
	} {
		z := zone{c.ready, c.lost}
		pause, ever := z.pause()
		if !ever {
			pause = 0
		}
		if z.state() != c.state || pause != c.pause {
			t.Errorf("%+v: state %d, pause %v; want %d, %v", z, z.state(), pause, c.state, c.pause)
		}
	}
	for _, c := range []struct {
		zones map[string]zone
		want  bool
	}{
		{nil, false},
		{map[string]zone{"a": {0, 1}}, true},
		{map[string]zone{"a": {0, 1}, "b": {0, 5}}, true},
		{map[string]zone{"a": {0, 1}, "b": {1, 5}}, false},
	} {
		if got := isolated(c.zones); got != c.want {
			t.Errorf("%v isolated: %t", c.zones, got)
		}
	}
}

// evicting counts the nodes with a NoExecute taint.
func (r *rig) evicting(names ...string) (n int) {
	for _, name := range names {
		node, err := r.client.CoreV1().Nodes().Get(r.t.Context(), name, metav1.GetOptions{})
		r.must(err)
		for _, taint := range node.Spec.Taints {
			if taint.Effect == corev1.TaintEffectNoExecute {
				n++
			}
		}
	}
	return n
}

func (r *rig) fleet(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint("n", i))
		r.addNode(names[i], corev1.ConditionTrue)
		r.renew(names[i])
	}
	r.refresh()
	return names
}

// pass lets time pass, in which some nodes renew their Leases.
func (r *rig) pass(d time.Duration, alive ...string) {
	for ; d > 0; d -= 5 * time.Second {
		r.clock.Step(5 * time.Second)
		for _, name := range alive {
			r.renew(name)
		}
		r.refresh()
	}
}

// A server that sees no node evicts nothing, however long that lasts; nor does it begin with those that come back a little later.
func TestAnIsolatedServerEvictsNothing(t *testing.T) {
	r := newRig(t)
	nodes := r.fleet(3)
	r.pass(time.Hour)
	for _, name := range nodes {
		r.expect(name, isolatedState)
	}
	back := func(name string) {
		r.renew(name)
		r.report(name, corev1.ConditionTrue)
	}
	back(nodes[0])
	r.refresh()
	r.pass(30*time.Second, nodes[0])
	if n := r.evicting(nodes...); n != 0 {
		t.Errorf("%d nodes are evicted before they could come back", n)
	}
	back(nodes[1])
	r.pass(30*time.Second, nodes[0], nodes[1])
	r.expect(nodes[0], "True pod=true")
	r.expect(nodes[1], "True pod=true")
	r.expect(nodes[2], unreachable) // it had its time
}

// When the last node is lost too, evictions that have begun end.
func TestEvictionsEndWhenTheLastNodeIsLost(t *testing.T) {
	r := newRig(t)
	nodes := r.fleet(3)
	r.pass(time.Minute, nodes[0], nodes[1])
	if n := r.evicting(nodes...); n != 1 {
		t.Fatalf("%d nodes are evicted, want 1", n)
	}
	r.pass(time.Minute)
	if n := r.evicting(nodes...); n != 0 {
		t.Errorf("%d nodes are evicted, though no node is ready", n)
	}
}

func TestNodesAreEvictedOneAfterTheOther(t *testing.T) {
	r := newRig(t)
	nodes := r.fleet(20)
	lost, alive := nodes[:10], nodes[10:]
	r.pass(45*time.Second, alive...) // past the grace period
	for want := 1; want <= 4; want++ {
		if n := r.evicting(lost...); n != want {
			t.Fatalf("%d nodes are evicted, want %d", n, want)
		}
		r.pass(evictEvery, alive...)
	}
}

// Most nodes of a small zone are lost: its network may be, and nobody is evicted until fewer are.
func TestAZoneThatIsPartlyLost(t *testing.T) {
	r := newRig(t)
	nodes := r.fleet(4)
	r.pass(5*time.Minute, nodes[0])
	if n := r.evicting(nodes...); n != 0 {
		t.Errorf("%d nodes are evicted, though 3 of 4 are lost", n)
	}
	r.renew(nodes[1])
	r.report(nodes[1], corev1.ConditionTrue)
	r.pass(30*time.Second, nodes[0], nodes[1])
	if n := r.evicting(nodes...); n != 2 {
		t.Errorf("%d nodes are evicted, want the 2 that are lost", n)
	}
}
