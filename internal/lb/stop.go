package lb

import (
	"context"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// nodePatience is how long the API may take to answer when the process ends.
const nodePatience = time.Second

// Stop is what becomes of the addresses that this node answers for when its process ends.
type Stop struct {
	// Grace is for how long they are kept for a process that follows on this node; 0: other nodes have them at once.
	Grace time.Duration
	// Final says why no process will follow, or nothing if it does not know of a reason. It may be nil.
	Final func() string
	// StandIn and Settled are those of announce.Options.
	StandIn func(addrs []netip.Addr, until time.Time) error
	Settled func()
}

// grace is for how long this node's addresses are kept, now that the process ends.
func (b *Balancer) grace() time.Duration {
	if b.Stop.Grace <= 0 {
		return 0
	}
	why := b.leavesForGood()
	if why == "" && b.Stop.Final != nil {
		why = b.Stop.Final()
	}
	if why != "" {
		b.Log.Info("leaving this node's addresses to other nodes", "why", why)
		return 0
	}
	return b.Stop.Grace
}

// leavesForGood says what the Node says about its end: somebody drains it, keeps balancers off it, or has deleted it.
func (b *Balancer) leavesForGood() string {
	node := b.currentNode()
	switch {
	case node == nil:
		return "" // a machine need not be a Node
	case node.DeletionTimestamp != nil:
		return "the Node is being deleted"
	case node.Spec.Unschedulable:
		return "the Node is cordoned"
	case metav1.HasLabel(node.ObjectMeta, corev1.LabelNodeExcludeBalancers):
		return "the Node has the label " + corev1.LabelNodeExcludeBalancers
	}
	return ""
}

// currentNode is this machine's Node as it is now: whoever drains a node may stop its programs at the same moment. It is nil if there is none.
func (b *Balancer) currentNode() *corev1.Node {
	ctx, cancel := context.WithTimeout(context.Background(), nodePatience)
	defer cancel()
	list, err := b.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", b.Node).String()})
	if err == nil && len(list.Items) > 0 {
		return &list.Items[0]
	}
	object, _, _ := b.nodes.GetByKey(b.Node)
	node, _ := object.(*corev1.Node)
	return node
}
