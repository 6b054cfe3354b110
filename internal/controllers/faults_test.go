package controllers_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"portal/internal/controllers/controllerstest"
)

var (
	faultTime = flag.Duration("faults", 12*time.Second, "how long the API server misbehaves in TestTheEndIsRight")
	faultSeed = flag.Uint64("seed", 0, "seed of TestTheEndIsRight; 0 takes one from the clock")
)

func joinSorted(words []string) string {
	slices.Sort(words)
	return strings.Join(words, " ")
}

// TestTheEndIsRight changes things at random while the API server disconnects, is slow, loses answers, and refuses
// what it should not, and then compares what is there with what should be.
func TestTheEndIsRight(t *testing.T) {
	seed := *faultSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", seed)
	w := newWorld(t)
	proxy := controllerstest.NewProxy(t, w.config, seed)
	c := newChurn(w, seed)
	for range 150 {
		c.step()
	}
	direct := w.config
	w.config = proxy.Config()
	stop := w.run("endpoints,endpointslice,mirror,garbage")
	w.config = direct

	for end := time.Now().Add(*faultTime); time.Now().Before(end); {
		switch c.rand.IntN(4) {
		case 0: // nothing works
			proxy.Set(controllerstest.Faults{Cut: 1, WatchCut: time.Millisecond})
			proxy.CutAll()
		case 1: // a quiet moment
			proxy.Set(controllerstest.Faults{})
		default:
			proxy.Set(controllerstest.Faults{
				Cut: 0.1, Lost: 0.1, Status: 0.2, Slow: 0.3, MaxDelay: 200 * time.Millisecond, WatchCut: time.Second,
			})
		}
		for pause := time.Now().Add(time.Duration(500+c.rand.IntN(1500)) * time.Millisecond); time.Now().Before(pause); {
			c.step()
			time.Sleep(time.Duration(c.rand.IntN(20)) * time.Millisecond)
		}
	}
	proxy.Set(controllerstest.Faults{})
	if proxy.Broken.Load() < 20 {
		t.Errorf("only %d requests were broken: this has tested nothing", proxy.Broken.Load())
	}
	// An informer whose watches were cut again and again waits up to a minute.
	w.eventually(75*time.Second, func() string { return w.wrong() })
	time.Sleep(time.Second)
	if wrong := w.wrong(); wrong != "" {
		t.Fatalf("it was right and is no longer: %s", wrong)
	}
	t.Logf("%d changes, %d requests broken", c.steps, proxy.Broken.Load())
	stop()
}

// churn changes Pods, Services, Endpoints and slices at random.
type churn struct {
	*world
	rand  *rand.Rand
	steps int
	ips   int
}

var (
	apps  = []string{"a", "b", "c", "d", "e"}
	tiers = []string{"x", "y"}
)

func newChurn(w *world, seed uint64) *churn {
	c := &churn{world: w, rand: rand.New(rand.NewPCG(seed, 1))}
	for i := range 4 {
		labels := map[string]string{}
		if i > 0 {
			labels[corev1.LabelTopologyZone] = fmt.Sprintf("z%d", i%2)
		}
		w.addNode(c.node(i), labels)
	}
	return c
}

func (c *churn) node(i int) string { return fmt.Sprintf("%s-%d", c.namespace, i) }

func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

func (c *churn) labels() map[string]string {
	return map[string]string{"app": pick(c.rand, apps), "tier": pick(c.rand, tiers)}
}

func (c *churn) name(kind string, n int) string { return fmt.Sprintf("%s%d", kind, c.rand.IntN(n)) }

// step makes one change. What can't be done because there is no such object, or there is one, isn't done.
func (c *churn) step() {
	c.steps++
	steps := []func() error{
		c.createPod, c.createPod, c.createPod, c.changePod, c.changePod, c.changePod, c.changePod, c.deletePod, c.deletePod,
		c.createService, c.createService, c.changeService, c.deleteService, c.handMade, c.handMade, c.vandalism,
	}
	err := pick(c.rand, steps)()
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsConflict(err) {
		c.Fatal(err)
	}
}

func (c *churn) createPod() error {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: c.name("p", 80), Labels: c.labels()},
		Spec: corev1.PodSpec{NodeName: c.node(c.rand.IntN(4)), Containers: []corev1.Container{{
			Name: "c", Image: "i", Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: int32(8000 + c.rand.IntN(2))}},
		}}},
	}
	if c.rand.IntN(4) == 0 {
		pod.Finalizers = []string{"example.com/wait"}
	}
	pod, err := c.client.CoreV1().Pods(c.namespace).Create(c.ctx(), pod, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	c.ips++
	pod.Status.PodIP = fmt.Sprintf("10.77.%d.%d", c.ips/250, c.ips%250+1)
	pod.Status.PodIPs = []corev1.PodIP{{IP: pod.Status.PodIP}, {IP: fmt.Sprintf("fd00:77::%x", c.ips)}}
	return c.writeStatus(pod)
}

func (c *churn) writeStatus(pod *corev1.Pod) error {
	pod.Status.Phase = pick(c.rand, []corev1.PodPhase{corev1.PodRunning, corev1.PodRunning, corev1.PodRunning, corev1.PodPending})
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodReady, Status: pick(c.rand, []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionTrue, corev1.ConditionFalse}),
		LastTransitionTime: metav1.Now(),
	}}
	_, err := c.client.CoreV1().Pods(c.namespace).UpdateStatus(c.ctx(), pod, metav1.UpdateOptions{})
	return err
}

