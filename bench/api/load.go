package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientset "k8s.io/client-go/kubernetes"

	"portal/bench/report"
)

const (
	// fewServices is the population at which latency is first taken.
	fewServices = 100
	// warmUps are creates before anything is measured, deleted again.
	warmUps = 300
	// namespaces that the Services are spread over.
	namespaces = 10
	// ours selects the Services that this benchmark created.
	ours = "app.kubernetes.io/part-of=bench"
)

// load is a number of clients that create Services.
type load struct {
	subject *subject
	clients []*clientset.Clientset
}

func newLoad(s *subject, clients int) (*load, error) {
	l := &load{subject: s}
	for range clients {
		c, err := s.client()
		if err != nil {
			return nil, err
		}
		l.clients = append(l.clients, c)
	}
	return l, nil
}

// measure fills the server with Services and measures the latency of creates near the start and at the end.
func (l *load) measure(ctx context.Context, opts options, at report.At) error {
	report.Logf("warming up")
	if _, err := l.churn(ctx, "warm", warmUps); err != nil {
		return err
	}
	time.Sleep(2 * time.Second) // kube-apiserver still sets itself up in its first seconds
	if _, err := l.fill(ctx, 0, fewServices); err != nil {
		return err
	}
	report.Logf("latency of creates at %d Services", fewServices)
	few, err := l.churn(ctx, "few", opts.samples)
	if err != nil {
		return err
	}
	before, err := l.subject.usage()
	if err != nil {
		return err
	}
	report.Logf("creating up to %d Services", opts.services)
	profile := l.subject.startProfile(ctx, opts.profiles, fmt.Sprintf("%d-clients", len(l.clients)))
	filled, err := l.fill(ctx, fewServices, opts.services)
	if err != nil {
		return err
	}
	after, err := l.subject.usage()
	if err != nil {
		return err
	}
	if err := profile(); err != nil {
		return err
	}
	report.Logf("latency of creates at %d Services", opts.services)
	many, err := l.churn(ctx, "many", opts.samples)
	if err != nil {
		return err
	}
	name, creates := l.subject.name, float64(opts.services-fewServices)
	at.Higher(name, createRate, creates/filled.Seconds(), "a second")
	at.Lower(name, failed, float64(l.subject.failures.Load()), "")
	if first, ok := l.subject.failure.Load().(string); ok {
		report.Logf("first failure: %s", first)
	}
	for i, took := range [][]time.Duration{few, many} {
		population := []int{fewServices, opts.services}[i]
		at.Lower(name, fmt.Sprintf("create p50 at %d Services", population), report.Quantile(took, 0.5), "ms")
		at.Lower(name, fmt.Sprintf("create p99 at %d Services", population), report.Quantile(took, 0.99), "ms")
	}
	at.Lower(name, createGrowth, report.Quantile(many, 0.99)/report.Quantile(few, 0.99), "×")
	at.Lower(name, "server CPU for each Service", report.Milliseconds(after.Server.CPU-before.Server.CPU)/creates, "ms")
	if l.subject.etcd != nil {
		at.Lower(name, "etcd's CPU for each Service", report.Milliseconds(after.Etcd.CPU-before.Etcd.CPU)/creates, "ms")
	}
	at.Memory(name, after.Server, l.subject.sampler.Peak())
	at.Lower(name, anonymousBoth, after.Server.Anonymous+after.Etcd.Anonymous, "MB")
	return ctx.Err()
}

// fill creates the Services from number first up to number end, each with its slice, as quickly as the server lets it.
func (l *load) fill(ctx context.Context, first, end int) (time.Duration, error) {
	start := time.Now()
	_, err := l.each(ctx, first, end, func(c *clientset.Clientset, i int) (time.Duration, error) {
		took, err := createService(ctx, c, service("svc", i))
		if err != nil {
			return 0, err
		}
		_, err = c.DiscoveryV1().EndpointSlices(namespaceOf(i)).Create(ctx, slice("svc", i, 2), metav1.CreateOptions{})
		return took, err
	})
	return time.Since(start), err
}

