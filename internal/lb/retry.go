package lb

import (
	"context"
	"errors"
	"time"
)

const (
	balancingRetry     = time.Second
	balancingRetryMost = 30 * time.Second
	// processStable is how long a balancing process must have run for its end to be an accident rather than the next of a row.
	processStable = time.Minute
)

// retryPace says how long to wait before what failed is tried again: twice as long with every failure of a row.
type retryPace struct {
	failures int // passes in a row
	ends     int // of the balancing process, in a row
	ended    time.Time
}

// failed is called after a pass that failed.
func (r *retryPace) failed() time.Duration {
	r.failures++
	return backoff(r.failures)
}

func (r *retryPace) succeeded() { r.failures = 0 }

// processEnded is called when the balancing process has ended. The first time another one is started at once.
func (r *retryPace) processEnded(now time.Time) time.Duration {
	if now.Sub(r.ended) > processStable {
		r.ends = 0
	}
	r.ended = now
	r.ends++
	if r.ends == 1 {
		return 0
	}
	return backoff(r.ends - 1)
}

// backoff is how long to wait after so many failures of a row.
func backoff(failures int) time.Duration {
	return min(balancingRetry<<min(failures-1, 10), balancingRetryMost)
}

// keep makes a pass after every change, every now and then, and again after those that failed, until the context ends. A change is never kept waiting by
// what failed: that may be one listener of many.
func (p *balancing) keep(ctx context.Context, pass func(context.Context) error) {
	check := time.NewTicker(checkInterval)
	defer check.Stop()
	var again <-chan time.Time
	var seen <-chan struct{} // of a process whose end is known
	for {
		gone := p.Balancing.Engine.Gone()
		if gone == seen {
			gone = nil
		}
		select {
		case <-ctx.Done():
			return
		case <-p.dirty:
			select {
			case <-ctx.Done():
				return
			case <-time.After(balancingDelay):
			}
		case <-again:
		case <-check.C:
			if again != nil {
				continue // it would be a retry before its time
			}
		case <-gone:
			seen = gone
			if wait := p.retries.processEnded(time.Now()); wait > 0 {
				p.Log.Warn("the balancing process ended again, restarting it later", "ends", p.retries.ends, "in", wait)
				again = time.After(wait)
				continue
			}
		}
		again = nil
		switch err := pass(ctx); {
		case err == nil:
			p.retries.succeeded()
		case ctx.Err() != nil:
		case errors.Is(err, errUnsettled):
			again = time.After(balancingDelay)
		default:
			wait := p.retries.failed()
			p.failed(err, wait)
			again = time.After(wait)
		}
	}
}
