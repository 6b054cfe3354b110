package plan_test

import (
	"fmt"
	"net/netip"
	"testing"

	"portal/internal/intent"
	"portal/internal/plan"
)

// many is a cluster of n Services of two endpoints each.
func many(n int) []*intent.Entry {
	out := make([]*intent.Entry, n)
	for i := range out {
		e := entry(fmt.Sprint("s", i), "10.96.0.1", "10.244.1.1@n1", "10.244.2.1@n2")
		e.Service.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}
		e.Service.ExternalIPs, e.Service.Ingress = nil, nil
		out[i] = e
	}
	return out
}

func BenchmarkFull(b *testing.B) {
	entries, facts := many(10000), here()
	b.ReportAllocs()
	for b.Loop() {
		s := plan.NewSnapshot(facts)
		for _, e := range entries {
			s.Set(e.Service.Key, plan.For(e, facts))
		}
	}
}

// BenchmarkChange must be flat in the number of Services.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 10000, 30000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := plan.NewSnapshot(here())
			for _, e := range many(n) {
				set(s, e)
			}
			s.Acknowledge()
			one, two := entry("s7", "10.96.0.7", "10.244.1.1@n1"), entry("s7", "10.96.0.7", "10.244.2.1@n2")
			b.ReportAllocs()
			for b.Loop() {
				set(s, one)
				if s.Delta().Empty() {
					b.Fatal("no change")
				}
				s.Acknowledge()
				one, two = two, one
			}
		})
	}
}