func (c *churn) changePod() error {
	client := c.client.CoreV1().Pods(c.namespace)
	pod, err := client.Get(c.ctx(), c.name("p", 80), metav1.GetOptions{})
	if err != nil {
		return err
	}
	switch {
	case pod.DeletionTimestamp != nil && c.rand.IntN(2) == 0:
		pod.Finalizers = nil
		_, err = client.Update(c.ctx(), pod, metav1.UpdateOptions{})
		return err
	case c.rand.IntN(5) == 0:
		pod.Labels = c.labels()
		_, err = client.Update(c.ctx(), pod, metav1.UpdateOptions{})
		return err
	}
	return c.writeStatus(pod)
}

func (c *churn) deletePod() error {
	grace := int64(c.rand.IntN(2) * 3600)
	return c.client.CoreV1().Pods(c.namespace).Delete(c.ctx(), c.name("p", 80), metav1.DeleteOptions{GracePeriodSeconds: &grace})
}

func (c *churn) createService() error {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: c.name("s", 20)}}
	c.shape(svc)
	if c.rand.IntN(4) == 0 {
		svc.Spec.ClusterIP = corev1.ClusterIPNone
	}
	dual := corev1.IPFamilyPolicyPreferDualStack
	if c.rand.IntN(3) == 0 {
		svc.Spec.IPFamilyPolicy = &dual
	}
	_, err := c.client.CoreV1().Services(c.namespace).Create(c.ctx(), svc, metav1.CreateOptions{})
	return err
}

func (c *churn) shape(svc *corev1.Service) {
	svc.Spec.Selector = nil
	switch c.rand.IntN(4) {
	case 0:
	case 1:
		svc.Spec.Selector = c.labels()
	default:
		svc.Spec.Selector = map[string]string{"app": pick(c.rand, apps)}
	}
	svc.Labels = map[string]string{"n": fmt.Sprint(c.rand.IntN(3))}
	svc.Spec.PublishNotReadyAddresses = c.rand.IntN(4) == 0
	svc.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80, TargetPort: pick(c.rand, []intstr.IntOrString{intstr.FromInt32(8080), intstr.FromString("web")})}}
	if c.rand.IntN(3) == 0 {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: "b", Port: 81})
	}
}

func (c *churn) changeService() error {
	client := c.client.CoreV1().Services(c.namespace)
	svc, err := client.Get(c.ctx(), c.name("s", 20), metav1.GetOptions{})
	if err != nil {
		return err
	}
	c.shape(svc)
	_, err = client.Update(c.ctx(), svc, metav1.UpdateOptions{})
	return err
}

func (c *churn) deleteService() error {
	return c.client.CoreV1().Services(c.namespace).Delete(c.ctx(), c.name("s", 20), metav1.DeleteOptions{})
}

// handMade makes, changes or deletes the Endpoints of a Service without a selector.
func (c *churn) handMade() error {
	svc, err := c.client.CoreV1().Services(c.namespace).Get(c.ctx(), c.name("s", 20), metav1.GetOptions{})
	if err != nil || svc.Spec.Selector != nil {
		return err
	}
	client := c.client.CoreV1().Endpoints(c.namespace)
	endpoints := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: svc.Name, Labels: map[string]string{"hand": "made"}}}
	subset := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "a", Port: int32(9000 + c.rand.IntN(2))}}}
	for i := range 1 + c.rand.IntN(5) {
		subset.Addresses = append(subset.Addresses, corev1.EndpointAddress{IP: pick(c.rand, []string{fmt.Sprintf("10.88.0.%d", i+1), fmt.Sprintf("fd00:88::%d", i+1)})})
	}
	endpoints.Subsets = []corev1.EndpointSubset{subset}
	switch c.rand.IntN(5) {
	case 0:
		return client.Delete(c.ctx(), svc.Name, metav1.DeleteOptions{})
	case 1, 2:
		_, err = client.Update(c.ctx(), endpoints, metav1.UpdateOptions{})
	default:
		_, err = client.Create(c.ctx(), endpoints, metav1.CreateOptions{})
	}
	return err
}

// vandalism deletes or empties what controllers have written.
func (c *churn) vandalism() error {
	if c.rand.IntN(2) == 0 {
		return c.client.CoreV1().Endpoints(c.namespace).Delete(c.ctx(), c.name("s", 20), metav1.DeleteOptions{})
	}
	client := c.client.DiscoveryV1().EndpointSlices(c.namespace)
	list, err := client.List(c.ctx(), metav1.ListOptions{})
	if err != nil || len(list.Items) == 0 {
		return err
	}
	slice := pick(c.rand, list.Items)
	if c.rand.IntN(2) == 0 {
		return client.Delete(c.ctx(), slice.Name, metav1.DeleteOptions{})
	}
	slice.Endpoints = slices.DeleteFunc(slice.Endpoints, func(discoveryv1.Endpoint) bool { return c.rand.IntN(2) == 0 })
	_, err = client.Update(c.ctx(), &slice, metav1.UpdateOptions{})
	return err
}
