package garbage

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	podsPeriod = 20 * time.Second
	// A node that isn't there may yet be registered: its Pods get this long.
	quarantine = 40 * time.Second
)

// podCollector deletes Pods that no node will run, or end.
type podCollector struct {
	client kubernetes.Interface
	pods   cache.SharedIndexInformer
	nodes  cache.SharedIndexInformer
	clock  clock.WithTicker
	keep   int

	missing map[string]time.Time // nodes that Pods name, and since when they have been missing
}

func (p *podCollector) run(ctx context.Context) {
	ticker := p.clock.NewTicker(podsPeriod)
	defer ticker.Stop()
	for {
		p.collect(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

func (p *podCollector) collect(ctx context.Context) {
	objs := p.pods.GetStore().List()
	pods := make([]*corev1.Pod, len(objs))
	for i, obj := range objs {
		pods[i] = obj.(*corev1.Pod)
	}
	for _, pod := range slices.Concat(p.finished(pods), p.podsOnMissingNodes(ctx, pods), p.podsWithoutAgent(ctx, pods), p.podsOutOfService(pods), unscheduled(pods)) {
		if err := p.delete(ctx, pod); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Info("deleting a Pod failed, retrying", "pod", klog.KObj(pod), "err", err)
		}
	}
}

func done(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// finished are the finished Pods over the number to keep: those that were evicted first, then the oldest.
func (p *podCollector) finished(pods []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, pod := range pods {
		if done(pod) {
			out = append(out, pod)
		}
	}
	if p.keep <= 0 || len(out) <= p.keep {
		return nil
	}
	rank := func(pod *corev1.Pod) int {
		if pod.Status.Reason == "Evicted" {
			return 0
		}
		return 1
	}
	slices.SortFunc(out, func(a, b *corev1.Pod) int {
		return cmp.Or(rank(a)-rank(b), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	return out[:len(out)-p.keep]
}

// podsOnMissingNodes are the Pods of nodes that have been missing for a while, by the API server's own word.
func (p *podCollector) podsOnMissingNodes(ctx context.Context, pods []*corev1.Pod) []*corev1.Pod {
	now := p.clock.Now()
	missing := map[string]time.Time{}
	for _, pod := range pods {
		name := pod.Spec.NodeName
		if _, there, _ := p.nodes.GetStore().GetByKey(name); name == "" || there {
			continue
		}
		if since, known := p.missing[name]; known {
			missing[name] = since
		} else {
			missing[name] = now
		}
	}
	p.missing = missing
	gone := map[string]bool{}
	for name, since := range missing {
		if now.Sub(since) >= quarantine {
			_, err := p.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			gone[name] = apierrors.IsNotFound(err)
		}
	}
	var out []*corev1.Pod
	for _, pod := range pods {
		if gone[pod.Spec.NodeName] {
			out = append(out, pod)
		}
	}
	return out
}

// podsWithoutAgent are Pods that are being deleted, whose time to end is over, and whose Node no agent looks after: it
// has never reported a version and has no Lease. Somebody made that Node by hand, and nobody else will end its Pods.
func (p *podCollector) podsWithoutAgent(ctx context.Context, pods []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	agentless := map[string]bool{}
	for _, pod := range pods {
		if pod.DeletionTimestamp == nil || pod.DeletionTimestamp.After(p.clock.Now()) || len(pod.Finalizers) > 0 {
			continue
		}
		obj, there, _ := p.nodes.GetStore().GetByKey(pod.Spec.NodeName)
		if !there || obj.(*corev1.Node).Status.NodeInfo.KubeletVersion != "" {
			continue
		}
		without, known := agentless[pod.Spec.NodeName]
		if !known {
			_, err := p.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, pod.Spec.NodeName, metav1.GetOptions{})
			without = apierrors.IsNotFound(err)
			agentless[pod.Spec.NodeName] = without
		}
		if without {
			out = append(out, pod)
		}
	}
	return out
}

// podsOutOfService are Pods that are being deleted on a node which is not ready, and of which somebody says that it is off: nothing of them
// runs any more, and what they hold may go to others.
func (p *podCollector) podsOutOfService(pods []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, pod := range pods {
		if pod.DeletionTimestamp == nil {
			continue
		}
		if obj, there, _ := p.nodes.GetStore().GetByKey(pod.Spec.NodeName); there && outOfService(obj.(*corev1.Node)) {
			out = append(out, pod)
		}
	}
	return out
}

func outOfService(node *corev1.Node) bool {
	ready := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	return !ready && slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
}

// unscheduled are Pods that are being deleted and have no node that would end them. One with finalizers waits for
// those, and until then its state is not for others to change.
func unscheduled(pods []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil && pod.Spec.NodeName == "" && len(pod.Finalizers) == 0 {
			out = append(out, pod)
		}
	}
	return out
}

// delete marks a Pod as failed, so that watchers see how it ended, and deletes it immediately: no node will do it.
func (p *podCollector) delete(ctx context.Context, pod *corev1.Pod) error {
	client := p.client.CoreV1().Pods(pod.Namespace)
	if !done(pod) {
		status := map[string]any{"phase": corev1.PodFailed}
		// One that was evicted before says so.
		if !slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue
		}) {
			status["conditions"] = []map[string]any{{
				"type": corev1.DisruptionTarget, "status": corev1.ConditionTrue,
				"lastTransitionTime": metav1.NewTime(p.clock.Now()),
				"reason":             "DeletionByPodGC", "message": "no node runs the Pod",
			}}
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": status})
		if err != nil {
			return err
		}
		if _, err := client.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
			return ignoreGone(err)
		}
	}
	now := int64(0)
	err := client.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &pod.UID}})
	return ignoreGone(err)
}

// ignoreGone: the Pod is gone, or another one has its name.
func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
