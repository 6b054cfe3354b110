package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
	podnetwork "portal/internal/node/network"
	"portal/test/harness"
)

// TestLabPodsLeaveNothing: when Pods are gone, so are their processes, namespaces, interfaces, mounts, control groups and files, though
// the agent was killed while they started, and again while they ended.
func TestLabPodsLeaveNothing(t *testing.T) {
	t.Parallel()
	const pods = 20
	l := startLab(t, lab.Options{Nodes: 1})
	node := l.Node("node1")
	apply := func(names ...string) {
		var manifest strings.Builder
		for _, name := range names {
			fmt.Fprintf(&manifest, `apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {app: brief}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  volumes: [{name: scratch, emptyDir: {medium: Memory}}]
  containers:
  - {name: c, image: host, command: [sleep, "100000"], volumeMounts: [{name: scratch, mountPath: /scratch}]}
---
`, name)
		}
		labKubectl(t, l, manifest.String(), "apply")
	}
	list := func() []corev1.Pod {
		out, err := l.API.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return out.Items
	}
	ready := func() (n int) {
		for _, pod := range list() {
			if podReady(&pod) == "" {
				n++
			}
		}
		return n
	}
	until := func(what string, so func() bool) {
		t.Helper()
		eventually(t, 2*time.Minute, what, func() string {
			if so() {
				return ""
			}
			return fmt.Sprintf("%d Pods, %d are ready", len(list()), ready())
		})
	}
	restart := func() {
		t.Helper()
		if err := node.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := node.Start(); err != nil {
			t.Fatal(err)
		}
	}
	remove := func() {
		t.Helper()
		labKubectl(t, l, "", "delete", "pods", "--all", "--wait=false")
	}

	apply("first")
	until("the first Pod", func() bool { return ready() == 1 })
	remove()
	until("the first Pod to go", func() bool { return len(list()) == 0 })
	before := settledTraces(t, l)

	var names []string
	for i := range pods {
		names = append(names, fmt.Sprintf("p%d", i))
	}
	apply(names...)
	until("some Pods", func() bool { return ready() > 0 })
	restart()
	until("all Pods", func() bool { return ready() == pods })
	for _, pod := range list() {
		if n := pod.Status.ContainerStatuses[0].RestartCount; n != 0 {
			t.Errorf("%s was restarted %d times", pod.Name, n)
		}
	}
	now, err := harness.FindTraces(l, "node1")
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{harness.TraceProcesses, harness.TraceNamespaces, harness.TraceVeths, harness.TraceCgroups, harness.TraceFiles} {
		if n := len(now.Beyond(before)[kind]); n < pods {
			t.Errorf("%d Pods have only %d %s: they are not counted", pods, n, kind)
		}
	}
	// One that the agent was killed in the middle of connecting is connected in the end.
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	uid := string(list()[0].UID)
	unfinished := filepath.Join(lab.NodeDir(l.Dir, "node1"), "pods", uid, "unfinished")
	if err := os.WriteFile(unfinished, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := node.Exec(t.Context(), "ip", "link", "delete", podnetwork.HostInterface(uid)); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the Pod's interface", func() string {
		out, err := node.Exec(t.Context(), "ip", "link", "show", podnetwork.HostInterface(uid))
		if _, is := os.Stat(unfinished); err != nil || is == nil || !strings.Contains(out, "state UP") {
			return fmt.Sprint(out, err)
		}
		return ""
	})
	until("all Pods again", func() bool { return ready() == pods })
	remove()
	restart()
	until("all Pods to go", func() bool { return len(list()) == 0 })
	eventually(t, 30*time.Second, "nothing to be left", func() string {
		now, err := harness.FindTraces(l, "node1")
		if err != nil {
			return err.Error()
		}
		return now.Beyond(before).String()
	})
}

// settledTraces are a node's without Pods, once nothing ends in the background any more.
func settledTraces(t *testing.T, l *lab.Lab) harness.Traces {
	t.Helper()
	last := harness.Traces{}
	eventually(t, 30*time.Second, "the node to settle", func() string {
		now, err := harness.FindTraces(l, "node1")
		if err != nil {
			return err.Error()
		}
		changed := now.Beyond(last).String() + last.Beyond(now).String()
		if last = now; changed != "" {
			time.Sleep(time.Second)
		}
		return changed
	})
	return last
}
