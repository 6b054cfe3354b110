package test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// workloads is a server with three nodes that a FakeKubelet plays.
func workloads(t *testing.T, args ...string) (*terminalOf, *kubernetes.Clientset) {
	t.Helper()
	api := startPortal(t, args...)
	client := connect(t, api.Kubeconfig)
	if _, err := harness.StartFakeKubelet(t.Context(), client, "n1", "n2", "n3"); err != nil {
		t.Fatal(err)
	}
	return newTerminal(t, api, []string{harness.Portal(), "kubectl"}), client
}

// podsOf are the Pods with a label, those that are being deleted left out.
func podsOf(t *testing.T, client kubernetes.Interface, selector string) []corev1.Pod {
	t.Helper()
	list, err := client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
}

func (k *terminalOf) is(want string, args ...string) {
	k.t.Helper()
	if got := strings.TrimSpace(k.run(args...)); got != want {
		k.t.Errorf("kubectl %s: %q, want %q", strings.Join(args, " "), got, want)
	}
}

// TestDeployments goes through what people do with kubectl: create, roll out, undo, pause, resume, restart, scale, expose.
func TestDeployments(t *testing.T) {
	t.Parallel()
	k, client := workloads(t)
	image := func(want string) {
		t.Helper()
		k.is(want, "get", "deployment", "web", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
		for _, pod := range podsOf(t, client, "app=web") {
			if got := pod.Spec.Containers[0].Image; got != want {
				t.Errorf("Pod %s has %s, want %s", pod.Name, got, want)
			}
		}
	}
	rolledOut := func() {
		t.Helper()
		k.run("rollout", "status", "deployment/web", "--timeout=60s")
	}
	k.run("create", "deployment", "web", "--image=web:1", "--replicas=3")
	rolledOut()
	image("web:1")
	if out := k.run("get", "deployment", "web"); !strings.Contains(out, "3/3") {
		t.Errorf("kubectl get deployment:\n%s", out)
	}
	nodes := map[string]int{}
	for _, pod := range podsOf(t, client, "app=web") {
		nodes[pod.Spec.NodeName]++
	}
	if len(nodes) != 3 {
		t.Errorf("three Pods are on %v", nodes)
	}

	k.run("set", "image", "deployment/web", "web=web:2")
	rolledOut()
	image("web:2")
	if out := k.run("rollout", "history", "deployment/web"); !strings.Contains(out, "1 ") || !strings.Contains(out, "2 ") {
		t.Errorf("history:\n%s", out)
	}
	if out := k.run("rollout", "history", "deployment/web", "--revision=1"); !strings.Contains(out, "web:1") {
		t.Errorf("revision 1:\n%s", out)
	}
	k.run("rollout", "undo", "deployment/web")
	rolledOut()
	image("web:1")
	k.is("3", "get", "deployment", "web", "-o", `jsonpath={.metadata.annotations.deployment\.kubernetes\.io/revision}`)

	k.run("rollout", "pause", "deployment/web")
	k.run("set", "image", "deployment/web", "web=web:3")
	k.run("scale", "deployment/web", "--replicas=5")
	within(t, "scaled while paused", func() error {
		if pods := podsOf(t, client, "app=web"); len(pods) != 5 || pods[0].Spec.Containers[0].Image != "web:1" {
			return fmt.Errorf("%d Pods", len(pods))
		}
		return nil
	})
	k.run("rollout", "resume", "deployment/web")
	rolledOut()
	image("web:3")
	before := podsOf(t, client, "app=web")
	k.run("rollout", "restart", "deployment/web")
	rolledOut()
	for _, pod := range podsOf(t, client, "app=web") {
		if slices.ContainsFunc(before, func(p corev1.Pod) bool { return p.UID == pod.UID }) {
			t.Errorf("Pod %s was not replaced", pod.Name)
		}
	}

	k.run("expose", "deployment", "web", "--port=80")
	within(t, "the Service has no endpoints", func() error {
		slices, err := client.DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=web"})
		if err != nil {
			return err
		}
		n := 0
		for _, s := range slices.Items {
			n += len(s.Endpoints)
		}
		if n != 5 {
			return fmt.Errorf("%d endpoints", n)
		}
		return nil
	})

	// A rollout that can't succeed leaves the old Pods, and undo repairs it.
	k.run("patch", "deployment", "web", "-p", `{"spec":{"progressDeadlineSeconds":2}}`)
	k.run("set", "image", "deployment/web", "web=broken:1")
	k.refused("exceeded its progress deadline", "rollout", "status", "deployment/web", "--timeout=60s")
	if ready := k.run("get", "deployment", "web", "-o", "jsonpath={.status.availableReplicas}"); ready != "4" && ready != "5" {
		t.Errorf("%s Pods are available in a broken rollout", ready)
	}
	k.run("rollout", "undo", "deployment/web")
	rolledOut()
	image("web:3")

	k.run("delete", "deployment", "web")
	within(t, "Pods stay", func() error {
		if pods := podsOf(t, client, "app=web"); len(pods) > 0 {
			return fmt.Errorf("%d Pods", len(pods))
		}
		return nil
	})
}

// TestRecreate never has Pods of two templates.
func TestRecreate(t *testing.T) {
	t.Parallel()
	k, client := workloads(t)
	k.run("create", "deployment", "web", "--image=web:1", "--replicas=2")
	k.run("patch", "deployment", "web", "-p", `{"spec":{"strategy":{"type":"Recreate","rollingUpdate":null}}}`)
	k.run("rollout", "status", "deployment/web", "--timeout=60s")
	watcher, err := client.CoreV1().Pods("default").Watch(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Stop()
	k.run("set", "image", "deployment/web", "web=web:2")
	k.run("rollout", "status", "deployment/web", "--timeout=60s")
	there := map[string]string{}
	for {
		select {
		case event := <-watcher.ResultChan():
			pod := event.Object.(*corev1.Pod)
			if there[pod.Name] = pod.Spec.Containers[0].Image; event.Type == "DELETED" {
				delete(there, pod.Name)
			}
			images := map[string]bool{}
			for _, image := range there {
				images[image] = true
			}
			if len(images) > 1 {
				t.Fatalf("Pods of two templates: %v", there)
			}
		default:
			return
		}
	}
}

const statefulSet = `apiVersion: v1
kind: Service
metadata: {name: db}
spec: {clusterIP: None, selector: {app: db}, ports: [{port: 5432}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: db}
spec:
  serviceName: db
  replicas: 3
  selector: {matchLabels: {app: db}}
  template:
    metadata: {labels: {app: db}}
    spec: {containers: [{name: db, image: "db:1"}]}
`

func TestStatefulSets(t *testing.T) {
	t.Parallel()
	k, client := workloads(t)
	k.run("apply", "-f", k.file("db.yaml", statefulSet))
	k.run("rollout", "status", "statefulset/db", "--timeout=60s")
	k.is("db-0 db-1 db-2", "get", "pods", "-l", "app=db", "-o", "jsonpath={.items[*].metadata.name}")
	k.is("db-1 db", "get", "pod", "db-1", "-o", "jsonpath={.spec.hostname} {.spec.subdomain}")
	k.run("set", "image", "statefulset/db", "db=db:2")
	k.run("rollout", "status", "statefulset/db", "--timeout=60s")
	k.is("db:2 db:2 db:2", "get", "pods", "-l", "app=db", "-o", "jsonpath={.items[*].spec.containers[0].image}")
	k.run("rollout", "undo", "statefulset/db")
	k.run("rollout", "status", "statefulset/db", "--timeout=60s")
	k.is("db:1 db:1 db:1", "get", "pods", "-l", "app=db", "-o", "jsonpath={.items[*].spec.containers[0].image}")
	k.run("scale", "statefulset/db", "--replicas=1")
	within(t, "scaled down", func() error {
		if pods := podsOf(t, client, "app=db"); len(pods) != 1 || pods[0].Name != "db-0" {
			return fmt.Errorf("%d Pods", len(pods))
		}
		return nil
	})
}

const daemonSet = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec: {containers: [{name: agent, image: "agent:1", ports: [{containerPort: 9000, hostPort: 9000}]}]}
`

func TestDaemonSets(t *testing.T) {
	t.Parallel()
	k, client := workloads(t)
	k.run("cordon", "n2")
	k.run("apply", "-f", k.file("agent.yaml", daemonSet))
	k.run("rollout", "status", "daemonset/agent", "--timeout=60s")
	nodes := map[string]bool{}
	for _, pod := range podsOf(t, client, "app=agent") {
		nodes[pod.Spec.NodeName] = true
	}
	if len(nodes) != 3 {
		t.Errorf("on %v", nodes)
	}
	k.run("set", "image", "daemonset/agent", "agent=agent:2")
	k.run("rollout", "status", "daemonset/agent", "--timeout=60s")
	k.is("agent:2 agent:2 agent:2", "get", "pods", "-l", "app=agent", "-o", "jsonpath={.items[*].spec.containers[0].image}")
	k.run("rollout", "undo", "daemonset/agent")
	k.run("rollout", "status", "daemonset/agent", "--timeout=60s")
	k.is("agent:1 agent:1 agent:1", "get", "pods", "-l", "app=agent", "-o", "jsonpath={.items[*].spec.containers[0].image}")
}

// TestScheduling: a Pod that fits nowhere says why, and gets a node when there is one.
func TestScheduling(t *testing.T) {
	t.Parallel()
	k, _ := workloads(t)
	k.run("run", "one", "--image=i")
	k.run("wait", "--for=condition=Ready", "pod/one", "--timeout=30s")
	k.run("run", "big", "--image=i", "--overrides", `{"spec":{"containers":[{"name":"big","image":"i","resources":{"requests":{"cpu":"16"}}}]}}`)
	within(t, "no reason is told", func() error {
		out := k.run("describe", "pod", "big")
		if !strings.Contains(out, "FailedScheduling") || !strings.Contains(out, "0/3 nodes are available: 3 Insufficient cpu.") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	k.is("Unschedulable", "get", "pod", "big", "-o", `jsonpath={.status.conditions[?(@.type=="PodScheduled")].reason}`)
	k.run("patch", "node", "n1", "--subresource=status", "-p", `{"status":{"allocatable":{"cpu":"20"},"capacity":{"cpu":"20"}}}`)
	k.run("wait", "--for=condition=Ready", "pod/big", "--timeout=30s")
	k.is("n1", "get", "pod", "big", "-o", "jsonpath={.spec.nodeName}")
}

// TestReplicationControllers: Pods are counted by their labels, released and orphaned.
func TestReplicationControllers(t *testing.T) {
	t.Parallel()
	k, client := workloads(t)
	k.run("apply", "-f", k.file("rc.yaml", `apiVersion: v1
kind: ReplicationController
metadata: {name: old}
spec: {replicas: 2, template: {metadata: {labels: {app: old}}, spec: {containers: [{name: c, image: i}]}}}
`))
	count := func(want int) {
		t.Helper()
		within(t, fmt.Sprintf("%d Pods", want), func() error {
			if pods := podsOf(t, client, "app=old"); len(pods) != want {
				return fmt.Errorf("%d", len(pods))
			}
			return nil
		})
	}
	count(2)
	k.run("scale", "rc/old", "--replicas=4")
	count(4)
	pod := podsOf(t, client, "app=old")[0].Name
	k.run("label", "pod", pod, "app=free", "--overwrite")
	count(4) // another one takes its place
	k.is("", "get", "pod", pod, "-o", "jsonpath={.metadata.ownerReferences}")
	k.run("delete", "rc", "old", "--cascade=orphan")
	count(4)
}