// churn creates and deletes Services, so that their number stays what it is, and returns what the creates took.
func (l *load) churn(ctx context.Context, name string, creates int) ([]time.Duration, error) {
	return l.each(ctx, 0, creates, func(c *clientset.Clientset, i int) (time.Duration, error) {
		took, err := createService(ctx, c, service(name, i))
		if err != nil {
			return 0, err
		}
		err = c.CoreV1().Services(namespaceOf(i)).Delete(ctx, service(name, i).Name, metav1.DeleteOptions{})
		return took, err
	})
}

// each distributes the numbers from first up to end over the clients. Each client has one request in flight. A failed request
// is counted and skipped; it is an error only if more than half of them fail.
func (l *load) each(ctx context.Context, first, end int,
	do func(*clientset.Clientset, int) (time.Duration, error),
) ([]time.Duration, error) {
	var next, refused, done atomic.Int64
	next.Store(int64(first))
	defer l.follow(&done, end-first)()
	all := make([][]time.Duration, len(l.clients))
	var workers sync.WaitGroup
	for worker, client := range l.clients {
		workers.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= end || refused.Load() > int64(end-first)/2 {
					return
				}
				took, err := do(client, i)
				if err != nil {
					refused.Add(1)
					continue
				}
				all[worker] = append(all[worker], took)
				done.Add(1)
			}
		})
	}
	workers.Wait()
	if refused.Load() > int64(end-first)/2 {
		return nil, fmt.Errorf("more than half of %d requests failed, the first: %v", end-first, l.subject.failure.Load())
	}
	return slices.Concat(all...), ctx.Err()
}

// follow logs progress every few seconds until stop is called.
func (l *load) follow(done *atomic.Int64, of int) (stop func()) {
	ended, quiet := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(quiet)
		const every = 5 * time.Second
		before := int64(0)
		for {
			select {
			case <-ended:
				return
			case <-time.After(every):
				now := done.Load()
				report.Logf("%d of %d, %.0f/s, %d failed requests", now, of, float64(now-before)/every.Seconds(), l.subject.failures.Load())
				before = now
			}
		}
	}()
	return func() {
		close(ended)
		<-quiet
	}
}

// createService returns how long the server took to create the Service.
func createService(ctx context.Context, c *clientset.Clientset, svc *corev1.Service) (time.Duration, error) {
	start := time.Now()
	_, err := c.CoreV1().Services(svc.Namespace).Create(ctx, svc, metav1.CreateOptions{})
	took := time.Since(start)
	if apierrors.IsAlreadyExists(err) {
		err = fmt.Errorf("an earlier request created it but failed: %w", err)
	}
	return took, err
}

func namespaceOf(i int) string { return fmt.Sprintf("bench-%d", i%namespaces) }

// service is a typical Service.
func service(name string, i int) *corev1.Service {
	app := fmt.Sprintf("%s-%05d", name, i)
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: app, Namespace: namespaceOf(i),
			Labels: map[string]string{"app.kubernetes.io/name": app, "app.kubernetes.io/part-of": "bench"},
		},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app.kubernetes.io/name": app},
			Ports: []corev1.ServicePort{{
				Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(8080),
			}},
		},
	}
}

// slice is what the EndpointSlice controller makes for a Service with some ready Pods.
func slice(name string, i, pods int) *discoveryv1.EndpointSlice {
	app := fmt.Sprintf("%s-%05d", name, i)
	yes, no, port, proto, portName := true, false, int32(8080), corev1.ProtocolTCP, "http"
	var endpoints []discoveryv1.Endpoint
	for pod := range pods {
		node := fmt.Sprintf("node-%d", (i+pod)%50)
		endpoints = append(endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 128+pod%100, i/250%250, i%250+1)},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			NodeName:   &node,
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: namespaceOf(i), Name: fmt.Sprintf("%s-%d", app, pod)},
		})
	}
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: app + "-x7k2p", Namespace: namespaceOf(i),
			Labels: map[string]string{
				discoveryv1.LabelServiceName: app,
				discoveryv1.LabelManagedBy:   "endpointslice-controller.k8s.io",
			},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   endpoints,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Protocol: &proto, Port: &port}},
	}
}
