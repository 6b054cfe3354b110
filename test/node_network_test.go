package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/node"
	"portal/test/harness"
)

// testNode makes this binary an agent of a node that may list all Nodes.
const testNode = "portal-test-node"

type testNodeOptions struct {
	Name, Address, Address6, Dir, Kubeconfig string
}

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == testNode {
		if err := runTestNode(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	besideEachOther()
	os.Exit(m.Run())
}

func runTestNode(text string) error {
	var o testNodeOptions
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", o.Kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	agent, err := node.New(node.Options{
		Client: client, NodesClient: client, Name: o.Name, NodeIPs: []netip.Addr{netip.MustParseAddr(o.Address), netip.MustParseAddr(o.Address6)}, DataDir: o.Dir, Masquerade: true, Version: "v1.37.1",
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return agent.Run(context.Background()) // until it is killed
}

// ipIn runs the ip command in a network namespace; it must succeed.
func ipIn(t *testing.T, ns netns.NsHandle, args string) string {
	t.Helper()
	var out []byte
	err := inNamespaceOf(ns, func() (err error) {
		out, err = exec.Command("ip", strings.Fields(args)...).CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("ip %s: %v: %s", args, err, out)
	}
	return string(out)
}

func inNamespaceOf(ns netns.NsHandle, f func() error) error {
	return (&podMachine{ns: ns}).do(f)
}

func newNetNS(t *testing.T) netns.NsHandle {
	t.Helper()
	made := make(chan netns.NsHandle)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		ns, err := netns.New()
		if err != nil {
			t.Error(err)
		}
		made <- ns
	}()
	ns := <-made
	t.Cleanup(func() { ns.Close() })
	ipIn(t, ns, "link set lo up")
	return ns
}

// whoServer tells who asks, until the test ends.
func whoServer(t *testing.T, ns netns.NsHandle, address string) {
	t.Helper()
	if err := inNamespaceOf(ns, func() error {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
				fmt.Fprint(c, host)
				c.Close()
			}
		}()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func askFrom(ns netns.NsHandle, address string) (answer string, err error) {
	err = inNamespaceOf(ns, func() error {
		c, err := net.DialTimeout("tcp", address, time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		data, err := io.ReadAll(c)
		answer = string(data)
		return err
	})
	return answer, err
}

// whoPod tells who asks, at port 8080, which is 8000 of its node.
const whoPod = `apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 1
  containers:
  - name: who
    image: host
    command: [python3, -u, -c]
    args:
    - |
      import socket
      s = socket.create_server(('::', 8080), family=socket.AF_INET6, dualstack_ipv6=True)
      while True:
          c, a = s.accept()
          c.sendall(a[0].removeprefix('::ffff:').encode()); c.close()
    ports: [{containerPort: 8080, hostPort: 8000}]
    readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
`

// TestNodeNetwork: three nodes, two on one link and one behind a router. Pods reach each other with their own addresses, the outside sees
// their nodes, hostPorts lead to them; a node that goes and a link that fails are followed.
func TestNodeNetwork(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	api := startPortal(t, "--cluster-cidr", "10.244.0.0/16,fd00:244::/56")
	client := connect(t, api.Kubeconfig)
	router := newNetNS(t)
	for _, cmd := range []string{"link add lan type bridge", "link add far type bridge", "link add out type bridge",
		"addr add 192.0.2.254/24 dev lan", "addr add 2001:db8:1::fe/64 dev lan nodad", "addr add 198.51.100.254/24 dev far", "addr add 2001:db8:2::fe/64 dev far nodad",
		"addr add 203.0.113.9/24 dev out", "addr add 2001:db8:3::9/64 dev out nodad", "link set lan up", "link set far up", "link set out up"} {
		ipIn(t, router, cmd)
	}
	if err := inNamespaceOf(router, func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	}); err != nil {
		t.Fatal(err)
	}
	whoServer(t, router, "203.0.113.9:80")
	whoServer(t, router, "[2001:db8:3::9]:80")

	type place struct{ link, address, address6, gateway, gateway6 string }
	places := []place{
		{"lan", "192.0.2.1", "2001:db8:1::1", "192.0.2.254", "2001:db8:1::fe"}, {"lan", "192.0.2.2", "2001:db8:1::2", "192.0.2.254", "2001:db8:1::fe"},
		{"far", "198.51.100.1", "2001:db8:2::1", "198.51.100.254", "2001:db8:2::fe"},
	}
	var machines []*podMachine
	for i, p := range places {
		m := &podMachine{name: fmt.Sprintf("net%d-%d", i, os.Getpid()), dir: t.TempDir(), ns: newNetNS(t), api: api, client: client}
		cable := fmt.Sprintf("to%d", i)
		ipIn(t, router, fmt.Sprintf("link add %s type veth peer name eth0 netns /proc/%d/fd/%d", cable, os.Getpid(), m.ns))
		ipIn(t, router, fmt.Sprintf("link set %s master %s up", cable, p.link))
		for _, cmd := range []string{"link set eth0 up", "addr add " + p.address + "/24 dev eth0", "addr add " + p.address6 + "/64 dev eth0 nodad", "route add default via " + p.gateway, "-6 route add default via " + p.gateway6} {
			ipIn(t, m.ns, cmd)
		}
		address := strings.TrimPrefix(api.URL, "https://")
		if err := m.do(func() error {
			l, err := net.Listen("tcp", address)
			if err == nil {
				relay := harness.NewRelay(l, address)
				t.Cleanup(relay.Close)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.wipe(t) })
		options, _ := json.Marshal(testNodeOptions{Name: m.name, Address: p.address, Address6: p.address6, Dir: filepath.Join(m.dir, "node"), Kubeconfig: api.Kubeconfig})
		m.args = []string{testNode, string(options)}
		m.startTestNode(t)
		machines = append(machines, m)
	}
	var pods []*corev1.Pod
	var namespaces []netns.NsHandle
	for i, m := range machines {
		eventually(t, 30*time.Second, "the ServiceAccount", func() string {
			_, err := client.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{})
			return errorText(err)
		})
		m.kubectl(t, strings.NewReplacer("NAME", fmt.Sprintf("who%d", i), "NODE", m.name).Replace(whoPod), "apply")
		pods = append(pods, m.pod(t, fmt.Sprintf("who%d", i), 30*time.Second, podReady))
		ns, err := netns.GetFromPath(fmt.Sprintf("/proc/%d/ns/net", m.shims()[0]))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ns.Close() })
		namespaces = append(namespaces, ns)
	}
	address := func(pod *corev1.Pod, family int) string { return pod.Status.PodIPs[family].IP }
	// reach says which Pods don't reach each other.
	reach := func() string {
		for i, from := range pods {
			for j, to := range pods {
				for family := range 2 {
					at := net.JoinHostPort(address(to, family), "8080")
					if got, err := askFrom(namespaces[i], at); err != nil || got != address(from, family) {
						return fmt.Sprintf("Pod %d to Pod %d at %s: %q, %v\n%s", i, j, at, got, err, machines[i].agent.Tail())
					}
				}
			}
		}
		return ""
	}
	eventually(t, 15*time.Second, "Pods to reach each other", reach)
	for i, p := range places {
		for outside, want := range map[string]string{"203.0.113.9:80": p.address, "[2001:db8:3::9]:80": p.address6} {
			if got, err := askFrom(namespaces[i], outside); err != nil || got != want {
				t.Errorf("the outside sees Pod %d as %q, want %s (%v)", i, got, want, err)
			}
		}
		for _, at := range []string{p.address + ":8000", "[" + p.address6 + "]:8000"} {
			if got, err := askFrom(router, at); err != nil {
				t.Errorf("hostPort at %s: %q, %v", at, got, err)
			}
		}
		if _, err := askFrom(machines[i].ns, "127.0.0.1:8000"); err != nil {
			t.Errorf("hostPort at 127.0.0.1: %v", err)
		}
	}
	if got := ipIn(t, machines[0].ns, "route show proto 112"); strings.Count(got, "via") != 2 || !strings.Contains(got, "via 192.0.2.2 dev eth0") || !strings.Contains(got, "dev portal-vxlan") {
		t.Errorf("routes:\n%s", got)
	}

	// A second Pod with the port.
	machines[0].kubectl(t, strings.NewReplacer("NAME", "again", "NODE", machines[0].name).Replace(whoPod), "apply")
	machines[0].pod(t, "again", 15*time.Second, func(p *corev1.Pod) string {
		if p.Status.Phase != corev1.PodFailed || p.Status.Reason != "NodePorts" || !strings.Contains(p.Status.Message, "default/who0") {
			return "not rejected"
		}
		return ""
	})
	machines[0].kubectl(t, "", "delete", "pod", "again")
	if got, err := askFrom(router, "192.0.2.1:8000"); err != nil {
		t.Errorf("after the second Pod has gone: %q, %v", got, err)
	}

	// The link of a node goes down, and its routes with it.
	ipIn(t, machines[0].ns, "link set eth0 down")
	if got := ipIn(t, machines[0].ns, "route show proto 112"); strings.Contains(got, "192.0.2.2") {
		t.Errorf("routes without a link:\n%s", got)
	}
	ipIn(t, machines[0].ns, "link set eth0 up")
	ipIn(t, machines[0].ns, "addr replace 2001:db8:1::1/64 dev eth0 nodad")
	ipIn(t, machines[0].ns, "route replace default via 192.0.2.254")
	ipIn(t, machines[0].ns, "-6 route replace default via 2001:db8:1::fe")
	eventually(t, 15*time.Second, "Pods to reach each other again", reach)

	// The agent is replaced while Pods talk.
	machines[0].agent.Kill()
	if why := reach(); why != "" {
		t.Errorf("without an agent: %s", why)
	}
	machines[0].startTestNode(t)
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		if why := reach(); why != "" {
			t.Errorf("while the agent starts: %s", why)
			break
		}
	}

	// A node leaves.
	machines[2].agent.Kill()
	if err := client.CoreV1().Nodes().Delete(t.Context(), machines[2].name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, m := range machines[:2] {
		eventually(t, 10*time.Second, "the routes to go", func() string {
			if got := ipIn(t, m.ns, "route show proto 112") + ipIn(t, m.ns, "-br link"); strings.Contains(got, "vxlan") {
				return got
			}
			return ""
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// startTestNode starts this binary as the machine's agent.
func (m *podMachine) startTestNode(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if m.agent, err = harness.StartIn(int(m.ns), m.dir, "node", self, m.args...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.agent.Kill)
	eventually(t, 30*time.Second, "the Node", func() string {
		n, err := m.client.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
		if err != nil {
			return err.Error() + "\n" + m.agent.Tail()
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return ""
			}
		}
		return fmt.Sprint(n.Status.Conditions, "\n", m.agent.Tail())
	})
}
