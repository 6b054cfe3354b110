package iptables

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// alone gives the test a network namespace of its own. The thread is never unlocked: it ends with the test.
func alone(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("network namespaces need root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		tb.Fatal(err)
	}
}

var facts = &plan.Facts{
	Node: "here", Families: []intent.Family{intent.IPv4, intent.IPv6},
	Addrs:     []netip.Addr{netip.MustParseAddr("172.31.0.11")},
	Pods:      plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
	NodePorts: plan.NodePorts{All: true, Loopback4: true},
}

// service n of many, with an endpoint more or less.
func cluster(n, endpoints int) *intent.Entry {
	key := intent.Key{Namespace: "default", Name: fmt.Sprint("web-", n)}
	s := &intent.Service{
		Key: key, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)})},
		Families: []intent.Family{intent.IPv4}, Ports: []intent.Port{{Protocol: intent.TCP, Port: 80}},
	}
	slice := &intent.Slice{
		Key: key, Service: key.Name, Family: intent.IPv4, Ports: []intent.EndpointPort{{Protocol: intent.TCP, Port: 8080}},
	}
	for i := range endpoints {
		a := netip.AddrFrom4([4]byte{10, 244, byte(n * 5 >> 8), byte(n*5 + i)})
		slice.Endpoints = append(slice.Endpoints, intent.Endpoint{Addr: a, NodeName: "there", Condition: intent.Ready | intent.Serving})
	}
	return &intent.Entry{Service: s, Slices: []*intent.Slice{slice}}
}

func BenchmarkScale(b *testing.B) {
	for _, v := range []Variant{NFT, Legacy} {
		for _, n := range []int{10, 1000, 10000, 30000} {
			b.Run(fmt.Sprintf("%s/%d", v, n), func(b *testing.B) {
				for b.Loop() {
					scale(b, v, n)
				}
			})
		}
	}
}

// held is how much memory is in use after a collection.
func held() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func scale(b *testing.B, v Variant, n int) {
	alone(b)
	s := plan.NewSnapshot(facts)
	put := func(n, endpoints int) {
		e := cluster(n, endpoints)
		s.Set(e.Service.Key, plan.For(e, facts))
	}
	for i := range n {
		put(i, 2)
	}
	before := held()
	back, err := New(Options{Variant: v}).Open(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	apply := func(unit string) {
		start := time.Now()
		if err := back.Apply(b.Context(), s, s.Delta()); err != nil {
			b.Fatal(err)
		}
		s.Acknowledge()
		b.ReportMetric(float64(time.Since(start).Microseconds())/1000, unit)
	}
	apply("ms-full")
	b.ReportMetric(float64(held()-before)/(1<<20), "MB-held")
	put(n/2, 3)
	apply("ms-change")
	put(n, 2)
	apply("ms-new")
	start := time.Now()
	if err := back.Check(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(time.Since(start).Microseconds())/1000, "ms-check")
	s.Forget()
	apply("ms-again")
	start = time.Now()
	if err := New(Options{}).Cleanup(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(time.Since(start).Microseconds())/1000, "ms-cleanup")
}
