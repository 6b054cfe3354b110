package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/bench/report"
	"portal/test/harness"
)

// cluster is the server and what is in it.
type cluster struct {
	options
	api    *harness.API
	config *rest.Config
	client *kubernetes.Clientset
	dir    string // for files of other processes

	leases                     sync.WaitGroup
	release                    context.CancelFunc
	changes, renewals, expired atomic.Int64 // changes of endpoints; renewals of Leases, and those that failed
}

const (
	namespaces = 20
	atOnce     = 24 // requests
	// patience is how long something may take without any progress.
	patience = 3 * time.Minute
)

func newCluster(api *harness.API, o options, dir string) (*cluster, error) {
	config, err := harness.Config(api.Kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	return &cluster{options: o, api: api, config: config, client: client, dir: dir, release: func() {}}, err
}

// stop has nodes renew their Leases no more.
func (c *cluster) stop() {
	c.release()
	c.leases.Wait()
	if n := c.expired.Load(); n > 0 {
		report.Logf("%d renewals of Leases failed", n)
	}
}

func nodeName(i int) string { return fmt.Sprintf("node-%04d", i) }

const namespacePrefix = "team-"

func namespaceOf(service int) string { return fmt.Sprint(namespacePrefix, service%namespaces) }

func serviceName(i int) string { return fmt.Sprintf("svc-%05d", i) }

// fill makes nodes, Services and ready Pods; the server's controllers make the slices.
func (c *cluster) fill(ctx context.Context) error {
	began := time.Now()
	for i := range namespaces {
		if _, err := c.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespaceOf(i)}}, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	if err := c.until(ctx, namespaces, "namespaces have their ServiceAccount", c.accounts); err != nil {
		return err
	}
	for _, step := range []struct {
		what string
		n    int
		make func(context.Context, int) error
	}{
		{"nodes", c.nodes, c.makeNode}, {"Services", c.services, c.makeService}, {"Pods", c.services * c.pods, c.makePod},
	} {
		report.Logf("creating %d %s", step.n, step.what)
		if err := report.Each(ctx, atOnce, step.n, patiently(ctx, step.make)); err != nil {
			return fmt.Errorf("create %s: %w", step.what, err)
		}
		if step.what == "nodes" {
			c.keepLeases(ctx)
		}
	}
	if err := c.until(ctx, c.services*c.pods, "endpoints are ready", c.ready); err != nil {
		return err
	}
	report.Logf("%d nodes, %d Services and %d Pods after %s", c.nodes, c.services, c.services*c.pods, time.Since(began).Round(time.Second))
	return nil
}

// patiently tries something that makes an object several times: a server under load may lose a connection.
func patiently(ctx context.Context, do func(context.Context, int) error) func(int) error {
	return func(i int) (err error) {
		for range 5 {
			if err = do(ctx, i); err == nil || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || !wait(ctx, time.Second) {
				break
			}
		}
		return err
	}
}

// until waits until there are as many as wanted, as long as it gets ahead.
func (c *cluster) until(ctx context.Context, want int, what string, count func(context.Context) (int, error)) error {
	most, end := -1, time.Time{}
	for logged := time.Now(); ; {
		n, err := count(ctx)
		if err != nil || n == want {
			return err
		}
		if n > most {
			most, end = n, time.Now().Add(patience)
		}
		switch {
		case time.Now().After(end):
			return fmt.Errorf("%d of %d %s, and no more for %s", n, want, what, patience)
		case time.Since(logged) > 10*time.Second:
			report.Logf("%d of %d %s", n, want, what)
			logged = time.Now()
		}
		if !wait(ctx, time.Second) {
			return ctx.Err()
		}
	}
}

// accounts counts namespaces in which Pods can be made: one without the ServiceAccount default admits none.
func (c *cluster) accounts(ctx context.Context) (n int, err error) {
	list, err := c.client.CoreV1().ServiceAccounts("").List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=default"})
	if err != nil {
		return 0, err
	}
	for i := range list.Items {
		if strings.HasPrefix(list.Items[i].Namespace, namespacePrefix) {
			n++
		}
	}
	return n, nil
}

// ready counts ready endpoints.
func (c *cluster) ready(ctx context.Context) (n int, err error) {
	list, err := c.client.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{ResourceVersion: "0", LabelSelector: "bench=reports"})
	if err != nil {
		return 0, err
	}
	for i := range list.Items {
		for _, e := range list.Items[i].Endpoints {
			if e.Conditions.Ready != nil && *e.Conditions.Ready {
				n++
			}
		}
	}
	return n, nil
}

func (c *cluster) makeNode(ctx context.Context, i int) error {
	node, err := c.client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i)}}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		node, err = c.client.CoreV1().Nodes().Get(ctx, nodeName(i), metav1.GetOptions{})
	}
	if err != nil {
		return err
	}
	node.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "NodeReady", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
	}}
	if _, err = c.client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return renew(ctx, c.client, nodeName(i))
}

func (c *cluster) makeService(ctx context.Context, i int) error {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: serviceName(i), Labels: map[string]string{"bench": "reports"}},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": serviceName(i)}, Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}
	_, err := c.client.CoreV1().Services(namespaceOf(i)).Create(ctx, svc, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (c *cluster) makePod(ctx context.Context, i int) error {
	service := i / c.pods
	pods := c.client.CoreV1().Pods(namespaceOf(service))
	name := fmt.Sprintf("%s-%d", serviceName(service), i%c.pods)
	pod, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": serviceName(service)}},
		Spec: corev1.PodSpec{NodeName: nodeName(i % c.nodes), Containers: []corev1.Container{{
			Name: "web", Image: "example/web:1", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 80}},
		}}},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		pod, err = pods.Get(ctx, name, metav1.GetOptions{})
	}
	if err != nil {
		return err
	}
	ip := netip.AddrFrom4([4]byte{10, 128 + byte(i>>16), byte(i >> 8), byte(i)}).String()
	now := metav1.Now()
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, StartTime: &now,
		Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: now}, {Type: corev1.ContainersReady, Status: corev1.ConditionTrue, LastTransitionTime: now},
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: now}, {Type: corev1.PodInitialized, Status: corev1.ConditionTrue, LastTransitionTime: now},
		},
		ContainerStatuses: []corev1.ContainerStatus{{Name: "web", Image: "example/web:1", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}}},
	}
	_, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

// change changes the endpoints of a Service that has no selector: nothing else in the cluster is touched.
func (c *cluster) change(ctx context.Context, i int) error {
	ready, port, protocol := true, int32(80), corev1.ProtocolTCP
	slices := c.client.DiscoveryV1().EndpointSlices("default")
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: fmt.Sprintf("churn-%d", i%100), Labels: map[string]string{"bench": "churn"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &protocol}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{fmt.Sprintf("10.200.%d.%d", i/250%250, i%250+1)}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
	c.changes.Add(1)
	if i < 100 {
		_, err := slices.Create(ctx, slice, metav1.CreateOptions{})
		return err
	}
	_, err := slices.Update(ctx, slice, metav1.UpdateOptions{})
	return err
}
