package test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// podMachine is a network namespace with `portal node` in it, which reaches the server by the same address as the test does.
type podMachine struct {
	name, dir string
	ns        netns.NsHandle
	api       *harness.API
	client    *kubernetes.Clientset
	agent     *harness.Process
	http      *http.Client
	args      []string
}

const machineAddress = "192.0.2.10"

func newPodMachine(t *testing.T, name string, apiArgs ...string) *podMachine {
	t.Helper()
	rootOnly(t)
	m := &podMachine{name: fmt.Sprintf("%s-%d", name, os.Getpid()), dir: t.TempDir()}
	m.api = startPortal(t, append([]string{"--cluster-cidr", "10.244.0.0/16,fd00:244::/56"}, apiArgs...)...)
	m.client = connect(t, m.api.Kubeconfig)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		ns, err := netns.New()
		m.ns = ns
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.ns.Close() })
	address := strings.TrimPrefix(m.api.URL, "https://")
	var relay *harness.Relay
	if err := m.do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "uplink"
		uplink := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(uplink); err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(machineAddress + "/24")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(uplink, addr); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(uplink); err != nil {
			return err
		}
		cable, err := net.Listen("tcp", address)
		if err == nil {
			relay = harness.NewRelay(cable, address)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(relay.Close)
	m.http = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = m.do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		},
	}}
	t.Cleanup(func() { m.wipe(t) })
	m.args = append(joinCommand(t, m.api, "node"), "--name", m.name, "--node-ip", machineAddress, "--data-dir", filepath.Join(m.dir, "node"))
	m.start(t)
	eventually(t, 30*time.Second, "the Node", func() string {
		node, err := m.client.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
		if err != nil {
			return err.Error() + "\n" + m.agent.Tail()
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return ""
			}
		}
		return fmt.Sprint(node.Status.Conditions, "\n", m.agent.Tail())
	})
	return m
}

// do runs something in the machine's network namespace.
func (m *podMachine) do(f func() error) error {
	out := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(m.ns); err != nil {
			out <- err
			return
		}
		out <- f()
	}()
	return <-out
}

func (m *podMachine) start(t *testing.T) {
	t.Helper()
	var err error
	if m.agent, err = harness.StartIn(int(m.ns), m.dir, "node", harness.Portal(), m.args...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.agent.Kill)
}

// shims are the processes of the machine's Pods that outlive the agent.
func (m *podMachine) shims() (out []int) {
	files, _ := filepath.Glob(filepath.Join(m.dir, "node", "pods", "*", "shim.pid"))
	for _, f := range files {
		data, _ := os.ReadFile(f)
		pid, _ := strconv.Atoi(strings.TrimSpace(string(data)))
		if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); bytes.Contains(line, []byte(m.dir)) {
			out = append(out, pid)
		}
	}
	return out
}

// wipe ends what a failed test left, and fails one that left something.
func (m *podMachine) wipe(t *testing.T) {
	if m.agent != nil {
		m.agent.Kill()
	}
	for _, pid := range m.shims() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		left := m.cgroups()
		for i := len(left) - 1; i >= 0; i-- {
			_ = syscall.Rmdir(left[i])
		}
		if len(left) == 0 {
			return
		}
	}
	t.Errorf("control groups are left: %v", m.cgroups())
}

// cgroups are the folders of the machine's control groups, outer ones first.
func (m *podMachine) cgroups() (out []string) {
	for _, pattern := range []string{"/sys/fs/cgroup/portal/", "/sys/fs/cgroup/*/portal/"} {
		roots, _ := filepath.Glob(pattern + m.name)
		for _, root := range roots {
			_ = filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
				if err == nil && e.IsDir() {
					out = append(out, path)
				}
				return nil
			})
		}
	}
	return out
}

// kubectl runs the built-in kubectl with a manifest.
func (m *podMachine) kubectl(t *testing.T, manifest string, args ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "manifest.yaml")
	if err := os.WriteFile(path, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	if manifest != "" {
		args = append(args, "-f", path)
	}
	out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"kubectl", "--kubeconfig", m.api.Kubeconfig}, args...)...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// pod waits until a Pod is what the function wants.
