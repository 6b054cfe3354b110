package test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"portal/test/harness"
)

// hostileMachine is a machine with a neighbour on it, a Pod that does nothing but answer and that nothing must happen to.
type hostileMachine struct {
	*podMachine
	neighbour *corev1.Pod
}

// maxPids is the limit of processes, small so that a mistake here does not take the machine that tests run on with it.
const maxPids = "150"

func newHostileMachine(t *testing.T) *hostileMachine {
	t.Helper()
	m := &hostileMachine{podMachine: newPodMachine(t, "hostile")}
	m.agent.Kill()
	m.args = append(m.args, "--pod-max-pids", maxPids)
	m.start(t)
	m.kubectl(t, strings.ReplaceAll(webNeighbour, "NODE", m.name), "apply")
	m.neighbour = m.pod(t, "neighbour", time.Minute, podReady)
	return m
}

const webNeighbour = `apiVersion: v1
kind: Pod
metadata: {name: neighbour}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: host
    command: [python3, -u, -c]
    args:
    - |
      import http.server, socket
      class S(http.server.ThreadingHTTPServer):
          address_family = socket.AF_INET6
      class H(http.server.BaseHTTPRequestHandler):
          def do_GET(self):
              self.send_response(200); self.end_headers()
              self.wfile.write(self.client_address[0].encode())
          def log_message(self, *a): pass
      S(('::', 8080), H).serve_forever()
    readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
`

// hostile is a Pod of one container, which changes may make worse.
func (m *hostileMachine) hostile(name string, command []string, changes ...func(*corev1.Pod, *corev1.Container)) *corev1.Pod {
	none := int64(1)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{
			NodeName: m.name, RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: &none,
			Containers: []corev1.Container{{
				Name: "c", Image: "host", Command: command,
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("256Mi"), corev1.ResourceCPU: resource.MustParse("500m")}},
			}},
		},
	}
	for _, change := range changes {
		change(pod, &pod.Spec.Containers[0])
	}
	return pod
}

func (m *hostileMachine) create(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if _, err := m.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func hostileScript(text string) []string { return []string{"sh", "-c", text} }

// log is what a Pod's container has said, from the files that it is kept in: the server is outside of the machine, and can't ask it.
func (m *hostileMachine) log(t *testing.T, pod string) string {
	t.Helper()
	p, err := m.client.CoreV1().Pods("default").Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	files, _ := filepath.Glob(filepath.Join(m.dir, "node", "logs", string(p.UID), "c-*.log"))
	var out strings.Builder
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return err.Error()
		}
		for line := range strings.Lines(string(data)) {
			parts := strings.SplitN(line, " ", 4) // time, stream, whether it is whole, text
			if len(parts) != 4 {
				return "not a line of a log: " + line
			}
			if parts[2] == "P" {
				parts[3] = strings.TrimSuffix(parts[3], "\n")
			}
			out.WriteString(parts[3])
		}
	}
	return out.String()
}

// remove deletes a Pod and waits until it is gone.
func (m *hostileMachine) remove(t *testing.T, name string) {
	t.Helper()
	if err := m.client.CoreV1().Pods("default").Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
	eventually(t, time.Minute, "the end of "+name, func() string {
		if _, err := m.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{}); err == nil {
			return "it is still there\n" + m.agent.Tail()
		}
		return ""
	})
}

// said waits for an Event of a Pod.
func (m *hostileMachine) said(t *testing.T, pod, reason string, words ...string) {
	t.Helper()
	eventually(t, time.Minute, "an Event "+reason+" of "+pod, func() string {
		list := m.events(t, pod, reason)
		for _, message := range list {
			all := true
			for _, w := range words {
				all = all && strings.Contains(message, w)
			}
			if all {
				return ""
			}
		}
		all, err := m.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod})
		why := fmt.Sprintf("wanted %q in one of %q; there are", words, list)
		for i := range all.Items {
			why += "\n" + all.Items[i].Reason + ": " + all.Items[i].Message
		}
		return fmt.Sprint(why, err)
	})
}

