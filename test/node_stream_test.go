package test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// streamMachine is a network namespace with a server and a node in it, and nothing else.
type streamMachine struct {
	podMachine
	kubeconfig string
}

const streamTokens = "ann-token,ann,1,\"\"\nbob-token,bob,2,\"\"\neve-token,eve,3,\"\"\ndan-token,dan,4,\"\"\n"

func newStreamMachine(t *testing.T) *streamMachine {
	t.Helper()
	rootOnly(t)
	need(t, harness.Portal(), "build")
	m := &streamMachine{podMachine: podMachine{name: fmt.Sprintf("stream-%d", os.Getpid()), dir: t.TempDir()}}
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
	if err := m.do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "uplink"
		uplink := &netlink.Bridge{LinkAttrs: attrs}
		addr, err := netlink.ParseAddr(machineAddress + "/24")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetUp(lo), netlink.LinkAdd(uplink), netlink.AddrAdd(uplink, addr), netlink.LinkSetUp(uplink))
	}); err != nil {
		t.Fatal(err)
	}
	tokens := filepath.Join(m.dir, "tokens.csv")
	if err := os.WriteFile(tokens, []byte(streamTokens), 0o600); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(m.dir, "data")
	m.kubeconfig = filepath.Join(data, "admin.kubeconfig")
	server, err := harness.StartIn(int(m.ns), m.dir, "server", harness.Portal(), "server", "--data-dir", data, "--listen", "127.0.0.1:6443",
		"--cluster-cidr", "10.244.0.0/16", "--token-auth-file", tokens)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Kill)
	eventually(t, 60*time.Second, "the server", func() string {
		if out, err := m.run(t.Context(), nil, nil, "get", "--raw", "/readyz"); err != nil {
			return err.Error() + out + server.Tail()
		}
		return ""
	})
	out, err := m.portal(t.Context(), nil, nil, "token", "create", "--kubeconfig", m.kubeconfig, "--role", "node")
	if err != nil {
		t.Fatal(err, out)
	}
	words := strings.Fields(out[strings.Index(out, "portal node"):])
	t.Cleanup(func() { m.wipe(t) })
	m.args = append(words[1:], "--name", m.name, "--node-ip", machineAddress, "--data-dir", filepath.Join(m.dir, "node"))
	m.start(t)
	eventually(t, 60*time.Second, "the node", func() string {
		out, err := m.run(t.Context(), nil, nil, "get", "--raw", "/api/v1/nodes/"+m.name+"/proxy/healthz")
		if err != nil || out != "ok" {
			return fmt.Sprint(out, err, "\n", m.agent.Tail())
		}
		return ""
	})
	return m
}