func (m *podMachine) pod(t *testing.T, name string, limit time.Duration, so func(*corev1.Pod) string) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	eventually(t, limit, "Pod "+name, func() string {
		var err error
		if pod, err = m.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		if why := so(pod); why != "" {
			return fmt.Sprintf("%s: %+v\n%s", why, pod.Status, m.agent.Tail())
		}
		return ""
	})
	return pod
}

func podReady(pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && pod.Status.Phase == corev1.PodRunning {
			return ""
		}
	}
	return "not ready"
}

func (m *podMachine) get(url string) (string, error) {
	r, err := m.http.Get(url)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	data, err := io.ReadAll(r.Body)
	return string(data), err
}

// webPod answers HTTP requests with what it knows about itself, and takes half a second to end.
const webPod = `apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 20
  securityContext: {runAsUser: 1234}
  volumes:
  - {name: scratch, emptyDir: {}}
  initContainers:
  - name: prepare
    image: host
    command: [sh, -c, "echo prepared > /scratch/file"]
    volumeMounts: [{name: scratch, mountPath: /scratch}]
  containers:
  - name: web
    image: host
    command: [python3, -u, -c]
    args:
    - |
      import http.server, os, signal, socket, sys, time
      class H(http.server.BaseHTTPRequestHandler):
          def do_GET(self):
              self.send_response(200); self.end_headers()
              self.wfile.write(('%s %d %d %s %s %s' % (os.uname()[1], os.getpid(), os.getuid(), os.environ['POD_IP'], os.environ['GREETING'], open('/scratch/file').read().strip())).encode())
          def log_message(self, *a): pass
      def end(*a):
          time.sleep(0.5); sys.exit(0)
      signal.signal(signal.SIGTERM, end)
      http.server.ThreadingHTTPServer.address_family = socket.AF_INET6 # and IPv4
      http.server.ThreadingHTTPServer(('::', 8080), H).serve_forever()
    env:
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: GREETING, value: "hello from $(POD_IP)"}
    volumeMounts: [{name: scratch, mountPath: /scratch, readOnly: true}]
    readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
    livenessProbe: {exec: {command: [test, -e, /scratch/file]}, periodSeconds: 1}
`

// TestNodePod is the life of a Pod: it is created by kubectl, runs and is ready, answers at its address, notices nothing when the
// agent is killed and replaced, ends gracefully, and leaves nothing.
func TestNodePod(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "pod")
	begin := time.Now()
	m.kubectl(t, strings.ReplaceAll(webPod, "NODE", m.name), "apply")
	pod := m.pod(t, "web", 30*time.Second, podReady)
	t.Logf("ready %s after kubectl was started", time.Since(begin).Round(time.Millisecond))
	if len(pod.Status.PodIPs) != 2 || pod.Status.HostIP != machineAddress {
		t.Errorf("addresses: %+v", pod.Status)
	}
	url := "http://" + net.JoinHostPort(pod.Status.PodIP, "8080")
	want := fmt.Sprintf("web 1 1234 %s hello from %s prepared", pod.Status.PodIP, pod.Status.PodIP)
	if got, err := m.get(url); err != nil || got != want {
		t.Fatalf("%q, %v, want %q", got, err, want)
	}
	if got, err := m.get("http://" + net.JoinHostPort(pod.Status.PodIPs[1].IP, "8080")); err != nil || got != want {
		t.Errorf("%q, %v", got, err)
	}
	m.replaceAgent(t, pod, url, want)

	begin = time.Now()
	m.kubectl(t, "", "delete", "pod", "web")
	took := time.Since(begin)
	if took < 400*time.Millisecond || took > 10*time.Second {
		t.Errorf("it was deleted within %s", took)
	}
	m.nothingLeft(t)
}