// answers: the neighbour does.
func (m *hostileMachine) answers(t *testing.T) {
	t.Helper()
	for _, ip := range m.neighbour.Status.PodIPs {
		url := "http://" + net.JoinHostPort(ip.IP, "8080")
		eventually(t, 30*time.Second, "the neighbour", func() string {
			if _, err := m.get(url); err != nil {
				return err.Error()
			}
			return ""
		})
	}
}

// unharmed: the node is ready and its agent has not been replaced; the neighbour is the same process and answers.
func (m *hostileMachine) unharmed(t *testing.T) {
	t.Helper()
	m.answers(t)
	now := m.pod(t, "neighbour", 30*time.Second, podReady)
	if before := m.neighbour.Status.ContainerStatuses[0]; now.Status.ContainerStatuses[0].ContainerID != before.ContainerID || now.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the neighbour was %+v and is %+v", before, now.Status.ContainerStatuses[0])
	}
	eventually(t, 30*time.Second, "the node", func() string {
		node, err := m.client.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue || c.Type == corev1.NodeDiskPressure && c.Status != corev1.ConditionFalse {
				return c.Message
			}
		}
		return ""
	})
	if err := syscall.Kill(m.agent.Pid(), 0); err != nil {
		t.Errorf("the agent: %v\n%s", err, m.agent.Tail())
	}
}

func hostileEnded(pod *corev1.Pod) string {
	if pod.Status.Phase != corev1.PodFailed && pod.Status.Phase != corev1.PodSucceeded {
		return "it has not ended"
	}
	return ""
}

// TestNodeHostile: Pods that mean harm end as they should, their Events and status say why, and neither the node nor their neighbour suffers.
func TestNodeHostile(t *testing.T) {
	t.Parallel()
	m := newHostileMachine(t)
	for _, c := range []struct {
		name string
		test func(*hostileMachine, *testing.T)
	}{
		{"forks", (*hostileMachine).forks},
		{"fills", (*hostileMachine).fills},
		{"log", (*hostileMachine).fillsLog},
		{"memory", (*hostileMachine).eatsMemory},
		{"ignores", (*hostileMachine).ignoresSignals},
		{"probes", (*hostileMachine).failsProbes},
		{"odd", (*hostileMachine).oddCharacters},
		{"links", (*hostileMachine).linksOutside},
		{"sockets", (*hostileMachine).manySockets},
		{"deep", (*hostileMachine).deepFolders},
		{"escapes", (*hostileMachine).escapes},
	} {
		if !t.Run(c.name, func(t *testing.T) { c.test(m, t) }) {
			t.Log(m.agent.Tail())
		}
		t.Run("after "+c.name, m.unharmed)
	}
	m.remove(t, "neighbour")
	m.nothingLeft(t)
}

// forks: a Pod that forks for ever gets as many processes as it may, is told of, and can be deleted.
func (m *hostileMachine) forks(t *testing.T) {
	m.create(t, m.hostile("forks", hostileScript(`f() { f | f & }; f; exec sleep 100000`)))
	m.said(t, "forks", "TooManyProcesses", maxPids+" processes", "--pod-max-pids")
	m.answers(t)
	m.remove(t, "forks")
}