// portal runs the binary in the machine.
func (m *streamMachine) portal(ctx context.Context, in io.Reader, env []string, args ...string) (string, error) {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, harness.Portal(), args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, &out, &out
	if err := m.begin(cmd); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

// begin starts a command in the machine's network.
func (m *streamMachine) begin(cmd *exec.Cmd) error { return m.do(cmd.Start) }

// run runs kubectl.
func (m *streamMachine) run(ctx context.Context, in io.Reader, env []string, args ...string) (string, error) {
	return m.portal(ctx, in, env, append([]string{"kubectl", "--kubeconfig", m.kubeconfig}, args...)...)
}

func (m *streamMachine) must(t *testing.T, in io.Reader, args ...string) string {
	t.Helper()
	out, err := m.run(t.Context(), in, nil, args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

const streamPods = `apiVersion: v1
kind: Pod
metadata: {name: talk}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 0
  containers:
  - {name: main, image: host, command: [sh, -c, "echo first; echo problem >&2; i=0; while :; do i=$((i+1)); echo line $i; sleep 0.2; done"]}
  - {name: quiet, image: host, command: [sh, -c, "echo only this; exec sleep 100000"]}
---
apiVersion: v1
kind: Pod
metadata: {name: crash}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 0
  containers:
  - {name: c, image: host, command: [sh, -c, "echo run $(cat /proc/sys/kernel/random/uuid); exit 3"]}
---
apiVersion: v1
kind: Pod
metadata: {name: listen}
spec:
  nodeName: NODE
  restartPolicy: Never
  terminationGracePeriodSeconds: 0
  containers:
  - {name: c, image: host, stdin: true, stdinOnce: true, command: [sh, -c, "while read line; do echo got $line; done; echo over; exit 7"]}
---
apiVersion: v1
kind: Pod
metadata: {name: waits}
spec:
  nodeName: NODE
  containers:
  - {name: c, image: no-such-image}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 0
  containers:
  - name: web
    image: host
    ports: [{name: http, containerPort: 8080}]
    command: [python3, -u, -c]
    args:
    - |
      import http.server
      class H(http.server.BaseHTTPRequestHandler):
          def answer(self):
              n = int(self.headers.get('Content-Length') or 0)
              body = self.rfile.read(n)
              self.send_response(200); self.end_headers()
              self.wfile.write(('%s %s %d' % (self.command, self.path, len(body))).encode())
          do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer
          def log_message(self, *a): pass
      http.server.ThreadingHTTPServer(('', 8080), H).serve_forever()
    readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: ann}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{kind: User, name: ann}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: getter}
rules: [{apiGroups: [""], resources: [pods, pods/exec], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: eve}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: getter}
subjects: [{kind: User, name: eve}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: monitoring}
rules: [{apiGroups: [""], resources: [nodes/proxy], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: dan}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: monitoring}
subjects: [{kind: User, name: dan}]
`

// TestNodeStreams: kubectl logs, exec, attach, cp, port-forward and proxies work with Pods of a node, through WebSocket and SPDY, for those
// who may, and for nobody else.
func TestNodeStreams(t *testing.T) {
	t.Parallel()
	m := newStreamMachine(t)
	m.must(t, strings.NewReader(strings.ReplaceAll(streamPods, "NODE", m.name)), "apply", "-f", "-")
	m.must(t, nil, "wait", "--for=condition=Ready", "pod/talk", "pod/web", "pod/listen", "--timeout=60s")
	t.Run("logs", m.testLogs)
	t.Run("exec", m.testExec)
	t.Run("terminal", m.testTerminal)
	t.Run("attach", m.testAttach)
	t.Run("forward", m.testForward)
	t.Run("proxies", m.testProxies)
	t.Run("access", m.testAccess)
	t.Run("monitoring", m.testMonitoring)
	if t.Failed() {
		t.Log(m.agent.Tail())
	}
	m.must(t, nil, "delete", "pods", "--all", "--timeout=60s")
}

func (m *streamMachine) testLogs(t *testing.T) {
	eventually(t, 10*time.Second, "ten lines", func() string {
		if out := m.must(t, nil, "logs", "talk", "-c", "main"); !strings.Contains(out, "first\n") || !strings.Contains(out, "problem\n") || !strings.Contains(out, "line 10\n") {
			return out
		}
		return ""
	})
	if out := m.must(t, nil, "logs", "talk", "-c", "quiet"); out != "only this\n" {
		t.Errorf("%q", out)
	}
	if out := m.must(t, nil, "logs", "talk", "-c", "main", "--tail=3"); strings.Count(out, "\n") != 3 || strings.Contains(out, "first") {
		t.Errorf("the last three: %q", out)
	}
	if out := m.must(t, nil, "logs", "talk", "-c", "main", "--since=1s"); strings.Contains(out, "first") || strings.Count(out, "\n") > 8 || out == "" {
		t.Errorf("of the last second: %q", out)
	}
	if out := m.must(t, nil, "logs", "talk", "-c", "main", "--limit-bytes=9"); len(out) != 9 {
		t.Errorf("nine bytes: %q", out)
	}
	if out := m.must(t, nil, "logs", "talk", "-c", "quiet", "--timestamps"); !regexp.MustCompile(`^\d{4}-\d\d-\d\dT[\d:.]+Z only this\n$`).MatchString(out) {
		t.Errorf("with times: %q", out)
	}
	if out := m.must(t, nil, "logs", "talk", "--all-containers", "--prefix", "--tail=2"); !strings.Contains(out, "[pod/talk/quiet] only this") || !strings.Contains(out, "[pod/talk/main] line") {
		t.Errorf("of all: %q", out)
	}
	if out, err := m.run(t.Context(), nil, nil, "get", "--raw", "/api/v1/namespaces/default/pods/talk/log?container=main&stream=Stderr"); err != nil || out != "problem\n" {
		t.Errorf("of one stream: %q, %v", out, err)
	}
	// Followed: lines come as they are written.
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if out, _ := m.run(ctx, nil, nil, "logs", "-f", "talk", "-c", "main", "--tail=0"); strings.Count(out, "\n") < 5 || strings.Contains(out, "first") {
		t.Errorf("followed: %q", out)
	}
	// Of the run before.
	eventually(t, 30*time.Second, "a second run", func() string {
		out, err := m.run(t.Context(), nil, nil, "logs", "crash", "--previous")
		if err != nil || !strings.HasPrefix(out, "run ") {
			return out
		}
		return ""
	})
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"logs", "waits"}, `container "c" in pod "waits" is waiting to start`},
		{[]string{"logs", "talk", "-c", "none"}, "container none is not valid for pod talk"},
		{[]string{"logs", "web", "--previous"}, `previous terminated container "web" in pod "web" not found`},
		{[]string{"get", "--raw", "/api/v1/namespaces/default/pods/web/log?tailLines=-1"}, "tailLines"},
		{[]string{"get", "--raw", "/api/v1/namespaces/default/pods/web/log?tailLines=x"}, "tailLines"},
		{[]string{"get", "--raw", "/api/v1/namespaces/default/pods/web/ephemeralcontainers"}, "ephemeral containers are not supported"},
	} {
		if out, err := m.run(t.Context(), nil, nil, c.args...); err == nil || !strings.Contains(out, c.want) {
			t.Errorf("%v: %v %q, want %q", c.args, err, out, c.want)
		}
	}
}