// replaceAgent kills the agent and starts another, while the Pod is asked all the time.
func (m *podMachine) replaceAgent(t *testing.T, pod *corev1.Pod, url, want string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	asked := 0
	asking.Go(func() {
		for ctx.Err() == nil {
			if got, err := m.get(url); err != nil || got != want {
				t.Errorf("while the agent is replaced: %q, %v", got, err)
				return
			}
			asked++
			time.Sleep(10 * time.Millisecond)
		}
	})
	watch, err := m.client.CoreV1().Pods("default").Watch(t.Context(), metav1.ListOptions{ResourceVersion: pod.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	m.agent.Kill()
	time.Sleep(300 * time.Millisecond)
	m.start(t)
	eventually(t, 30*time.Second, "the new agent", func() string {
		if n := strings.Count(logOf(t, m.agent), "node is running Pods"); n != 2 {
			return fmt.Sprintf("%d starts:\n%s", n, m.agent.Tail())
		}
		return ""
	})
	time.Sleep(1500 * time.Millisecond) // probes have been asked again
	watch.Stop()
	for e := range watch.ResultChan() {
		if p, ok := e.Object.(*corev1.Pod); ok && podReady(p) != "" {
			t.Errorf("the Pod stopped being ready: %+v", p.Status)
		}
	}
	cancel()
	asking.Wait()
	if asked < 50 {
		t.Errorf("asked only %d times", asked)
	}
	after, err := m.client.CoreV1().Pods("default").Get(t.Context(), pod.Name, metav1.GetOptions{})
	if err != nil || after.Status.ContainerStatuses[0].ContainerID != pod.Status.ContainerStatuses[0].ContainerID || after.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("%+v, %v", after.Status, err)
	}
}

// nothingLeft checks that no trace of any Pod is on the machine.
func (m *podMachine) nothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, 10*time.Second, "nothing to be left", func() string {
		var left []string
		for _, pattern := range []string{"pods/*", "logs/*", "volumes/*", "addresses/*.*.*.*"} {
			files, _ := filepath.Glob(filepath.Join(m.dir, "node", pattern))
			for _, f := range files {
				if !strings.Contains(f, "/last-") {
					left = append(left, f)
				}
			}
		}
		for _, dir := range m.cgroups() {
			if strings.Contains(dir, "/pod") && strings.Contains(filepath.Base(dir), "pod") && filepath.Base(dir) != m.name {
				left = append(left, dir)
			}
		}
		_ = m.do(func() error {
			links, err := netlink.LinkList()
			for _, l := range links {
				if l.Type() == "veth" {
					left = append(left, l.Attrs().Name)
				}
			}
			return err
		})
		return strings.Join(left, "\n")
	})
	if mounts, _ := os.ReadFile("/proc/self/mounts"); bytes.Contains(mounts, []byte(m.dir)) {
		t.Errorf("mounts are left:\n%s", mounts)
	}
}

// TestNodeCrashes: a container that fails is started again with a back-off; one that ends well is done; what can't start says why.
func TestNodeCrashes(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "crash")
	pod := func(name, policy, image, script string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec:\n  nodeName: %s\n  restartPolicy: %s\n  containers:\n  - {name: c, image: %s, command: [sh, -c, %q]}\n---\n",
			name, m.name, policy, image, script)
	}
	m.kubectl(t, pod("fails", "Always", "host", "echo I am leaving > /dev/termination-log; exit 3")+pod("succeeds", "Never", "host", "exit 0")+
		pod("unknown", "Always", "example.com/none", "exit 0")+strings.Replace(pod("missing", "Never", "host", "x"), `[sh, -c, "x"]`, "[no-such-program]", 1), "apply")
	m.pod(t, "fails", 30*time.Second, func(p *corev1.Pod) string {
		s := p.Status.ContainerStatuses
		if len(s) == 0 || s[0].RestartCount < 1 || s[0].State.Waiting == nil || s[0].State.Waiting.Reason != "CrashLoopBackOff" {
			return "not in back-off"
		}
		if last := s[0].LastTerminationState.Terminated; last == nil || last.ExitCode != 3 || last.Message != "I am leaving\n" {
			return "its last end is not told"
		}
		return ""
	})
	m.pod(t, "succeeds", 30*time.Second, func(p *corev1.Pod) string {
		if p.Status.Phase != corev1.PodSucceeded {
			return "not succeeded"
		}
		return ""
	})
	m.pod(t, "unknown", 30*time.Second, func(p *corev1.Pod) string {
		if s := p.Status.ContainerStatuses; len(s) == 0 || s[0].State.Waiting == nil || s[0].State.Waiting.Reason != "ImagePullBackOff" || !strings.Contains(s[0].State.Waiting.Message, "pull example.com/none") {
			return "not waiting for its image"
		}
		return ""
	})
	m.pod(t, "missing", 30*time.Second, func(p *corev1.Pod) string {
		if s := p.Status.ContainerStatuses; p.Status.Phase != corev1.PodFailed || s[0].State.Terminated == nil || !strings.Contains(s[0].State.Terminated.Message, "not found in $PATH") {
			return "not failed"
		}
		return ""
	})
	m.kubectl(t, "", "delete", "pod", "fails", "succeeds", "unknown", "missing")
	if _, err := m.client.CoreV1().Pods("default").Get(t.Context(), "fails", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Error(err)
	}
	m.nothingLeft(t)
}