// fills: Pods that fill what they may write are stopped by a limit, and the status says by which.
func (m *hostileMachine) fills(t *testing.T) {
	mount := func(pod *corev1.Pod, c *corev1.Container, source corev1.EmptyDirVolumeSource) {
		pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &source}}}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
	}
	limit := resource.MustParse("4Mi")
	const much = "head -c 30000000 /dev/zero > %s; echo ended with $?; sleep 100000"
	// What is on the disk is measured, and who has too much is evicted.
	m.create(t, m.hostile("fills-volume", hostileScript(fmt.Sprintf(much, "/v/file")), func(pod *corev1.Pod, c *corev1.Container) {
		mount(pod, c, corev1.EmptyDirVolumeSource{SizeLimit: &limit})
	}))
	m.create(t, m.hostile("fills-root", hostileScript(fmt.Sprintf(much, "/var/tmp/file")), func(_ *corev1.Pod, c *corev1.Container) {
		c.Resources.Limits[corev1.ResourceEphemeralStorage] = limit
	}))
	m.create(t, m.hostile("fills-files", hostileScript("mkdir /v/d; cd /v/d; i=0; while [ $i -lt 3000 ]; do echo x > $i; i=$((i+1)); done; sleep 100000"), func(pod *corev1.Pod, c *corev1.Container) {
		mount(pod, c, corev1.EmptyDirVolumeSource{SizeLimit: &limit})
	}))
	// What is in memory is full.
	m.create(t, m.hostile("fills-memory", hostileScript(fmt.Sprintf(much, "/v/file")), func(pod *corev1.Pod, c *corev1.Container) {
		mount(pod, c, corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: &limit})
	}))
	m.create(t, m.hostile("fills-shm", hostileScript("head -c 100000000 /dev/zero > /dev/shm/file; echo ended with $?; sleep 100000")))
	for name, want := range map[string]string{"fills-volume": `"v"`, "fills-root": "ephemeral", "fills-files": `"v"`} {
		p := m.pod(t, name, 2*time.Minute, hostileEnded)
		if p.Status.Reason != "Evicted" || !strings.Contains(p.Status.Message, want) || !strings.Contains(p.Status.Message, "4Mi") {
			t.Errorf("%s: %s: %s", name, p.Status.Reason, p.Status.Message)
		}
		m.said(t, name, "Evicted", "4Mi")
	}
	for _, name := range []string{"fills-memory", "fills-shm"} {
		eventually(t, time.Minute, name, func() string {
			if text := m.log(t, name); !strings.Contains(text, "No space left on device") || !strings.Contains(text, "ended with 1") {
				return fmt.Sprintf("it says %.300q", text)
			}
			return ""
		})
	}
	for _, name := range []string{"fills-volume", "fills-root", "fills-files", "fills-memory", "fills-shm"} {
		m.remove(t, name)
	}
}

