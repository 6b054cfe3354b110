package test

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// volumePod shows its volumes' files by HTTP.
const volumePod = `apiVersion: v1
kind: Pod
metadata: {name: NAME, labels: {app: files}, annotations: {note: first}}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 1
  volumes:
  - {name: config, configMap: {name: settings}}
  - {name: hidden, secret: {secretName: keys, optional: true}}
  - {name: about, downwardAPI: {items: [{path: note, fieldRef: {fieldPath: "metadata.annotations['note']"}}]}}
  - name: all
    projected:
      sources:
      - {configMap: {name: settings, items: [{key: colour, path: deep/colour}]}}
      - {serviceAccountToken: {path: token, expirationSeconds: 600}}
  containers:
  - name: c
    image: host
    command: [python3, -m, http.server, "8080", -d, /files]
    volumeMounts:
    - {name: config, mountPath: /files/config}
    - {name: hidden, mountPath: /files/hidden}
    - {name: about, mountPath: /files/about}
    - {name: all, mountPath: /files/all}
    - {name: config, mountPath: /files/fixed, subPath: colour}
    readinessProbe: {httpGet: {port: 8080, path: /config/colour}, periodSeconds: 1}
`

// TestNodeVolumesFollow: a Pod waits for what its volumes need, and their files change with what they come from while it runs, also
// after the agent was replaced.
func TestNodeVolumesFollow(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "volumes")
	for i := range 3 {
		m.kubectl(t, strings.NewReplacer("NAME", fmt.Sprint("files-", i), "NODE", m.name).Replace(volumePod), "apply")
	}
	eventually(t, 20*time.Second, "an event about the missing ConfigMap", func() string {
		if list := m.events(t, "files-0", "FailedMount"); len(list) == 0 || !strings.Contains(list[0], "settings") {
			return fmt.Sprint(list)
		}
		return ""
	})
	time.Sleep(2500 * time.Millisecond) // the next try would be seconds away
	configMaps := m.client.CoreV1().ConfigMaps("default")
	if _, err := configMaps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "settings"}, Data: map[string]string{"colour": "red", "size": "1"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	pod := m.pod(t, "files-0", 20*time.Second, podReady)
	t.Logf("ready %s after the ConfigMap was created", time.Since(begin).Round(time.Millisecond))
	read := func(path string) string {
		text, err := m.get("http://" + net.JoinHostPort(pod.Status.PodIP, "8080") + "/" + path)
		if err != nil {
			return err.Error()
		}
		return text
	}
	becomes := func(path, want string) {
		t.Helper()
		took := eventually(t, 10*time.Second, path, func() string {
			if got := read(path); got != want {
				return fmt.Sprintf("%q, want %q\n%s", got, want, m.agent.Tail())
			}
			return ""
		})
		t.Logf("%s followed within %s", path, took.Round(time.Millisecond))
	}
	set := func(colour string) {
		t.Helper()
		if _, err := configMaps.Patch(t.Context(), "settings", types.MergePatchType, []byte(`{"data":{"colour":"`+colour+`","size":null,"more":"yes"}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	becomes("config/colour", "red")
	becomes("config/size", "1")
	token := read("all/token")
	if strings.Count(token, ".") != 2 {
		t.Errorf("token %.20q", token)
	}
	set("blue")
	becomes("config/colour", "blue")
	becomes("config/more", "yes")
	becomes("all/deep/colour", "blue")
	if text := read("config/size"); !strings.Contains(text, "404") {
		t.Errorf("a key that is gone: %q", text)
	}
	if got := read("fixed"); got != "red" {
		t.Errorf("a subPath changed: %q", got)
	}
	if _, err := m.client.CoreV1().Secrets("default").Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "keys"}, Data: map[string][]byte{"key": []byte("k")}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	becomes("hidden/key", "k")
	m.kubectl(t, "", "annotate", "pod", "files-0", "note=second", "--overwrite")
	becomes("about/note", "second")
	if again := read("all/token"); again != token {
		t.Error("the token was replaced without need")
	}

	m.agent.Kill()
	set("green")
	m.start(t)
	becomes("config/colour", "green")
	if again := read("all/token"); again != token {
		t.Error("a new agent replaced the token without need")
	}
	if got := read("fixed"); got != "red" {
		t.Errorf("a subPath changed: %q", got)
	}
	m.kubectl(t, "", "delete", "pod", "--all")
	m.nothingLeft(t)
}

// TestNodeEviction: Pods that take more of the disk than they may are ended, and what they took is free again.
func TestNodeEviction(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "evict")
	pod := func(name, volumes, container, script string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec:\n  nodeName: %s\n  terminationGracePeriodSeconds: 30\n  volumes: [%s]\n  containers:\n  - {name: c, image: host, command: [sh, -c, %q], %s}\n---\n",
			name, m.name, volumes, script+"; sleep 1000", container)
	}
	m.kubectl(t, pod("volume", "{name: v, emptyDir: {sizeLimit: 1Mi}}", "volumeMounts: [{name: v, mountPath: /v}]", "head -c 3000000 /dev/zero > /v/file")+
		pod("layer", "", "resources: {limits: {ephemeral-storage: 1Mi}}", "head -c 3000000 /dev/zero > /opt/file")+
		pod("good", "{name: v, emptyDir: {sizeLimit: 10Mi}}", "volumeMounts: [{name: v, mountPath: /v}], resources: {limits: {ephemeral-storage: 20Mi}}", "head -c 3000000 /dev/zero > /v/file")+
		pod("memory", "{name: v, emptyDir: {medium: Memory}}", "volumeMounts: [{name: v, mountPath: /v}], resources: {limits: {memory: 32Mi}}", "df -k /v | tail -1 > /dev/termination-log; exit 0"), "apply")
	for name, want := range map[string]string{"volume": `"v"`, "layer": "ephemeral-storage"} {
		p := m.pod(t, name, 40*time.Second, func(p *corev1.Pod) string {
			if p.Status.Phase != corev1.PodFailed {
				return "not failed"
			}
			return ""
		})
		if p.Status.Reason != "Evicted" || !strings.Contains(p.Status.Message, want) {
			t.Errorf("%s: %s: %s", name, p.Status.Reason, p.Status.Message)
		}
		if len(m.events(t, name, "Evicted")) != 1 {
			t.Errorf("%s: events %q", name, m.events(t, name, "Evicted"))
		}
	}
	m.pod(t, "memory", 10*time.Second, func(p *corev1.Pod) string {
		s := p.Status.ContainerStatuses
		if len(s) == 0 || s[0].LastTerminationState.Terminated == nil && s[0].State.Terminated == nil {
			return "not ended"
		}
		last := s[0].LastTerminationState.Terminated
		if last == nil {
			last = s[0].State.Terminated
		}
		if !strings.Contains(last.Message, " 32768 ") {
			return "the volume in memory is not bounded by the Pod's memory: " + last.Message
		}
		return ""
	})
	m.pod(t, "good", time.Second, podReady)
	m.kubectl(t, "", "delete", "pod", "--all")
	m.nothingLeft(t)
}
