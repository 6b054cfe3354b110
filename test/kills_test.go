//go:build kills

package test

import (
	"flag"
	"fmt"
	"maps"
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
//
// Some requests fail of necessity, and are counted apart: those that were under way to the dead node, and those that were sent to it
// before anybody could know. They have 5 s, the grace period is ten times that. From 3 s after the endpoints are gone none fails, not
// even one from a port that has tried the dead node before.
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
		killAndStart(t, l, *killAway, machines...)
		t.Logf("killed and back: %v, from %s to %s", machines, began.Round(time.Millisecond), load.since().Round(time.Millisecond))
	}
	renewed(t, l)
	load.none(t)
	if after := containersOf(t, l); !maps.Equal(after, before) {
		t.Errorf("containers were\n%v\nand are\n%v", before, after)
	}
	powerOff(t, l, sources, spread, mode == "userspace")
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

// powerOff ends all processes of node3. Where the proxy relays connections, it may try another Pod before a request fails.
func powerOff(t *testing.T, l *lab.Lab, sources, spread []requestSource, relays bool) {
	t.Helper()
	for i := range spread {
		spread[i].limit, spread[i].waiting = 5*time.Second, 2*spread[i].rate // a third of them wait all that time
	}
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
	time.Sleep(10 * time.Second) // requests go on
	load.none(t)
	early := 0
	for _, f := range risky.end(t) {
		// A request may have been under way when the node died. Proxies have a moment to follow, and end what waits for the node
		// a good second later.
		if f.at+f.took < off || f.at > gone+3*time.Second {
			t.Errorf("not because of the dead node: %v", f)
		}
		early++
	}
	t.Logf("%d requests were sent to the dead node before its endpoints were gone", early)
	if early == 0 && !relays {
		t.Error("no request was sent to the dead node: its Pods had no share of the load")
	}
}

// since is how far the requests have come.
func (r *requests) since() time.Duration { return time.Since(r.began) }
