package apiserver

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestLoadMeter: that requests wait is reported once, and forgotten some time after the last of them.
func TestLoadMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []Load
		m := &loadMeter{report: func(l Load) { seen = append(seen, l) }}
		m.connections(3)
		for range 4 {
			m.waited()
			time.Sleep(waitingFor / 2)
		}
		if want := []Load{{Connections: 3}, {3, true}}; !slices.Equal(seen, want) {
			t.Fatalf("while requests wait: %v, want %v", seen, want)
		}
		time.Sleep(waitingFor)
		synctest.Wait()
		if last := seen[len(seen)-1]; len(seen) != 3 || last.Waiting {
			t.Errorf("after the last one: %v, want one report more, that none waits", seen)
		}
	})
}

// TestWaitingIsLoad: a request with a large answer that has to wait for others of its user counts. One that does not wait does not, and
// neither does one with a small answer.
func TestWaitingIsLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, heavy := range []bool{true, false} {
			turns := newTurns(1)
			reports := 0
			turns.waited = func() { reports++ }
			key := turnKey{user: "someone", heavy: heavy}
			var begun []func()
			for range turns.most(key, turns.now()) {
				begun = append(begun, turns.take(t.Context(), key))
			}
			if reports > 0 {
				t.Fatalf("heavy %v: requests that need not wait count as waiting", heavy)
			}
			go func() {
				if done := turns.take(t.Context(), key); done != nil {
					done()
				}
			}()
			synctest.Wait()
			if got := reports == 1; got != heavy {
				t.Errorf("heavy %v: a request that waits was reported %d times", heavy, reports)
			}
			for _, done := range begun {
				done()
			}
			synctest.Wait()
		}
	})
}
