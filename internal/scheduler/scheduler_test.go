package scheduler

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
)

func newNode(name string, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
			"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("10"),
		}},
	}
	for _, f := range change {
		f(n)
	}
	return n
}

func label(key, value string) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Labels[key] = value }
}

func taint(key, value string, effect corev1.TaintEffect) func(*corev1.Node) {
	return func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Value: value, Effect: effect})
	}
}

func suffers(kind corev1.NodeConditionType, status corev1.ConditionStatus) func(*corev1.Node) {
	return func(n *corev1.Node) {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: kind, Status: status})
	}
}

func newPodObject(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

type change = func(*corev1.Pod)

func on(node string) change { return func(p *corev1.Pod) { p.Spec.NodeName = node } }

func tolerates(key string) change {
	return func(p *corev1.Pod) {
		p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule})
	}
}

func app(name string) change { return func(p *corev1.Pod) { p.Labels["app"] = name } }

func asks(cpu, memory string) change {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse(cpu), "memory": resource.MustParse(memory)}
	}
}

func hostPortOf(port int32, ip string) change {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: port, HostPort: port, HostIP: ip, Protocol: corev1.ProtocolTCP}}
	}
}

func affinityTo(app, topology string) []corev1.PodAffinityTerm {
	return []corev1.PodAffinityTerm{{LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}, TopologyKey: topology}}
}

func near(app, topology string) change {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: affinityTo(app, topology)}}
	}
}

func far(app, topology string) change {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: affinityTo(app, topology)}}
	}
}

func spreadOver(topology string, skew int32, when corev1.UnsatisfiableConstraintAction) change {
	return func(p *corev1.Pod) {
		p.Spec.TopologySpreadConstraints = append(p.Spec.TopologySpreadConstraints, corev1.TopologySpreadConstraint{
			TopologyKey: topology, MaxSkew: skew, WhenUnsatisfiable: when, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": p.Labels["app"]}},
		})
	}
}

func clusterOf(nodes []*corev1.Node, pods ...*corev1.Pod) *Cluster {
	c := NewCluster(func(name string) labels.Set { return labels.Set{"kubernetes.io/metadata.name": name} })
	for _, n := range nodes {
		c.SetNode(n)
	}
	for _, p := range pods {
		c.SetPod(p)
	}
	return c
}

func nodes(list ...*corev1.Node) []*corev1.Node { return list }

var zoned = nodes(newNode("a1", label(corev1.LabelTopologyZone, "a")), newNode("a2", label(corev1.LabelTopologyZone, "a")), newNode("b1", label(corev1.LabelTopologyZone, "b")))

