package conntrack

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// TestHandshakesHaveTime: a flow to an endpoint that leaves may still be answered, and one to an endpoint that is back is left
// alone; many changes cost few passes.
func TestHandshakesHaveTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const a, b, c, d = "10.244.0.1", "10.244.0.2", "10.244.0.3", "10.244.0.4"
		to := func(endpoint string) Flow { return Flow{intent.TCP, ap("10.96.0.10:53"), ap(endpoint + ":5353")} }
		kernel := &table{flows: []Flow{to(a), to(b), to(c), to(d)}}
		cleaner := New(kernel, slog.New(slog.DiscardHandler), nil)
		stop := run(t, cleaner)
		defer stop()
		now := planned(intent.TCP, a, b, c, d)
		change := func(endpoints ...string) {
			next := planned(intent.TCP, endpoints...)
			cleaner.Acknowledged([]plan.ServiceChange{{Old: now, New: next}}, only(next), nil, false)
			now = next
			synctest.Wait()
		}
		left := func(endpoints ...string) {
			t.Helper()
			synctest.Wait()
			var want []Flow
			for _, e := range endpoints {
				want = append(want, to(e))
			}
			if !slices.Equal(kernel.left(), want) {
				t.Errorf("left: %v, want %v", kernel.left(), want)
			}
		}
		change(b, c, d) // a leaves
		time.Sleep(600 * time.Millisecond)
		change(d) // b and c too
		left(a, b, c, d)
		time.Sleep(300 * time.Millisecond)
		change(c, d) // c is back
		left(a, b, c, d)
		time.Sleep(200 * time.Millisecond)
		left(b, c, d)
		time.Sleep(time.Second)
		left(c, d)
		if kernel.passed() != 2 {
			t.Errorf("%d passes", kernel.passed())
		}
		for i := range 100 {
			if change(c, d); i%2 == 0 {
				change(d)
			}
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		if synctest.Wait(); kernel.passed() > 10 {
			t.Errorf("%d passes after 5 s of changes", kernel.passed())
		}
		left(c, d) // the last change brought it back
	})
}

// TestHandshakesAreRetried: what a failed pass was to look at is looked at again, but for what has changed meanwhile.
func TestHandshakesAreRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const a, b, c = "10.244.0.1", "10.244.0.2", "10.244.0.3"
		to := func(endpoint string) Flow { return Flow{intent.TCP, ap("10.96.0.10:53"), ap(endpoint + ":5353")} }
		kernel := &failing{table: table{flows: []Flow{to(a), to(b), to(c)}}}
		cleaner := New(kernel, slog.New(slog.DiscardHandler), nil)
		all, one, two := planned(intent.TCP, a, b, c), planned(intent.TCP, c), planned(intent.TCP, b, c)
		kernel.during = func() { // b comes back while the pass is made
			cleaner.Acknowledged([]plan.ServiceChange{{Old: one, New: two}}, only(two), nil, false)
		}
		stop := run(t, cleaner)
		defer stop()
		cleaner.Acknowledged([]plan.ServiceChange{{Old: all, New: one}}, only(one), nil, false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if want := []Flow{to(b), to(c)}; !slices.Equal(kernel.left(), want) {
			t.Errorf("left: %v, want %v", kernel.left(), want)
		}
		if kernel.passed() != 1 {
			t.Errorf("%d passes after one that failed", kernel.passed())
		}
	})
}

// failing is a table of which the first pass fails.
type failing struct {
	table
	during func()
}

func (f *failing) Delete(family intent.Family, protocol intent.Protocol, match func(Flow) bool) (int, error) {
	if during := f.during; during != nil {
		f.during = nil
		during()
		return 0, errors.New("the dump was interrupted")
	}
	return f.table.Delete(family, protocol, match)
}

func run(t *testing.T, c *Cleaner) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { c.Run(ctx) })
	return func() { cancel(); wg.Wait() }
}
