package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"portal/bench/report"
	"portal/test/harness"
)

const (
	bigNamespace, bigName = "big", "big"
	writers               = 24
)

// cluster is the API server that all subjects work on, and the expected state of its objects.
type cluster struct {
	options
	client     kubernetes.Interface
	seen       *observer
	dir        string
	kubeconfig string
	members    [][]string // by Service: the names of its Pods
	bigPods    []string
	generation int
}

func newCluster(ctx context.Context, api *harness.API, o options, dir string) (*cluster, error) {
	client, err := harness.Connect(api.Kubeconfig)
	if err != nil {
		return nil, err
	}
	return &cluster{options: o, client: client, seen: observe(ctx, client), dir: dir, kubeconfig: api.Kubeconfig, members: make([][]string, o.services)}, nil
}

func (c *cluster) namespaceOf(service int) string { return fmt.Sprintf("ns%d", service%c.namespaces) }

func serviceName(i int) string { return fmt.Sprintf("s%d", i) }

func (c *cluster) populate(ctx context.Context) error {
	for i := range 10 {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i), Labels: map[string]string{corev1.LabelTopologyZone: fmt.Sprintf("z%d", i%3)}}}
		if _, err := c.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	names := []string{bigNamespace}
	for i := range c.namespaces {
		names = append(names, fmt.Sprintf("ns%d", i))
	}
	for _, name := range names {
		if _, err := c.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	if err := c.createService(ctx, bigNamespace, bigName); err != nil {
		return err
	}
	if err := report.Each(ctx, writers, c.services, func(i int) error { return c.createService(ctx, c.namespaceOf(i), serviceName(i)) }); err != nil {
		return err
	}
	for i := range c.pods {
		s := i % c.services
		c.members[s] = append(c.members[s], fmt.Sprintf("p%d", i))
	}
	err := report.Each(ctx, writers, c.pods, func(i int) error {
		s := i % c.services
		return c.createPod(ctx, c.namespaceOf(s), fmt.Sprintf("p%d", i), serviceName(s), i)
	})
	if err != nil {
		return err
	}
	for i := range c.big {
		c.bigPods = append(c.bigPods, fmt.Sprintf("b%d", i))
	}
	return report.Each(ctx, writers, c.big, func(i int) error { return c.createPod(ctx, bigNamespace, c.bigPods[i], bigName, 1_000_000+i) })
}

func nodeName(i int) string { return fmt.Sprintf("node%d", i) }

func (c *cluster) createService(ctx context.Context, namespace, name string) error {
	_, err := c.client.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	return err
}

func (c *cluster) createPod(ctx context.Context, namespace, name, app string, n int) error {
	client := c.client.CoreV1().Pods(namespace)
	pod, err := client.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": app, "pod-template-hash": "5d59d67564", "tier": "web"}},
		Spec:       corev1.PodSpec{NodeName: nodeName(n % 10), Containers: []corev1.Container{{Name: "c", Image: "i", Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 8080}}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: address(n), PodIPs: []corev1.PodIP{{IP: address(n)}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}},
	}
	_, err = client.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

func address(n int) string { return fmt.Sprintf("10.%d.%d.%d", 64+n>>16&63, n>>8&255, n&255) }

// deleteSlices deletes all EndpointSlices and Endpoints that controllers have written.
func (c *cluster) deleteSlices(ctx context.Context) error {
	for i := -1; i < c.namespaces; i++ {
		namespace := bigNamespace
		if i >= 0 {
			namespace = fmt.Sprintf("ns%d", i)
		}
		if err := c.client.DiscoveryV1().EndpointSlices(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			return err
		}
		if err := c.client.CoreV1().Endpoints(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			return err
		}
	}
	return c.seen.waitUntil(ctx, 2*time.Minute, func(o *observer) bool { return len(o.services) == 0 })
}

// allSynced reports whether every Service's slices have all its Pods.
func (c *cluster) allSynced(o *observer) bool {
	if len(o.services) < c.services+1 {
		return false
	}
	for i, pods := range c.members {
		if o.services[c.namespaceOf(i)+"/"+serviceName(i)].endpoints() != len(pods) {
			return false
		}
	}
	return c.bigSynced(o)
}

