package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
	"portal/test/harness"
)

// startLab is a lab of the test's own.
func startLab(t *testing.T, o lab.Options) *lab.Lab {
	t.Helper()
	rootOnly(t)
	need(t, harness.Portal(), "build")
	o.Name, o.Dir, o.Portal = fmt.Sprintf("t%d-%d", os.Getpid(), time.Now().UnixNano()%1e6), filepath.Join(t.TempDir(), "lab"), harness.Portal()
	began := time.Now()
	l, err := lab.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Logf("a lab of %d nodes was ready after %v", o.Nodes, time.Since(began))
	return l
}

// on runs a command on a machine, and fails the test if it fails.
func on(t *testing.T, m *lab.Machine, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	out, err := m.Exec(ctx, args...)
	if err != nil {
		t.Fatalf("on %s: %v", m.Name, err)
	}
	return out
}

// labKubectl runs the built-in kubectl on this computer, with a manifest on its standard input if there is one.
func labKubectl(t *testing.T, l *lab.Lab, manifest string, args ...string) string {
	t.Helper()
	if manifest != "" {
		path := filepath.Join(t.TempDir(), "manifest.yaml")
		if err := os.WriteFile(path, []byte(manifest), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "-f", path)
	}
	out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"kubectl", "--kubeconfig", l.Kubeconfig}, args...)...)
	if err != nil {
		t.Fatalf("kubectl %v: %v\n%s", args, err, out)
	}
	return out
}

// backends is a Service with Pods behind it, all on one node.
func backends(name, node string, replicas int) string {
	return serviceManifest(name, "NodePort", name, "") + workload{
		name: name, replicas: replicas, pod: "nodeSelector: {kubernetes.io/hostname: " + node + "}\ntolerations: [{operator: Exists}]",
	}.String()
}

