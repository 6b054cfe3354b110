package test

import (
	"flag"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/lab"
)

var (
	rollPods  = flag.Int("roll.pods", 12, "how many Pods TestLabRoll rolls over")
	rollModes = flag.String("roll.modes", "nftables", "the proxy modes in which TestLabRoll and TestLabKills run")
	rollRate  = flag.Int("roll.rate", 100, "requests a second in all")
)

// rollExternalIP is led to node2 by the lab's router.
const rollExternalIP = "198.51.100.7"

// rollable is a Service with Pods behind it on several nodes.
func rollable(name string, replicas int, nodes ...string) string {
	on := "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [" +
		strings.Join(nodes, ", ") + "]}]}]}}}\n"
	return serviceManifest(name, "NodePort", name, "") + workload{
		name: name, replicas: replicas, spec: "strategy: {rollingUpdate: {maxSurge: 25%, maxUnavailable: 0}}", pod: on + spread(name),
	}.String()
}

// deployed waits until all Pods of a Deployment are of its present template, available, and alone.
func deployed(t *testing.T, l *lab.Lab, name string, limit time.Duration) time.Duration {
	t.Helper()
	return eventually(t, limit, "the Deployment "+name, func() string {
		d, err := l.API.AppsV1().Deployments("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		want, s := *d.Spec.Replicas, d.Status
		if s.ObservedGeneration != d.Generation || s.Replicas != want || s.UpdatedReplicas != want || s.AvailableReplicas != want {
			return fmt.Sprintf("%d Pods, %d of the new template, %d available", s.Replicas, s.UpdatedReplicas, s.AvailableReplicas)
		}
		return ""
	})
}

// backendsOf are a Deployment's Pods.
func backendsOf(t *testing.T, l *lab.Lab, app string) []corev1.Pod {
	t.Helper()
	list, err := l.API.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// serviceOf is a Service, and reachable waits until each of some machines gets answers from it at each of its addresses.
func serviceOf(t *testing.T, l *lab.Lab, name string) *corev1.Service {
	t.Helper()
	svc, err := l.API.CoreV1().Services("default").Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return svc
}

// through are the ways to a Service: its cluster IP from each node, its node ports, and its external IP if it has one, from outside.
func through(l *lab.Lab, svc *corev1.Service, nodes []string, rate int) (out []requestSource) {
	for _, name := range nodes {
		out = append(out, requestSource{name: name, machine: l.Node(name), addresses: []string{net.JoinHostPort(svc.Spec.ClusterIP, "80")}})
	}
	var outside []string
	for i := range nodes {
		outside = append(outside, fmt.Sprintf("192.168.100.%d:%d", 11+i, svc.Spec.Ports[0].NodePort))
	}
	for _, ip := range svc.Spec.ExternalIPs {
		outside = append(outside, net.JoinHostPort(ip, "80"))
	}
	out = append(out, requestSource{name: "client", machine: l.Client, addresses: outside})
	for i := range out {
		out[i].rate = rate / len(out)
	}
	return out
}

// reachable waits until every way to a Service leads somewhere.
func reachable(t *testing.T, sources []requestSource) {
	t.Helper()
	for _, s := range sources {
		for _, address := range s.addresses {
			eventually(t, 30*time.Second, s.name+" to "+address, func() string {
				if err := s.machine.Do(func() error {
					_, err := ask(address, time.Now().Add(requestLimit()))
					return err
				}); err != nil {
					return err.Error()
				}
				return ""
			})
		}
	}
}

// TestLabRoll: while all Pods of a Deployment are replaced, new ones before old ones, no request to its Service fails: from the nodes
// through its cluster IP, from outside through node ports and an external IP.
func TestLabRoll(t *testing.T) {
	t.Parallel()
	for _, mode := range strings.Split(*rollModes, ",") {
		t.Run(mode, func(t *testing.T) { roll(t, mode) })
	}
}

func roll(t *testing.T, mode string) {
	l := startLab(t, lab.Options{Nodes: 3, ProxyMode: mode})
	begin := time.Now()
	labKubectl(t, l, rollable("roll", *rollPods, l.NodeNames()...), "apply")
	labKubectl(t, l, "", "patch", "service", "roll", "-p", `{"spec":{"externalIPs":["`+rollExternalIP+`"]}}`)
	on(t, l.Router, "ip", "route", "add", rollExternalIP, "via", "192.168.100.12")
	deployed(t, l, "roll", 5*time.Minute)
	t.Logf("%d Pods were ready after %s", *rollPods, time.Since(begin).Round(time.Millisecond))
	old := backendsOf(t, l, "roll")
	sources := through(l, serviceOf(t, l, "roll"), l.NodeNames(), *rollRate)
	reachable(t, sources)

	load := sendRequests(t, sources...)
	load.answeredBy(t, *rollPods)
	rolling := time.Now()
	change := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"rolled":"%d"}}}}}`, rolling.Unix())
	if _, err := l.API.AppsV1().Deployments("default").Patch(t.Context(), "roll", types.StrategicMergePatchType, change, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	deployed(t, l, "roll", 10*time.Minute)
	took := time.Since(rolling)
	// The last of the old ones are still ending.
	eventually(t, 2*time.Minute, "the end of the old Pods", func() string {
		if n := len(backendsOf(t, l, "roll")); n != *rollPods {
			return fmt.Sprintf("there are %d Pods", n)
		}
		return ""
	})
	seen := len(load.pods())
	eventually(t, time.Minute, "answers of all new Pods", func() string {
		answered := load.pods()
		for _, pod := range backendsOf(t, l, "roll") {
			if !slices.Contains(answered, pod.Name) {
				return fmt.Sprintf("%d Pods had answered when the last was replaced; now %d have, %s not", seen, len(answered), pod.Name)
			}
		}
		return ""
	})
	t.Logf("%d Pods rolled over within %s", *rollPods, took.Round(time.Millisecond))
	load.none(t)
	for _, pod := range backendsOf(t, l, "roll") {
		if slices.ContainsFunc(old, func(o corev1.Pod) bool { return o.UID == pod.UID }) {
			t.Errorf("%s was not replaced", pod.Name)
		}
	}
}
