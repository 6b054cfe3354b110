package store

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestProgressIsBoundedByItsCost: however many reads wait, etcd is asked for a fifth of the time at most.
func TestProgressIsBoundedByItsCost(t *testing.T) {
	for _, cost := range []time.Duration{0, 10 * time.Millisecond, 100 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			asked := 0
			p := newProgress(func(context.Context) error { asked++; time.Sleep(cost); return nil })
			const span, between = 2 * time.Second, 100 * time.Microsecond
			for end := time.Now().Add(span); time.Now().Before(end); time.Sleep(between) {
				p.request()
			}
			p.close()
			each := max(atMostEvery, (1+restFor)*cost)
			if most := int(span/each) + 1; asked > most || asked < most/2 {
				t.Errorf("a request of %v was made %d times in %v, want %d at most and not half of that", cost, asked, span, most)
			}
			p.request()
			synctest.Wait()
		})
	}
}