// TestLab: in a lab of two nodes, a Service with Pods on one of them answers by cluster IP, by name and by node port; a client outside
// reaches it; a node that is unplugged is lost, its endpoints and its DNS server with it, and comes back.
func TestLab(t *testing.T) {
	t.Parallel()
	l := startLab(t, lab.Options{Nodes: 2, Zones: 2})
	node1 := l.Node("node1")
	if got := labKubectl(t, l, "", "get", "nodes", "-o", "jsonpath={.items[*].metadata.labels.topology\\.kubernetes\\.io/zone}"); got != "zone-1 zone-2" {
		t.Errorf("the nodes are in %q", got)
	}
	labKubectl(t, l, backends("my-service", "node1", 3), "apply")
	labKubectl(t, l, "", "wait", "--for=condition=Available", "--timeout=60s", "deployment/my-service")
	svc, err := l.API.CoreV1().Services("default").Get(t.Context(), "my-service", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{
		"http://" + svc.Spec.ClusterIP + "/",
		fmt.Sprintf("http://node1:%d/", svc.Spec.Ports[0].NodePort),
	} {
		eventually(t, 10*time.Second, url, func() string {
			seen := map[string]bool{}
			for range 30 {
				out, err := node1.Exec(t.Context(), "curl", "-sS", "--max-time", "2", url)
				if err != nil {
					return err.Error()
				}
				seen[out] = true
			}
			if len(seen) != 3 {
				return fmt.Sprintf("answers of %v", seen)
			}
			return ""
		})
	}
	outside := on(t, l.Client, "curl", "-sS", "--max-time", "5", fmt.Sprintf("http://node1:%d/", svc.Spec.Ports[0].NodePort))
	if !strings.HasPrefix(outside, "my-service-") {
		t.Errorf("to the client outside it answers %q", outside)
	}

	dns, err := l.API.CoreV1().Services("kube-system").Get(t.Context(), "kube-dns", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if dns.Spec.ClusterIP != "10.96.0.10" {
		t.Errorf("kube-dns is at %s", dns.Spec.ClusterIP)
	}
	for _, m := range []*lab.Machine{node1, l.Node("node2")} {
		for _, server := range dns.Spec.ClusterIPs {
			got := on(t, m, "dig", "+short", "+tries=2", "+time=2", "@"+server, "my-service.default.svc.cluster.local")
			if strings.TrimSpace(got) != svc.Spec.ClusterIP {
				t.Errorf("on %s, %s says %q", m.Name, server, got)
			}
		}
	}
	// What a Pod sends to another of its node through a Service is not filtered as bridged, though its port is isolated.
	inPod(t, l, svc.Spec.ClusterIP)
	killedAgent(t, l, svc.Spec.ClusterIP)
	lostNode(t, l)
	if err := l.PowerOff("node2"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Node("node2").Exec(t.Context(), "true"); err == nil {
		t.Error("a machine without power runs a command")
	}
}

// inPod: a Pod finds the Service by its name, from inside its network.
func inPod(t *testing.T, l *lab.Lab, clusterIP string) {
	t.Helper()
	list, err := l.API.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=my-service"})
	if err != nil || len(list.Items) == 0 {
		t.Fatal(err)
	}
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "lab", "exec", "--name", l.Name, "--net", list.Items[0].Name, "--", "curl", "-sS", "--max-time", "5", "http://my-service/env/MY_SERVICE")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if want := "MY_SERVICE_SERVICE_HOST=" + clusterIP; !strings.Contains(out, want) {
		t.Errorf("the Pods' variables are\n%s\nwithout %s", out, want)
	}
	// Without --net it is the container's own program, and its exit status.
	if out, err := harness.Run(t.Context(), nil, harness.Portal(), "lab", "exec", "--name", l.Name, list.Items[0].Name, "--", "/portal", "version"); err != nil || out == "" {
		t.Errorf("in the container: %q, %v", out, err)
	}
	var exit *exec.ExitError
	if out, err := harness.Run(t.Context(), nil, harness.Portal(), "lab", "exec", "--name", l.Name, list.Items[0].Name, "--", "/portal", "version", "--wrong"); !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("a wrong flag in the container: %q, %v", out, err)
	}
	// A Service that comes later has a name, but no variables in Pods that are there already.
	labKubectl(t, l, "", "create", "service", "clusterip", "late", "--tcp=80")
	late := labKubectl(t, l, "", "get", "service", "late", "-o", "jsonpath={.spec.clusterIP}")
	eventually(t, 10*time.Second, "the name late", func() string {
		out, err := harness.Run(t.Context(), nil, harness.Portal(), "lab", "exec", "--name", l.Name, "--net", "default/"+list.Items[0].Name, "--", "getent", "hosts", "late")
		if err != nil || !strings.Contains(out, late) {
			return fmt.Sprint(out, err)
		}
		return ""
	})
	if out := on(t, l.Node("node1"), "curl", "-sS", "--max-time", "5", "http://"+clusterIP+"/env/LATE"); out != "" {
		t.Errorf("a Service that came later is in a Pod's environment: %s", out)
	}
}

// killedAgent: Pods and Services go on without the node's agent, and names resolve again with the next.
func killedAgent(t *testing.T, l *lab.Lab, clusterIP string) {
	t.Helper()
	node := l.Node("node1")
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if got := on(t, node, "curl", "-sS", "--max-time", "5", "http://"+clusterIP+"/"); !strings.HasPrefix(got, "my-service-") {
			t.Errorf("without an agent: %q", got)
		}
	}
	pods := labKubectl(t, l, "", "get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[0].restartCount}")
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "DNS of the next agent", func() string {
		out, err := node.Exec(t.Context(), "dig", "+short", "+tries=1", "+time=1", "@10.96.0.10", "my-service.default.svc.cluster.local")
		if strings.TrimSpace(out) != clusterIP {
			return fmt.Sprint(out, err)
		}
		return ""
	})
	if again := labKubectl(t, l, "", "get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[0].restartCount}"); again != pods {
		t.Errorf("containers were restarted: %s, before %s", again, pods)
	}
}

// lostNode: a node that is unplugged becomes NotReady, and leaves kube-dns; plugged in, it is back.
func lostNode(t *testing.T, l *lab.Lab) {
	t.Helper()
	serving := func() (out []string) {
		list, err := l.API.DiscoveryV1().EndpointSlices("kube-system").List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=kube-dns"})
		if err != nil {
			return []string{err.Error()}
		}
		for _, s := range list.Items {
			for _, e := range s.Endpoints {
				if s.AddressType == discoveryv1.AddressTypeIPv4 {
					out = append(out, *e.NodeName)
				}
			}
		}
		return out
	}
	ready := func(name string) corev1.ConditionStatus {
		node, err := l.API.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return corev1.ConditionStatus(err.Error())
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady {
				return c.Status
			}
		}
		return ""
	}
	eventually(t, 30*time.Second, "DNS on both nodes", func() string {
		if got := fmt.Sprint(serving()); got != "[node1 node2]" {
			return "DNS is served by " + got
		}
		return ""
	})
	if err := l.Cut("node1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 90*time.Second, "the loss of node1", func() string {
		endpoints := labKubectl(t, l, "", "get", "endpointslices", "-l", "kubernetes.io/service-name=my-service", "-o", "jsonpath={.items[*].endpoints[?(@.conditions.ready==true)].targetRef.name}")
		if got := fmt.Sprint(serving(), ready("node1"), endpoints); got != fmt.Sprint([]string{"node2"}, corev1.ConditionUnknown, "") {
			return got
		}
		return ""
	})
	if err := l.Heal("node1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "the return of node1", func() string {
		if got := fmt.Sprint(serving(), ready("node1")); got != fmt.Sprint([]string{"node1", "node2"}, corev1.ConditionTrue) {
			return got
		}
		return ""
	})
}