// TestShimTakesOverEarly: in the whole binary too, the processes beside Pods take over before the packages that they don't need are
// initialised. Each Pod, container and exec would pay for that in memory and time.
func TestShimTakesOverEarly(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	ready, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer ready.Close()
	cmd := exec.Command(harness.Portal())
	cmd.Args, cmd.Env, cmd.ExtraFiles = []string{"portal-shim"}, []string{"GODEBUG=inittrace=1"}, []*os.File{ready}
	out, _ := cmd.CombinedOutput()
	total, packages := 0, 0
	for _, line := range strings.Split(string(out), "\n") {
		if f := strings.Fields(line); len(f) > 7 && f[0] == "init" {
			n, _ := strconv.Atoi(f[7])
			total += n
			packages++
		}
	}
	t.Logf("%d packages are initialised before it and allocate %d bytes", packages, total)
	said, _ := os.ReadFile(ready.Name())
	if !strings.Contains(string(said), "started by portal node") || packages == 0 || total > 1<<20 {
		t.Errorf("%q; %d bytes:\n%s", said, total, out)
	}
}

var manyPods = flag.Int("node.pods", 30, "how many Pods TestNodeManyPods starts")

// TestNodeManyPods starts many Pods at once and deletes them all, and reports what that took.
func TestNodeManyPods(t *testing.T) {
	m := newPodMachine(t, "many")
	pods := *manyPods
	var manifest strings.Builder
	for i := range pods {
		fmt.Fprintf(&manifest, "apiVersion: v1\nkind: Pod\nmetadata: {name: p%d, labels: {app: many}}\nspec:\n  nodeName: %s\n  terminationGracePeriodSeconds: 1\n  containers:\n  - {name: c, image: host, command: [sleep, \"1000\"]}\n---\n", i, m.name)
	}
	begin := time.Now()
	m.kubectl(t, manifest.String(), "apply")
	created := time.Since(begin)
	eventually(t, time.Minute, "all Pods to be ready", func() string {
		list, err := m.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=many"})
		if err != nil {
			return err.Error()
		}
		ready := 0
		for i := range list.Items {
			if podReady(&list.Items[i]) == "" {
				ready++
			}
		}
		if ready < pods {
			return fmt.Sprintf("%d are ready\n%s", ready, m.agent.Tail())
		}
		return ""
	})
	all := time.Since(begin)
	shims := 0
	for _, pid := range m.shims() {
		shims += pss(t, pid)
	}
	t.Logf("%d Pods: created within %s, ready within %s; agent %d kB, each shim %d kB (PSS)", pods, created.Round(time.Millisecond), all.Round(time.Millisecond), pss(t, m.agent.Pid()), shims/pods)
	if n := len(m.shims()); n != pods {
		t.Errorf("%d shims for %d Pods", n, pods)
	}
	begin = time.Now()
	m.kubectl(t, "", "delete", "pod", "-l", "app=many", "--wait=true")
	t.Logf("deleted within %s", time.Since(begin).Round(time.Millisecond))
	m.nothingLeft(t)
	if left := m.shims(); len(left) != 0 {
		t.Errorf("shims are left: %v", left)
	}
}

// pss is a process's share of memory, in kB.
func pss(t *testing.T, pid int) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(data), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	t.Fatalf("no PSS of %d", pid)
	return 0
}
