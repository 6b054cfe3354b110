package endpointslice

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/sliceview"
	"portal/internal/controllers/writes"
)

var allNodes = queue.Key{Name: "nodes"}

func (c *Controller) watch() error {
	if _, err := c.Slices.AddEventHandler(membership.Handlers(c.sliceChanged, c.sliceGone)); err != nil {
		return err
	}
	_, err := c.Nodes.AddEventHandler(membership.Handlers(c.nodeChanged, func(gone *corev1.Node) {
		c.nodes.Add(allNodes)
		c.touchPodsOn(gone.Name)
	}))
	return err
}

// membersChanged queues a Service whose Pods or selector have changed. A standby may see what the leader made of that before
// the change itself.
func (c *Controller) membersChanged(key queue.Key) {
	c.queue.Add(key)
	if c.listed.Load() && !c.working.Load() && c.agree(key) {
		c.queue.Deprioritize(key)
	}
}

// sliceChanged requeues a slice's Service if somebody else changed the slice.
func (c *Controller) sliceChanged(old, slice *discovery.EndpointSlice) {
	origin := c.view.Writes.Saw(slice)
	if old != nil && old.ResourceVersion == slice.ResourceVersion {
		return // listed again
	}
	key := sliceview.ServiceOf(slice)
	if old != nil {
		if was := sliceview.ServiceOf(old); was.Name != "" && was != key {
			c.queue.AddAfter(was, foreignChangeDelay)
		}
	}
	if key.Name == "" {
		return
	}
	ours := c.view.Mine(slice)
	switch {
	case !c.working.Load():
		// Every Service is in the queue already. This is the leader's work, or was there.
		if ours && c.agree(key) {
			c.queue.Deprioritize(key)
		}
	case origin == writes.Foreign && (ours || old != nil && c.view.Mine(old)):
		c.queue.AddAfter(key, foreignChangeDelay)
	}
}

func (c *Controller) sliceGone(slice *discovery.EndpointSlice) {
	own := c.view.Writes.Gone(slice)
	if key := sliceview.ServiceOf(slice); !own && key.Name != "" && c.view.Mine(slice) && c.working.Load() {
		c.queue.AddAfter(key, foreignChangeDelay)
	}
}

// agree reports whether a Service's slices show its Pods as they are.
func (c *Controller) agree(key queue.Key) bool {
	list, err := c.view.Cached(key)
	if err != nil {
		return false
	}
	shown := map[types.UID]bool{}
	for _, slice := range list {
		for _, e := range slice.Endpoints {
			if e.TargetRef != nil {
				shown[e.TargetRef.UID] = e.Conditions.Ready == nil || *e.Conditions.Ready
			}
		}
	}
	return maps.Equal(shown, membership.Shown(c.Members.Pods(key)))
}

// nodeChanged: endpoints carry their node's zone, and a Pod on a node that isn't known yet is no endpoint.
func (c *Controller) nodeChanged(old, node *corev1.Node) {
	zoned := old == nil || old.Labels[corev1.LabelTopologyZone] != node.Labels[corev1.LabelTopologyZone]
	if zoned || nodeReady(old) != nodeReady(node) || allocatableCPU(old) != allocatableCPU(node) {
		c.nodes.Add(allNodes)
	}
	if zoned {
		c.touchPodsOn(node.Name)
	}
}

func (c *Controller) touchPodsOn(node string) {
	pods, err := c.Pods.GetIndexer().ByIndex(membership.ByNode, node)
	if err != nil {
		return
	}
	for _, obj := range pods {
		c.touch(obj.(*corev1.Pod))
	}
}

func (c *Controller) touch(pod *corev1.Pod) {
	for _, key := range c.Members.Services(nil, pod.Namespace, pod.Labels) {
		c.queue.Add(key)
	}
}

func nodeReady(node *corev1.Node) bool {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == corev1.NodeReady {
			return node.Status.Conditions[i].Status == corev1.ConditionTrue
		}
	}
	return false
}

func allocatableCPU(node *corev1.Node) int64 { return node.Status.Allocatable.Cpu().MilliValue() }
