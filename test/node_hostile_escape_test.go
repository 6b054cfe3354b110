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
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

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
    f.write(b'y' * 10000 + b'\xff\xfe the end \xc3\x28')
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
