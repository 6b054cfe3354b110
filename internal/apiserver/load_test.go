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
		if last := seen[len(seen)-1]; len(seen) != 3 || last.Waiting {
			t.Errorf("after the last one: %v, want one report more, that none waits", seen)
		}
	})
}

// TestWaitingIsLoad: a request that has to wait for others of its user counts, one that does not wait does not.
func TestWaitingIsLoad(t *testing.T) {
	turns := newTurns(1)
	waited := make(chan struct{}, 1)
	turns.waited = func() { waited <- struct{}{} }
	key := turnKey{user: "someone", heavy: true}
	first := turns.take(t.Context(), key)
	if len(waited) > 0 {
		t.Fatal("the first request counts as waiting")
	}
	go func() {
		if done := turns.take(t.Context(), key); done != nil {
			done()
		}
	}()
	select {
	case <-waited:
	case <-time.After(time.Minute):
		t.Error("the second request does not count as waiting")
	}
	first()
}