// fillsLog: a log takes no more than its files may, and its end can be read.
func (m *hostileMachine) fillsLog(t *testing.T) {
	m.create(t, m.hostile("log", hostileScript(`yes "$(head -c 1000 /dev/zero | tr '\0' x)" | head -c 90000000; echo; echo the end; sleep 100000`)))
	eventually(t, 3*time.Minute, "the end of the log", func() string {
		if text := m.log(t, "log"); !strings.HasSuffix(text, "\nthe end\n") {
			return fmt.Sprintf("it has %d bytes", len(text))
		}
		return ""
	})
	pod, err := m.client.CoreV1().Pods("default").Get(t.Context(), "log", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	files, _ := filepath.Glob(filepath.Join(m.dir, "node", "logs", string(pod.UID), "*"))
	for _, f := range files {
		if st, err := os.Stat(f); err == nil {
			size += st.Size()
		}
	}
	if len(files) != 5 || size > 50<<20 {
		t.Errorf("%d files of %d bytes altogether", len(files), size)
	}
	m.remove(t, "log")
}

// eatsMemory: the status says what killed it.
func (m *hostileMachine) eatsMemory(t *testing.T) {
	m.create(t, m.hostile("memory", []string{"python3", "-c", "b = []\nwhile True: b.append(bytearray(1 << 20))"}, func(_ *corev1.Pod, c *corev1.Container) {
		c.Resources.Limits[corev1.ResourceMemory] = resource.MustParse("48Mi")
	}))
	p := m.pod(t, "memory", 2*time.Minute, hostileEnded)
	if s := p.Status.ContainerStatuses[0].State.Terminated; s == nil || s.Reason != "OOMKilled" || s.ExitCode != 137 {
		t.Errorf("%+v", p.Status.ContainerStatuses[0].State)
	}
	m.remove(t, "memory")
}

// ignoresSignals: a Pod that ignores what asks it to end is killed after its grace period, with all that it started.
func (m *hostileMachine) ignoresSignals(t *testing.T) {
	m.create(t, m.hostile("ignores", hostileScript(`trap '' TERM INT HUP; (trap '' TERM; setsid sleep 100000 &) ; echo deaf; while :; do sleep 1000; done`)))
	eventually(t, time.Minute, "the Pod", func() string {
		if text := m.log(t, "ignores"); text != "deaf\n" {
			return fmt.Sprintf("it says %.300q", text)
		}
		return ""
	})
	m.remove(t, "ignores")
	m.said(t, "ignores", "Killing")
}

// failsProbes: a server at the wrong address is not ready, and one that fails now and then is restarted; Events say what the probe got.
func (m *hostileMachine) failsProbes(t *testing.T) {
	server := func(address, answer string) []string {
		return []string{"python3", "-u", "-c", `
import http.server, random, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(` + answer + `); self.end_headers()
        self.wfile.write(b'this is what I say \xff\x00\x1b[31m')
    def log_message(self, *a): pass
http.server.HTTPServer(('` + address + `', 8080), H).serve_forever()`}
	}
	get := corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(8080)}}
	m.create(t, m.hostile("wrong-address", server("127.0.0.1", "200"), func(_ *corev1.Pod, c *corev1.Container) {
		c.ReadinessProbe = &corev1.Probe{ProbeHandler: get, PeriodSeconds: 1, FailureThreshold: 1}
	}))
	m.create(t, m.hostile("wrong-answer", server("", "503"), func(_ *corev1.Pod, c *corev1.Container) {
		c.ReadinessProbe = &corev1.Probe{ProbeHandler: get, PeriodSeconds: 1, FailureThreshold: 1}
	}))
	m.create(t, m.hostile("random", server("", "random.choice((200, 500))"), func(pod *corev1.Pod, c *corev1.Container) {
		pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
		c.ReadinessProbe = &corev1.Probe{ProbeHandler: get, PeriodSeconds: 1, FailureThreshold: 1}
		c.LivenessProbe = &corev1.Probe{ProbeHandler: get, PeriodSeconds: 1, FailureThreshold: 2, InitialDelaySeconds: 3}
	}))
	m.said(t, "wrong-address", "Unhealthy", "Readiness probe of container c failed", "connection refused")
	m.said(t, "wrong-answer", "Unhealthy", "Readiness probe of container c failed", "503")
	m.said(t, "random", "Unhealthy", "Liveness probe of container c failed", "500")
	m.pod(t, "random", 2*time.Minute, func(pod *corev1.Pod) string {
		if len(pod.Status.ContainerStatuses) == 0 || pod.Status.ContainerStatuses[0].RestartCount == 0 {
			return "it was not restarted"
		}
		return ""
	})
	for _, name := range []string{"wrong-address", "wrong-answer"} {
		if p := m.pod(t, name, time.Minute, func(*corev1.Pod) string { return "" }); podReady(p) == "" {
			t.Errorf("%s is ready", name)
		}
	}
	for _, name := range []string{"wrong-address", "wrong-answer", "random"} {
		m.remove(t, name)
	}
}

