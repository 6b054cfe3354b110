package queue

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var key = Key{Namespace: "ns", Name: "a"}

// start runs a queue in the test's bubble until the test ends.
func start(t *testing.T, opts Options, run Sync) *Queue {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	q := New(opts, run)
	var done sync.WaitGroup
	done.Go(func() { q.Run(ctx, 4) })
	t.Cleanup(func() { cancel(); done.Wait() })
	return q
}

func TestManyCallsAreOneRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs, running atomic.Int32
		q := start(t, Options{}, func(context.Context, Key) (Result, error) {
			if running.Add(1) > 1 {
				t.Error("two runs of one key at a time")
			}
			time.Sleep(time.Second)
			running.Add(-1)
			runs.Add(1)
			return Result{}, nil
		})
		q.Add(key)
		synctest.Wait() // the first run has begun
		for range 100 {
			q.Add(key)
		}
		time.Sleep(10 * time.Second)
		if runs.Load() != 2 {
			t.Errorf("%d runs: one, and one for the hundred calls in the meantime", runs.Load())
		}
	})
}

func TestFailuresAreRetriedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs []time.Time
		healthy := time.Now().Add(time.Hour)
		q := start(t, Options{FirstBackOff: time.Second, MaxBackOff: time.Minute}, func(context.Context, Key) (Result, error) {
			runs = append(runs, time.Now())
			if time.Now().Before(healthy) {
				return Result{}, errors.New("the API server is away")
			}
			return Result{}, nil
		})
		q.Add(key)
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if last := runs[len(runs)-1]; last.Before(healthy) || last.After(healthy.Add(time.Minute)) {
			t.Errorf("last run %s after it could succeed", last.Sub(healthy))
		}
		if first := runs[1].Sub(runs[0]); first != time.Second {
			t.Errorf("first retry after %s", first)
		}
		if len(runs) > 80 {
			t.Errorf("%d runs in an hour: the wait should have grown to a minute", len(runs))
		}
	})
}

func TestAFailingKeyHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := Key{Name: "b"}
		var at time.Time
		q := start(t, Options{FirstBackOff: time.Hour, MaxBackOff: time.Hour}, func(_ context.Context, k Key) (Result, error) {
			if k == other {
				at = time.Now()
				return Result{}, nil
			}
			return Result{}, errors.New("no")
		})
		begin := time.Now()
		q.Add(key)
		synctest.Wait()
		q.Add(other)
		synctest.Wait()
		if !at.Equal(begin) {
			t.Errorf("the other key ran after %s", at.Sub(begin))
		}
	})
}

func TestWritesPauseAKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		writes := 3
		var runs []time.Duration
		begin := time.Now()
		q := start(t, Options{WritePause: 100 * time.Millisecond, MaxWritePause: time.Second}, func(context.Context, Key) (Result, error) {
			runs = append(runs, time.Since(begin))
			return Result{Writes: writes}, nil
		})
		step := func(want time.Duration) {
			t.Helper()
			q.Add(key)
			time.Sleep(5 * time.Second)
			synctest.Wait()
			if got := runs[len(runs)-1]; got != want {
				t.Errorf("ran at %s, want %s", got, want)
			}
		}
		step(0) // a quiet key at once
		q.Add(key)
		synctest.Wait()
		writes = 50
		step(5*time.Second + 300*time.Millisecond) // three writes, three tenths of a second
		q.Add(key)
		synctest.Wait()
		step(11 * time.Second) // never more than the limit
	})
}

func TestAgainIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs int
		q := start(t, Options{}, func(context.Context, Key) (Result, error) {
			runs++
			if runs < 10 {
				return Result{Again: time.Second}, nil
			}
			return Result{}, nil
		})
		q.Add(key)
		time.Sleep(9*time.Second + time.Millisecond)
		synctest.Wait()
		if runs != 10 {
			t.Errorf("%d runs in nine seconds, one a second asked for", runs)
		}
	})
}

func TestRunEndsWithItsRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := false
		q := New(Options{}, func(ctx context.Context, _ Key) (Result, error) {
			<-ctx.Done()
			time.Sleep(time.Minute) // a write that takes its time
			ended = true
			return Result{}, ctx.Err()
		})
		q.Add(key)
		time.AfterFunc(time.Second, cancel)
		q.Run(ctx, 1)
		if !ended {
			t.Error("Run returned before the run it had started")
		}
	})
}

func TestPausesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := start(t, Options{WritePause: time.Millisecond, MaxWritePause: time.Second}, func(context.Context, Key) (Result, error) {
			return Result{Writes: 1}, nil
		})
		for i := range 10 * firstSweep {
			q.Add(Key{Name: string(rune('a' + i%26)), Namespace: time.Duration(i).String()})
			if i%64 == 0 {
				time.Sleep(time.Second)
			}
		}
		time.Sleep(time.Second)
		q.mu.Lock()
		defer q.mu.Unlock()
		if len(q.pauses) > 2*firstSweep {
			t.Errorf("%d keys are remembered although all have rested", len(q.pauses))
		}
	})
}

// TestAPanicIsAFailure: the key is retried later and later, and others are synced.
func TestAPanicIsAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs, others atomic.Int32
		q := start(t, Options{FirstBackOff: time.Second, MaxBackOff: time.Minute}, func(_ context.Context, k Key) (Result, error) {
			if k != key {
				others.Add(1)
			} else if runs.Add(1) <= 5 {
				panic("a mistake in the controller")
			}
			return Result{}, nil
		})
		q.Add(key)
		time.Sleep(30 * time.Second) // after 0, 1, 3, 7 and 15 s
		synctest.Wait()
		if runs.Load() != 5 {
			t.Errorf("%d runs", runs.Load())
		}
		q.Add(Key{Name: "b"})
		time.Sleep(time.Minute)
		synctest.Wait()
		if runs.Load() != 6 || others.Load() != 1 {
			t.Errorf("%d runs, %d of the other key", runs.Load(), others.Load())
		}
	})
}