// TestLabLeavesNothing: on a machine of its own, a lab changes nothing of the network, nor when it is killed; what a killed one
// leaves, `portal lab delete` removes. Two run side by side.
func TestLabLeavesNothing(t *testing.T) {
	rootOnly(t)
	need(t, harness.Portal(), "build")
	m := newMachine(t)
	m.ownGroups(t, "portal-lab-one", "portal-lab-two") // a lab's record would say so, but that ends with the machine
	m.do(t, "mount -t tmpfs tmpfs /run")
	look := func() string {
		return m.do(t, "ip -o link | sed 's/qlen.*//'; ip -o address; ip route show table all; ip -6 route show table all; nft list ruleset; "+
			"find /proc/sys/net -type f ! -path '*/stable_secret' ! -name 'nf_conntrack_count' ! -name nf_conntrack_expect_max ! -name tcp_fastopen_key ! -path '*/route/flush' -exec grep -H . {} + 2>/dev/null; "+
			"ls /run/portal/labs /var/lib/portal/lab 2>/dev/null; find /sys/fs/cgroup -maxdepth 2 -name 'portal-lab-one' -o -name 'portal-lab-two'; ls /run/netns 2>/dev/null")
	}
	eventually(t, 10*time.Second, "the machine's own addresses", func() string {
		return m.do(t, "ip -6 -o address show tentative")
	})
	before := look()
	same := func(when string) {
		t.Helper()
		var after string
		for range 20 { // namespaces go in the background
			if after = look(); after == before {
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
		t.Errorf("%s, this has changed:\n%s", when, changedLines(before, after))
	}
	for _, name := range []string{"one", "two"} {
		m.do(t, ".cache/bin/portal lab --nodes 1 --name "+name+" >"+name+".log 2>&1 & "+name+"=$!")
	}
	for _, name := range []string{"one", "two"} {
		m.wait(t, name+".log", "Ctrl-C ends it")
		got := m.do(t, "KUBECONFIG=/var/lib/portal/lab/"+name+"/admin.kubeconfig .cache/bin/portal kubectl get nodes -o name")
		if got != "node/node1\n" {
			t.Errorf("the lab %s has the nodes %s", name, got)
		}
	}
	if got := m.do(t, ".cache/bin/portal lab --nodes 1 --name one"); !strings.Contains(got, "runs already") {
		t.Errorf("a second lab of the name: %s", got)
	}
	m.do(t, "kill -INT $one; wait $one")
	m.wait(t, "one.log", "The lab one is gone.")
	m.do(t, "kill -KILL $two; wait $two")
	if got := m.do(t, ".cache/bin/portal lab exec --name two node1 -- true"); !strings.Contains(got, "portal lab delete two") {
		t.Errorf("exec in a lab that was killed: %s", got)
	}
	if got := m.do(t, ".cache/bin/portal lab delete two"); got != "lab two deleted\n" {
		t.Errorf("delete: %s", got)
	}
	if got := m.do(t, "ls /run/portal/labs /var/lib/portal/lab"); got != "/run/portal/labs:\n\n/var/lib/portal/lab:\n" {
		t.Errorf("left are %s", got)
	}
	m.do(t, "rm -r /run/portal /var/lib/portal")
	same("after both have ended")
	if got := m.do(t, "ls /proc | grep -c '^[0-9]*$'; ps -e -o args | grep -c '[p]ortal'"); !strings.HasSuffix(got, "\n0\n") {
		t.Errorf("processes are left: %s", m.do(t, "ps -e -o pid,args"))
	}
}

// changedLines are the lines that only one of two texts has.
func changedLines(before, after string) string {
	var out strings.Builder
	for sign, pair := range map[string][2]string{"-": {before, after}, "+": {after, before}} {
		have := map[string]bool{}
		for line := range strings.Lines(pair[1]) {
			have[line] = true
		}
		for line := range strings.Lines(pair[0]) {
			if !have[line] {
				out.WriteString(sign + line)
			}
		}
	}
	return out.String()
}
