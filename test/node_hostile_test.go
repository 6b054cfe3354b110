package test

import (
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
