package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/bench/report"
	"portal/internal/lab"
	"portal/test/harness"
)

const (
	node      = "node1"
	namespace = "default"
	port      = 9376
	// patience is how long anything may take before the benchmark gives up.
	patience = 5 * time.Minute
)

// workload is what the Pods of a measurement do.
type workload struct {
	about, name string
	container   corev1.Container
}

var (
	sleeping = workload{"started at once, each one process", "sleeper", corev1.Container{Name: "c", Image: "host", Command: []string{"sleep", "100000"}}}
	serving  = workload{"started at once, each a web server with a readiness probe behind one Service", "server", server()}
)

func server() corev1.Container {
	return corev1.Container{
		Name: "c", Image: "portal", Args: []string{"echo", "--listen", fmt.Sprintf(":%d", port)},
		ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 5, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(port)}}},
	}
}

// bench measures one node of a lab.
type bench struct {
	lab  *lab.Lab
	node *lab.Machine
	// before is what is there without Pods.
	before harness.Traces
}

func (b *bench) api() *kubernetes.Clientset { return b.lab.API }

func (b *bench) create(ctx context.Context, name string, w workload) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": w.name}}, Spec: corev1.PodSpec{
		NodeName: node, TerminationGracePeriodSeconds: ptr.To[int64](1), Containers: []corev1.Container{w.container},
	}}
	return report.Until(ctx, 10*time.Second, 50*time.Millisecond, func() error { // the first waits for its service account
		_, err := b.api().CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
		return err
	})
}

// service makes a Service for Pods of a workload, and returns where it answers.
func (b *bench) service(ctx context.Context, app string) (string, error) {
	svc, err := b.api().CoreV1().Services(namespace).Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: app}, Spec: corev1.ServiceSpec{
		Selector: map[string]string{"app": app}, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(port)}},
	}}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(svc.Spec.ClusterIP, "80"), nil
}