func TestChoose(t *testing.T) {
	const zone = corev1.LabelTopologyZone
	for name, c := range map[string]struct {
		cluster *Cluster
		pod     *corev1.Pod
		want    string // the node, or a part of the reason that there is none
	}{
		"no nodes":        {clusterOf(nil), newPodObject("p"), "0/0 nodes are available"},
		"a node":          {clusterOf(nodes(newNode("a"))), newPodObject("p"), "a"},
		"silent node":     {clusterOf(nodes(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})), newPodObject("p"), "0/1 nodes are available: 1 node(s) run no Pods (status.allocatable says none)."},
		"too much CPU":    {clusterOf(nodes(newNode("a"))), newPodObject("p", asks("5", "1Gi")), "1 Insufficient cpu"},
		"both":            {clusterOf(nodes(newNode("a"))), newPodObject("p", asks("5", "9Gi")), "1 Insufficient cpu, 1 Insufficient memory"},
		"taken":           {clusterOf(nodes(newNode("a")), newPodObject("x", on("a"), asks("3", "1Gi"))), newPodObject("p", asks("2", "1Gi")), "Insufficient cpu"},
		"elsewhere":       {clusterOf(nodes(newNode("a"), newNode("b")), newPodObject("x", on("a"), asks("3", "1Gi"))), newPodObject("p", asks("2", "1Gi")), "b"},
		"ended Pods":      {clusterOf(nodes(newNode("a")), newPodObject("x", on("a"), asks("3", "1Gi"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })), newPodObject("p", asks("2", "1Gi")), "a"},
		"the emptier one": {clusterOf(nodes(newNode("a"), newNode("b")), newPodObject("x", on("a"), asks("1", "1Gi"))), newPodObject("p"), "b"},
		"cordoned":        {clusterOf(nodes(newNode("a", func(n *corev1.Node) { n.Spec.Unschedulable = true }))), newPodObject("p"), "cordoned"},
		"not ready": {clusterOf(nodes(newNode("a", func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
		}))), newPodObject("p"), "1 node(s) are not ready"},
		"disk pressure":        {clusterOf(nodes(newNode("a", suffers(corev1.NodeDiskPressure, corev1.ConditionTrue)))), newPodObject("p"), "1 node(s) have the taint {node.kubernetes.io/disk-pressure: }"},
		"written down already": {clusterOf(nodes(newNode("a", suffers(corev1.NodeDiskPressure, corev1.ConditionTrue), taint(corev1.TaintNodeDiskPressure, "", "NoSchedule")))), newPodObject("p", tolerates(corev1.TaintNodeDiskPressure)), "a"},
		"another pressure":     {clusterOf(nodes(newNode("a", suffers(corev1.NodeMemoryPressure, corev1.ConditionTrue)))), newPodObject("p", tolerates(corev1.TaintNodeDiskPressure)), "memory-pressure"},
		"pressure unknown":     {clusterOf(nodes(newNode("a", suffers(corev1.NodePIDPressure, corev1.ConditionUnknown)))), newPodObject("p"), "a"},
		"no network":           {clusterOf(nodes(newNode("a", suffers(corev1.NodeNetworkUnavailable, corev1.ConditionTrue)), newNode("b"))), newPodObject("p"), "b"},
		"tainted":              {clusterOf(nodes(newNode("a", taint("k", "v", "NoSchedule")))), newPodObject("p"), "taint {k: v}"},
		"tolerated":            {clusterOf(nodes(newNode("a", taint("k", "v", "NoExecute")))), newPodObject("p", func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Operator: "Exists"}} }), "a"},
		"another value":        {clusterOf(nodes(newNode("a", taint("k", "v", "NoSchedule")))), newPodObject("p", func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Key: "k", Value: "w"}} }), "taint"},
		"rather not":           {clusterOf(nodes(newNode("a", taint("k", "v", "PreferNoSchedule")), newNode("b")), newPodObject("x", on("b"), asks("1", "1Gi"))), newPodObject("p"), "b"},
		"selector":             {clusterOf(zoned), newPodObject("p", func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{zone: "b"} }), "b1"},
		"selects none":         {clusterOf(zoned), newPodObject("p", func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{zone: "c"} }), "3 node(s) don't match the Pod's node selector"},
		"by name":              {clusterOf(zoned), newPodObject("p", pinned("a2")), "a2"},
		"prefers":              {clusterOf(zoned), newPodObject("p", prefers(zone, "b")), "b1"},
		"port taken":           {clusterOf(nodes(newNode("a")), newPodObject("x", on("a"), hostPortOf(80, ""))), newPodObject("p", hostPortOf(80, "10.0.0.1")), "host ports"},
		"other address":        {clusterOf(nodes(newNode("a")), newPodObject("x", on("a"), hostPortOf(80, "10.0.0.2"))), newPodObject("p", hostPortOf(80, "10.0.0.1")), "a"},
		"near":                 {clusterOf(zoned, newPodObject("x", on("b1"), app("db"))), newPodObject("p", near("db", zone)), "b1"},
		"near nobody":          {clusterOf(zoned), newPodObject("p", near("db", zone)), "3 node(s) are not near"},
		"the first of many":    {clusterOf(zoned[:1]), newPodObject("p", app("db"), near("db", zone)), "a1"},
		"far":                  {clusterOf(zoned, newPodObject("x", on("a1"), app("db"))), newPodObject("p", far("db", zone)), "b1"},
		"far from all":         {clusterOf(zoned, newPodObject("x", on("a1"), app("db")), newPodObject("y", on("b1"), app("db"))), newPodObject("p", far("db", zone)), "3 node(s) are near Pods that the Pod's anti-affinity excludes"},
		"kept far":             {clusterOf(zoned, newPodObject("x", on("a1"), far("web", zone))), newPodObject("p", app("web")), "b1"},
		"other namespace":      {clusterOf(zoned[:1], newPodObject("x", on("a1"), app("db"), func(p *corev1.Pod) { p.Namespace = "other" })), newPodObject("p", far("db", zone)), "a1"},
		"spread":               {clusterOf(zoned, newPodObject("x", on("a1"), app("w"))), newPodObject("p", app("w"), spreadOver(zone, 1, corev1.DoNotSchedule)), "b1"},
		"spread, no label":     {clusterOf(nodes(newNode("a"))), newPodObject("p", app("w"), spreadOver(zone, 1, corev1.DoNotSchedule)), "lack the label"},
		"spread, too many":     {clusterOf(nodes(zoned[0], newNode("b1", label(zone, "b"), taint("k", "v", "NoSchedule"))), newPodObject("x", on("a1"), app("w"))), newPodObject("p", app("w"), spreadOver(zone, 1, corev1.DoNotSchedule)), "topology spread constraints"},
		"spread if it can":     {clusterOf(zoned, newPodObject("x", on("b1"), app("w")), newPodObject("y", on("a1"), app("w"))), newPodObject("p", app("w"), spreadOver(corev1.LabelHostname, 1, corev1.ScheduleAnyway)), "a2"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := c.cluster.Choose(c.pod, rand.New(rand.NewPCG(1, 2)))
			if err != nil {
				var unfit *Unfit
				if !errors.As(err, &unfit) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "nodes are available") {
					t.Errorf("%v, want %s", err, c.want)
				}
			} else if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

