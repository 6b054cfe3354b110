// Package findings writes Events about what package explain finds wrong, for those who look at objects and not at Portal. It looks at the whole
// cluster seldom, and writes only when something has become wrong and stays so. What is wrong, it does not decide.
package findings

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/explain"
	"portal/internal/explain/gather"
)

// Name is the controller's.
const Name = "findings"

const (
	// interval is how often the cluster is looked at while it changes, and idleInterval while it does not: reports of nodes change by themselves.
	interval, idleInterval = 30 * time.Second, 5 * time.Minute
	// restFactor is how much longer than a look the time after it is, up to maxRest: about half a percent of a processor goes there.
	restFactor = 200
	maxRest    = 15 * time.Minute
	// lookTimeout bounds one look.
	lookTimeout = 2 * time.Minute
)

// Deps are what the controller needs.
type Deps struct {
	Client kubernetes.Interface
	Clock  clock.WithTicker // the wall clock if nil
	// Watched are informers whose changes are a reason to look.
	Watched []cache.SharedIndexInformer
	// Look is what finds what is wrong; nil: package explain, on all that the API has.
	Look func(context.Context) ([]Found, error)
}

// Found is something that is wrong with an object.
type Found struct {
	explain.Finding
	// About is the object, as an Event refers to it.
	About corev1.ObjectReference
}

// Controller looks and writes.
type Controller struct {
	Deps
	changed atomic.Bool
	known   Known
}

// New makes the controller; Run starts it once the informers have synced.
func New(deps Deps) (*Controller, error) {
	if deps.Clock == nil {
		deps.Clock = clock.RealClock{}
	}
	c := &Controller{Deps: deps}
	if c.Look == nil {
		c.Look = c.explain
	}
	c.changed.Store(true)
	note := func() { c.changed.Store(true) }
	for _, i := range deps.Watched {
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { note() }, UpdateFunc: func(_, _ any) { note() }, DeleteFunc: func(any) { note() },
		}); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Run looks until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	log := klog.FromContext(ctx)
	looked := c.Clock.Now()
	wait := interval // a cluster that has just started is not in order yet
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.Clock.After(wait):
		}
		wait = interval
		began := c.Clock.Now()
		// What was found must be seen again before it is written, or be gone.
		if !c.changed.Swap(false) && !c.known.Pending() && began.Sub(looked) < idleInterval {
			continue
		}
		looked = began
		found, err := c.step(ctx)
		took := c.Clock.Since(began)
		wait = min(max(interval, restFactor*took), maxRest)
		switch {
		case err == nil:
			log.V(2).Info("looked at the cluster", "found", found, "took", took, "nextIn", wait)
		case ctx.Err() == nil:
			log.V(1).Info("the cluster could not be looked at, retrying", "err", err, "nextIn", wait)
		}
	}
}

// step looks once, writes what is new, and returns how much was found.
func (c *Controller) step(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	found, err := c.Look(ctx)
	if err != nil {
		c.changed.Store(true)
		return 0, err
	}
	news := c.known.Update(c.Clock.Now(), found)
	for i, f := range news {
		if err := c.write(ctx, f); err != nil {
			for _, unwritten := range news[i:] {
				c.known.Forget(unwritten)
			}
			return len(found), fmt.Errorf("write an Event about %s: %w", f.Object, err)
		}
	}
	return len(found), nil
}

// explain looks at everything that the API has.
func (c *Controller) explain(ctx context.Context) ([]Found, error) {
	evidence, err := gather.Gather(ctx, gather.Options{Client: c.Client, ObjectsOnly: true})
	if err != nil {
		return nil, err
	}
	all := explain.All(explain.Look(evidence))
	if all = slices.DeleteFunc(all, func(f explain.Finding) bool { return !News(&f) }); len(all) == 0 {
		return nil, nil
	}
	var out []Found
	known := references(evidence)
	for _, f := range all {
		if about, ok := known[f.Object]; ok {
			out = append(out, Found{f, about})
		}
	}
	return out, nil
}
