//go:build kills

package test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
)

var (
	killPods  = flag.Int("kills.pods", 6, "how many Pods are behind each of the two Services of TestLabKills")
	killAway  = flag.Duration("kills.away", 4*time.Second, "for how long agents and the server are gone")
	killGrace = flag.Duration("kills.grace", 20*time.Second, "how long a node may go without renewing its Lease")
)

// TestLabKills: under load, an agent, the server, both of them and at last all processes of a node are killed. Pods of the other nodes
// answer every request, without the agent and without the server; who comes back disturbs no Pod; a dead node's endpoints are gone
// within the grace period.
func TestLabKills(t *testing.T) {
	for _, mode := range strings.Split(*rollModes, ",") {
		t.Run(mode, func(t *testing.T) { kills(t, mode) })
	}
}

func kills(t *testing.T, mode string) {
	l := startLab(t, lab.Options{Nodes: 3, ProxyMode: mode, ServerArgs: []string{"--node-monitor-grace-period", killGrace.String()}})
	// The Pods of one Service are on nodes that live, those of the other on all.
	living := []string{"node1", "node2"}
	labKubectl(t, l, rollable("living", *killPods, living...), "apply")
	labKubectl(t, l, rollable("spread", *killPods, l.NodeNames()...), "apply")
	deployed(t, l, "living", 5*time.Minute)
	deployed(t, l, "spread", 5*time.Minute)
	before := containersOf(t, l)
	sources := through(l, serviceOf(t, l, "living"), living, *rollRate/2)
	spread := through(l, serviceOf(t, l, "spread"), living, *rollRate/2)
	reachable(t, sources)
	reachable(t, spread)

	load := sendRequests(t, slices.Concat(sources, spread)...)
	// In the userspace mode the agent's process carries the connections that begin on its node.
	first, others := "node2", []string{"node1", "node3"}
	if mode == "userspace" {
		first, others = "node3", []string{"node3"}
	}
	for _, machines := range [][]string{{first}, {"server"}, append(others, "server")} {
		began := load.since()
		killAndStart(t, l, machines)
		t.Logf("killed and back: %v, from %s to %s", machines, began.Round(time.Millisecond), load.since().Round(time.Millisecond))
	}
	renewed(t, l)
	load.none(t)
	if after := containersOf(t, l); !maps.Equal(after, before) {
		t.Errorf("containers were\n%v\nand are\n%v", before, after)
	}
	powerOff(t, l, sources, spread)
}

// killAndStart kills the programs of machines, has them stay down for a while, and waits until they are back.
func killAndStart(t *testing.T, l *lab.Lab, machines []string) {
	t.Helper()
	starts := map[string]int{}
	for _, name := range machines {
		starts[name] = agentStarts(l, name)
		if err := labMachine(l, name).Kill(); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(*killAway) // requests go on
	for _, name := range machines {
		if err := labMachine(l, name).Start(); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range machines {
		eventually(t, 2*time.Minute, name+" to be back", func() string {
			if name == "server" {
				if err := l.API.RESTClient().Get().AbsPath("/readyz").Do(t.Context()).Error(); err != nil {
					return err.Error()
				}
			} else if n := agentStarts(l, name); n <= starts[name] {
				return fmt.Sprintf("its agent has looked after Pods %d times", n)
			}
			return ""
		})
	}
}

func labMachine(l *lab.Lab, name string) *lab.Machine {
	if name == "server" {
		return l.Server
	}
	return l.Node(name)
}

// agentStarts is how often agents of a node have begun to look after Pods.
func agentStarts(l *lab.Lab, node string) int {
	data, _ := os.ReadFile(filepath.Join(l.Dir, "machines", node, node+".log"))
	return strings.Count(string(data), "node is running Pods")
}

// renewed waits until every node's agent has renewed its Lease after this moment, and all nodes are ready.
func renewed(t *testing.T, l *lab.Lab) {
	t.Helper()
	since := time.Now()
	for _, name := range l.NodeNames() {
		eventually(t, 2*time.Minute, name+" to renew its Lease", func() string {
			lease, err := l.API.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if !lease.Spec.RenewTime.After(since) {
				return "it is of " + lease.Spec.RenewTime.String()
			}
			node, err := l.API.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			for _, c := range node.Status.Conditions {
				if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
					return ""
				}
			}
			return fmt.Sprint(node.Status.Conditions)
		})
	}
}

// containersOf are the runs of all Pods' containers, by Pod.
func containersOf(t *testing.T, l *lab.Lab) map[string]string {
	t.Helper()
	out := map[string]string{}
	list, err := l.API.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range list.Items {
		for _, c := range pod.Status.ContainerStatuses {
			out[pod.Name] += fmt.Sprintf("%s ready=%v restarts=%d", c.ContainerID, c.Ready, c.RestartCount)
		}
	}
	return out
}

// powerOff ends all processes of node3.
func powerOff(t *testing.T, l *lab.Lab, sources, spread []requestSource) {
	t.Helper()
	load, risky := sendRequests(t, sources...), sendRequests(t, spread...)
	off := risky.since()
	if err := l.PowerOff("node3"); err != nil {
		t.Fatal(err)
	}
	took := eventually(t, *killGrace+time.Minute, "the endpoints of node3 to go", func() string {
		list, err := l.API.DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=spread"})
		if err != nil {
			return err.Error()
		}
		here := 0
		for _, s := range list.Items {
			for _, e := range s.Endpoints {
				if *e.NodeName == "node3" && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
					here++
				}
			}
		}
		if here > 0 {
			return fmt.Sprintf("%d are ready", here)
		}
		return ""
	})
	gone := risky.since()
	t.Logf("the endpoints of a dead node were gone after %s, with a grace period of %s", took.Round(time.Millisecond), *killGrace)
	// The node monitor looks every few seconds.
	if slack := 15 * time.Second; took > *killGrace+slack {
		t.Errorf("that is more than the grace period and %s", slack)
	}
	time.Sleep(5 * time.Second) // requests go on
	load.none(t)
	early := 0
	for _, f := range risky.end(t) {
		// A request may have been under way when the node died, and a proxy has a moment to follow.
		if f.at+f.took < off || f.at > gone+2*time.Second {
			t.Errorf("not because of the dead node: %v", f)
		}
		early++
	}
	t.Logf("%d requests were sent to the dead node before its endpoints were gone", early)
	if early == 0 {
		t.Error("no request was sent to the dead node: its Pods had no share of the load")
	}
}
