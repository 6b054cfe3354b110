package controllers_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/controllers"
	"portal/internal/controllers/controllerstest"
)

// world is an API server, and a namespace of the test's own in it.
type world struct {
	*testing.T
	config    *rest.Config
	client    kubernetes.Interface
	namespace string
}

var worlds atomic.Int64

func newWorld(t *testing.T) *world {
	t.Helper()
	config := controllerstest.APIServer(t)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, config: config, client: client, namespace: fmt.Sprintf("test-%d-%d", time.Now().UnixNano()%1e9, worlds.Add(1))}
	_, err = client.CoreV1().Namespaces().Create(w.ctx(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}, metav1.CreateOptions{})
	w.must(err)
	t.Cleanup(func() {
		_ = client.CoreV1().Namespaces().Delete(context.Background(), w.namespace, metav1.DeleteOptions{})
	})
	return w
}

func (w *world) ctx() context.Context { return context.Background() }

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// run starts controllers and waits until they work; they end with the test, and must do so soon.
func (w *world) run(selection string, change ...func(*controllers.Config)) (stop func()) {
	w.Helper()
	s, err := controllers.ParseSelection([]string{selection})
	w.must(err)
	ready := make(chan struct{})
	cfg := controllers.Config{REST: w.config, Ready: func() { close(ready) }}
	for _, f := range change {
		f(&cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- controllers.Run(ctx, cfg, s) }()
	var once atomic.Bool
	stop = func() {
		if once.Swap(true) {
			return
		}
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				w.Errorf("the controllers ended with: %v", err)
			}
		case <-time.After(5 * time.Second):
			w.Error("the controllers did not end within 5 s")
		}
	}
	w.Cleanup(stop)
	select {
	case <-ready:
	case err := <-ended:
		ended <- nil
		w.Fatalf("the controllers ended at once: %v", err)
	case <-time.After(20 * time.Second):
		w.Fatal("the controllers have not seen everything within 20 s")
	}
	return stop
}

// patience is how long a test waits at least for what must come but has no time limit of its own: a busy machine takes
// many times what an idle one does.
const patience = 45 * time.Second

// eventually waits until a check has nothing to say.
func (w *world) eventually(usually time.Duration, check func() string) {
	w.Helper()
	w.within(max(usually, patience), check)
}