// oddCharacters: whatever the API accepts arrives as it is, and what a container says is kept as it was said.
func (m *hostileMachine) oddCharacters(t *testing.T) {
	const odd = "a b\t'\"`;&|<>*?\\ü✓ \x01:,=%s\r\n$X .."
	data := map[string]string{"-.._": "2", "-_.A": odd, "UPPER.lower-1_": "3"}
	if _, err := m.client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "odd"}, Data: data, BinaryData: map[string][]byte{"binary": {0, 255, 254, '\n'}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	program := `
import json, os, sys
out = {'args': sys.argv[1:], 'env': os.environ.get('ODD'), 'cwd': os.getcwd(), 'files': {}}
for name in ('sub dir/ü:,\\', '-..dots', '-rf *', 'new\nline'):
    out['files'][name] = open('/odd/' + name, 'rb').read().decode('latin-1')
out['labels'] = open('/labels/labels').read()
print(json.dumps(out))
sys.stdout.flush()
os.write(1, b'\xff\xfe\x00\x1b[31m not UTF-8\n')
os.write(1, b'x' * 100000 + b'\n')
with open('/end/of it', 'wb') as f:
    f.write(b'\xff\xfe the end \xc3\x28 ' + b'y' * 10000)
os._exit(3)
`
	m.create(t, m.hostile("odd", []string{"python3", "-c", program, odd, "", "-"}, func(pod *corev1.Pod, c *corev1.Container) {
		pod.Labels = map[string]string{"a.b-c.example/X_y.z-1": "v.A_l-ue", "empty": ""}
		pod.Annotations = map[string]string{"odd": odd}
		c.Env = []corev1.EnvVar{{Name: "ODD", Value: odd}}
		c.WorkingDir = "/tmp/o d;d\\ü"
		c.TerminationMessagePath = "/end/of it"
		path := "sub dir/ü:,\\"
		pod.Spec.Volumes = []corev1.Volume{
			{Name: "v", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: "odd"},
				Items: []corev1.KeyToPath{
					{Key: "-_.A", Path: path}, {Key: "-.._", Path: "-..dots"}, {Key: "binary", Path: "-rf *"}, {Key: "UPPER.lower-1_", Path: "new\nline"},
				},
			}}},
			{Name: "l", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{
				{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}},
			}}}},
		}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/odd"}, {Name: "l", MountPath: "/labels"}}
	}))
	p := m.pod(t, "odd", time.Minute, hostileEnded)
	text := m.log(t, "odd")
	line, rest, _ := strings.Cut(text, "\n")
	var got struct {
		Args     []string
		Env, Cwd string
		Files    map[string]string
		Labels   string
	}
	if err := json.Unmarshal([]byte(line), &got); err != nil {
		t.Fatalf("%v: %.2000q, %+v", err, text, p.Status)
	}
	if len(got.Args) != 3 || got.Args[0] != odd || got.Args[1] != "" || got.Args[2] != "-" || got.Env != odd || got.Cwd != "/tmp/o d;d\\ü" {
		t.Errorf("%+v", got)
	}
	var content []byte // each byte came as a character
	for _, r := range got.Files["sub dir/ü:,\\"] {
		content = append(content, byte(r))
	}
	if string(content) != odd || got.Files["-..dots"] != "2" || got.Files["-rf *"] != "\x00\u00ff\u00fe\n" || got.Files["new\nline"] != "3" {
		t.Errorf("files: %q", got.Files)
	}
	if !strings.Contains(got.Labels, `a.b-c.example/X_y.z-1="v.A_l-ue"`) {
		t.Errorf("labels: %q", got.Labels)
	}
	if !strings.HasPrefix(rest, "\xff\xfe\x00\x1b[31m not UTF-8\n") || !strings.HasSuffix(rest, strings.Repeat("x", 100000)+"\n") {
		t.Errorf("the log: %.100q", rest)
	}
	end := p.Status.ContainerStatuses[0].State.Terminated
	if end == nil || end.ExitCode != 3 || !strings.Contains(end.Message, "the end") || len(end.Message) > 4096+10 {
		t.Errorf("%+v", end)
	}
	m.remove(t, "odd")
}

