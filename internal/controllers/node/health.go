package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"portal/internal/controllers/membership"
)

// pulse is the last renewal of a node's Lease, and when it was seen by this machine's clock: the node's own may be wrong.
type pulse struct {
	renewed metav1.MicroTime
	at      time.Time
	ready   corev1.ConditionStatus
}

func (c *Controller) monitor(ctx context.Context) {
	ticker := c.Clock.NewTicker(c.MonitorPeriod)
	defer ticker.Stop()
	for {
		c.monitorAll(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		case <-c.wake:
			// Others that change at the same time are judged with it.
			select {
			case <-ctx.Done():
				return
			case <-time.After(coalesceDelay):
			}
		}
	}
}

const coalesceDelay = 50 * time.Millisecond

// changed has the nodes judged soon if the taints of one are not what its conditions and spec.unschedulable say: what waits for a new node, or
// must keep off one that takes no more Pods, must not wait for the next round.
func (c *Controller) changed(node *corev1.Node) {
	notReady := slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return slices.Contains(healthTaints, t.Key) })
	status := readiness(node)
	if (status == "" || (status == corev1.ConditionTrue) != notReady) && sameTaints(node.Spec.Taints, withState(node.Spec.Taints, node)) {
		return
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *Controller) monitorAll(ctx context.Context) {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return
	}
	known := make(map[string]bool, len(nodes))
	for _, node := range nodes {
		known[node.Name] = true
	}
	maps.DeleteFunc(c.health, func(name string, _ pulse) bool { return !known[name] })
	failed := func(node *corev1.Node, err error) {
		if ctx.Err() == nil {
			klog.FromContext(ctx).Info("updating a node's state failed, retrying", "node", node.Name, "err", err)
		}
	}
	if !c.canRenew(ctx) {
		// Every node gets the whole grace period from the time on when it can renew its Lease again.
		for name, p := range c.health {
			p.at = c.Clock.Now()
			c.health[name] = p
		}
		for _, node := range nodes {
			if err := c.taintState(ctx, node); err != nil {
				failed(node, err)
			}
		}
		return
	}
	zones := map[string]zone{}
	var judged []verdict
	for _, node := range nodes {
		v, err := c.judge(ctx, node)
		if err != nil {
			failed(node, err)
			continue
		}
		judged = append(judged, v)
		if v.leased && !excluded(node) {
			z := zones[zoneOf(node)]
			if v.status == corev1.ConditionTrue {
				z.ready++
			} else {
				z.lost++
			}
			zones[zoneOf(node)] = z
		}
	}
	c.setIsolated(ctx, isolated(zones))
	maps.DeleteFunc(c.evicted, func(name string, _ time.Time) bool { _, there := zones[name]; return !there })
	for _, v := range judged {
		if err := c.settle(ctx, v, zones[zoneOf(v.node)]); err != nil {
			failed(v.node, err)
		}
	}
}

// canRenew reports whether nodes can renew their Leases, as far as one can see from here: the API server answers, and has
// the namespace that Leases are in. If they can't, their silence says nothing about them.
func (c *Controller) canRenew(ctx context.Context) bool {
	namespace, err := c.Client.CoreV1().Namespaces().Get(ctx, corev1.NamespaceNodeLease, metav1.GetOptions{})
	if ctx.Err() != nil {
		return false
	}
	reason := ""
	switch {
	case apierrors.IsForbidden(err): // then there is an answer, and the Leases themselves are the only evidence
	case err != nil:
		reason = err.Error()
	case namespace.DeletionTimestamp != nil:
		reason = "namespace " + namespace.Name + " is being deleted"
	}
	if suspended := reason != ""; suspended != c.suspended {
		c.suspended = suspended
		if suspended {
			klog.FromContext(ctx).Info("node health checks suspended: nodes can't renew their Leases", "reason", reason)
		} else {
			klog.FromContext(ctx).Info("node health checks resumed", "gracePeriod", c.GracePeriod)
		}
	}
	return reason == ""
}

// verdict is what a round finds out about a node.
type verdict struct {
	node   *corev1.Node
	status corev1.ConditionStatus
	leased bool // it has, or had, a Lease
}

// judge finds out how a node is, and marks one Unknown whose Lease is too old. The status of a node that never had a Lease is left alone: somebody
// else keeps it, or nobody does.
func (c *Controller) judge(ctx context.Context, node *corev1.Node) (verdict, error) {
	now := c.Clock.Now()
	last, known := c.health[node.Name]
	lease, err := c.leases.Get(node.Name)
	if err == nil && lease.Spec.RenewTime != nil && (!known || !lease.Spec.RenewTime.Equal(&last.renewed)) {
		last = pulse{renewed: *lease.Spec.RenewTime, at: now, ready: last.ready}
	} else if !known {
		return verdict{node: node, status: readiness(node)}, nil
	}
	c.health[node.Name] = last
	status := readiness(node)
	if now.Sub(last.at) > c.GracePeriod && status != corev1.ConditionUnknown {
		alive, err := c.renewedSince(ctx, node.Name, last)
		if err != nil {
			return verdict{}, err
		}
		if !alive {
			if node, err = c.markUnknown(ctx, node); err != nil {
				return verdict{}, err
			}
			status = corev1.ConditionUnknown
		}
	}
	return verdict{node: node, status: status, leased: true}, nil
}

