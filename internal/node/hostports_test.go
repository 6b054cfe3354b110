package node

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func podWithPorts(name string, ports ...corev1.ContainerPort) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: types.UID(name)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Ports: ports}}},
	}
}

func TestHostPorts(t *testing.T) {
	pod := podWithPorts("p",
		corev1.ContainerPort{ContainerPort: 80}, corev1.ContainerPort{ContainerPort: 81, HostPort: 8081}, corev1.ContainerPort{ContainerPort: 53, HostPort: 53, Protocol: "UDP", HostIP: "192.0.2.1"},
		corev1.ContainerPort{ContainerPort: 82, HostPort: 8082, Protocol: "SCTP", HostIP: "::"})
	pod.Spec.InitContainers = []corev1.Container{
		{Name: "once", Ports: []corev1.ContainerPort{{ContainerPort: 1, HostPort: 1}}},
		{Name: "sidecar", RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways), Ports: []corev1.ContainerPort{{ContainerPort: 2, HostPort: 2}}},
	}
	var got []string
	for _, p := range natPorts(hostPorts(pod), []netip.Addr{netip.MustParseAddr("10.244.0.5"), netip.MustParseAddr("fd00::5")}, "pod0") {
		got = append(got, fmt.Sprintf("%d %v:%d %v", p.Protocol, p.Host, p.HostPort, p.Pod))
	}
	want := []string{
		"6 invalid IP:2 10.244.0.5:2", "6 invalid IP:2 [fd00::5]:2", "6 invalid IP:8081 10.244.0.5:81", "6 invalid IP:8081 [fd00::5]:81",
		"17 192.0.2.1:53 10.244.0.5:53", "132 :::8082 [fd00::5]:82",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestPortClaims: two Pods don't have the same port, unless at different addresses or by different protocols.
func TestPortClaims(t *testing.T) {
	first := corev1.ContainerPort{ContainerPort: 80, HostPort: 8080, HostIP: "192.0.2.1"}
	for name, c := range map[string]struct {
		second corev1.ContainerPort
		taken  bool
	}{
		"the same":         {first, true},
		"another port":     {corev1.ContainerPort{ContainerPort: 80, HostPort: 8081, HostIP: "192.0.2.1"}, false},
		"another address":  {corev1.ContainerPort{ContainerPort: 80, HostPort: 8080, HostIP: "192.0.2.2"}, false},
		"another protocol": {corev1.ContainerPort{ContainerPort: 80, HostPort: 8080, HostIP: "192.0.2.1", Protocol: "UDP"}, false},
		"all addresses":    {corev1.ContainerPort{ContainerPort: 80, HostPort: 8080}, true},
		"0.0.0.0":          {corev1.ContainerPort{ContainerPort: 80, HostPort: 8080, HostIP: "0.0.0.0"}, true},
		"none":             {corev1.ContainerPort{ContainerPort: 80}, false},
	} {
		var claims portClaims
		if r := claims.take(podWithPorts("a", first)); r != nil {
			t.Fatal(r)
		}
		if r := claims.take(podWithPorts("a", first)); r != nil {
			t.Errorf("%s: its own port: %v", name, r)
		}
		r := claims.take(podWithPorts("b", c.second))
		if (r != nil) != c.taken || r != nil && (r.Reason != "NodePorts" || !strings.Contains(r.Message, "8080/TCP is in use on this node by the Pod ns/a")) {
			t.Errorf("%s: %+v", name, r)
		}
		claims.release("a")
		if r := claims.take(podWithPorts("b", c.second)); r != nil {
			t.Errorf("%s, after the other has gone: %v", name, r)
		}
	}
}