// linksOutside: links that a Pod makes in its volumes lead nowhere outside of them for the node, which follows none.
func (m *hostileMachine) linksOutside(t *testing.T) {
	shared := func(pod *corev1.Pod, c *corev1.Container, sub, at string) {
		pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		pod.Spec.InitContainers = []corev1.Container{{
			Name: "prepare", Image: "host", Command: hostileScript(`ln -s / /v/root; ln -s /etc /v/etc; ln -s ../../../../../../etc /v/up; ln -s /proc/self/root /v/magic; echo prepared`),
			VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/v"}},
		}}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: at, SubPath: sub}}
	}
	for name, sub := range map[string]string{"link-root": "root", "link-etc": "etc", "link-up": "up", "link-below": "root/etc", "link-magic": "magic/etc"} {
		m.create(t, m.hostile(name, hostileScript("ls -la /w; cat /w/hostname /w/shadow; echo began"), func(pod *corev1.Pod, c *corev1.Container) { shared(pod, c, sub, "/w") }))
	}
	for _, name := range []string{"link-root", "link-etc", "link-up", "link-below", "link-magic"} {
		m.pod(t, name, time.Minute, func(pod *corev1.Pod) string {
			if hostileEnded(pod) == "" || len(m.events(t, name, "Failed")) > 0 {
				return ""
			}
			return "it has not ended"
		})
		if text := m.log(t, name); strings.Contains(text, "began") {
			t.Errorf("%s ran:\n%s", name, text)
		}
		m.said(t, name, "Failed", "subPath")
		m.remove(t, name)
	}
	// Where the node reads what a Pod wrote: its log and its last words.
	secret := filepath.Join(m.dir, "secret")
	if err := os.WriteFile(secret, []byte("the node's secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	m.create(t, m.hostile("link-words", hostileScript("rm -f /dev/termination-log; ln -sf "+secret+" /dev/termination-log; mv /dev/termination-log /dev/x; echo "+secret+"; exit 1")))
	p := m.pod(t, "link-words", time.Minute, hostileEnded)
	if status, _ := json.Marshal(p.Status); bytes.Contains(status, []byte("the node's secret")) {
		t.Errorf("the status has it: %s", status)
	}
	m.remove(t, "link-words")
	// A working directory that something left open leads to (CVE-2024-21626).
	for _, dir := range []string{"/proc/self/fd/3", "/proc/self/fd/7", "/proc/self/fd/8/../../..", "/proc/1/root", "/proc/self/cwd"} {
		name := fmt.Sprintf("cwd-%x", sha256.Sum256([]byte(dir)))[:12]
		m.create(t, m.hostile(name, hostileScript("ls "+filepath.Join(m.dir, "node")+" ./node ../node ../../node 2>/dev/null && echo escaped; echo tried"), func(_ *corev1.Pod, c *corev1.Container) { c.WorkingDir = dir }))
		m.pod(t, name, time.Minute, hostileEnded)
		if text := m.log(t, name); strings.Contains(text, "escaped") {
			t.Errorf("workingDir %s: %s", dir, text)
		}
		m.remove(t, name)
	}
}

// manySockets: thousands of sockets, and of flows to the neighbour that the node tracks, leave it answering.
func (m *hostileMachine) manySockets(t *testing.T) {
	m.create(t, m.hostile("sockets", []string{"python3", "-u", "-c", `
import resource, socket, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(1, 5000):
    try:
        u.sendto(b'x', (sys.argv[1], port))
    except OSError as e:
        pass
server = socket.create_server(('', 7000), backlog=4096)
while len(held) < 3000:
    s = socket.create_connection(('127.0.0.1', 7000))
    held.append(s)
print('holds', len(held))
import time
time.sleep(100000)
`, m.neighbour.Status.PodIPs[0].IP}))
	eventually(t, 2*time.Minute, "its sockets", func() string {
		if text := m.log(t, "sockets"); text != "holds 3000\n" {
			return fmt.Sprintf("it says %.300q", text)
		}
		return ""
	})
	m.answers(t)
	m.remove(t, "sockets")
}

// deepFolders: folders nested more deeply than anybody can open are removed with their Pod.
func (m *hostileMachine) deepFolders(t *testing.T) {
	m.create(t, m.hostile("deep", []string{"python3", "-c", `
import os
for base in ('/v', '/var/tmp'):
    os.chdir(base)
    for _ in range(5000):
        os.mkdir('d')
        os.chdir('d')
print('deep enough')
`}, func(pod *corev1.Pod, c *corev1.Container) {
		pod.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
	}))
	p := m.pod(t, "deep", 2*time.Minute, hostileEnded)
	if text := m.log(t, "deep"); text != "deep enough\n" {
		t.Errorf("%s: %+v", text, p.Status)
	}
	m.remove(t, "deep")
	for _, dir := range []string{"pods", "volumes"} {
		path := filepath.Join(m.dir, "node", dir, string(p.UID))
		eventually(t, time.Minute, "the end of "+path, func() string {
			if _, err := os.Lstat(path); err == nil {
				return "it is still there\n" + m.agent.Tail()
			}
			return ""
		})
	}
}

// escapes: none of the known ways leads out of a container whose process is root in it and has the usual capabilities.
func (m *hostileMachine) escapes(t *testing.T) {
	program, err := os.ReadFile(filepath.Join("..", "internal", "node", "runtime", "testdata", "escapes.py"))
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(harness.Portal())
	if err != nil {
		t.Fatal(err)
	}
	name := "portal-hostile-" + m.name
	var listener net.Listener
	if err := m.do(func() (err error) {
		listener, err = net.Listen("unix", "@"+name)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	m.create(t, m.hostile("escapes", []string{"python3", "-c", string(program), filepath.Join(m.dir, "node"), name}))
	p := m.pod(t, "escapes", 2*time.Minute, hostileEnded)
	lines := strings.Split(strings.TrimSpace(m.log(t, "escapes")), "\n")
	last := len(lines) - 1
	for _, line := range lines[:last] {
		if !strings.HasSuffix(line, ": held") {
			t.Error(line)
		}
	}
	if lines[last] != fmt.Sprint("tried ", last) || last < 70 {
		t.Errorf("it ended with %q: %+v", lines[last], p.Status)
	}
	if after, err := os.ReadFile(harness.Portal()); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the program was changed: %v", err)
	}
	m.remove(t, "escapes")
	m.forges(t)
}

// forges: a Pod that sends packets in its neighbour's name is not heard.
func (m *hostileMachine) forges(t *testing.T) {
	m.create(t, m.hostile("listens", []string{"python3", "-u", "-c", `
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('', 9000))
print('listening')
while True:
    data, who = s.recvfrom(100)
    print(who[0], data.decode())
`}))
	listens := m.pod(t, "listens", time.Minute, podReady)
	eventually(t, time.Minute, "the listener", func() string {
		if text := m.log(t, "listens"); text != "listening\n" {
			return fmt.Sprintf("it says %.300q", text)
		}
		return ""
	})
	m.create(t, m.hostile("forges", []string{"python3", "-u", "-c", `
import socket, struct, sys
victim, to = sys.argv[1:]
def checksum(b):
    n = sum(struct.unpack('>%dH' % (len(b) // 2), b))
    while n >> 16: n = (n & 0xffff) + (n >> 16)
    return ~n & 0xffff
def packet(source, text):
    udp = struct.pack('>HHHH', 9000, 9000, 8 + len(text), 0) + text
    head = struct.pack('>BBHHHBBH4s4s', 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(to))
    return head[:10] + struct.pack('>H', checksum(head)) + head[12:] + udp
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
for source in (victim, '192.0.2.200', '127.0.0.1'):
    for _ in range(5):
        raw.sendto(packet(source, b'forged'), (to, 0))
# ARP that says the neighbour and the gateway were here.
frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
frames.bind(('eth0', 0))
mac = frames.getsockname()[4]
for address in (victim, victim.rsplit('.', 1)[0] + '.1'):
    ip = socket.inet_aton(address)
    frames.send(b'\xff' * 6 + mac + b'\x08\x06' + struct.pack('>HHBBH', 1, 0x0800, 6, 4, 2) + mac + ip + b'\xff' * 6 + ip)
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.sendto(b'honest', (to, 9000))
print('sent')
`, m.neighbour.Status.PodIPs[0].IP, listens.Status.PodIPs[0].IP}))
	p := m.pod(t, "forges", time.Minute, hostileEnded)
	if text := m.log(t, "forges"); text != "sent\n" {
		t.Errorf("%s: %+v", text, p.Status)
	}
	eventually(t, time.Minute, "what was sent with its own address", func() string {
		text := m.log(t, "listens")
		if !strings.Contains(text, "honest") {
			return fmt.Sprintf("it says %.300q", text)
		}
		if strings.Contains(text, "forged") {
			t.Fatalf("it heard:\n%s", text)
		}
		return ""
	})
	m.answers(t)
	m.remove(t, "listens")
	m.remove(t, "forges")
}
