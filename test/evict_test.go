package test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
)

const replaced = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: replaced}
spec:
  replicas: 3
  selector: {matchLabels: {app: replaced}}
  template:
    metadata: {labels: {app: replaced}}
    spec:
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: replaced}}}
      tolerations:
      - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 5}
      - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 5}
      containers:
      - name: backend
        image: portal
        args: [echo, --listen, ":9376"]
        readinessProbe: {httpGet: {port: 9376}, periodSeconds: 1}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: everywhere}
spec:
  selector: {matchLabels: {app: everywhere}}
  template:
    metadata: {labels: {app: everywhere}}
    spec:
      containers: [{name: c, image: host, command: [sleep, "100000"]}]
`

// TestLabReplacesPodsOfADeadNode: when a node dies, its Pods are evicted after the time for which they tolerate that, and run on the others; those
// of DaemonSets stay with it. When the Node is deleted, what is left of its Pods is too.
func TestLabReplacesPodsOfADeadNode(t *testing.T) {
	t.Parallel()
	l := startLab(t, lab.Options{Nodes: 3, ServerArgs: []string{"--node-monitor-grace-period", "15s"}})
	labKubectl(t, l, replaced, "apply")
	labKubectl(t, l, "", "rollout", "status", "--timeout=120s", "deployment/replaced")
	labKubectl(t, l, "", "rollout", "status", "--timeout=120s", "daemonset/everywhere")
	pods := func(app string) []corev1.Pod {
		list, err := l.API.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	dead := pods("replaced")[0].Spec.NodeName
	if err := l.PowerOff(dead); err != nil {
		t.Fatal(err)
	}
	took := eventually(t, 3*time.Minute, "three replicas on living nodes", func() string {
		running := 0
		for _, pod := range pods("replaced") {
			if pod.Spec.NodeName == dead {
				if pod.DeletionTimestamp == nil {
					return "a Pod of the dead node is not deleted"
				}
				continue
			}
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
					running++
				}
			}
		}
		if running != 3 {
			return fmt.Sprintf("%d are ready", running)
		}
		return ""
	})
	t.Logf("the replicas of a dead node were replaced after %s", took.Round(time.Millisecond))
	stays := false
	for _, pod := range pods("everywhere") {
		stays = stays || pod.Spec.NodeName == dead && pod.DeletionTimestamp == nil
	}
	if !stays {
		t.Error("the Pod of the DaemonSet was evicted")
	}
	labKubectl(t, l, "", "delete", "node", dead)
	eventually(t, 3*time.Minute, "the Pods of a deleted Node to go", func() string {
		for _, pod := range append(pods("replaced"), pods("everywhere")...) {
			if pod.Spec.NodeName == dead {
				return pod.Name + " is there"
			}
		}
		return ""
	})
}