// bigSynced reports whether the big Service's slices have the Pods that it has now, and no others.
func (c *cluster) bigSynced(o *observer) bool {
	s := o.services[bigNamespace+"/"+bigName]
	if s.endpoints() != len(c.bigPods) {
		return false
	}
	for _, pod := range c.bigPods {
		if !s.has(pod) {
			return false
		}
	}
	return true
}

// waitIdle waits until no slice has been written for two seconds.
func (c *cluster) waitIdle(ctx context.Context) error {
	return c.seen.waitUntil(ctx, 10*time.Minute, func(o *observer) bool { return time.Since(o.last) > 2*time.Second })
}

// waitEndpoints waits until all Endpoints are written too; controllers write them after the slices.
func (c *cluster) waitEndpoints(ctx context.Context) error {
	for end := time.Now().Add(20 * time.Minute); ; {
		list, err := c.client.CoreV1().Endpoints("").List(ctx, metav1.ListOptions{Limit: 1})
		if err != nil {
			return err
		}
		count := len(list.Items)
		if list.RemainingItemCount != nil {
			count += int(*list.RemainingItemCount)
		}
		if count > c.services {
			return c.waitIdle(ctx)
		}
		if time.Now().After(end) {
			return fmt.Errorf("only %d of %d Endpoints are written", count, c.services)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// churn changes the readiness of Pods at a steady rate, and measures how long each change takes to reach its slice.
func (c *cluster) churn(ctx context.Context, r *rand.Rand) (latencies []time.Duration, lost int, err error) {
	ticker := time.NewTicker(time.Second / time.Duration(c.rate))
	defer ticker.Stop()
	ready := map[string]bool{}
	var writes sync.WaitGroup
	var mu sync.Mutex
	for end := time.Now().Add(c.options.churn); time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		case <-ticker.C:
		}
		service := r.IntN(c.services)
		name := c.members[service][r.IntN(len(c.members[service]))]
		namespace := c.namespaceOf(service)
		key := namespace + "/" + name
		was, known := ready[key]
		if c.seen.waiting(key) {
			continue // its last change has not arrived yet
		}
		now := known && !was
		ready[key] = now
		writes.Go(func() {
			if e := c.setReady(ctx, namespace, name, now); e != nil {
				mu.Lock()
				err = e
				mu.Unlock()
			}
		})
	}
	writes.Wait()
	if err != nil {
		return nil, 0, err
	}
	// A change that has not arrived within two minutes counts with the time waited.
	_ = c.seen.waitUntil(ctx, 2*time.Minute, func(o *observer) bool { return len(o.expected) == 0 })
	latencies, lost = c.seen.drain()
	for key, now := range ready {
		if namespace, name, ok := splitKey(key); ok && !now {
			if err := c.setReady(ctx, namespace, name, true); err != nil {
				return nil, 0, err
			}
		}
	}
	_ = c.seen.waitUntil(ctx, 5*time.Minute, func(o *observer) bool { return len(o.expected) == 0 })
	c.seen.drain()
	return latencies, lost, nil
}

func (c *cluster) setReady(ctx context.Context, namespace, name string, ready bool) error {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"lastTransitionTime":%q}]}}`, status, time.Now().UTC().Format(time.RFC3339))
	// The clock starts when the write is sent: a slice may be written before its answer is here.
	c.seen.expect(namespace+"/"+name, ready)
	_, err := c.client.CoreV1().Pods(namespace).Patch(ctx, name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	return err
}

// rollOver replaces the Pods of the big Service, a few at a time, as a Deployment does.
func (c *cluster) rollOver(ctx context.Context) error {
	c.generation++
	next := make([]string, len(c.bigPods))
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	var steps sync.WaitGroup
	room := make(chan struct{}, 8)
	var mu sync.Mutex
	var failed error
	for i, old := range c.bigPods {
		next[i] = fmt.Sprintf("b%d-%d", i, c.generation)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		room <- struct{}{}
		steps.Go(func() {
			defer func() { <-room }()
			err := c.createPod(ctx, bigNamespace, next[i], bigName, 1_000_000+c.generation*c.big+i)
			if err == nil {
				err = c.client.CoreV1().Pods(bigNamespace).Delete(ctx, old, *metav1.NewDeleteOptions(0))
			}
			if err != nil {
				mu.Lock()
				failed = err
				mu.Unlock()
			}
		})
	}
	steps.Wait()
	c.bigPods = next
	return failed
}
