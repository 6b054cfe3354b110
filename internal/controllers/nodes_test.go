package controllers_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/controllers"
)

func TestPodsOfASilentNodeLeaveTheEndpoints(t *testing.T) {
	w := newWorld(t)
	silent, quiet := w.namespace+"-silent", w.namespace+"-quiet"
	w.addNode(silent, nil)
	w.addNode(quiet, nil) // never had a Lease
	now := metav1.NowMicro()
	_, err := w.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(w.ctx(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: silent}, Spec: coordinationv1.LeaseSpec{RenewTime: &now},
	}, metav1.CreateOptions{})
	w.must(err)
	w.addService("s", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "a"} })
	w.addPod("p1", silent, map[string]string{"app": "a"}, "10.1.0.1")
	w.addPod("p2", quiet, map[string]string{"app": "a"}, "10.1.0.2")
	w.run("*", func(c *controllers.Config) {
		c.NodeGracePeriod, c.NodeMonitorPeriod = 2*time.Second, 200*time.Millisecond
	})

	ready := func(want string) func() string {
		return func() string {
			if got := w.readyIn("s"); got != want {
				return fmt.Sprintf("ready: %s, want %s", got, want)
			}
			return ""
		}
	}
	w.eventually(2*time.Second, ready("10.1.0.1 10.1.0.2"))
	w.eventually(10*time.Second, ready("10.1.0.2"))
	node, err := w.client.CoreV1().Nodes().Get(w.ctx(), silent, metav1.GetOptions{})
	w.must(err)
	// No node that keeps a Lease is ready, so no Pods are evicted.
	if len(node.Spec.Taints) != 1 || node.Spec.Taints[0].Key != corev1.TaintNodeUnreachable || node.Spec.Taints[0].Effect != corev1.TaintEffectNoSchedule {
		t.Errorf("taints %v", node.Spec.Taints)
	}
}

// readyIn are the ready addresses of a Service's slices.
func (w *world) readyIn(service string) string {
	list, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).List(w.ctx(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service})
	w.must(err)
	var out []string
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready != nil && *e.Conditions.Ready {
				out = append(out, e.Addresses[0])
			}
		}
	}
	return joinSorted(out)
}

func TestNodesGetTheirPodCIDRs(t *testing.T) {
	w := newWorld(t)
	name := func(i int) string { return fmt.Sprintf("%s-n%d", w.namespace, i) }
	for i := range 5 {
		w.addNode(name(i), nil)
	}
	// Ranges of the test's own: other tests' nodes get parts too, and are gone soon.
	ranges := []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16"), netip.MustParsePrefix("fd00:200::/48")}
	w.run("node", func(c *controllers.Config) {
		c.ClusterCIDRs = ranges
		c.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.200.0.0/24")}
	})
	w.addNode(name(5), nil)
	w.eventually(5*time.Second, func() string {
		owners := map[string]string{"10.200.0.0/24": "the Services"}
		for i := range 6 {
			node, err := w.client.CoreV1().Nodes().Get(w.ctx(), name(i), metav1.GetOptions{})
			w.must(err)
			if len(node.Spec.PodCIDRs) != 2 || node.Spec.PodCIDR != node.Spec.PodCIDRs[0] {
				return fmt.Sprintf("%s has %v", node.Name, node.Spec.PodCIDRs)
			}
			for j, text := range node.Spec.PodCIDRs {
				if p, err := netip.ParsePrefix(text); err != nil || !ranges[j].Contains(p.Addr()) {
					t.Fatalf("%s has %s, not a part of %s", node.Name, text, ranges[j])
				}
				if other := owners[text]; other != "" {
					t.Fatalf("%s is both %s's and %s's", text, other, node.Name)
				}
				owners[text] = node.Name
			}
		}
		return ""
	})
}

