package main

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// observer watches EndpointSlices and records when they changed, and to what.
type observer struct {
	mu        sync.Mutex
	services  map[string]service // namespace/name → its slices
	writes    map[string]int
	last      time.Time // when a slice was last seen to change
	expected  map[string]expectation
	latencies []time.Duration
	dead      map[string]time.Time // Pods that are gone, and since when
	stalest   time.Duration        // the longest that an endpoint of such a Pod stayed
}

// service is the readiness of the Pods in a Service's slices, by slice.
type service map[string]map[string]bool

func (s service) endpoints() int {
	n := 0
	for _, pods := range s {
		n += len(pods)
	}
	return n
}

func (s service) has(pod string) bool {
	for _, pods := range s {
		if _, ok := pods[pod]; ok {
			return true
		}
	}
	return false
}

type expectation struct {
	ready bool
	since time.Time
}

func observe(ctx context.Context, client kubernetes.Interface) *observer {
	o := &observer{services: map[string]service{}, writes: map[string]int{}, expected: map[string]expectation{}, dead: map[string]time.Time{}, last: time.Now()}
	f := informers.NewSharedInformerFactory(client, 0)
	informer := f.Discovery().V1().EndpointSlices().Informer()
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { o.changed(obj.(*discoveryv1.EndpointSlice), false) },
		UpdateFunc: func(_, obj any) { o.changed(obj.(*discoveryv1.EndpointSlice), false) },
		DeleteFunc: func(obj any) {
			if slice, ok := obj.(*discoveryv1.EndpointSlice); ok {
				o.changed(slice, true)
			}
		},
	})
	f.StartWithContext(ctx)
	f.WaitForCacheSyncWithContext(ctx)
	return o
}

func (o *observer) changed(slice *discoveryv1.EndpointSlice, gone bool) {
	now := time.Now()
	name := slice.Labels[discoveryv1.LabelServiceName]
	if name == "" || slice.Namespace == "default" {
		return
	}
	key := slice.Namespace + "/" + name
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = now
	o.writes[key]++
	before := o.services[key][slice.Name]
	after := map[string]bool{}
	if !gone {
		for _, e := range slice.Endpoints {
			after[e.TargetRef.Name] = *e.Conditions.Ready
		}
	}
	for pod := range before {
		if _, still := after[pod]; !still {
			o.left(slice.Namespace+"/"+pod, now)
		}
	}
	for pod, ready := range after {
		if want, ok := o.expected[slice.Namespace+"/"+pod]; ok && want.ready == ready {
			o.latencies = append(o.latencies, now.Sub(want.since))
			delete(o.expected, slice.Namespace+"/"+pod)
		}
	}
	switch {
	case !gone && o.services[key] == nil:
		o.services[key] = service{slice.Name: after}
	case !gone:
		o.services[key][slice.Name] = after
	default:
		delete(o.services[key], slice.Name)
		if len(o.services[key]) == 0 {
			delete(o.services, key)
		}
	}
}

// left records that an endpoint was removed and, if its Pod was deleted before, how long it stayed.
func (o *observer) left(pod string, now time.Time) {
	if since, ok := o.dead[pod]; ok {
		o.stalest = max(o.stalest, now.Sub(since))
		delete(o.dead, pod)
	}
}

func (o *observer) died(pod string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dead[pod] = time.Now()
}

func (o *observer) expect(pod string, ready bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.expected[pod] = expectation{ready, time.Now()}
}

func (o *observer) waiting(pod string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, ok := o.expected[pod]
	return ok
}

// drain returns the latencies measured since the last call. A change that has not arrived counts with the time waited so far.
func (o *observer) drain() (latencies []time.Duration, lost int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	latencies = o.latencies
	for _, e := range o.expected {
		latencies = append(latencies, time.Since(e.since))
		lost++
	}
	o.latencies, o.expected = nil, map[string]expectation{}
	return latencies, lost
}

func (o *observer) writesOf(service string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.writes[service]
}

// waitUntil polls until a condition holds.
func (o *observer) waitUntil(ctx context.Context, within time.Duration, holds func(*observer) bool) error {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(within); ; {
		o.mu.Lock()
		ok := holds(o)
		o.mu.Unlock()
		if ok {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %s", within)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

func splitKey(key string) (namespace, name string, ok bool) { return strings.Cut(key, "/") }
