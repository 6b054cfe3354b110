package controllers

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"k8s.io/endpointslice"
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

func TestStrippedServicesKeepWhatAsksForHints(t *testing.T) {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{corev1.AnnotationTopologyMode: "Auto", "other": "x"}}}
	if got := fmt.Sprint(stripService(svc).Annotations); got != "map[service.kubernetes.io/topology-mode:Auto]" {
		t.Errorf("annotations %s", got)
	}
}