// TestPressureKeepsPodsOff: a node that takes no more Pods is tainted, and gets only Pods that tolerate it, until it takes Pods again.
func TestPressureKeepsPodsOff(t *testing.T) {
	w := newWorld(t)
	name := w.namespace
	w.addNode(name, map[string]string{"only": name})
	report := func(pressure corev1.ConditionStatus) {
		t.Helper()
		status := corev1.NodeStatus{
			Capacity: corev1.ResourceList{"cpu": resource.MustParse("1"), "pods": resource.MustParse("5")},
			Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue}, {Type: corev1.NodeDiskPressure, Status: pressure},
			},
		}
		status.Allocatable = status.Capacity
		patch, err := json.Marshal(map[string]any{"status": status})
		w.must(err)
		_, err = w.client.CoreV1().Nodes().Patch(w.ctx(), name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		w.must(err)
	}
	add := func(name string, tolerations ...corev1.Toleration) {
		t.Helper()
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: template("x").Spec}
		pod.Spec.NodeSelector, pod.Spec.Tolerations = map[string]string{"only": w.namespace}, tolerations
		_, err := w.client.CoreV1().Pods(w.namespace).Create(w.ctx(), pod, metav1.CreateOptions{})
		w.must(err)
	}
	expect := func(taints string, ordinary, tolerant string) {
		t.Helper()
		w.eventually(10*time.Second, func() string {
			node, err := w.client.CoreV1().Nodes().Get(w.ctx(), name, metav1.GetOptions{})
			w.must(err)
			var have []string
			for _, taint := range node.Spec.Taints {
				have = append(have, taint.ToString())
			}
			out := fmt.Sprint(have)
			for _, pod := range []string{"ordinary", "tolerant"} {
				pod, err := w.client.CoreV1().Pods(w.namespace).Get(w.ctx(), pod, metav1.GetOptions{})
				w.must(err)
				reason := ""
				for _, c := range pod.Status.Conditions {
					if c.Type == corev1.PodScheduled {
						reason = c.Reason
					}
				}
				out += " " + pod.Spec.NodeName + reason
			}
			if want := fmt.Sprintf("[%s] %s %s", taints, ordinary, tolerant); out != want {
				return out + ", want " + want
			}
			return ""
		})
	}
	report(corev1.ConditionTrue)
	w.run("node,scheduler", func(c *controllers.Config) { c.NodeMonitorPeriod = time.Hour }) // what changes is noticed at once
	add("ordinary")
	add("tolerant", corev1.Toleration{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists})
	expect("node.kubernetes.io/disk-pressure:NoSchedule", corev1.PodReasonUnschedulable, name)
	report(corev1.ConditionFalse)
	expect("", name, name)
	_, err := w.client.CoreV1().Nodes().Patch(w.ctx(), name, types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
	w.must(err)
	expect("node.kubernetes.io/unschedulable:NoSchedule", name, name)
}

// A Pod that somebody runs outside the cluster's nodes is an endpoint, without a nodeName.
func TestAPodWithoutANodeIsAnEndpoint(t *testing.T) {
	w := newWorld(t)
	w.addService("s", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "a"} })
	w.addPod("p", "", map[string]string{"app": "a"}, "10.1.0.1")
	w.run("endpoints,endpointslice")
	w.eventually(5*time.Second, func() string {
		if got := w.readyIn("s"); got != "10.1.0.1" {
			return "ready in the slices: " + got
		}
		endpoints, err := w.client.CoreV1().Endpoints(w.namespace).Get(w.ctx(), "s", metav1.GetOptions{})
		if err != nil || len(endpoints.Subsets) != 1 || len(endpoints.Subsets[0].Addresses) != 1 {
			return fmt.Sprintf("Endpoints: %v %v", endpoints, err)
		}
		if node := endpoints.Subsets[0].Addresses[0].NodeName; node != nil {
			t.Errorf("nodeName %q", *node)
		}
		return ""
	})
	for _, e := range w.slices(discoveryv1.LabelServiceName + "=s")["s"].Endpoints {
		if e.NodeName != nil {
			t.Errorf("nodeName %q", *e.NodeName)
		}
	}
}
