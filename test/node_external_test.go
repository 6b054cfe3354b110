package test

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// TestNodeExternal: a server that Portal does not run becomes an endpoint in one line, is ready while it answers, outlives the agent, and
// is gone in one line.
func TestNodeExternal(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "external")
	listen := func() net.Listener {
		t.Helper()
		var l net.Listener
		if err := m.do(func() (err error) {
			l, err = net.Listen("tcp", machineAddress+":9000")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	server := listen()
	portal := func(args ...string) (string, error) {
		t.Helper()
		return harness.Run(t.Context(), nil, harness.Portal(), append(args, "--kubeconfig", m.api.Kubeconfig)...)
	}
	m.kubectl(t, "apiVersion: v1\nkind: Service\nmetadata: {name: db}\nspec: {selector: {app: db}, ports: [{port: 80, targetPort: sql}]}\n", "apply")
	text, err := portal("register", "db-1", "--address", machineAddress, "--port", "sql:9000", "-l", "app=db", "--node", m.name)
	if err != nil {
		t.Fatalf("%s, %v", text, err)
	}
	pod := m.pod(t, "db-1", 20*time.Second, podReady)
	if pod.Status.PodIP != machineAddress || pod.Status.ContainerStatuses[0].State.Running == nil {
		t.Errorf("%+v", pod.Status)
	}
	endpoint := func(want string) {
		t.Helper()
		took := eventually(t, 20*time.Second, "the endpoint to be "+want, func() string {
			list, err := m.client.DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=db"})
			if err != nil {
				return err.Error()
			}
			got := "gone"
			for _, s := range list.Items {
				for _, e := range s.Endpoints {
					got = fmt.Sprintf("%s:%d %v", e.Addresses[0], *s.Ports[0].Port, *e.Conditions.Ready)
				}
			}
			if got != want {
				return got + "\n" + m.agent.Tail()
			}
			return ""
		})
		t.Logf("endpoint %s within %s", want, took.Round(time.Millisecond))
	}
	endpoint(machineAddress + ":9000 true")
	_ = server.Close()
	endpoint(machineAddress + ":9000 false")
	_ = listen()
	endpoint(machineAddress + ":9000 true")

	m.agent.Kill()
	m.start(t)
	eventually(t, 30*time.Second, "the new agent", func() string {
		if n := strings.Count(logOf(t, m.agent), "node is running Pods"); n != 2 {
			return m.agent.Tail()
		}
		return ""
	})
	time.Sleep(3 * time.Second)
	after := m.pod(t, "db-1", time.Second, podReady)
	if a, b := after.Status.ContainerStatuses[0], pod.Status.ContainerStatuses[0]; a.ContainerID != b.ContainerID || a.RestartCount != 0 {
		t.Errorf("after the agent was replaced: %+v, before %+v", a, b)
	}
	m.kubectl(t, "", "annotate", "pod", "db-1", "portal.dev/external-addresses=192.0.2.77", "--overwrite")
	endpoint("192.0.2.77:9000 false")
	m.kubectl(t, "", "annotate", "pod", "db-1", "portal.dev/external-addresses="+machineAddress, "--overwrite")
	endpoint(machineAddress + ":9000 true")

	if text, err := portal("register", "db-1", "--address", machineAddress, "--port", "9000"); err == nil || !strings.Contains(text, "registered already") {
		t.Errorf("%s, %v", text, err)
	}
	text, err = portal("deregister", "db-1", "-o", "json")
	if made := (corev1.Pod{}); err != nil || json.Unmarshal([]byte(text), &made) != nil || made.Name != "db-1" {
		t.Errorf("%s, %v", text, err)
	}
	endpoint("gone")
	for _, c := range []struct {
		want string
		args []string
	}{
		{"one argument", []string{"register"}}, {"--address: is required", []string{"register", "a", "--port", "1"}}, {"--port: is required", []string{"register", "a", "--address", "192.0.2.1"}},
		{"no IP address", []string{"register", "a", "--address", "example.com", "--port", "1"}}, {"loopback", []string{"register", "a", "--address", "127.0.0.1", "--port", "1"}},
		{"link-local", []string{"register", "a", "--address", "fe80::1", "--port", "1"}}, {"group", []string{"register", "a", "--address", "224.1.1.1", "--port", "1"}},
		{"range of Services", []string{"register", "a", "--address", "10.96.0.5", "--port", "1"}}, {"of a family", []string{"register", "a", "--address", "192.0.2.1,192.0.2.2", "--port", "1"}},
		{"from 1 to 65535", []string{"register", "a", "--address", "192.0.2.1", "--port", "0"}}, {"protocol", []string{"register", "a", "--address", "192.0.2.1", "--port", "1/ICMP"}},
		{"--probe", []string{"register", "a", "--address", "192.0.2.1", "--port", "1", "--probe", "ping"}}, {"needs a path", []string{"register", "a", "--address", "192.0.2.1", "--port", "1", "--probe", "http"}},
		{"--labels", []string{"register", "a", "--address", "192.0.2.1", "--port", "1", "-l", "x"}}, {"NAME", []string{"register", "A_b", "--address", "192.0.2.1", "--port", "1"}},
		{"not registered", []string{"deregister", "nobody"}},
	} {
		if text, err := portal(c.args...); err == nil || !strings.Contains(text, c.want) {
			t.Errorf("%v: %s, %v, want %q", c.args, text, err, c.want)
		}
	}
	m.nothingLeft(t)
}
