package lb

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"portal/internal/lb/config"
)

// mortal is a balancing process that ends some time after it was started.
type mortal struct {
	life   time.Duration
	gone   chan struct{}
	starts atomic.Int64
}

func (m *mortal) Apply(context.Context, config.Config) error {
	if m.gone != nil {
		select {
		case <-m.gone:
		default:
			return nil
		}
	}
	gone := make(chan struct{})
	m.gone = gone
	m.starts.Add(1)
	time.AfterFunc(m.life, func() { close(gone) })
	return nil
}

func (m *mortal) Gone() <-chan struct{} { return m.gone }

// TestRetries: what fails again and again is tried less and less often, and changes are taken in at once all the same.
func TestRetries(t *testing.T) {
	const long = 10 * time.Minute
	// A row of 1, 2, 4, 8, 16 and then 30 s.
	const most = 6 + int(long/balancingRetryMost)
	run := func(t *testing.T, m *mortal, pass func(context.Context) error) *balancing {
		p := newBalancing(&Balancer{Options: Options{Balancing: &Balancing{Engine: m}, Log: slog.New(slog.DiscardHandler)}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			p.keep(ctx, pass)
		}()
		t.Cleanup(func() {
			cancel()
			<-ended
		})
		p.changed()
		return p
	}
	t.Run("passes that fail", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var count atomic.Int64
			var broken atomic.Bool
			broken.Store(true)
			passes := func() int { return int(count.Load()) }
			p := run(t, &mortal{}, func(context.Context) error {
				count.Add(1)
				if broken.Load() {
					return errors.New("it is broken")
				}
				return nil
			})
			time.Sleep(long)
			if n := passes(); n < 6 || n > most {
				t.Errorf("%d passes in %v, want 6 to %d", n, long, most)
			}
			before := passes()
			p.changed()
			time.Sleep(2 * balancingDelay)
			if passes() != before+1 {
				t.Error("a change waits for the next retry")
			}
			broken.Store(false)
			time.Sleep(balancingRetryMost + checkInterval)
			before = passes()
			time.Sleep(long)
			if got, want := passes()-before, int(long/checkInterval); got < want-1 || got > want+1 {
				t.Errorf("%d passes while all is well, want %d", got, want)
			}
			broken.Store(true)
			p.changed()
			time.Sleep(2 * balancingDelay)
			before = passes()
			time.Sleep(balancingRetry)
			if passes() == before {
				t.Error("the first retry of another row comes late")
			}
		})
	})
	t.Run("a process that ends again and again", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := &mortal{life: 100 * time.Millisecond}
			run(t, m, func(ctx context.Context) error { return m.Apply(ctx, config.Config{}) })
			time.Sleep(time.Second)
			if m.starts.Load() < 2 {
				t.Error("one that ended once is not replaced at once")
			}
			time.Sleep(long)
			if m.starts.Load() > int64(most+1) {
				t.Errorf("%d starts in %v, want at most %d", m.starts.Load(), long, most+1)
			}
		})
	})
}
