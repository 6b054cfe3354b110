//go:build peers

package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// webPods answer with their names, and are ready unless /tmp/broken exists.
const webPods = `apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: NodePort
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 2
      containers:
      - name: web
        image: example.com/web:1
        imagePullPolicy: Never
        command: [/bin/sh, -c, "trap 'exit 0' TERM; busybox hostname >/www/index.html; echo serving as $HOSTNAME; busybox httpd -f -p 8080 -h /www & wait"]
        ports: [{containerPort: 8080}]
        readinessProbe: {exec: {command: [/bin/sh, -c, "[ ! -e /tmp/broken ]"]}, periodSeconds: 1, failureThreshold: 1}
        resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
`

// settingsOfTest are what this kubelet and this containerd need besides what docs/node.md says, since the machine that they are on is
// no whole machine: its control groups may be of version 1, and it may not make a process less likely to be killed when memory is short.
const (
	kubeletOfTest    = "failCgroupV1: false\nfailSwapOn: false\n"
	containerdOfTest = "[plugins.'io.containerd.cri.v1.runtime']\nrestrict_oom_score_adj = true\n" +
		"[plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = 'example.com/pause:1'\n" +
		"[plugins.'io.containerd.internal.v1.opt']\npath = '/var/lib/containerd/opt'\n"
)

// TestPeersKubeletPods does what docs/node.md says about a real kubelet: it joins with containerd, runs the Pods of a Deployment, and
// `portal proxy` serves them. Everything is on a machine of its own, in namespaces.
func TestPeersKubeletPods(t *testing.T) {
	rootNeeded(t)
	for _, peer := range []string{"kubelet", "containerd", "containerd-shim-runc-v2", "ctr"} {
		need(t, harness.Peer(peer), ".cache/peers/"+peer)
	}
	dir, inside := onMachine(t)
	if !inside {
		return
	}
	k := newKubeletMachine(t, dir)
	k.join(t)
	k.serve(t)
	k.probes(t)
	k.streams(t)
	k.replaces(t)
	k.deletes(t)
	k.quiet(t)
}

// kubeletMachine is a machine with a server, a kubelet, containerd and a proxy on it.
type kubeletMachine struct {
	dir, audit string
	steps      []string // what docs/node.md says, block for block
	api        *harness.API
	client     *kubernetes.Clientset
	kubelet    *harness.Process
	containerd *harness.Process
	proxy      *harness.Process
	words      *strings.Replacer // for what docs/node.md leaves open
	clusterIP  string
	nodePort   int32
}

const kubeletName = "kubelet-1"

func newKubeletMachine(t *testing.T, dir string) *kubeletMachine {
	t.Helper()
	k := &kubeletMachine{dir: dir, audit: filepath.Join(dir, "audit.log"), steps: documented(t, "docs/node.md", "A real kubelet beside `portal node`")}
	ownSettings(t, dir)
	for _, args := range []string{
		"link set lo up", "netns add outside",
		"link add eth0 type veth peer name eth0 netns outside", "addr add " + nodeAddress + "/24 dev eth0", "link set eth0 up", "route add default via 192.0.2.1",
		"-n outside addr add 192.0.2.1/24 dev eth0", "-n outside link set eth0 up", "-n outside link set lo up",
	} {
		k.run(t, "ip "+args)
	}
	k.run(t, "hostname "+kubeletName)
	k.api = startPortal(t, append(audited(t, k.audit), "--cluster-cidr", "10.244.0.0/16")...)
	k.client = connect(t, k.api.Kubeconfig)
	return k
}

