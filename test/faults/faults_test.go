package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/explain"
	"portal/internal/lab"
	"portal/test/harness"
)

// fault is something wrong, in a namespace of its own.
type fault struct {
	name string
	// objects are applied first; NS stands for the namespace.
	objects string
	// then are commands that are run when the objects are there, and what they make is ready.
	then []string
	// ask is what explain is asked; default: service web.
	ask []string
	// code is that of the first finding, empty: any; and says is in its verdict.
	code, says string
	// at is what must answer after the fix; default: the cluster IP of the Service web. "none": nothing can be typed that would help. What begins with
	// "udp " is asked with a packet.
	at string
	// from is the machine that asks; default: node1.
	from string
	// answers: it answers before the fix too, to some or by chance.
	answers bool
}

// backend is a Deployment with a Pod that serves at 9376.
func backend(name, labels, container string) string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s, namespace: NS}
spec:
  replicas: 1
  selector: {matchLabels: {deployment: %[1]s}}
  template:
    metadata: {labels: {deployment: %[1]s, %[2]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: c
        image: portal
%[3]s
---
`, name, labels, container)
}

const serving = `        args: [echo, --listen, ":9376"]
        ports: [{name: http, containerPort: 9376}]`

// service is the Service web.
func service(selector, spec string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: NS}\nspec: {%s %s}\n---\n", selector, spec)
}

const (
	ofWeb = "selector: {app: web},"
	ports = "ports: [{port: 80, targetPort: 9376}]"
)

// cluster is the lab that all faults share.
type cluster struct {
	*lab.Lab
	env []string
	// bin has the programs that are typed, and dir what they read.
	bin, dir string
}

func startLab(t *testing.T) *cluster {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	l, err := lab.Start(t.Context(), lab.Options{
		Name: fmt.Sprintf("f%d", os.Getpid()), Dir: filepath.Join(dir, "lab"), Portal: harness.Portal(), Nodes: 2,
		ServerArgs: []string{"--node-monitor-grace-period=10s"}, BalancerPools: pools,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	// What is printed is typed as it stands, with the programs that people have.
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"portal":  fmt.Sprintf("#!/bin/sh\nexec %s \"$@\"\n", harness.Portal()),
		"kubectl": fmt.Sprintf("#!/bin/sh\nexec %s kubectl \"$@\"\n", harness.Portal()),
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return &cluster{l, append(os.Environ(), "LAB="+l.Name, "KUBECONFIG="+l.Kubeconfig, "PATH="+bin+":"+os.Getenv("PATH")), bin, dir}
}

// shell runs a line as a person would.
func (c *cluster) shell(ctx context.Context, line string) (string, error) {
	return c.shellIn(ctx, c.dir, line)
}

func (c *cluster) shellIn(ctx context.Context, dir, line string) (string, error) {
	cmd := exec.CommandContext(ctx, "bash", "-c", line)
	cmd.Env, cmd.Dir = c.env, dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// explain asks, and returns the answer and the first line that is printed.
func (c *cluster) explain(ctx context.Context, args ...string) (answer explain.Answer, first string, err error) {
	cmd := exec.CommandContext(ctx, harness.Portal(), append([]string{"explain", "-o", "json"}, args...)...)
	cmd.Env = c.env
	out, err := cmd.Output()
	if code := cmd.ProcessState.ExitCode(); code != 0 && code != 1 {
		return answer, "", fmt.Errorf("explain ended with %d: %w: %s", code, err, out)
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return answer, "", fmt.Errorf("%w: %s", err, out)
	}
	if answer.Healthy != (err == nil) {
		return answer, "", fmt.Errorf("healthy is %t, and the exit status says %v", answer.Healthy, err)
	}
	return answer, answer.Verdict, nil
}

// until calls f until it returns nothing to complain about.
func until(t *testing.T, limit time.Duration, f func(ctx context.Context) string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	complaint := ""
	for {
		// What is cut off by the limit says nothing; what was wrong before it does.
		now := f(ctx)
		if now == "" {
			return ""
		}
		if ctx.Err() == nil || complaint == "" {
			complaint = now
		}
		select {
		case <-ctx.Done():
			return complaint
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// patience is how long something may take on a machine that is busy.
const patience = 150 * time.Second

// busy limits how many faults are tried at the same time.
var busy = make(chan struct{}, 6)

// TestFaults: explain names the cause of each fault, and its fix works. Some of them: make test-faults FAULTS='faults/(typo_in_a_key|no_selector)'.
func TestFaults(t *testing.T) {
	c := startLab(t)
	t.Run("healthy", func(t *testing.T) {
		if complaint := until(t, patience, func(ctx context.Context) string {
			a, first, err := c.explain(ctx)
			if err != nil || !a.Healthy {
				return fmt.Sprint(first, err)
			}
			return ""
		}); complaint != "" {
			t.Error(complaint)
		}
	})
	t.Run("one namespace only", c.limited)
	t.Run("faults", func(t *testing.T) {
		for i, f := range faults {
			t.Run(f.name, func(t *testing.T) {
				t.Parallel()
				busy <- struct{}{}
				defer func() { <-busy }()
				c.try(t, fmt.Sprintf("fault%d", i), f)
			})
		}
	})
	t.Run("nodes", c.more)
}

// placeholder is where a fault's objects and commands have their namespace.
var placeholder = regexp.MustCompile(`\bNS`)

func in(namespace, text string) string { return placeholder.ReplaceAllString(text, namespace) }

// limited: a user who may read one namespace gets answers about it, and learns what was not seen.
func (c *cluster) limited(t *testing.T) {
	manifest := filepath.Join(c.dir, "limited.yaml")
	objects := in("limited", backend("web", "app: web", serving)+service("selector: {app: wbe},", ports))
	if err := os.WriteFile(manifest, []byte(objects), 0o600); err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(c.dir, "limited.kubeconfig")
	for _, line := range []string{
		"kubectl create namespace limited", "kubectl apply -f " + manifest, "kubectl create serviceaccount reader -n limited",
		"kubectl create rolebinding reader -n limited --clusterrole=view --serviceaccount=limited:reader",
		fmt.Sprintf("cp $KUBECONFIG %[1]s && kubectl --kubeconfig %[1]s config set-credentials reader --token=$(kubectl create token reader -n limited) && kubectl --kubeconfig %[1]s config set-context --current --user=reader", kubeconfig),
	} {
		if out, err := c.shell(t.Context(), line); err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	if complaint := until(t, patience, func(ctx context.Context) string {
		a, first, err := c.explain(ctx, "service", "web", "-n", "limited", "--kubeconfig", kubeconfig)
		if err != nil || len(a.Findings) != 1 || a.Findings[0].Code != "selector-typo" || !strings.Contains(fmt.Sprint(a.Unseen), "nodes: forbidden") {
			return fmt.Sprint(first, a.Unseen, err)
		}
		return ""
	}); complaint != "" {
		t.Error(complaint)
	}
	if out, err := c.shell(t.Context(), "kubectl delete namespace limited"); err != nil {
		t.Error(out, err)
	}
}

func (c *cluster) try(t *testing.T, namespace string, f fault) {
	within := func(text string) string { return in(namespace, text) }
	manifest := filepath.Join(c.dir, namespace+".yaml")
	if err := os.WriteFile(manifest, []byte(within(f.objects)), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, line := range append([]string{"kubectl create namespace " + namespace, "kubectl apply -f " + manifest}, f.then...) {
		if out, err := c.shell(t.Context(), within(line)); err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	defer func() {
		_, _ = c.shell(context.Background(), "kubectl delete --wait=false namespace "+namespace)
		if strings.Contains(f.objects, "finalizers:") { // what is left of it would be a fault of the cluster
			_, _ = c.shell(context.Background(), within(`for o in $(kubectl get -n NS pods,services -o name); do kubectl patch -n NS $o --type=merge -p '{"metadata":{"finalizers":null}}'; done`))
		}
	}()
	ask := f.ask
	if ask == nil {
		ask = []string{"service", "web"}
	}
	ask = slices.Clone(ask)
	for i := range ask {
		filled, err := c.fill(t.Context(), within(ask[i]), namespace)
		if err != nil {
			t.Fatal(err)
		}
		ask[i] = filled
	}
	var answer explain.Answer
	if complaint := until(t, patience, func(ctx context.Context) string {
		var err error
		if answer, _, err = c.explain(ctx, append(ask, "-n", namespace)...); err != nil {
			return err.Error()
		}
		if len(answer.Findings) == 0 || f.code != "" && answer.Findings[0].Code != f.code || !strings.Contains(answer.Verdict, within(f.says)) {
			code := ""
			if len(answer.Findings) > 0 {
				code = answer.Findings[0].Code
			}
			return fmt.Sprintf("[%s] %s\nwant [%s] with %q", code, answer.Verdict, f.code, f.says)
		}
		return ""
	}); complaint != "" {
		t.Fatal(complaint)
	}
	if f.at == "none" {
		return
	}
	at := within(f.at)
	if !f.answers {
		if err := c.get(t.Context(), f.from, at, namespace); err == nil {
			t.Errorf("it answers before it is fixed: %s", answer.Verdict)
		}
	}
	c.fix(t, answer.Findings[0])
	if complaint := until(t, patience, func(ctx context.Context) string {
		if err := c.get(ctx, f.from, at, namespace); err != nil {
			return err.Error()
		}
		return ""
	}); complaint != "" {
		t.Errorf("%s\nfixed by %q, it does not answer: %s", answer.Verdict, answer.Findings[0].Fix, complaint)
	}
	if !f.answers {
		return
	}
	said := answer.Findings[0]
	if complaint := until(t, patience, func(ctx context.Context) string {
		a, _, err := c.explain(ctx, append(ask, "-n", namespace)...)
		if err != nil || slices.ContainsFunc(a.Findings, func(f explain.Finding) bool {
			return f.Code == said.Code && f.Object == said.Object && f.Field == said.Field
		}) {
			return fmt.Sprint(a.Verdict, err)
		}
		return ""
	}); complaint != "" {
		t.Errorf("fixed by %q, it is still said: %s", said.Fix, complaint)
	}
}

// fill puts addresses in a text: VIP is the cluster IP of the Service web, LBIP its load balancer's, ENTRY that of all Ingresses, and POD that of
// the Pod p.
func (c *cluster) fill(ctx context.Context, text, namespace string) (string, error) {
	of := func(ns, name string, address func(*corev1.Service) string) func() (string, error) {
		return func() (string, error) {
			s, err := c.API.CoreV1().Services(ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return "", err
			}
			return address(s), nil
		}
	}
	balancer := func(s *corev1.Service) string {
		if len(s.Status.LoadBalancer.Ingress) == 0 {
			return ""
		}
		return s.Status.LoadBalancer.Ingress[0].IP
	}
	for word, find := range map[string]func() (string, error){
		"VIP":   of(namespace, "web", func(s *corev1.Service) string { return s.Spec.ClusterIP }),
		"LBIP":  of(namespace, "web", balancer),
		"ENTRY": of("kube-system", "portal-ingress", balancer),
		"POD": func() (string, error) {
			p, err := c.API.CoreV1().Pods(namespace).Get(ctx, "p", metav1.GetOptions{})
			if err != nil {
				return "", err
			}
			return p.Status.PodIP, nil
		},
	} {
		if !strings.Contains(text, word) {
			continue
		}
		address, err := find()
		if err != nil || address == "" {
			return "", fmt.Errorf("%s: no address yet: %w", word, err)
		}
		text = strings.ReplaceAll(text, word, address)
	}
	return text, nil
}

// fix types what is printed.
func (c *cluster) fix(t *testing.T, f explain.Finding) {
	t.Helper()
	if len(f.Fix) == 0 {
		t.Errorf("[%s] %s: nothing to type", f.Code, f.Verdict)
	}
	dir := t.TempDir()
	for _, line := range f.Fix {
		if complaint := until(t, patience, func(ctx context.Context) string {
			var out string
			var err error
			if f.On != "" {
				out, err = c.Node(f.On).Exec(ctx, "env", "PATH="+c.bin+":"+os.Getenv("PATH"), "bash", "-c", line)
			} else {
				out, err = c.shellIn(ctx, dir, line)
			}
			if err == nil {
				return ""
			}
			if !strings.Contains(out, "Unable to connect to the server") { // which is busy
				t.Errorf("%s: %v: %s", line, err, out)
				return ""
			}
			return fmt.Sprintf("%s: %v: %s", line, err, out)
		}); complaint != "" {
			t.Error(complaint)
		}
	}
}

// get asks over HTTP: with arguments of curl, or at the cluster IP and first port of the Service web.
func (c *cluster) get(ctx context.Context, from, at, namespace string) error {
	if at == "" {
		s, err := c.API.CoreV1().Services(namespace).Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(s.Spec.Ports) == 0 {
			return fmt.Errorf("%s has no port", s.Name)
		}
		at = "http://" + net.JoinHostPort(s.Spec.ClusterIP, fmt.Sprint(s.Spec.Ports[0].Port)) + "/"
	}
	at, err := c.fill(ctx, at, namespace)
	if err != nil {
		return err
	}
	m := c.Node("node1")
	if from == "client" {
		m = c.Client
	}
	if to, ok := strings.CutPrefix(at, "udp "); ok {
		host, port, err := net.SplitHostPort(to)
		if err != nil {
			return err
		}
		_, err = m.Exec(ctx, "python3", "-c", "import socket,sys\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\ns.settimeout(2)\ns.sendto(b'hello',(sys.argv[1],int(sys.argv[2])))\ns.recv(9)", host, port)
		return err
	}
	_, err = m.Exec(ctx, append([]string{"curl", "-sS", "--fail", "--max-time", "2"}, strings.Fields(at)...)...)
	return err
}
