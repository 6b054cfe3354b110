package nftables

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// snapshot has Services of two endpoints each.
func snapshot(services int) *plan.Snapshot {
	s := plan.NewSnapshot(facts)
	for i := range services {
		plans(s, service(i, endpoint(i, 0), endpoint(i, 1)))
	}
	return s
}

func endpoint(service, i int) string {
	return fmt.Sprintf("10.%d.%d.%d", 128+i, service>>8, service&255)
}

// threadTime is how long this thread has had a CPU, in the kernel too: on a busy machine it says more than the clock.
func threadTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkFullSync(b *testing.B) {
	for _, n := range []int{1000, 10000, 30000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			inNamespace(b)
			s, be := snapshot(n), opened(b)
			start, turns := threadTime(), 0
			for b.Loop() {
				if err := be.Apply(context.Background(), s, &plan.Delta{Full: true}); err != nil {
					b.Fatal(err)
				}
				turns++
			}
			b.ReportMetric(float64((threadTime()-start).Microseconds())/float64(turns), "cpu-µs/op")
		})
	}
}

// BenchmarkFirstSync is into a kernel that has nothing of ours yet.
func BenchmarkFirstSync(b *testing.B) {
	for _, n := range []int{1, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			inNamespace(b)
			s := snapshot(n)
			var all time.Duration
			turns := 0
			for ; b.Loop(); turns++ {
				be := opened(b)
				began := time.Now()
				if err := be.Apply(context.Background(), s, &plan.Delta{Full: true}); err != nil {
					b.Fatal(err)
				}
				all += time.Since(began)
				if err := New(Options{}).Cleanup(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(all.Microseconds())/float64(turns), "sync-µs")
		})
	}
}

// BenchmarkEndpoint changes an endpoint of one Service, the number of its endpoints, or an endpoint of two frontends.
func BenchmarkEndpoint(b *testing.B) {
	inNamespace(b)
	for _, n := range []int{10, 10000, 30000} {
		s, be := snapshot(n), opened(b)
		if err := apply(be, s); err != nil {
			b.Fatal(err)
		}
		for _, kind := range []string{"replaced", "added", "shared"} {
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) {
				for i := 0; b.Loop(); i++ {
					e := service(7, endpoint(7, 0), endpoint(7, 2+i%2))
					if kind == "added" && i%2 == 0 {
						e = service(7, endpoint(7, 0), endpoint(7, 2), endpoint(7, 3))
					}
					if kind == "shared" {
						e.Service.Type, e.Service.Ports[0].NodePort = intent.NodePort, 30007
					}
					plans(s, e)
					if err := apply(be, s); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkMemory says what the mode itself remembers of 10,000 Services.
func BenchmarkMemory(b *testing.B) {
	inNamespace(b)
	s := snapshot(10000)
	used := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		before := used()
		be := opened(b)
		if err := be.Apply(context.Background(), s, &plan.Delta{Full: true}); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(used()-before)/1e6, "MB")
		runtime.KeepAlive(be)
	}
}
