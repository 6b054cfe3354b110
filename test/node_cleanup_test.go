package test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	parts "portal/internal/identity"
	"portal/test/harness"
)

// inside runs a command in the machine's network namespace.
func (m *podMachine) inside(args ...string) (out string, err error) {
	err = m.do(func() error {
		text, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		out = string(text)
		return err
	})
	return out, err
}

// processes are those that name the machine's folder in their command line.
func (m *podMachine) processes() (out []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		if line, _ := os.ReadFile(f); bytes.Contains(line, []byte(m.dir)) {
			out = append(out, string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	return out
}

// TestNodeCleanup: while an agent runs, --cleanup names it and touches nothing. After it was killed, --cleanup ends its Pods and its balancing
// process and leaves nothing: no process, interface, rule, route, control group or file, but what is somebody else's. It can be repeated.
func TestNodeCleanup(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "cleanup")
	m.agent.Kill()
	m.kubectl(t, fmt.Sprintf(`apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: balancers}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: %q}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: %q}]
`, parts.MachineLB, parts.Node.Group()), "apply")
	m.args = append(m.args, "--load-balancer-pool", "192.0.2.100-192.0.2.110", "--load-balancer-metrics-bind-address", "")
	m.start(t)
	m.kubectl(t, fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  nodeName: %s
  containers:
  - {name: c, image: portal, args: [echo, --listen, ":9376"], ports: [{containerPort: 9376, hostPort: 18080}], volumeMounts: [{name: v, mountPath: /v}]}
  volumes: [{name: v, emptyDir: {}}]
`, m.name)+serviceManifest("web", "LoadBalancer", "web", "", aws("backend-protocol", "http")), "apply")
	pod := m.pod(t, "web", time.Minute, podReady)
	url := fmt.Sprintf("http://%s:9376/", pod.Status.PodIP)
	control := filepath.Join(m.dir, "node", "balancing", "control")
	eventually(t, time.Minute, "the balancing process", func() string {
		_, err := os.Stat(control)
		if err != nil {
			return err.Error() + "\n" + m.agent.Tail()
		}
		return ""
	})
	eventually(t, time.Minute, "the Pod answers", func() string {
		if _, err := m.get(url); err != nil {
			return err.Error()
		}
		return ""
	})
	cleanup := []string{harness.Portal(), "node", "--cleanup", "--data-dir", filepath.Join(m.dir, "node"), "--node-ip", machineAddress}
	out, err := m.inside(cleanup...)
	if want := fmt.Sprintf("pid %d ", m.agent.Pid()); err == nil || !strings.Contains(out, want) {
		t.Fatalf("beside a running agent: %v\n%s; want an error with %s", err, out, want)
	}
	if got, err := m.get(url); err != nil || got == "" {
		t.Fatalf("a cleanup that was refused has harmed a Pod: %q %v", got, err)
	}
	m.agent.Kill()
	foreign := filepath.Join(m.dir, "node", "mine.txt")
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	other := slices.Clone(cleanup)
	other[slices.Index(other, "--data-dir")+1] = filepath.Join(m.dir, "other")
	if out, err := m.inside(other...); err == nil || !strings.Contains(out, "--data-dir: there are Pods") {
		t.Errorf("with a folder that is not the node's: %v\n%s", err, out)
	}
	if got, err := m.get(url); err != nil || got == "" {
		t.Errorf("a cleanup with another folder has harmed a Pod: %q %v", got, err)
	}
	out, err = m.inside(cleanup...)
	if err != nil || !strings.Contains(out, "Ended 1 Pods of the Node "+m.name) {
		t.Errorf("%v\n%s", err, out)
	}
	m.bare(t)
	if err := os.Remove(foreign); err != nil {
		t.Error("somebody else's file was removed: ", err)
	}
	if out, err := m.inside(cleanup...); err != nil {
		t.Errorf("again: %v\n%s", err, out)
	}
}

// bare checks that the machine is as it was before it was a node.
func (m *podMachine) bare(t *testing.T) {
	t.Helper()
	eventually(t, time.Minute, "no process", func() string { return strings.Join(m.processes(), "\n") })
	if left := m.cgroups(); len(left) > 0 {
		t.Errorf("control groups: %v", left)
	}
	for command, want := range map[string]string{
		"nft list ruleset":       "",
		"ip rule show":           "0: from all lookup local 32766: from all lookup main 32767: from all lookup default",
		"ip -4 route show":       "192.0.2.0/24 dev uplink proto kernel scope link src " + machineAddress,
		"ip -br link show":       "lo uplink",
		"ip -br -4 address show": "lo uplink",
	} {
		got, err := m.inside(strings.Fields(command)...)
		if strings.HasPrefix(command, "ip -br") { // the names
			var names []string
			for line := range strings.Lines(got) {
				names = append(names, strings.Fields(line)[0])
			}
			got = strings.Join(names, " ")
		}
		if got = strings.Join(strings.Fields(got), " "); err != nil || got != want {
			t.Errorf("%s: %v %q, want %q", command, err, got, want)
		}
	}
	entries, err := os.ReadDir(filepath.Join(m.dir, "node"))
	if err != nil || len(entries) != 1 || entries[0].Name() != "mine.txt" {
		t.Errorf("the data directory has %v, %v", entries, err)
	}
}