// within is for what must come in time.
func (w *world) within(within time.Duration, check func() string) {
	w.Helper()
	deadline := time.Now().Add(within)
	for {
		wrong := check()
		if wrong == "" {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("still after %s: %s", within, wrong)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (w *world) addService(name string, change ...func(*corev1.Service)) *corev1.Service {
	w.Helper()
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}
	for _, f := range change {
		f(svc)
	}
	made, err := w.client.CoreV1().Services(w.namespace).Create(w.ctx(), svc, metav1.CreateOptions{})
	w.must(err)
	return made
}

func (w *world) addPod(name, node string, labels map[string]string, ips ...string) *corev1.Pod {
	w.Helper()
	pod, err := w.client.CoreV1().Pods(w.namespace).Create(w.ctx(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{})
	w.must(err)
	pod.Status.Phase = corev1.PodRunning
	for i, ip := range ips {
		if i == 0 {
			pod.Status.PodIP = ip
		}
		pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	pod, err = w.client.CoreV1().Pods(w.namespace).UpdateStatus(w.ctx(), pod, metav1.UpdateOptions{})
	w.must(err)
	return pod
}

func (w *world) addNode(name string, labels map[string]string) {
	w.Helper()
	_, err := w.client.CoreV1().Nodes().Create(w.ctx(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	w.must(err)
	w.Cleanup(func() {
		_ = w.client.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{})
	})
}

func TestANamespaceIsEmptiedInOrder(t *testing.T) {
	w := newWorld(t)
	w.addService("s")
	held := w.addService("held", func(s *corev1.Service) { s.Finalizers = []string{"example.com/wait"} })
	w.addPod("p", "no-such-node", nil, "10.1.2.3")
	w.run("namespace")
	w.must(w.client.CoreV1().Namespaces().Delete(w.ctx(), w.namespace, metav1.DeleteOptions{}))

	condition := func(kind corev1.NamespaceConditionType, want string) func() string {
		return func() string {
			ns, err := w.client.CoreV1().Namespaces().Get(w.ctx(), w.namespace, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			for _, c := range ns.Status.Conditions {
				if c.Type == kind && c.Status == corev1.ConditionTrue && strings.Contains(c.Message, want) {
					return ""
				}
			}
			return fmt.Sprintf("no %s with %q in %+v", kind, want, ns.Status)
		}
	}
	// The Pod's node would end it; there is none, and until then the rest stays.
	w.eventually(10*time.Second, condition(corev1.NamespaceContentRemaining, "pods (1)"))
	if _, err := w.client.CoreV1().Services(w.namespace).Get(w.ctx(), "s", metav1.GetOptions{}); err != nil {
		t.Errorf("a Service went before the Pod: %v", err)
	}
	now := int64(0)
	w.must(w.client.CoreV1().Pods(w.namespace).Delete(w.ctx(), "p", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	w.eventually(10*time.Second, condition(corev1.NamespaceFinalizersRemaining, "example.com/wait (on 1)"))
	if _, err := w.client.CoreV1().Services(w.namespace).Get(w.ctx(), "s", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the other Service is still there: %v", err)
	}
	held, err := w.client.CoreV1().Services(w.namespace).Get(w.ctx(), held.Name, metav1.GetOptions{})
	w.must(err)
	held.Finalizers = nil
	_, err = w.client.CoreV1().Services(w.namespace).Update(w.ctx(), held, metav1.UpdateOptions{})
	w.must(err)
	w.eventually(10*time.Second, func() string {
		if _, err := w.client.CoreV1().Namespaces().Get(w.ctx(), w.namespace, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprintf("the namespace is still there: %v", err)
		}
		return ""
	})
}

// TestANamespaceEndsWithoutAnAgent: a Pod on a Node that somebody registered by hand, which nobody looks after, does not keep its namespace
// for ever.
func TestANamespaceEndsWithoutAnAgent(t *testing.T) {
	w := newWorld(t)
	w.addNode(w.namespace, nil)
	_, err := w.client.CoreV1().Pods(w.namespace).Create(w.ctx(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec:       corev1.PodSpec{NodeName: w.namespace, TerminationGracePeriodSeconds: new(int64(1)), Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{})
	w.must(err)
	w.run("namespace,garbage")
	w.must(w.client.CoreV1().Namespaces().Delete(w.ctx(), w.namespace, metav1.DeleteOptions{}))
	w.eventually(time.Minute, func() string { // it is looked for what nobody ends every 20 seconds
		ns, err := w.client.CoreV1().Namespaces().Get(w.ctx(), w.namespace, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return ""
		}
		return fmt.Sprintf("the namespace is still there: %+v %v", ns.Status, err)
	})
}

func TestNoneRunsNothing(t *testing.T) {
	w := newWorld(t)
	// Nothing is asked of an API server that isn't there.
	w.config = &rest.Config{Host: "https://127.0.0.1:1"}
	stop := w.run("none")
	stop()
}

// An API server that hangs holds up neither the start nor the end.
func TestControllersEndWhileTheServerHangs(t *testing.T) {
	w := newWorld(t)
	proxy := controllerstest.NewProxy(t, w.config, 1)
	w.config = proxy.Config()
	for i := range 20 {
		w.addService(fmt.Sprintf("s%d", i), func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "a"} })
	}
	stop := w.run("*", func(c *controllers.Config) {
		c.Ready = chain(c.Ready, func() { proxy.Set(controllerstest.Faults{Slow: 1, MaxDelay: time.Hour}) })
	})
	time.Sleep(300 * time.Millisecond)
	begin := time.Now()
	stop()
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("it took %s to end", took)
	}
}

func chain(fs ...func()) func() {
	return func() {
		for _, f := range fs {
			f()
		}
	}
}
