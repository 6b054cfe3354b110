package controllers

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	podresources "k8s.io/component-helpers/resource"
	"k8s.io/endpointslice"
	"k8s.io/utils/ptr"

	"portal/internal/scheduler"
)

func restNowhere() *rest.Config { return &rest.Config{Host: "https://127.0.0.1:1"} }

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

// A stripped Pod resolves every target port as the whole one does.
func TestStrippedPodsHaveTheirPorts(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	port := func(name string, number int32) corev1.ContainerPort {
		return corev1.ContainerPort{Name: name, ContainerPort: number, Protocol: corev1.ProtocolTCP, HostIP: "x"}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{"a": "b"}, ManagedFields: []metav1.ManagedFieldsEntry{{}}},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{
				{Ports: []corev1.ContainerPort{port("setup", 1)}},
				{RestartPolicy: &always, Ports: []corev1.ContainerPort{port("sidecar", 2), port("web", 3)}},
			},
			Containers: []corev1.Container{
				{Image: "i", Ports: []corev1.ContainerPort{port("", 4), port("web", 5)}},
				{Ports: []corev1.ContainerPort{port("web", 6), {Name: "dns", ContainerPort: 7, Protocol: corev1.ProtocolUDP}}},
			},
		},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodInitialized}, {Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	got, err := strip(stripPod)(pod.DeepCopy())
	if err != nil {
		t.Fatal(err)
	}
	stripped := got.(*corev1.Pod)
	for _, name := range []string{"web", "sidecar", "setup", "dns", "nothing"} {
		for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
			ask := &corev1.ServicePort{TargetPort: intstr.FromString(name), Protocol: protocol}
			want, wantErr := endpointslice.FindPort(pod, ask)
			have, haveErr := endpointslice.FindPort(stripped, ask)
			if want != have || (wantErr == nil) != (haveErr == nil) {
				t.Errorf("%s %s: %d %v, want %d %v", protocol, name, have, haveErr, want, wantErr)
			}
		}
	}
	if stripped.Annotations != nil || stripped.ManagedFields != nil || stripped.Spec.Containers[0].Image != "" || len(stripped.Status.Conditions) != 1 {
		t.Errorf("not stripped: %v", stripped)
	}
}

// A stripped Pod takes the same of a node, and keeps the same others away.
func TestStrippedPodsTakeTheSame(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	asks := func(cpu, disk string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Requests: corev1.ResourceList{
			"cpu": resource.MustParse(cpu), "ephemeral-storage": resource.MustParse(disk), "example.com/gpu": resource.MustParse("1"),
		}}
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", OwnerReferences: []metav1.OwnerReference{{UID: "other"}, {UID: "owner", Controller: ptr.To(true)}}},
		Spec: corev1.PodSpec{
			SchedulerName: "s", NodeSelector: map[string]string{"a": "b"}, Overhead: corev1.ResourceList{"cpu": resource.MustParse("10m")},
			InitContainers: []corev1.Container{{Resources: asks("3", "1Gi")}, {RestartPolicy: &always, Resources: asks("1", "1Gi")}},
			Containers: []corev1.Container{
				{Resources: asks("500m", "2Gi"), Ports: []corev1.ContainerPort{{ContainerPort: 80, HostPort: 8080, HostIP: "10.0.0.1"}}},
				{Resources: asks("700m", "1Gi")},
			},
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{}, PodAntiAffinity: &corev1.PodAntiAffinity{}},
		},
	}
	for _, node := range []string{"", "n"} {
		pod.Spec.NodeName = node
		got, err := strip(stripPod)(pod.DeepCopy())
		if err != nil {
			t.Fatal(err)
		}
		stripped := got.(*corev1.Pod)
		want, have := podresources.PodRequests(pod, podresources.PodResourcesOptions{}), podresources.PodRequests(stripped, podresources.PodResourcesOptions{})
		if !equality.Semantic.DeepEqual(want, have) {
			t.Errorf("on %q it takes %v, want %v", node, have, want)
		}
		if ports := stripped.Spec.Containers[0].Ports; len(ports) != 1 || ports[0].HostPort != 8080 || ports[0].HostIP != "10.0.0.1" {
			t.Errorf("on %q it has the ports %v", node, ports)
		}
		if stripped.Spec.Affinity.PodAntiAffinity == nil || (stripped.Spec.Affinity.NodeAffinity == nil) != (node != "") || (stripped.Spec.NodeSelector == nil) != (node != "") {
			t.Errorf("on %q its affinity is %+v, its selector %v", node, stripped.Spec.Affinity, stripped.Spec.NodeSelector)
		}
		if len(stripped.OwnerReferences) != 1 || stripped.OwnerReferences[0].UID != "owner" {
			t.Errorf("on %q it is owned by %v", node, stripped.OwnerReferences)
		}
	}
}

func TestStrippedServicesKeepWhatAsksForHints(t *testing.T) {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{corev1.AnnotationTopologyMode: "Auto", "other": "x"}}}
	if got := fmt.Sprint(stripService(svc).Annotations); got != "map[service.kubernetes.io/topology-mode:Auto]" {
		t.Errorf("annotations %s", got)
	}
}

// A stripped Node keeps the same Pods off: it is ready or not, and suffers from the same.
func TestStrippedNodesHaveTheirTroubles(t *testing.T) {
	node := &corev1.Node{Spec: corev1.NodeSpec{Unschedulable: true, Taints: []corev1.Taint{{Key: "mine", Effect: corev1.TaintEffectNoSchedule}}}}
	for _, kind := range []corev1.NodeConditionType{
		corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure, corev1.NodeNetworkUnavailable, corev1.NodeReady,
	} {
		for _, status := range []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionFalse, corev1.ConditionUnknown} {
			node.Status.Conditions = []corev1.NodeCondition{{Type: kind, Status: status, Message: "long"}, {Type: "Other", Status: corev1.ConditionTrue}}
			if want, got := scheduler.Taints(node), scheduler.Taints(stripNode(node)); !equality.Semantic.DeepEqual(want, got) {
				t.Errorf("%s %s: %v, want %v", kind, status, got, want)
			}
		}
	}
}
