// Package backend is the contract between the proxy's loop and a mode: a mechanism that programs a plan.Snapshot into the
// kernel. It knows no mechanism itself.
package backend

import (
	"context"
	"fmt"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// Backend is a mode at work. Its methods are called by one goroutine at a time.
type Backend interface {
	// Apply makes the kernel do what next says. The delta tells what differs from the last snapshot for which Apply
	// returned nil; with delta.Full nothing is known, and whatever this mode finds of its own that next does not want is
	// removed in the same step, without a moment in which traffic of a wanted Service is lost. Apply is idempotent and all
	// or nothing, unless it returns a *Refused. next is valid during the call only; what it points to is immutable and
	// may be kept.
	Apply(ctx context.Context, next *plan.Snapshot, delta *plan.Delta) error
	// Check looks, cheaply, whether what was acknowledged is still in the kernel. An error says what differs (or why this can't
	// be known), and the next Apply will be a full one.
	Check(ctx context.Context) error
	// Close frees what the process holds. What was programmed stays, so that traffic goes on.
	Close() error
}

// CheckInterval is a Backend whose Check is cheap enough to run more often than usual, so that drift is repaired sooner.
type CheckInterval interface {
	Backend
	CheckInterval() time.Duration
}

// FallsBack is a Backend with a second, slower way to program the kernel, which it takes for a time when the first fails.
// It logs that itself.
type FallsBack interface {
	Backend
	// Fallbacks counts how often it did since it was opened.
	Fallbacks() uint64
}

// Mode is how a mechanism is entered.
type Mode interface {
	// Name is the value of --proxy-mode.
	Name() string
	// Traits are what the mode can do and does by default.
	Traits() Traits
	// Probe says why this machine can't run the mode, in one line that says what to do; nil: it can.
	Probe(ctx context.Context, families []intent.Family) error
	// Open returns a Backend. It takes over what an earlier process left in the kernel, and changes nothing yet.
	Open(ctx context.Context) (Backend, error)
	// Cleanup removes everything of this mode, and nothing else. It does nothing where there is nothing.
	Cleanup(ctx context.Context) error
	// Limits are what this mode does differently from the plan, in words for people; empty: nothing.
	Limits() []string
}

// Traits are what a mode can do and does by default, as far as the loop has to know.
type Traits struct {
	plan.Traits
	// Automatic: the mode may be chosen without being asked for.
	Automatic bool
	// Fallback is the mode to use where this one can't run; empty: none.
	Fallback string
	// FailureMetric counts failed full syncs, PartialFailureMetric failed incremental ones, under kube-proxy's names; empty: it
	// has none.
	FailureMetric, PartialFailureMetric string
}

// Refused says that some frontends could not be encoded or were refused by the kernel. All others were applied.
type Refused struct {
	Frontends map[plan.FrontendKey]error
}

func (r *Refused) Error() string {
	for k, err := range r.Frontends {
		return fmt.Sprintf("%d frontends were refused, among them %v port %d: %v", len(r.Frontends), k.Addr, k.Port, err)
	}
	return "no frontend was refused"
}
