//go:build console

package test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
	"portal/test/harness"
)

// TestConsoleTraffic: in a lab in which a Service is used all the time, the console shows how much, and the trace of the command.
func TestConsoleTraffic(t *testing.T) {
	buildConsole(t)
	l := startLab(t, lab.Options{Nodes: 2, Zones: 2})
	labKubectl(t, l, backends("web", "node1", 2)+backends("cart", "node2", 3)+backends("catalog", "node2", 1)+
		serviceManifest("search", "ClusterIP", "serch", "")+serviceManifest("edge", "LoadBalancer", "web", "")+
		"---\napiVersion: v1\nkind: Service\nmetadata: {name: payments}\nspec: {type: ExternalName, externalName: pay.example.com}\n", "apply")
	labKubectl(t, l, "", "wait", "--for=condition=Available", "--timeout=60s", "deployment/web", "deployment/cart", "deployment/catalog")
	for _, name := range l.NodeNames() {
		if err := l.Node(name).Do(func() error {
			for _, setting := range []string{"acct", "timestamp"} {
				if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_"+setting, []byte("1"), 0); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for name, pause := range map[string]time.Duration{"web": 5 * time.Millisecond, "cart": 100 * time.Millisecond, "edge": 400 * time.Millisecond} {
		svc, err := l.API.CoreV1().Services("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		useService(t, l.Node("node2"), net.JoinHostPort(svc.Spec.ClusterIP, "80"), pause)
	}
	beside, err := harness.Start(t.TempDir(), "console", harness.Portal(), "console", "--kubeconfig", l.Kubeconfig, "--listen", fmt.Sprintf("127.0.0.1:%d", harness.FreePort()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(beside.Kill)
	const to = "web.default:80"
	said, err := harness.Run(t.Context(), nil, harness.Portal(), "trace", "--kubeconfig", l.Kubeconfig, "--from", "node2", "--to", to)
	if err != nil || !strings.HasPrefix(said, "ARRIVES") {
		t.Fatalf("portal trace: %v\n%s", err, said)
	}
	runBrowser(t, map[string]any{
		"parts": []string{"traffic"}, "lab": consoleURL(t, beside), "kubeconfig": l.Kubeconfig, "portal": harness.Portal(), "shots": os.Getenv("CONSOLE_SHOTS"),
		"trace": said, "traceFrom": "node2", "traceTo": to,
	})
	countingStops(t, l)
}

// useService has a machine use a Service until the test ends: short connections, and a few that stay open.
func useService(t *testing.T, from *lab.Machine, to string, pause time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	dial := func() (c net.Conn, err error) {
		err = from.Do(func() error {
			c, err = net.DialTimeout("tcp", to, time.Second)
			return err
		})
		return c, err
	}
	go func() {
		defer close(done)
		var open []net.Conn
		defer func() {
			for _, c := range open {
				_ = c.Close()
			}
		}()
		for n := 0; ctx.Err() == nil; n++ {
			c, err := dial()
			switch {
			case err != nil: // its Pods are away for a while
			case len(open) < 5:
				open = append(open, c)
			default:
				_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")
				_ = c.SetReadDeadline(time.Now().Add(time.Second))
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}
			if n%500 == 499 && len(open) > 0 { // those that were cut make room
				_ = open[0].Close()
				open = open[1:]
			}
			time.Sleep(pause + pause*time.Duration(n/50%8)/2) // so that the plot has hills
		}
	}()
}

// countingStops checks that the nodes count nothing any more: no socket waits for conntrack's events.
func countingStops(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range l.NodeNames() {
		eventually(t, time.Minute, "counting on "+name, func() string {
			for line := range strings.Lines(on(t, l.Node(name), "cat", "/proc/net/netlink")) {
				if f := strings.Fields(line); len(f) > 3 && f[1] == "12" && (f[3] == "00000005" || f[3] == "00000007") {
					return "somebody still counts: " + line
				}
			}
			return ""
		})
	}
}
