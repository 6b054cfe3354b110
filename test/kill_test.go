package test

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
)

// TestLabKill is a small TestLabKills: an agent and the server are killed under load, then a node. When the rules no longer lead to the
// dead node, every request is answered, also one from a port from which its client has tried to reach the dead node before.
func TestLabKill(t *testing.T) {
	t.Parallel()
	l := startLab(t, lab.Options{Nodes: 2, ProxyMode: "nftables"})
	labKubectl(t, l, rollable("web", 4, l.NodeNames()...), "apply")
	deployed(t, l, "web", 2*time.Minute)
	before := containersOf(t, l)
	svc := serviceOf(t, l, "web")
	sources := through(l, svc, []string{"node1"}, 40)
	reachable(t, sources)

	load := sendRequests(t, sources...)
	load.answeredBy(t, 4)
	killAndStart(t, l, time.Second, "node1", "server")
	load.none(t)
	if after := containersOf(t, l); !maps.Equal(after, before) {
		t.Errorf("containers were\n%v\nand are\n%v", before, after)
	}

	if err := l.PowerOff("node2"); err != nil {
		t.Fatal(err)
	}
	node1, address := l.Node("node1"), net.JoinHostPort(svc.Spec.ClusterIP, "80")
	tryFrom := func(port int, limit time.Duration) error {
		return node1.Do(func() error {
			_, err := askAt(port, address, time.Now().Add(limit))
			return err
		})
	}
	var silent []int
	port := 20000
	eventually(t, time.Minute, "requests to the dead node", func() string {
		port++
		// While it goes off it may refuse.
		if err := tryFrom(port, time.Second); err != nil && !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ECONNRESET) {
			silent = append(silent, port)
		}
		if len(silent) < 3 {
			return fmt.Sprintf("%d got no answer", len(silent))
		}
		return ""
	})
	// Nobody waits for the grace period: an administrator removes the Pods.
	var dead []string
	for _, pod := range backendsOf(t, l, "web") {
		if pod.Spec.NodeName == "node2" {
			dead = append(dead, pod.Status.PodIP)
			if err := l.API.CoreV1().Pods("default").Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, time.Minute, "rules without the dead node", func() string {
		rules := on(t, node1, "nft", "list", "ruleset")
		for _, ip := range dead {
			if strings.Contains(rules, ip+" ") {
				return "they have " + ip
			}
		}
		return ""
	})
	load = sendRequests(t, sources...)
	for _, port := range silent {
		eventually(t, time.Minute, fmt.Sprintf("an answer to port %d", port), func() string {
			if err := tryFrom(port, 10*time.Second); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	time.Sleep(2 * time.Second) // requests go on
	load.none(t)
}

// killAndStart kills the programs of machines, has them stay down for a while, and waits until they are back.
func killAndStart(t *testing.T, l *lab.Lab, away time.Duration, machines ...string) {
	t.Helper()
	starts := map[string]int{}
	for _, name := range machines {
		starts[name] = agentStarts(l, name)
		if err := labMachine(l, name).Kill(); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(away) // requests go on
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
