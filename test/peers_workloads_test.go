//go:build peers

package test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// oursOff are the controllers of workloads that kube-controller-manager takes over; theirs is what it calls them. Its controller of
// StatefulSets waits for PersistentVolumeClaims, which Portal doesn't serve.
const (
	oursOff = "-deployment,-replicaset,-replicationcontroller,-daemonset"
	theirs  = "deployment-controller,replicaset-controller,replicationcontroller-controller,daemonset-controller"
)

// TestPeersWorkloads: kube-controller-manager takes over from Portal's controllers, rolls out and back, and hands back. Neither replaces a Pod
// because the other one made it.
func TestPeersWorkloads(t *testing.T) {
	t.Parallel()
	dir, port := t.TempDir(), harness.FreePort()
	start := func(args ...string) *harness.API {
		t.Helper()
		api, err := harness.StartPortalAt(dir, port, args...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(api.Kill)
		return api
	}
	api := start()
	client := connect(t, api.Kubeconfig)
	if _, err := harness.StartFakeKubelet(t.Context(), client, "n1", "n2", "n3"); err != nil {
		t.Fatal(err)
	}
	k := newTerminal(t, api, []string{harness.Portal(), "kubectl"})
	sets := []string{"deployment/web", "statefulset/db", "daemonset/agent"}
	rolledOut := func() {
		t.Helper()
		for _, set := range sets {
			k.run("rollout", "status", set, "--timeout=90s")
		}
	}
	uids := func() string {
		t.Helper()
		list, err := client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, pod := range list.Items {
			if pod.DeletionTimestamp == nil {
				out = append(out, string(pod.UID))
			}
		}
		slices.Sort(out)
		return strings.Join(out, " ")
	}
	// observed waits until whoever controls has seen a change of every set that means nothing.
	observed := func(n int) {
		t.Helper()
		for _, set := range sets {
			k.run("patch", set, "--type=merge", "-p", fmt.Sprintf(`{"spec":{"revisionHistoryLimit":%d}}`, n))
		}
		within(t, "nobody observes", func() error {
			for _, set := range sets {
				got := k.run("get", set, "-o", "jsonpath={.metadata.generation} {.status.observedGeneration}")
				if seen := strings.Fields(got); len(seen) != 2 || seen[0] != seen[1] {
					return fmt.Errorf("%s: %s", set, got)
				}
			}
			return nil
		})
	}
	images := func(want string) {
		t.Helper()
		for _, app := range []string{"web", "db", "agent"} {
			for _, pod := range podsOf(t, client, "app="+app) {
				if got := pod.Spec.Containers[0].Image; got != app+":"+want {
					t.Errorf("Pod %s has %s", pod.Name, got)
				}
			}
		}
	}
	update := func(version string) {
		t.Helper()
		for _, app := range []string{"web", "db", "agent"} {
			k.run("set", "image", sets[slices.Index([]string{"web", "db", "agent"}, app)], app+"="+app+":"+version)
		}
		rolledOut()
		images(version)
	}
	k.run("create", "deployment", "web", "--image=web:1", "--replicas=3")
	k.run("apply", "-f", k.file("db.yaml", statefulSet))
	k.run("apply", "-f", k.file("agent.yaml", daemonSet))
	rolledOut()
	update("2")
	before := uids()

	api.Kill()
	api = start("--controllers", oursOff)
	managerDir := t.TempDir()
	manager := startPeer(t, managerDir, "kube-controller-manager", "--kubeconfig", api.Kubeconfig, "--authentication-kubeconfig", api.Kubeconfig,
		"--authorization-kubeconfig", api.Kubeconfig, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(harness.FreePort()),
		"--cert-dir", filepath.Join(managerDir, "certs"), "--leader-elect=false", "--controllers", theirs)
	observed(11)
	if after := uids(); after != before {
		t.Errorf("kube-controller-manager replaced Pods:\n%s\n%s", before, after)
	}
	for _, set := range sets {
		k.run("rollout", "undo", set)
	}
	rolledOut()
	images("1")
	update("3")
	before = uids()

	manager.Kill()
	api.Kill()
	api = start()
	observed(12)
	if after := uids(); after != before {
		t.Errorf("Portal replaced Pods:\n%s\n%s", before, after)
	}
	for _, set := range sets {
		k.run("rollout", "undo", set)
	}
	rolledOut()
	images("1")
	if list, err := client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{}); err != nil || !slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
		return e.Reason == "ScalingReplicaSet"
	}) {
		t.Errorf("no Event tells of the rollouts: %v", err)
	}
}