// run runs a shell script with Portal and the peers in its path and returns what it printed.
func (k *kubeletMachine) run(t *testing.T, script string) string {
	t.Helper()
	out, err := k.try(t.Context(), script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (k *kubeletMachine) try(ctx context.Context, script string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	env := []string{"PATH=" + k.path()}
	if k.api != nil {
		env = append(env, "KUBECONFIG="+k.api.Kubeconfig)
	}
	return harness.Run(ctx, env, "sh", "-ec", script)
}

func (k *kubeletMachine) path() string {
	return filepath.Dir(harness.Portal()) + ":" + filepath.Dir(harness.Peer("kubelet")) + ":" + os.Getenv("PATH")
}

// step does the next block of docs/node.md: all but its last line if that starts a program of the given name, which is then
// started, with further arguments.
func (k *kubeletMachine) step(t *testing.T, program string, more ...string) *harness.Process {
	t.Helper()
	if len(k.steps) == 0 {
		t.Fatalf("docs/node.md says nothing about %s", program)
	}
	block := strings.TrimSuffix(k.words.Replace(k.steps[0]), "\n")
	k.steps = k.steps[1:]
	if program == "" {
		k.run(t, block)
		return nil
	}
	files, command := "", block
	if i := strings.LastIndex(block, "\n"); i >= 0 {
		files, command = block[:i], block[i+1:]
	}
	words := strings.Fields(command)
	if words[0] != program {
		t.Fatalf("docs/node.md has %q where %s is to be started", command, program)
	}
	k.run(t, files)
	path, err := exec.LookPath(program)
	if err != nil {
		t.Fatal(err)
	}
	p, err := harness.Start(k.dir, program+"-of-the-machine", path, append(words[1:], more...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

// join makes the machine a Node that is ready, by the steps of docs/node.md.
func (k *kubeletMachine) join(t *testing.T) {
	t.Helper()
	t.Setenv("PATH", k.path())
	k.words = strings.NewReplacer("\nEOT\ncontainerd", "\n"+containerdOfTest+"EOT\ncontainerd")
	k.containerd = k.step(t, "containerd")
	t.Cleanup(func() { k.explain(t) })
	eventually(t, time.Minute, "containerd", func() string {
		if _, err := k.try(t.Context(), "ctr version"); err != nil {
			return err.Error() + "\n" + k.containerd.Tail()
		}
		return ""
	})
	k.images(t)

	tokens := map[string]createdToken{}
	for _, command := range strings.Split(strings.TrimSpace(k.steps[0]), "\n") {
		var made createdToken
		if err := json.Unmarshal([]byte(k.run(t, command+" -o json")), &made); err != nil {
			t.Fatal(err)
		}
		tokens[made.Role] = made
	}
	k.steps = k.steps[1:]
	node, proxy := tokens["node"], tokens["proxy"]
	if node.Token == "" || proxy.Token == "" {
		t.Fatalf("docs/node.md makes tokens for %v", tokens)
	}
	k.words = strings.NewReplacer("SERVER", node.Server, "NODE-TOKEN", node.Token, "PROXY-TOKEN", proxy.Token, "CA-HASH", proxy.CAHashes[0],
		"NODE", kubeletName, "\nEOT\nkubelet", "\n"+kubeletOfTest+"EOT\nkubelet")
	k.step(t, "")
	k.kubelet = k.step(t, "kubelet", "--node-ip", nodeAddress, "-v", "2")
	eventually(t, 2*time.Minute, "a Node with a Pod CIDR, not ready for want of a network", func() string {
		n, err := k.client.CoreV1().Nodes().Get(t.Context(), kubeletName, metav1.GetOptions{})
		if err != nil {
			return err.Error() + "\n" + k.kubelet.Tail()
		}
		ready := readyCondition(n)
		if n.Spec.PodCIDR == "" || ready.Status != corev1.ConditionFalse || !strings.Contains(ready.Message, "cni") {
			return fmt.Sprintf("Pod CIDR %q, ready: %v", n.Spec.PodCIDR, ready)
		}
		return ""
	})
	k.step(t, "")
	took := eventually(t, 2*time.Minute, "a Node that is ready", func() string {
		n, err := k.client.CoreV1().Nodes().Get(t.Context(), kubeletName, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if ready := readyCondition(n); ready.Status != corev1.ConditionTrue || len(n.Spec.Taints) > 0 {
			return fmt.Sprint(ready, n.Spec.Taints)
		}
		t.Logf("%s runs %s on %s", n.Name, n.Status.NodeInfo.ContainerRuntimeVersion, n.Status.NodeInfo.KubeletVersion)
		return ""
	})
	t.Logf("ready %.1f s after it had a network", took.Seconds())
	eventually(t, time.Minute, "a request for a serving certificate", func() string {
		if k.run(t, "portal kubectl get csr -o name --field-selector spec.signerName=kubernetes.io/kubelet-serving") == "" {
			return "there is none"
		}
		return ""
	})
	k.step(t, "") // approves it
	k.proxy = k.step(t, "portal", "--hostname-override", kubeletName)
	if len(k.steps) > 0 {
		t.Errorf("docs/node.md says more than the test does: %q", k.steps)
	}
}

// createdToken is what `portal token create -o json` prints.
type createdToken struct {
	Token, Role, Server string
	CAHashes            []string
}

func readyCondition(n *corev1.Node) corev1.NodeCondition {
	i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	if i < 0 {
		return corev1.NodeCondition{}
	}
	return n.Status.Conditions[i]
}

// images loads the image of the Pods, and the one that containerd runs for as long as a Pod lives, into containerd.
func (k *kubeletMachine) images(t *testing.T) {
	t.Helper()
	layer := imageLayer(t, map[string]string{"bin/": "", "etc/": "", "tmp/": "", "www/": ""}, "bin/busybox")
	for image, entrypoint := range map[string][]string{
		"example.com/web:1":   {"/bin/sh"},
		"example.com/pause:1": {"/bin/busybox", "tail", "-f", "/dev/null"},
	} {
		img, err := mutate.AppendLayers(empty.Image, layer)
		if err != nil {
			t.Fatal(err)
		}
		c, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		c = c.DeepCopy()
		c.OS, c.Architecture = "linux", runtime.GOARCH
		c.Config = v1.Config{Entrypoint: entrypoint, Env: []string{"PATH=/bin"}}
		if img, err = mutate.ConfigFile(img, c); err != nil {
			t.Fatal(err)
		}
		tag, err := name.NewTag(image)
		if err != nil {
			t.Fatal(err)
		}
		archive := filepath.Join(k.dir, "image.tar")
		if err := tarball.WriteToFile(archive, tag, img); err != nil {
			t.Fatal(err)
		}
		k.run(t, "ctr --namespace k8s.io images import "+archive)
	}
}

// kubectl returns what kubectl prints, or its error.
func (k *kubeletMachine) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return kubectl(t, k.api, args...)
}

// serve has the kubelet run the Pods, and demands that the proxy leads to both of them: from the node, from outside, and from a Pod.
func (k *kubeletMachine) serve(t *testing.T) {
	t.Helper()
	write(t, filepath.Join(k.dir, "web.yaml"), webPods)
	k.kubectl(t, "apply", "-f", filepath.Join(k.dir, "web.yaml"))
	eventually(t, 2*time.Minute, "two ready endpoints", func() string { return k.endpoints(t, 2) })
	s, err := k.client.CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	k.clusterIP, k.nodePort = s.Spec.ClusterIP, s.Spec.Ports[0].NodePort
	pods := k.pods(t)
	for from, get := range k.ways(pods[0]) {
		k.answers(t, from, get, pods)
	}
	if got := k.kubectl(t, "exec", pods[0], "--", "/bin/sh", "-c", "echo $WEB_SERVICE_PORT $KUBERNETES_SERVICE_PORT"); got != "80 443" {
		t.Errorf("the Pod's variables about Services: %q", got)
	}
}

// ways are those by which the Service is reached, by where they begin.
func (k *kubeletMachine) ways(pod string) map[string]func() (string, error) {
	const request = `portal kubectl exec %s -- /bin/sh -c "printf 'GET / HTTP/1.0\r\n\r\n' | busybox nc -w 5 %s 80 | busybox tail -n 1"` // its wget may crash: glibc, linked statically
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	return map[string]func() (string, error){
		"the node, to the cluster IP": func() (string, error) {
			resp, err := client.Get("http://" + k.clusterIP + "/")
			if err != nil {
				return "", err
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			return string(body), err
		},
		"outside, to the node port": func() (string, error) {
			return k.try(context.Background(), fmt.Sprintf("ip netns exec outside curl -s -m 5 http://%s:%d/", nodeAddress, k.nodePort))
		},
		"a Pod, to the cluster IP": func() (string, error) {
			return k.try(context.Background(), fmt.Sprintf(request, pod, k.clusterIP))
		},
	}
}

// answers waits until each of these Pods has answered, and nobody else in between.
func (k *kubeletMachine) answers(t *testing.T, from string, get func() (string, error), pods []string) {
	t.Helper()
	seen := map[string]bool{}
	eventually(t, 2*time.Minute, "from "+from, func() string {
		answer, err := get()
		if err != nil {
			return err.Error()
		}
		if answer = strings.TrimSpace(answer); !slices.Contains(pods, answer) {
			clear(seen)
			return fmt.Sprintf("%q answers, which is none of %v", answer, pods)
		}
		seen[answer] = true
		if len(seen) < len(pods) {
			return fmt.Sprintf("of %v only %v answer", pods, seen)
		}
		return ""
	})
}

// pods are the names of those that are not being deleted.
func (k *kubeletMachine) pods(t *testing.T) (out []string) {
	t.Helper()
	list, err := k.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			out = append(out, p.Name)
		}
	}
	return out
}

// endpoints says what is wrong if the Service has another number of ready endpoints.
func (k *kubeletMachine) endpoints(t *testing.T, want int) string {
	t.Helper()
	list, err := k.client.DiscoveryV1().EndpointSlices("default").List(t.Context(), metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=web"})
	if err != nil {
		return err.Error()
	}
	ready := 0
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready != nil && *e.Conditions.Ready {
				ready++
			}
		}
	}
	if ready != want {
		return fmt.Sprintf("%d ready endpoints, want %d\n%s", ready, want, k.state())
	}
	return ""
}

// state is what a person would look at first.
func (k *kubeletMachine) state() string {
	out, _ := k.try(context.Background(), "portal kubectl get pods,nodes -A -o wide; portal kubectl get events -A | tail -n 20")
	return out
}

// probes has a Pod's readiness probe fail, and then succeed again.
func (k *kubeletMachine) probes(t *testing.T) {
	t.Helper()
	pods := k.pods(t)
	k.kubectl(t, "exec", pods[0], "--", "/bin/busybox", "touch", "/tmp/broken")
	eventually(t, time.Minute, "one ready endpoint", func() string { return k.endpoints(t, 1) })
	k.only(t, pods[1])
	k.kubectl(t, "exec", pods[0], "--", "/bin/busybox", "rm", "/tmp/broken")
	eventually(t, time.Minute, "two ready endpoints again", func() string { return k.endpoints(t, 2) })
	k.answers(t, "the node, after a Pod was unready", k.ways("")["the node, to the cluster IP"], pods)
}

// only waits until this Pod answers alone, thirty times in a row.
func (k *kubeletMachine) only(t *testing.T, pod string) {
	t.Helper()
	get := k.ways("")["the node, to the cluster IP"]
	eventually(t, time.Minute, "nobody but "+pod+" to answer", func() string {
		for range 30 {
			if answer, err := get(); err != nil || strings.TrimSpace(answer) != pod {
				return fmt.Sprintf("%q %v", answer, err)
			}
		}
		return ""
	})
}

// streams reads logs and runs commands, which the API server has the kubelet do.
func (k *kubeletMachine) streams(t *testing.T) {
	t.Helper()
	pod := k.pods(t)[0]
	if got, want := k.kubectl(t, "logs", pod), "serving as "+pod; got != want {
		t.Errorf("logs: %q, want %q", got, want)
	}
	if got := k.run(t, "echo through the kubelet | portal kubectl exec -i "+pod+" -- /bin/busybox tr a-z A-Z"); strings.TrimSpace(got) != "THROUGH THE KUBELET" {
		t.Errorf("exec: %q", got)
	}
	if out, err := k.try(t.Context(), "portal kubectl exec "+pod+" -- /bin/sh -c 'exit 7'"); err == nil || !strings.Contains(out+err.Error(), "exit code 7") {
		t.Errorf("exec of what fails: %v %q", err, out)
	}
	if got := k.kubectl(t, "get", "--raw", "/api/v1/nodes/"+kubeletName+"/proxy/healthz"); got != "ok" {
		t.Errorf("the kubelet's health, through the API server: %q", got)
	}
}

// replaces deletes a Pod: another takes its place, and only the living answer.
func (k *kubeletMachine) replaces(t *testing.T) {
	t.Helper()
	old := k.pods(t)
	k.kubectl(t, "delete", "pod", old[0])
	eventually(t, 2*time.Minute, "a Pod in its place", func() string {
		now := k.pods(t)
		if len(now) != 2 || slices.Contains(now, old[0]) {
			return fmt.Sprint(now)
		}
		return k.endpoints(t, 2)
	})
	k.answers(t, "outside, after a Pod was replaced", k.ways("")["outside, to the node port"], k.pods(t))
}

// deletes removes everything, and demands that nothing of it runs on.
func (k *kubeletMachine) deletes(t *testing.T) {
	t.Helper()
	k.kubectl(t, "delete", "--wait=false", "-f", filepath.Join(k.dir, "web.yaml"))
	eventually(t, 2*time.Minute, "no Pods", func() string {
		list, err := k.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		if n := len(list.Items); n > 0 {
			return fmt.Sprintf("%d are still there\n%s", n, k.state())
		}
		return k.endpoints(t, 0)
	})
	eventually(t, time.Minute, "no answer at the node port", func() string {
		if answer, err := k.ways("")["outside, to the node port"](); err == nil {
			return answer
		}
		return ""
	})
	eventually(t, 2*time.Minute, "no containers", func() string {
		return strings.TrimSpace(k.run(t, "ctr --namespace k8s.io tasks list --quiet 2>/dev/null"))
	})
}

// refusals are lines in the kubelet's log which say that the API server refused it something.
var refusals = regexp.MustCompile(`(?i)forbidden|err="?unauthorized`)

// quiet demands that the API server refused the kubelet and the proxy nothing.
func (k *kubeletMachine) quiet(t *testing.T) {
	t.Helper()
	for _, p := range []*harness.Process{k.kubelet, k.proxy, k.containerd} {
		select {
		case <-p.Done():
			t.Errorf("%s ended by itself:\n%s", p.Name, p.Tail())
		default:
		}
	}
	for _, p := range []*harness.Process{k.kubelet, k.proxy} {
		for line := range strings.Lines(logOf(t, p)) {
			if refusals.MatchString(line) {
				t.Errorf("%s: %s", p.Name, strings.TrimSpace(line))
			}
		}
	}
	notRefused(t, k.audit, "system:node:"+kubeletName, "system:portal:proxy:"+kubeletName)
}

// explain shows the logs of a test that failed.
func (k *kubeletMachine) explain(t *testing.T) {
	if !t.Failed() {
		return
	}
	for _, p := range []*harness.Process{k.containerd, k.kubelet, k.proxy} {
		if p != nil {
			t.Logf("%s:\n%s", p.Name, p.Tail())
		}
	}
}
