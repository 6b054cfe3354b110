package harness

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// FakeKubelet plays nodes for tests of the control plane alone: it says of Pods that are bound to its nodes that they run, and
// of deleted ones that they have ended. Nothing runs anywhere. A Pod with an image called "broken…" never becomes ready, one with
// "done…" ends at once with success, and one with "fails…" with exit code 1.
type FakeKubelet struct {
	client kubernetes.Interface
	nodes  map[string]bool
	last   atomic.Int32 // Pod's address
}

// StartFakeKubelet creates nodes and plays their kubelets until ctx ends.
func StartFakeKubelet(ctx context.Context, client kubernetes.Interface, names ...string) (*FakeKubelet, error) {
	k := &FakeKubelet{client: client, nodes: map[string]bool{}}
	for i, name := range names {
		k.nodes[name] = true
		node, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			corev1.LabelHostname: name, corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%2),
		}}}, metav1.CreateOptions{})
		if err != nil {
			return nil, err
		}
		node.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("50")}
		node.Status.Capacity = node.Status.Allocatable
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}}
		if _, err := client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
			return nil, err
		}
	}
	if err := k.welcome(ctx); err != nil {
		return nil, err
	}
	factory := informers.NewSharedInformerFactory(client, 2*time.Second) // what failed is done again with the resync
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { k.look(ctx, obj.(*corev1.Pod)) },
		UpdateFunc: func(_, obj any) { k.look(ctx, obj.(*corev1.Pod)) },
	}); err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return k, nil
}

// welcome waits until the nodes take Pods: a new node is tainted until the control plane has seen that it is ready.
func (k *FakeKubelet) welcome(ctx context.Context) error {
	return wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		list, err := k.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		return !slices.ContainsFunc(list.Items, func(n corev1.Node) bool { return k.nodes[n.Name] && len(n.Spec.Taints) > 0 }), nil
	})
}

func (k *FakeKubelet) look(ctx context.Context, pod *corev1.Pod) {
	if !k.nodes[pod.Spec.NodeName] || ctx.Err() != nil {
		return
	}
	pods := k.client.CoreV1().Pods(pod.Namespace)
	if pod.DeletionTimestamp != nil {
		err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &pod.UID}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil {
			fmt.Printf("fake kubelet: deleting %s: %v\n", pod.Name, err)
		}
		return
	}
	if pod.Status.Phase != corev1.PodPending {
		return
	}
	next, now := pod.DeepCopy(), metav1.Now()
	ready := corev1.ConditionTrue
	for _, c := range pod.Spec.Containers {
		if strings.HasPrefix(c.Image, "broken") {
			ready = corev1.ConditionFalse
		}
		next.Status.ContainerStatuses = append(next.Status.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, Ready: ready == corev1.ConditionTrue, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
		})
	}
	n := k.last.Add(1)
	next.Status.Phase, next.Status.StartTime = corev1.PodRunning, &now
	if image := pod.Spec.Containers[0].Image; strings.HasPrefix(image, "done") {
		ready = k.end(&next.Status, corev1.PodSucceeded, 0)
	} else if strings.HasPrefix(image, "fails") {
		ready = k.end(&next.Status, corev1.PodFailed, 1)
	}
	next.Status.PodIP = fmt.Sprintf("10.244.%d.%d", n/250, 1+n%250)
	next.Status.PodIPs = []corev1.PodIP{{IP: next.Status.PodIP}}
	for _, kind := range []corev1.PodConditionType{corev1.ContainersReady, corev1.PodReady} {
		next.Status.Conditions = append(next.Status.Conditions, corev1.PodCondition{Type: kind, Status: ready, LastTransitionTime: now})
	}
	if _, err := pods.UpdateStatus(ctx, next, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil {
		fmt.Printf("fake kubelet: status of %s: %v\n", pod.Name, err)
	}
}

// end ends all containers of a Pod.
func (k *FakeKubelet) end(status *corev1.PodStatus, phase corev1.PodPhase, code int32) (ready corev1.ConditionStatus) {
	status.Phase = phase
	for i := range status.ContainerStatuses {
		c := &status.ContainerStatuses[i]
		c.Ready, c.State = false, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			ExitCode: code, StartedAt: *status.StartTime, FinishedAt: *status.StartTime,
		}}
	}
	return corev1.ConditionFalse
}
