package test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// imageLayer is a layer of files: name → content; names that end in / are folders.
func imageLayer(t *testing.T, files map[string]string, program string) v1.Layer {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	add := func(name, content string, mode int64) {
		h := &tar.Header{Name: name, Mode: mode, Size: int64(len(content)), Typeflag: tar.TypeReg}
		if strings.HasSuffix(name, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) { // folders before what is in them
		add(name, files[name], 0o644)
	}
	if program != "" {
		data, err := os.ReadFile("/usr/bin/busybox")
		if err != nil {
			t.Fatalf("the test's images need busybox (static): %v", err)
		}
		add(program, string(data), 0o755)
		if err := w.WriteHeader(&tar.Header{Name: "bin/sh", Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(out.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// shellImage has busybox as its shell, and answers HTTP requests with what is in /www.
func shellImage(t *testing.T, answer string, more ...v1.Layer) v1.Image {
	t.Helper()
	layers := append([]v1.Layer{
		imageLayer(t, map[string]string{"etc/": "", "etc/passwd": "root:x:0:0::/:/bin/sh\nweb:x:101:102::/:/bin/sh\n", "etc/group": "web:x:102:\n", "bin/": "", "www/": "", "www/old": "x"}, "bin/busybox"),
		imageLayer(t, map[string]string{"www/": "", "www/index.html": answer, "www/.wh.old": ""}, ""),
	}, more...)
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", runtime.GOARCH
	c.Config = v1.Config{
		Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"trap 'echo quit > /dev/termination-log; exit 0' QUIT; /bin/busybox httpd -f -p 8080 -h $PWD & wait"},
		Env: []string{"FROM_IMAGE=yes"}, WorkingDir: "/www", User: "web", StopSignal: "SIGQUIT",
	}
	if img, err = mutate.ConfigFile(img, c); err != nil {
		t.Fatal(err)
	}
	return img
}

// imageRegistry is a registry in the machine's network namespace, on loopback.
type imageRegistry struct {
	host  string
	down  atomic.Bool
	asked atomic.Int32 // for manifests
}

func (m *podMachine) registry(t *testing.T) *imageRegistry {
	t.Helper()
	var listener net.Listener
	if err := m.do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	r := &imageRegistry{host: listener.Addr().String()}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if strings.Contains(q.URL.Path, "/manifests/") && q.Method == http.MethodGet {
			r.asked.Add(1)
		}
		switch {
		case r.down.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		case strings.Contains(q.URL.Path, "/private/") && q.Method == http.MethodGet && q.Header.Get("Authorization") == "":
			w.Header().Set("WWW-Authenticate", `Basic realm="private"`)
			w.WriteHeader(http.StatusUnauthorized)
		case q.URL.Path == "/v2/" && q.Header.Get("Authorization") == "":
			w.Header().Set("WWW-Authenticate", `Basic realm="private"`)
			w.WriteHeader(http.StatusUnauthorized)
		default:
			inner.ServeHTTP(w, q)
		}
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return r
}

func (m *podMachine) push(t *testing.T, r *imageRegistry, ref string, img v1.Image) string {
	t.Helper()
	full := r.host + "/" + ref
	parsed, err := name.ParseReference(full)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(parsed, img, remote.WithTransport(m.http.Transport)); err != nil {
		t.Fatal(err)
	}
	return full
}

// image runs `portal image` beside the agent.
func (m *podMachine) image(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out string
	err := m.do(func() (err error) {
		out, err = harness.Run(t.Context(), nil, harness.Portal(), append([]string{"image", "--data-dir", filepath.Join(m.dir, "node")}, args...)...)
		return err
	})
	return out, err
}

func (m *podMachine) events(t *testing.T, pod, reason string) (out []string) {
	t.Helper()
	list, err := m.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod + ",reason=" + reason})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Items {
		out = append(out, e.Message)
	}
	return out
}

// imagePod runs an image as it says itself.
func (m *podMachine) imagePod(name, ref, more string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec:\n  nodeName: %s\n  terminationGracePeriodSeconds: 10\n  containers:\n  - name: c\n    image: %s\n%s\n---\n", name, m.name, ref, more)
}

func waitingFor(reason string) func(*corev1.Pod) string {
	return func(p *corev1.Pod) string {
		if s := p.Status.ContainerStatuses; len(s) == 1 && s[0].State.Waiting != nil && s[0].State.Waiting.Reason == reason {
			return ""
		}
		return "not " + reason
	}
}

// TestNodeImages: Pods run what registries and archives have, as the image says; and what can't be pulled is told and tried again.
func TestNodeImages(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "image")
	r := m.registry(t)
	web := m.push(t, r, "team/web:1", shellImage(t, "hello from an image"))
	probe := "    readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}"
	begin := time.Now()
	m.kubectl(t, m.imagePod("web", web, probe), "apply")
	pod := m.pod(t, "web", 60*time.Second, podReady)
	t.Logf("pulled and ready %s after kubectl was started", time.Since(begin).Round(time.Millisecond))
	if got, err := m.get("http://" + net.JoinHostPort(pod.Status.PodIP, "8080")); err != nil || got != "hello from an image" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := m.get("http://" + net.JoinHostPort(pod.Status.PodIP, "8080") + "/old"); err != nil || got == "x" {
		t.Errorf("a file that a layer removed: %q, %v", got, err)
	}
	if id := pod.Status.ContainerStatuses[0].ImageID; !strings.HasPrefix(id, r.host+"/team/web@sha256:") {
		t.Errorf("imageID %q", id)
	}
	for _, reason := range []string{"Pulling", "Pulled", "Started"} {
		if len(m.events(t, "web", reason)) != 1 {
			t.Errorf("events %s: %q", reason, m.events(t, "web", reason))
		}
	}
	m.imageUser(t, web)
	m.imageListed(t, web)
	m.imagePolicies(t, r, web)
	m.imageFailures(t, r)
	m.imageArchive(t)

	// It ends by the signal that its image names.
	watch, err := m.client.CoreV1().Pods("default").Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=web"})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	m.kubectl(t, "", "delete", "pod", "web", "--wait=false")
	quit := false
	for e := range watch.ResultChan() {
		if p, ok := e.Object.(*corev1.Pod); ok {
			for _, c := range p.Status.ContainerStatuses {
				quit = quit || c.State.Terminated != nil && strings.Contains(c.State.Terminated.Message, "quit")
			}
		}
		if e.Type == "DELETED" {
			break
		}
	}
	if !quit {
		t.Error("SIGQUIT, the image's own signal, did not end it")
	}
	m.kubectl(t, "", "delete", "pod", "--all")
	m.nothingLeft(t)
}

// imageUser: the image's user, environment and folder are the container's.
func (m *podMachine) imageUser(t *testing.T, ref string) {
	t.Helper()
	m.kubectl(t, m.imagePod("who", ref, `    args: ["echo $(/bin/busybox id -u):$(/bin/busybox id -g) $FROM_IMAGE $PWD > /dev/termination-log; exit 0"]`+"\n  restartPolicy: Never"), "apply")
	m.pod(t, "who", 30*time.Second, func(p *corev1.Pod) string {
		if s := p.Status.ContainerStatuses; len(s) == 1 && s[0].State.Terminated != nil {
			if got := strings.TrimSpace(s[0].State.Terminated.Message); got != "101:102 yes /www" {
				t.Errorf("the container is %q", got)
			}
			return ""
		}
		return "not ended"
	})
}

// imageListed: what is here is listed by the command and by the Node, and what a container has is not removed.
func (m *podMachine) imageListed(t *testing.T, ref string) {
	t.Helper()
	text, err := m.image(t, "ls", "-o", "json")
	var list []struct{ Names []string }
	if err != nil || json.Unmarshal([]byte(text), &list) != nil || len(list) != 1 || list[0].Names[0] != ref {
		t.Errorf("%s, %v", text, err)
	}
	if text, err := m.image(t, "rm", ref); err == nil || !strings.Contains(text, "a container of this node has it") {
		t.Errorf("removed what is used: %s, %v", text, err)
	}
	eventually(t, 30*time.Second, "the image on the Node", func() string {
		node, err := m.client.CoreV1().Nodes().Get(t.Context(), m.name, metav1.GetOptions{})
		if err != nil || len(node.Status.Images) == 0 || !strings.Contains(strings.Join(node.Status.Images[0].Names, " "), ref) || node.Status.Images[0].SizeBytes < 100_000 {
			return fmt.Sprint(node.Status.Images, err)
		}
		return ""
	})
}

// imagePolicies: Always asks the registry, the others don't; Never does not start what is not here.
func (m *podMachine) imagePolicies(t *testing.T, r *imageRegistry, ref string) {
	t.Helper()
	sleep := "    args: [\"exec /bin/busybox sleep 1000\"]\n    imagePullPolicy: "
	before := r.asked.Load()
	m.kubectl(t, m.imagePod("present", ref, sleep+"IfNotPresent")+m.imagePod("never", r.host+"/none:1", sleep+"Never")+m.imagePod("invalid", `"Not/An/Image:!"`, sleep+"Always"), "apply")
	m.pod(t, "present", 30*time.Second, podReady)
	if got := r.asked.Load(); got != before {
		t.Errorf("the registry was asked %d times for what is here", got-before)
	}
	m.pod(t, "never", 30*time.Second, waitingFor("ErrImageNeverPull"))
	m.pod(t, "invalid", 30*time.Second, waitingFor("InvalidImageName"))
	m.kubectl(t, m.imagePod("always", ref, sleep+"Always"), "apply")
	m.pod(t, "always", 30*time.Second, podReady)
	if got := r.asked.Load(); got == before {
		t.Error("the registry was not asked")
	}
}

// imageFailures: a registry that is down, and one that wants credentials, are told and tried again.
func (m *podMachine) imageFailures(t *testing.T, r *imageRegistry) {
	t.Helper()
	private := m.push(t, r, "private/web:1", shellImage(t, "secret"))
	later := m.push(t, r, "later:1", shellImage(t, "later"))
	r.down.Store(true)
	m.kubectl(t, m.imagePod("later", later, ""), "apply")
	m.pod(t, "later", 30*time.Second, waitingFor("ImagePullBackOff"))
	eventually(t, 10*time.Second, "events", func() string {
		if len(m.events(t, "later", "Failed")) == 0 || len(m.events(t, "later", "BackOff")) == 0 {
			return fmt.Sprint(m.events(t, "later", "Failed"), m.events(t, "later", "BackOff"))
		}
		return ""
	})
	r.down.Store(false)
	m.kubectl(t, m.imagePod("refused", private, ""), "apply")
	m.pod(t, "refused", 30*time.Second, waitingFor("ImagePullBackOff"))
	m.kubectl(t, "", "create", "secret", "docker-registry", "login", "--docker-server="+r.host, "--docker-username=me", "--docker-password=word")
	m.kubectl(t, m.imagePod("allowed", private, "  imagePullSecrets: [{name: login}, {name: missing}]"), "apply")
	m.pod(t, "allowed", 30*time.Second, podReady)
	if list := m.events(t, "allowed", "FailedToRetrieveImagePullSecret"); len(list) != 1 || !strings.Contains(list[0], "missing") {
		t.Errorf("events about the missing secret: %q", list)
	}
	m.pod(t, "later", 60*time.Second, podReady)
}

// imageArchive: an image of many layers that is loaded while the agent runs, and the command without an agent's help.
func (m *podMachine) imageArchive(t *testing.T) {
	t.Helper()
	var many []v1.Layer
	for i := range 60 {
		many = append(many, imageLayer(t, map[string]string{"www/": "", fmt.Sprintf("www/file%d", i): fmt.Sprint(i)}, ""))
	}
	tag, err := name.NewTag("loaded.example/web:1")
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "web.tar")
	if err := tarball.WriteToFile(archive, tag, shellImage(t, "many layers", many...)); err != nil {
		t.Fatal(err)
	}
	if text, err := m.image(t, "load", archive); err != nil {
		t.Fatalf("%s, %v", text, err)
	}
	m.kubectl(t, m.imagePod("loaded", "loaded.example/web:1", "    imagePullPolicy: Never\n    readinessProbe: {httpGet: {port: 8080, path: /file59}, periodSeconds: 1}"), "apply")
	m.pod(t, "loaded", 30*time.Second, podReady)
	m.kubectl(t, "", "delete", "pod", "loaded")
	if text, err := m.image(t, "prune"); err != nil || strings.Contains(text, "loaded.example") {
		t.Errorf("%s, %v", text, err)
	}
	if text, err := m.image(t, "rm", "loaded.example/web:1"); err != nil {
		t.Errorf("%s, %v", text, err)
	}
	for _, c := range []struct {
		want string
		args []string
	}{
		{"one argument", []string{"pull"}}, {"no reference", []string{"pull", "Not/An/Image:!"}}, {"no such file", []string{"load", "/nowhere"}},
		{"no tar archive", []string{"load", "/etc/passwd"}}, {"not on this node", []string{"rm", "loaded.example/web:1"}}, {"unknown command", []string{"push"}},
		{"--insecure-registry", []string{"pull", "--insecure-registry", "http://x", "a:1"}}, {"--image-max-size", []string{"pull", "--image-max-size", "lots", "a:1"}},
		{"--auth-file", []string{"pull", "--auth-file", "/nowhere", "a:1"}},
	} {
		if text, err := m.image(t, c.args...); err == nil || !strings.Contains(text, c.want) {
			t.Errorf("%v: %s, %v", c.args, text, err)
		}
	}
}
