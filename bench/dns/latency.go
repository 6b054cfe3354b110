package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/bench/report"
)

const (
	changesPerSecond = 20
	changeMedian     = "change until answered, median"
	changeP99        = "change until answered, p99"
)

// latencies measures, for each subject, the time from a write to the API until the answer shows it: new Services, and
// new endpoints of existing ones, in turn.
func (b *bench) latencies(ctx context.Context, at report.At, c client) error {
	for _, d := range b.contenders() {
		p, addr, _, err := b.launch(ctx, d)
		if err != nil {
			return err
		}
		all, err := b.changes(ctx, c, addr)
		p.Stop()
		if err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
		at.Lower(d.name, changeMedian, report.Quantile(all, 0.5), "ms")
		at.Lower(d.name, changeP99, report.Quantile(all, 0.99), "ms")
	}
	b.report.Note("Changes: %d writes a second to the API, new Services and new endpoints in turn.", changesPerSecond)
	at.WantWithin(own, changeP99, 50)
	return nil
}

// changes makes changes at a fixed rate, whether those before are answered yet or not, and returns how long each took.
func (b *bench) changes(ctx context.Context, c client, addr string) ([]time.Duration, error) {
	run := rand.IntN(1 << 19) // what an earlier run left must not be mistaken for this one's
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []time.Duration
	var first error
	tick := time.NewTicker(time.Second / changesPerSecond)
	defer tick.Stop()
	for i := range changesPerSecond * max(5, b.seconds) {
		<-tick.C
		wg.Go(func() {
			began := time.Now()
			name, err := b.change(ctx, c, run, i)
			if err == nil {
				err = answers(ctx, addr, name, 30*time.Second, 500*time.Microsecond)
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, time.Since(began))
			if first == nil {
				first = err
			}
		})
	}
	wg.Wait()
	return all, first
}

// change makes the i-th change, and returns the name that must exist after it.
func (b *bench) change(ctx context.Context, c client, run, i int) (string, error) {
	if i%2 == 0 {
		name := fmt.Sprintf("new-%d-%05d", run, i)
		_, err := c.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		}, metav1.CreateOptions{})
		return fmt.Sprintf("%s.%s.svc.cluster.local.", name, namespace), err
	}
	service := fmt.Sprintf("svc-%05d", i*7919%b.services)
	slices := c.DiscoveryV1().EndpointSlices(namespace)
	s, err := slices.Get(ctx, service+"-1", metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	at := 240<<16 + run + i
	s.Endpoints[1].Addresses = []string{fmt.Sprintf("10.%d.%d.%d", at>>16, at>>8&255, at&255)}
	_, err = slices.Update(ctx, s, metav1.UpdateOptions{})
	return fmt.Sprintf("10-%d-%d-%d.%s.%s.svc.cluster.local.", at>>16, at>>8&255, at&255, service, namespace), err
}