func pinned(name string) change {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: "In", Values: []string{name}}}}},
		}}}
	}
}

func prefers(key, value string) change {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{
			Weight: 100, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: "In", Values: []string{value}}}},
		}}}}
	}
}

// TestSiblingsAreSpread: the Pods of one owner end up on all nodes, evenly.
func TestSiblingsAreSpread(t *testing.T) {
	c := clusterOf(nodes(newNode("a"), newNode("b"), newNode("c")))
	chance := rand.New(rand.NewPCG(1, 2))
	for i := range 9 {
		p := newPodObject(fmt.Sprint(i))
		p.OwnerReferences = []metav1.OwnerReference{{UID: "owner", Controller: ptr.To(true)}}
		node, err := c.Choose(p, chance)
		if err != nil {
			t.Fatal(err)
		}
		p.Spec.NodeName = node
		c.SetPod(p)
	}
	for name, n := range c.nodes {
		if len(n.pods) != 3 {
			t.Errorf("%d on %s", len(n.pods), name)
		}
	}
}

// TestBooks: whatever comes and goes, no node has more than it can give, and in the end nothing is left over.
func TestBooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := clusterOf(nodes(newNode("a"), newNode("b")))
		chance := rand.New(rand.NewPCG(1, 2))
		var there []types.NamespacedName
		for i := range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(there) > 0 && rapid.Bool().Draw(t, "ends") {
				c.DropPod(there[0])
				there = there[1:]
				continue
			}
			p := newPodObject(fmt.Sprint(i), asks(fmt.Sprintf("%dm", rapid.IntRange(0, 2500).Draw(t, "cpu")), "1Gi"))
			node, err := c.Choose(p, chance)
			if err != nil {
				continue
			}
			p.Spec.NodeName = node
			c.SetPod(p)
			there = append(there, keyOf(p))
			for name, n := range c.nodes {
				if n.used["cpu"] > 4000 || n.used["memory"] > 8<<30 || len(n.pods) > 10 {
					t.Fatalf("%s is overfull: %v", name, n.used)
				}
			}
		}
		for _, key := range there {
			c.DropPod(key)
		}
		for name, n := range c.nodes {
			if n.used["cpu"] != 0 || n.counted["memory"] != 0 || len(n.pods) != 0 {
				t.Fatalf("left over on %s: %v", name, n.used)
			}
		}
	})
}

// TestHugeAmounts: a Pod that asks for more than a number can hold fits nowhere, takes everything, and gives back what it took.
func TestHugeAmounts(t *testing.T) {
	chance := rand.New(rand.NewPCG(1, 2))
	small := newPodObject("p", asks("1", "1Gi"))
	for _, huge := range []change{asks("1", "9223372036854775807"), asks("9223372036854775807", "1Gi"), asks("18446744073709552", "1Gi")} {
		c := clusterOf(nodes(newNode("a")), newPodObject("w", on("a"), asks("2", "1Gi")))
		if node, err := c.Choose(newPodObject("p", huge), chance); err == nil {
			t.Errorf("it fits on %s", node)
		}
		c.SetPod(newPodObject("x", on("a"), huge))
		c.SetPod(newPodObject("y", on("a"), huge))
		if node, err := c.Choose(small, chance); err == nil {
			t.Errorf("%s is full, and another fits", node)
		}
		c.DropPod(types.NamespacedName{Namespace: "default", Name: "x"})
		c.DropPod(types.NamespacedName{Namespace: "default", Name: "y"})
		if _, err := c.Choose(small, chance); err != nil {
			t.Error(err)
		}
		if _, err := c.Choose(newPodObject("p", asks("3", "1Gi")), chance); err == nil {
			t.Error("what the other Pod takes is forgotten")
		}
	}
}