func ready(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// follow calls a function with each Pod, now and whenever it changes, until that says that it is done.
func (b *bench) follow(ctx context.Context, app string, done func(pods map[string]*corev1.Pod) bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not done within %v", patience))
	defer cancel()
	pods := map[string]*corev1.Pod{}
	for {
		list, err := b.api().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		clear(pods)
		for i := range list.Items {
			pods[list.Items[i].Name] = &list.Items[i]
		}
		if done(pods) {
			return nil
		}
		watch, err := b.api().CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{LabelSelector: "app=" + app, ResourceVersion: list.ResourceVersion})
		if err != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		for e := range watch.ResultChan() {
			pod, ok := e.Object.(*corev1.Pod)
			if !ok {
				break
			}
			if pods[pod.Name] = pod; e.Type == "DELETED" {
				delete(pods, pod.Name)
			}
			if done(pods) {
				watch.Stop()
				return nil
			}
		}
		watch.Stop()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

func countReady(pods map[string]*corev1.Pod) (n int) {
	for _, p := range pods {
		if ready(p) {
			n++
		}
	}
	return n
}

// answers asks a Service from the node until it answers.
func (b *bench) answers(ctx context.Context, address string) error {
	return b.node.Do(func() error {
		return report.Until(ctx, patience, 2*time.Millisecond, func() error { return ask(address) })
	})
}

func ask(address string) error {
	c, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"); err != nil {
		return err
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	return nil
}

// warmUp has a Pod come and go, and looks at what is there without any.
func (b *bench) warmUp(ctx context.Context) error {
	for _, w := range []workload{sleeping, serving} {
		if err := b.create(ctx, w.name, w); err != nil {
			return err
		}
		if err := b.follow(ctx, w.name, func(pods map[string]*corev1.Pod) bool { return countReady(pods) == 1 }); err != nil {
			return err
		}
		if err := b.deleteAll(ctx, w.name); err != nil {
			return err
		}
	}
	time.Sleep(2 * time.Second) // what ends in the background has
	var err error
	b.before, err = harness.FindTraces(b.lab, node)
	return err
}

func (b *bench) deleteAll(ctx context.Context, app string) error {
	if err := b.api().CoreV1().Pods(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "app=" + app}); err != nil {
		return err
	}
	return b.follow(ctx, app, func(pods map[string]*corev1.Pod) bool { return len(pods) == 0 })
}

// one starts Pods one after the other, each with a Service that is there already.
func (b *bench) one(ctx context.Context, n int, at report.At) error {
	report.Logf("starting %d Pods one after the other", n)
	var isReady, answered []time.Duration
	for i := range n {
		w := serving
		w.name = fmt.Sprintf("single-%d", i)
		address, err := b.service(ctx, w.name)
		if err != nil {
			return err
		}
		time.Sleep(300 * time.Millisecond) // idle
		begin := time.Now()
		if err := b.create(ctx, w.name, w); err != nil {
			return err
		}
		if err := b.follow(ctx, w.name, func(pods map[string]*corev1.Pod) bool { return countReady(pods) == 1 }); err != nil {
			return fmt.Errorf("the Pod %s: %w", w.name, err)
		}
		isReady = append(isReady, time.Since(begin))
		if err := b.answers(ctx, address); err != nil {
			return fmt.Errorf("the Service %s: %w", w.name, err)
		}
		answered = append(answered, time.Since(begin))
		if err := b.deleteAll(ctx, w.name); err != nil {
			return err
		}
		if err := b.api().CoreV1().Services(namespace).Delete(ctx, w.name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	at.Lower(portal, "created until ready, p50", report.Quantile(isReady, 0.5), "ms")
	at.Lower(portal, "created until ready, p99", report.Quantile(isReady, 0.99), "ms")
	const p50 = "created until it answers through its Service, p50"
	at.Lower(portal, p50, report.Quantile(answered, 0.5), "ms")
	at.Lower(portal, "created until it answers through its Service, p99", report.Quantile(answered, 0.99), "ms")
	at.WantWithin(portal, p50, answerLimit)
	return nil
}

// start creates Pods with a few connections, and returns how long it took until the last was ready.
func (b *bench) start(ctx context.Context, n int, w workload) (time.Duration, error) {
	begin := time.Now()
	created := make(chan error, 1)
	go func() {
		created <- report.Each(ctx, 4, n, func(i int) error { return b.create(ctx, fmt.Sprintf("%s-%d", w.name, i), w) })
	}()
	err := b.follow(ctx, w.name, func(pods map[string]*corev1.Pod) bool { return countReady(pods) == n })
	took := time.Since(begin)
	return took, errors.Join(<-created, err)
}

// many starts Pods together and deletes them.
func (b *bench) many(ctx context.Context, n int, w workload, at report.At) error {
	report.Logf("starting %d Pods: %s", n, w.about)
	address := ""
	if w.name == serving.name {
		var err error
		if address, err = b.service(ctx, w.name); err != nil {
			return err
		}
	}
	took, err := b.start(ctx, n, w)
	if err != nil {
		return err
	}
	if address != "" {
		if err := b.answers(ctx, address); err != nil {
			return err
		}
	}
	const started = "created until the last is ready"
	at.Lower(portal, started, took.Seconds(), "s")
	at.WantWithin(portal, started, startLimit)
	time.Sleep(5 * time.Second) // steady
	agent, err := report.ReadOwn(harness.AgentPID(b.node))
	if err != nil {
		return err
	}
	at.Lower(portal, "agent, anonymous memory", agent.Anonymous, "MB")
	const pss = "agent, PSS"
	at.Lower(portal, pss, agent.PSS, "MB")
	at.WantWithin(portal, pss, memoryLimit)
	begin := time.Now()
	if err := b.deleteAll(ctx, w.name); err != nil {
		return err
	}
	at.Lower(portal, "deleted until the last is gone", time.Since(begin).Seconds(), "s")
	return b.left(ctx, at)
}

// left counts what is left of Pods that are gone, after a moment for what ends in the background.
func (b *bench) left(ctx context.Context, at report.At) error {
	var left harness.Traces
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		now, err := harness.FindTraces(b.lab, node)
		if err != nil {
			return err
		}
		if left = now.Beyond(b.before); len(left) == 0 || time.Now().After(end) || ctx.Err() != nil {
			break
		}
	}
	if len(left) > 0 {
		report.Logf("left are\n%v", left)
	}
	for _, kind := range harness.TraceKinds() {
		name := kind + " that are left"
		at.Lower(portal, name, float64(len(left[kind])), "")
		at.WantWithin(portal, name, 0)
	}
	return nil
}

// killed kills the agent while half of the Pods have started, and while half of them have ended.
func (b *bench) killed(ctx context.Context, n int, at report.At) error {
	report.Logf("starting %d Pods, and killing the agent", n)
	w := sleeping
	w.name = "survivor"
	restart := func(half func(pods map[string]*corev1.Pod) bool) func() error {
		done := make(chan error, 1)
		go func() {
			err := b.follow(ctx, w.name, half)
			if err == nil {
				err = b.node.Kill()
			}
			time.Sleep(500 * time.Millisecond)
			done <- errors.Join(err, b.node.Start())
		}()
		return func() error { return <-done }
	}
	wait := restart(func(pods map[string]*corev1.Pod) bool { return countReady(pods) >= n/2 })
	took, err := b.start(ctx, n, w)
	if err := errors.Join(err, wait()); err != nil {
		return err
	}
	at.Lower(portal, "created until the last is ready", took.Seconds(), "s")
	restarts := 0
	if err := b.follow(ctx, w.name, func(pods map[string]*corev1.Pod) bool {
		for _, p := range pods {
			restarts += int(p.Status.ContainerStatuses[0].RestartCount)
		}
		return true
	}); err != nil {
		return err
	}
	const again = "containers that were restarted"
	at.Lower(portal, again, float64(restarts), "")
	at.WantWithin(portal, again, 0)
	wait = restart(func(pods map[string]*corev1.Pod) bool { return len(pods) <= n/2 })
	begin := time.Now()
	if err := errors.Join(b.deleteAll(ctx, w.name), wait()); err != nil {
		return err
	}
	at.Lower(portal, "deleted until the last is gone", time.Since(begin).Seconds(), "s")
	return b.left(ctx, at)
}
