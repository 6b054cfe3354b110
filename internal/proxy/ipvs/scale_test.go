package ipvs

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/plan"
)

// BenchmarkScale times a kernel of its own: all at once, one endpoint, a look whether all is there, and all again.
func BenchmarkScale(b *testing.B) {
	if err := hasIPVS(); err != nil && os.Getenv("PORTAL_VM") == "" {
		b.Skipf("%v; the virtual machine of test/vm has it", err)
	}
	for _, n := range []int{1000, 4000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				scale(b, n)
			}
		})
	}
}

func scale(b *testing.B, services int) {
	// Never unlocked: the thread ends with the benchmark, and the namespace with it.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		b.Fatal(err)
	}
	// Without a single address, IPVS takes every endpoint for a broadcast address.
	if lo, err := netlink.LinkByName("lo"); err != nil || netlink.LinkSetUp(lo) != nil {
		b.Fatal("the loopback device can't be set up")
	}
	back, err := New(Options{}).Open(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer back.Close()
	s := plan.NewSnapshot(facts())
	put := func(i int, endpoints ...string) {
		e := service(fmt.Sprint("s", i), fmt.Sprintf("10.96.%d.%d", i/250, 1+i%250), nil, endpoints...)
		s.Set(e.Service.Key, plan.For(e, s.Facts))
	}
	timed := func(unit string, do func() error) {
		start := time.Now()
		if err := do(); err != nil {
			b.Fatalf("%s: %v", unit, err)
		}
		b.ReportMetric(float64(time.Since(start).Microseconds())/1000, unit)
	}
	apply := func() error {
		err := back.Apply(b.Context(), s, s.Delta())
		s.Acknowledge()
		return err
	}
	for i := range services {
		put(i, "10.244.1.1", "10.244.1.2")
	}
	timed("ms-full", apply)
	put(7, "10.244.1.1", "10.244.1.3")
	timed("ms-change", apply)
	timed("ms-check", func() error { return back.Check(b.Context()) })
	s.Forget()
	timed("ms-again", apply)
}
