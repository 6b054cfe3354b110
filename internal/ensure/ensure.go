// Package ensure keeps objects in the API that must always exist: it checks each of them when something changed, and from
// time to time, and retries what failed with backoff. It knows no object by name, and no failure of it ends a program.
package ensure

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/watch"
)

// Object is one object, or a few that belong together.
type Object struct {
	// Name is for logs and metrics: "service default/kubernetes".
	Name string
	// Ensure reads the object and creates or repairs it where needed. It must do nothing when all is well.
	Ensure func(context.Context) error
	// Watch opens a watch whose events say that it is time to check; nil leaves the object to the resync.
	Watch func(context.Context) (watch.Interface, error)
}

const (
	resyncInterval = 30 * time.Second
	// coalesceDelay bounds how often a burst of events makes everything be checked.
	coalesceDelay = 200 * time.Millisecond
	minBackoff    = 500 * time.Millisecond
	maxBackoff    = 10 * time.Second
	checkTimeout  = 10 * time.Second
)

// Loop checks objects until it is stopped.
type Loop struct {
	objects []Object
	report  func(name string, err error)
	changed chan struct{}
}

// New makes a loop over objects, which are checked in their order. report gets the outcome of every check.
func New(report func(name string, err error), objects ...Object) *Loop {
	return &Loop{objects: objects, report: report, changed: make(chan struct{}, 1)}
}

// Check makes a running loop check everything soon.
func (l *Loop) Check() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// Once checks every object, whatever becomes of those before it, and says whether all are as they should be.
func (l *Loop) Once(ctx context.Context) bool {
	ok := true
	for _, object := range l.objects {
		check, cancel := context.WithTimeout(ctx, checkTimeout)
		err := object.Ensure(check)
		cancel()
		if ctx.Err() != nil {
			return false
		}
		l.report(object.Name, err)
		ok = ok && err == nil
	}
	return ok
}

// Run checks until ctx ends, and returns when all that it started has ended.
func (l *Loop) Run(ctx context.Context) {
	var watches sync.WaitGroup
	defer watches.Wait()
	for _, object := range l.objects {
		if object.Watch != nil {
			watches.Go(func() { l.follow(ctx, object.Watch) })
		}
	}
	backoff := minBackoff
	for ctx.Err() == nil {
		wait := resyncInterval
		if l.Once(ctx) {
			backoff = minBackoff
		} else {
			wait = backoff
			backoff = min(2*backoff, maxBackoff)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-l.changed:
			pause(ctx, coalesceDelay)
		}
		timer.Stop()
	}
}

// follow asks for a check at each event of a watch, and opens the watch again when it ends.
func (l *Loop) follow(ctx context.Context, open func(context.Context) (watch.Interface, error)) {
	for ctx.Err() == nil {
		w, err := open(ctx)
		if err == nil {
			for range w.ResultChan() {
				l.Check()
			}
			w.Stop()
		}
		pause(ctx, time.Second)
	}
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
