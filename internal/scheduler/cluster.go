// Package scheduler chooses nodes for Pods: it knows which Pods are on which nodes, what they need and what they want near
// or far, and says which node fits best, or why none does. It is pure: who calls it reads and writes the API.
package scheduler

import (
	"cmp"
	"maps"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/component-helpers/resource"
)

// Cluster is what is known of nodes and of the Pods that are on them. It is not safe for use by several goroutines.
type Cluster struct {
	nodes map[string]*node
	pods  map[types.NamespacedName]*pod
	// withTerms are the Pods that say something about others: those may have to respect it.
	withTerms  map[types.NamespacedName]*pod
	namespaces func(name string) labels.Set
}

// NewCluster is an empty one. namespaces gives the labels of a namespace.
func NewCluster(namespaces func(name string) labels.Set) *Cluster {
	return &Cluster{
		nodes: map[string]*node{}, pods: map[types.NamespacedName]*pod{}, withTerms: map[types.NamespacedName]*pod{}, namespaces: namespaces,
	}
}

// node is a node and what its Pods take. The object is nil where only Pods are known.
type node struct {
	name   string
	object *corev1.Node
	pods   map[types.NamespacedName]*pod
	used   amounts
	// counted is used, with a little for Pods that ask for nothing: they are not free either.
	counted amounts
}

// pod is a Pod and what it takes.
type pod struct {
	*corev1.Pod
	needs   amounts
	counted amounts
	ports   []hostPort
	near    []term
	far     []term
	wishes  []wish
	owner   types.UID
	spreads []spread
}

// amounts are quantities of resources: thousandths of CPUs, units of everything else. None is below 0; what is too much for
// a number is plenty.
type amounts map[corev1.ResourceName]int64

const plenty = math.MaxInt64

func (a amounts) add(b amounts) {
	for name, value := range b {
		if value > plenty-a[name] {
			a[name] = plenty
		} else {
			a[name] += value
		}
	}
}

// remove takes away what was added before. It fails if that can't be told any more.
func (a amounts) remove(b amounts) bool {
	for name, value := range b {
		if a[name] == plenty {
			return false
		}
		a[name] -= value
	}
	return true
}

func amountsOf(list corev1.ResourceList) amounts {
	out := amounts{}
	for name, quantity := range list {
		switch {
		case quantity.Sign() <= 0:
			out[name] = 0
		case name == corev1.ResourceCPU && quantity.CmpInt64(plenty/1000) > 0, quantity.CmpInt64(plenty) > 0:
			out[name] = plenty // the methods below would overflow
		case name == corev1.ResourceCPU:
			out[name] = quantity.MilliValue()
		default:
			out[name] = quantity.Value()
		}
	}
	return out
}

// What a Pod counts for that asks for no CPU or memory.
const (
	leastCPU    = 100
	leastMemory = 200 << 20
)

func newPod(object *corev1.Pod) *pod {
	p := &pod{Pod: object, needs: amountsOf(podresources.PodRequests(object, podresources.PodResourcesOptions{})), ports: hostPorts(object)}
	p.counted = maps.Clone(p.needs)
	if p.counted[corev1.ResourceCPU] == 0 {
		p.counted[corev1.ResourceCPU] = leastCPU
	}
	if p.counted[corev1.ResourceMemory] == 0 {
		p.counted[corev1.ResourceMemory] = leastMemory
	}
	if owner := metav1.GetControllerOfNoCopy(object); owner != nil {
		p.owner = owner.UID
	}
	p.near, p.far, p.wishes = termsOf(object)
	p.spreads = spreadsOf(object)
	return p
}

func keyOf(object metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: object.GetNamespace(), Name: object.GetName()}
}

// SetNode adds a node, or tells its new state.
func (c *Cluster) SetNode(object *corev1.Node) { c.node(object.Name).object = object }

// DropNode forgets a node. Its Pods may be there for a while.
func (c *Cluster) DropNode(name string) {
	if n := c.nodes[name]; n != nil {
		n.object = nil
		c.tidy(n)
	}
}

func (c *Cluster) node(name string) *node {
	n := c.nodes[name]
	if n == nil {
		n = &node{name: name, pods: map[types.NamespacedName]*pod{}, used: amounts{}, counted: amounts{}}
		c.nodes[name] = n
	}
	return n
}

func (c *Cluster) tidy(n *node) {
	if n.object == nil && len(n.pods) == 0 {
		delete(c.nodes, n.name)
	}
}

// SetPod adds a Pod that has a node, or tells its new state. One that has none, or has ended, takes nothing.
func (c *Cluster) SetPod(object *corev1.Pod) {
	key := keyOf(object)
	c.DropPod(key)
	if object.Spec.NodeName == "" || object.Status.Phase == corev1.PodSucceeded || object.Status.Phase == corev1.PodFailed {
		return
	}
	p := newPod(object)
	n := c.node(object.Spec.NodeName)
	n.pods[key] = p
	n.used.add(p.needs)
	n.counted.add(p.counted)
	c.pods[key] = p
	if len(p.far) > 0 || len(p.wishes) > 0 || len(p.near) > 0 {
		c.withTerms[key] = p
	}
}

// DropPod forgets a Pod.
func (c *Cluster) DropPod(key types.NamespacedName) {
	p := c.pods[key]
	if p == nil {
		return
	}
	delete(c.pods, key)
	delete(c.withTerms, key)
	n := c.nodes[p.Spec.NodeName]
	delete(n.pods, key)
	if !n.used.remove(p.needs) || !n.counted.remove(p.counted) {
		n.used, n.counted = amounts{}, amounts{}
		for _, left := range n.pods {
			n.used.add(left.needs)
			n.counted.add(left.counted)
		}
	}
	c.tidy(n)
}

// On is the node that a Pod is known to be on; "" if none.
func (c *Cluster) On(key types.NamespacedName) string {
	if p := c.pods[key]; p != nil {
		return p.Spec.NodeName
	}
	return ""
}

// present are the nodes that exist, in the order of their names.
func (c *Cluster) present() []*node {
	out := make([]*node, 0, len(c.nodes))
	for _, n := range c.nodes {
		if n.object != nil {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b *node) int { return cmp.Compare(a.name, b.name) })
	return out
}

// hostPort is a port that a Pod takes on its node.
type hostPort struct {
	ip       string
	protocol corev1.Protocol
	port     int32
}

func hostPorts(object *corev1.Pod) []hostPort {
	var out []hostPort
	collect := func(containers []corev1.Container, init bool) {
		for i := range containers {
			if init && (containers[i].RestartPolicy == nil || *containers[i].RestartPolicy != corev1.ContainerRestartPolicyAlways) {
				continue // it has ended before the others start
			}
			for _, p := range containers[i].Ports {
				if p.HostPort > 0 {
					out = append(out, hostPort{cmp.Or(p.HostIP, anyIP), cmp.Or(p.Protocol, corev1.ProtocolTCP), p.HostPort})
				}
			}
		}
	}
	collect(object.Spec.InitContainers, true)
	collect(object.Spec.Containers, false)
	return out
}

const anyIP = "0.0.0.0"

func (a hostPort) conflicts(b hostPort) bool {
	anywhere := func(ip string) bool { return ip == anyIP || ip == "::" }
	return a.port == b.port && a.protocol == b.protocol && (a.ip == b.ip || anywhere(a.ip) || anywhere(b.ip))
}