// protocols are the environments in which kubectl uses one or the other.
var protocols = map[string][]string{
	"WebSocket": {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=true", "KUBECTL_PORT_FORWARD_WEBSOCKETS=true"},
	"SPDY":      {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false", "KUBECTL_PORT_FORWARD_WEBSOCKETS=false"},
}

func (m *streamMachine) testExec(t *testing.T) {
	data := make([]byte, 3<<20)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	for name, env := range protocols {
		t.Run(name, func(t *testing.T) {
			out, err := m.run(t.Context(), nil, env, "exec", "talk", "-c", "quiet", "--", "sh", "-c", "echo out; echo err >&2; exit 42")
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 42 || !strings.Contains(out, "out\n") || !strings.Contains(out, "err\n") {
				t.Errorf("%v: %q", err, out)
			}
			out, err = m.run(t.Context(), bytes.NewReader(data), env, "exec", "-i", "talk", "-c", "quiet", "--", "cat")
			if err != nil || out != string(data) {
				t.Errorf("%v: %d of %d bytes", err, len(out), len(data))
			}
			if out, err := m.run(t.Context(), nil, env, "exec", "talk", "-c", "quiet", "--", "no-such-program"); err == nil || !strings.Contains(out, "executable file not found in $PATH") {
				t.Errorf("%v: %q", err, out)
			}
			for i := range 5 {
				m.killClient(t, env, fmt.Sprintf("8642%d%d", len(name), i))
			}
		})
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	m.must(t, nil, "cp", filepath.Join(dir, "file"), "talk:/tmp/copied", "-c", "quiet")
	m.must(t, nil, "cp", "talk:/tmp/copied", filepath.Join(dir, "back"), "-c", "quiet")
	if back, err := os.ReadFile(filepath.Join(dir, "back")); err != nil || !bytes.Equal(back, data) {
		t.Errorf("copied there and back: %d bytes, %v", len(back), err)
	}
}

// killClient: when the client of a command that says nothing is killed, the command is. The mark is its argument.
func (m *streamMachine) killClient(t *testing.T, env []string, mark string) {
	t.Helper()
	runs := func() string {
		last := len(mark) - 1
		return m.must(t, nil, "exec", "talk", "-c", "quiet", "--", "sh", "-c", "grep -l '"+mark[:last]+"["+mark[last:]+"]' /proc/[0-9]*/cmdline || true")
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = m.run(ctx, nil, env, "exec", "talk", "-c", "quiet", "--", "sleep", mark)
	}()
	eventually(t, 30*time.Second, "the command", func() string {
		if runs() == "" {
			return "it does not run"
		}
		return ""
	})
	cancel()
	<-ended
	eventually(t, 30*time.Second, "the end of the command", runs)
}

// testTerminal runs kubectl exec -it with a terminal of its own.
func (m *streamMachine) testTerminal(t *testing.T) {
	for name, env := range protocols {
		t.Run(name, func(t *testing.T) {
			master, terminal, err := openPTY()
			if err != nil {
				t.Fatal(err)
			}
			defer master.Close()
			_ = unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 33, Col: 111})
			cmd := exec.CommandContext(t.Context(), harness.Portal(), "kubectl", "--kubeconfig", m.kubeconfig, "exec", "-it", "talk", "-c", "quiet", "--", "sh")
			cmd.Env = append(os.Environ(), env...)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
			if err := m.begin(cmd); err != nil {
				t.Fatal(err)
			}
			_ = terminal.Close()
			var mu sync.Mutex
			var seen bytes.Buffer
			go func() {
				buf := make([]byte, 4096)
				for {
					n, err := master.Read(buf)
					mu.Lock()
					seen.Write(buf[:n])
					mu.Unlock()
					if err != nil {
						return
					}
				}
			}()
			expect := func(send, want string) {
				t.Helper()
				_, _ = io.WriteString(master, send)
				eventually(t, 20*time.Second, want, func() string {
					mu.Lock()
					defer mu.Unlock()
					if strings.Contains(seen.String(), want) {
						return ""
					}
					return seen.String()
				})
			}
			expect("", "# ")
			expect("tty; stty size; echo \"e\"nd\n", "end\r\n")
			expect("", "33 111")
			expect("exit 5\n", "exit 5")
			err = cmd.Wait()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 5 {
				t.Errorf("%v\n%s", err, seen.String())
			}
		})
	}
}

func openPTY() (master, terminal *os.File, err error) {
	if master, err = os.OpenFile("/dev/ptmx", os.O_RDWR, 0); err != nil {
		return nil, nil, err
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, err
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		return nil, nil, err
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	return master, terminal, err
}

func (m *streamMachine) testAttach(t *testing.T) {
	out, err := m.run(t.Context(), strings.NewReader("one\ntwo\n"), nil, "attach", "-i", "listen")
	if err != nil || !strings.Contains(out, "got two") {
		t.Errorf("%v: %q", err, out)
	}
	eventually(t, 10*time.Second, "its end", func() string {
		if out := m.must(t, nil, "get", "pod", "listen", "-o", "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"); out != "7" {
			return out
		}
		return ""
	})
	if out := m.must(t, nil, "logs", "listen"); out != "got one\ngot two\nover\n" {
		t.Errorf("the log has %q", out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if out, _ := m.run(ctx, nil, nil, "attach", "talk", "-c", "main"); strings.Count(out, "line ") < 3 {
		t.Errorf("attached: %q", out)
	}
}

func (m *streamMachine) testForward(t *testing.T) {
	port := 18080
	for name, env := range protocols {
		t.Run(name, func(t *testing.T) {
			port++
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cmd := exec.CommandContext(ctx, harness.Portal(), "kubectl", "--kubeconfig", m.kubeconfig, "port-forward", "pod/web", fmt.Sprintf("%d:8080", port))
			cmd.Env = append(os.Environ(), env...)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := m.begin(cmd); err != nil {
				t.Fatal(err)
			}
			defer func() { cancel(); _ = cmd.Wait() }()
			client := m.inside(nil)
			url := fmt.Sprintf("http://127.0.0.1:%d/x", port)
			eventually(t, 20*time.Second, "the forwarded port", func() string {
				if r, err := client.Get(url); err != nil {
					return err.Error()
				} else {
					_ = r.Body.Close()
				}
				return ""
			})
			var asking sync.WaitGroup
			for range 10 {
				asking.Go(func() {
					for range 10 {
						r, err := client.Post(url, "text/plain", strings.NewReader(strings.Repeat("x", 100_000)))
						if err != nil {
							t.Error(err)
							return
						}
						data, err := io.ReadAll(r.Body)
						_ = r.Body.Close()
						if err != nil || string(data) != "POST /x 100000" {
							t.Errorf("%q, %v", data, err)
						}
					}
				})
			}
			asking.Wait()
		})
	}
}

// TestNodeTwin: a node whose address another Node has, too, serves with a certificate for its name.
func TestNodeTwin(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "twin")
	path := filepath.Join(m.dir, "node", "serving.pem")
	serving := func() (*x509.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(path, path)
		if err != nil {
			return nil, err
		}
		return x509.ParseCertificate(pair.Certificate[0])
	}
	eventually(t, time.Minute, "a certificate with its address", func() string {
		cert, err := serving()
		if err != nil || len(cert.IPAddresses) != 1 {
			return fmt.Sprint(err, "\n", m.agent.Tail())
		}
		return ""
	})
	nodes := m.client.CoreV1().Nodes()
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	_, err := nodes.Create(t.Context(), other, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the address of the other", func() string {
		// Controllers write to it, too.
		if other, err = nodes.Get(t.Context(), "other", metav1.GetOptions{}); err == nil {
			other.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: machineAddress}}
			_, err = nodes.UpdateStatus(t.Context(), other, metav1.UpdateOptions{})
		}
		if err != nil {
			return err.Error()
		}
		return ""
	})
	m.agent.Kill()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	m.start(t)
	eventually(t, 2*time.Minute, "a certificate with its name", func() string {
		cert, err := serving()
		if err != nil || len(cert.IPAddresses) != 0 || cert.Subject.CommonName != "system:node:"+m.name {
			return fmt.Sprint(err, cert, "\n", m.agent.Tail())
		}
		return ""
	})
}
