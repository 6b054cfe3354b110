package test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// rejectedPod has a sidecar, and a sysctl that nodes don't allow.
const rejectedPod = `apiVersion: v1
kind: Pod
metadata: {name: rejected}
spec:
  nodeName: NODE
  securityContext: {sysctls: [{name: kernel.core_pattern, value: x}]}
  initContainers: [{name: s, image: host, restartPolicy: Always, command: [sleep, "1000"]}]
  containers: [{name: a, image: host, command: [sleep, "1000"]}]
`

// restartingPod has a sidecar whose end starts everything again, once.
const restartingPod = `apiVersion: v1
kind: Pod
metadata: {name: restarting}
spec:
  nodeName: NODE
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  volumes: [{name: d, emptyDir: {}}]
  initContainers:
  - {name: i, image: host, command: [sh, -c, "echo x >> /d/f"], volumeMounts: [{name: d, mountPath: /d}]}
  - name: s
    image: host
    restartPolicy: Always
    restartPolicyRules: [{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]
    command: [sh, -c, "sleep 1; [ $(wc -l < /d/f) -ge 2 ] && exec sleep 1000; exit 42"]
    volumeMounts: [{name: d, mountPath: /d}]
  containers:
  - {name: a, image: host, command: [sleep, "1000"]}
`

// TestNodeRestartsAll: a container's rule has the whole Pod begin again in place, on a node that has just rejected a Pod with a sidecar.
func TestNodeRestartsAll(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "restarts")
	m.kubectl(t, strings.ReplaceAll(rejectedPod, "NODE", m.name), "apply")
	m.pod(t, "rejected", 20*time.Second, func(p *corev1.Pod) string {
		if p.Status.Phase != corev1.PodFailed || p.Status.Reason != "SysctlForbidden" {
			return fmt.Sprintf("phase %s, reason %s", p.Status.Phase, p.Status.Reason)
		}
		return ""
	})
	m.kubectl(t, strings.ReplaceAll(restartingPod, "NODE", m.name), "apply")
	addr := m.pod(t, "restarting", 20*time.Second, podReady).Status.PodIP
	again := m.pod(t, "restarting", time.Minute, func(p *corev1.Pod) string {
		for _, c := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
			if c.RestartCount != 1 || !c.Ready {
				return fmt.Sprintf("%s: %d restarts, ready %v", c.Name, c.RestartCount, c.Ready)
			}
		}
		return ""
	})
	if again.Status.PodIP != addr {
		t.Errorf("address %s, before %s", again.Status.PodIP, addr)
	}
	m.kubectl(t, "", "delete", "pod", "restarting", "rejected")
	m.nothingLeft(t)
}
