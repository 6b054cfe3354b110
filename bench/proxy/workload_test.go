package main

import (
	"net/netip"
	"testing"
)

func TestMixIsSeededAndHasItsShares(t *testing.T) {
	const n = 20_000
	mix, again, other := mixed(1), mixed(1), mixed(2)
	count := map[string]int{}
	endpoints, differ := 0, 0
	for i := range n {
		s := mix.service(i)
		if s != again.service(i) {
			t.Fatalf("Service %d differs between two mixes of the same seed", i)
		}
		if s != other.service(i) {
			differ++
		}
		if s.ports < 1 || s.ports > 4 || s.endpoints < 1 || s.endpoints > maxEndpoints {
			t.Fatalf("Service %d: %+v", i, s)
		}
		endpoints += s.endpoints
		count[s.kind]++
		for name, is := range map[string]bool{
			"affinity": s.affinity, "local": s.local, "four ports": s.ports == 4, "one endpoint": s.endpoints == 1,
			"100 endpoints and more": s.endpoints >= 100, "200 endpoints": s.endpoints == maxEndpoints,
		} {
			if is {
				count[name]++
			}
		}
	}
	if differ < n/2 {
		t.Errorf("only %d of %d Services differ with another seed", differ, n)
	}
	for name, want := range map[string][2]float64{
		"affinity": {0.09, 0.11}, "local": {0.045, 0.055}, "four ports": {0.04, 0.06}, "NodePort": {0.09, 0.11}, "LoadBalancer": {0.09, 0.11},
		"one endpoint": {0.45, 0.60}, "100 endpoints and more": {0.003, 0.01}, "200 endpoints": {0.001, 0.006},
	} {
		if got := float64(count[name]) / n; got < want[0] || got > want[1] {
			t.Errorf("share of %s: %.4f, want %v", name, got, want)
		}
	}
	if mean := float64(endpoints) / n; mean < 3 || mean > 7 {
		t.Errorf("%.1f endpoints on average", mean)
	}
}

func TestPodAddressesAreDistinctAndInRange(t *testing.T) {
	seen := map[string]bool{}
	v4, v6 := netip.MustParsePrefix(podRange), netip.MustParsePrefix(podRange6)
	for _, i := range []int{1, 255, 256, 65536, 30_000*maxEndpoints - 1, freshFrom + 1, freshFrom + 1<<17} {
		a, b := podAddr(i), podAddr6(i)
		if seen[a] || seen[b] || !v4.Contains(netip.MustParseAddr(a)) || !v6.Contains(netip.MustParseAddr(b)) {
			t.Errorf("Pod %d: %s, %s", i, a, b)
		}
		seen[a], seen[b] = true, true
	}
}