// settle brings a node's taints and Pods in line with its state.
func (c *Controller) settle(ctx context.Context, v verdict, z zone) error {
	if !v.leased {
		if v.status == corev1.ConditionTrue {
			return c.taint(ctx, v, z) // every new Node bears the taint of one that is not ready
		}
		return c.taintState(ctx, v.node)
	}
	if err := c.taint(ctx, v, z); err != nil {
		return err
	}
	last := c.health[v.node.Name]
	// A node that reports itself not ready still reports its Pods, so they are marked only once; those of a silent node each time.
	if v.status == corev1.ConditionUnknown || v.status == corev1.ConditionFalse && last.ready == corev1.ConditionTrue {
		if err := c.podsNotReady(ctx, v.node); err != nil {
			return err
		}
	}
	last.ready = v.status
	c.health[v.node.Name] = last
	return nil
}

// renewedSince asks the API server itself: a watch that hangs must not make every node Unknown.
func (c *Controller) renewedSince(ctx context.Context, name string, last pulse) (bool, error) {
	lease, err := c.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return lease.Spec.RenewTime != nil && !lease.Spec.RenewTime.Equal(&last.renewed), nil
}

func readiness(node *corev1.Node) corev1.ConditionStatus {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == corev1.NodeReady {
			return node.Status.Conditions[i].Status
		}
	}
	return ""
}

// Conditions that only the node itself can know; what it said about them is out of date when it is silent.
var reported = []corev1.NodeConditionType{corev1.NodeReady, corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure}

func (c *Controller) markUnknown(ctx context.Context, node *corev1.Node) (*corev1.Node, error) {
	// From the server: the informer's Nodes are stripped, and an update replaces the whole status.
	live, err := c.Client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	now := metav1.NewTime(c.Clock.Now())
	for _, kind := range reported {
		i := slices.IndexFunc(live.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == kind })
		if i < 0 {
			if kind == corev1.NodeReady {
				live.Status.Conditions = append(live.Status.Conditions, corev1.NodeCondition{
					Type: kind, Status: corev1.ConditionUnknown, LastHeartbeatTime: live.CreationTimestamp, LastTransitionTime: now,
					Reason: "NodeStatusNeverUpdated", Message: "the node has never reported its state",
				})
			}
			continue
		}
		if have := &live.Status.Conditions[i]; have.Status != corev1.ConditionUnknown {
			have.Status, have.LastTransitionTime = corev1.ConditionUnknown, now
			have.Reason, have.Message = "NodeStatusUnknown", "the node has stopped renewing its Lease"
		}
	}
	updated, err := c.Client.CoreV1().Nodes().UpdateStatus(ctx, live, metav1.UpdateOptions{})
	if err != nil {
		return nil, err
	}
	c.Recorder.Eventf(updated, corev1.EventTypeNormal, "NodeNotReady", "node %s has not renewed its Lease for %s", node.Name, c.GracePeriod)
	return updated, nil
}

func (c *Controller) podsNotReady(ctx context.Context, node *corev1.Node) error {
	pods, err := c.Pods.GetIndexer().ByIndex(membership.ByNode, node.Name)
	if err != nil {
		return err
	}
	var errs []error
	for _, obj := range pods {
		pod := obj.(*corev1.Pod)
		if !membership.Ready(pod) {
			continue
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": pod.UID},
			"status": map[string]any{"conditions": []map[string]any{{
				"type": corev1.PodReady, "status": corev1.ConditionFalse,
				"lastTransitionTime": metav1.NewTime(c.Clock.Now()),
				"reason":             "NodeNotReady", "message": "the node is not ready",
			}}},
		})
		if err != nil {
			return err
		}
		_, err = c.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		switch {
		case err == nil:
			c.Recorder.Eventf(pod, corev1.EventTypeWarning, "NodeNotReady", "node %s is not ready", node.Name)
		case apierrors.IsNotFound(err):
		case apierrors.IsConflict(err): // it was changed at that moment, or another one has its name
			errs = append(errs, fmt.Errorf("marking Pod %s/%s not ready: %w", pod.Namespace, pod.Name, err))
		default:
			return fmt.Errorf("marking Pod %s/%s not ready: %w", pod.Namespace, pod.Name, err)
		}
	}
	return errors.Join(errs...)
}
