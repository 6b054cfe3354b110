package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/bench/report"
)

// killResult is how a change of leaders went.
type killResult struct {
	takeover time.Duration // from the leader's death to the first slice written after it
	stalest  time.Duration // how long an endpoint of a dead Pod stayed
}

// standby is how long the second instance has to fill its caches before it must take over.
const standby = 20 * time.Second

// killLeader runs two instances of Portal's controllers, replaces Pods, and kills the leader halfway through.
func (c *cluster) killLeader(ctx context.Context) (killResult, error) {
	var r killResult
	report.Logf("portal: two instances, rollover of %d Pods", c.killRoll)
	first, err := c.startPortal()
	if err != nil {
		return r, err
	}
	defer first.Kill()
	if err := c.waitForLeader(ctx); err != nil {
		return r, err
	}
	if err := c.waitReconciling(ctx); err != nil {
		return r, err
	}
	second, err := c.startPortal()
	if err != nil {
		return r, err
	}
	defer second.Kill()
	// It can't be seen from outside when its caches are complete.
	time.Sleep(standby)
	if err := c.seen.waitUntil(ctx, 5*time.Minute, c.allSynced); err != nil {
		return r, err
	}
	if err := c.waitIdle(ctx); err != nil {
		return r, err
	}
	var killed time.Time
	var watch sync.WaitGroup
	err = c.rollMembers(ctx, func(done int) {
		if done != c.killRoll/2 {
			return
		}
		killed = time.Now()
		first.Kill()
		watch.Go(func() {
			// What the leader had sent may still arrive; the standby can't write before the Lease has run out.
			time.Sleep(time.Second)
			from := time.Now()
			_ = c.seen.waitUntil(ctx, time.Minute, func(o *observer) bool { return o.last.After(from) })
			r.takeover = time.Since(killed)
		})
	})
	watch.Wait()
	if err != nil {
		return r, err
	}
	if err := c.seen.waitUntil(ctx, 2*time.Minute, c.allSynced); err != nil {
		return r, fmt.Errorf("the end state is wrong: %w", err)
	}
	if err := c.seen.waitUntil(ctx, time.Minute, func(o *observer) bool { return len(o.dead) == 0 }); err != nil {
		return r, errors.New("endpoints of dead Pods stay")
	}
	r.stalest = c.seen.stalest
	return r, nil
}

// waitReconciling waits until a controller reconciles: a change of a Pod reaches its slice.
func (c *cluster) waitReconciling(ctx context.Context) error {
	for _, ready := range []bool{false, true} {
		if err := c.setReady(ctx, c.namespaceOf(0), c.members[0][0], ready); err != nil {
			return err
		}
		if err := c.seen.waitUntil(ctx, 5*time.Minute, func(o *observer) bool { return len(o.expected) == 0 }); err != nil {
			return fmt.Errorf("the leader does not reconcile: %w", err)
		}
	}
	c.seen.drain()
	return nil
}

func (c *cluster) waitForLeader(ctx context.Context) error {
	return report.Until(ctx, 30*time.Second, 100*time.Millisecond, func() error {
		lease, err := c.client.CoordinationV1().Leases("kube-system").Get(ctx, "portal-controllers", metav1.GetOptions{})
		if err == nil && (lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "") {
			err = errors.New("no leader within 30 s")
		}
		return err
	})
}

// rollMembers replaces Pods of many Services and calls done with the number replaced so far.
func (c *cluster) rollMembers(ctx context.Context, done func(int)) error {
	c.generation++
	var mu sync.Mutex
	count := 0
	return report.Each(ctx, writers, c.killRoll, func(i int) error {
		service := i % c.services
		slot := i / c.services % len(c.members[service])
		namespace, old := c.namespaceOf(service), c.members[service][slot]
		next := fmt.Sprintf("k%d-%d", i, c.generation)
		if err := c.createPod(ctx, namespace, next, serviceName(service), 2_000_000+i); err != nil {
			return err
		}
		if err := c.client.CoreV1().Pods(namespace).Delete(ctx, old, *metav1.NewDeleteOptions(0)); err != nil {
			return err
		}
		c.seen.died(namespace + "/" + old)
		mu.Lock()
		defer mu.Unlock()
		c.members[service][slot] = next
		count++
		done(count)
		return nil
	})
}
