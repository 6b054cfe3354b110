package test

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
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

// certificatePod shows its certificate and whom it trusts by HTTP.
const certificatePod = `apiVersion: v1
kind: Pod
metadata: {name: identity}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 1
  volumes:
  - name: tls
    projected:
      sources:
      - {clusterTrustBundle: {name: anchors, path: ca.pem}}
      - {clusterTrustBundle: {signerName: example.com/none, labelSelector: {}, optional: true, path: none.pem}}
      - {podCertificate: {signerName: example.com/signer, keyType: ECDSAP256, credentialBundlePath: tls/both.pem, userAnnotations: {example.com/for: test}}}
  containers:
  - name: c
    image: host
    command: [python3, -m, http.server, "8080", -d, /tls]
    volumeMounts: [{name: tls, mountPath: /tls}]
    readinessProbe: {httpGet: {port: 8080, path: /ca.pem}, periodSeconds: 1}
`

// TestNodeCertificates: a Pod waits for a ClusterTrustBundle and for the signer of its certificate. The bundle's file follows it, and an agent
// that is started anew asks for no other certificate.
func TestNodeCertificates(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "certs")
	m.kubectl(t, strings.ReplaceAll(certificatePod, "NODE", m.name), "apply")
	waits := func(what string) {
		t.Helper()
		eventually(t, 20*time.Second, "an event about "+what, func() string {
			if list := m.events(t, "identity", "FailedMount"); !strings.Contains(fmt.Sprint(list), what) {
				return fmt.Sprint(list)
			}
			return ""
		})
	}
	waits("anchors")
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	authority := func(name string) (*x509.Certificate, string) {
		template := &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		}
		der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
		if err != nil {
			t.Fatal(err)
		}
		return template, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	}
	ca, anchor := authority("first")
	bundles := m.client.CertificatesV1().ClusterTrustBundles()
	bundle, err := bundles.Create(t.Context(), &certificatesv1.ClusterTrustBundle{ObjectMeta: metav1.ObjectMeta{Name: "anchors"}, Spec: certificatesv1.ClusterTrustBundleSpec{TrustBundle: "text\n" + anchor}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	waits("example.com/signer")

	requests := m.client.CertificatesV1().PodCertificateRequests("default")
	list, err := requests.List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].Spec.UnverifiedUserAnnotations["example.com/for"] != "test" {
		t.Fatalf("requests: %+v, %v", list, err)
	}
	asked := &list.Items[0]
	stub, err := x509.ParseCertificateRequest(asked.Spec.StubPKCS10Request)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now().Truncate(time.Second)
	end := begin.Add(2 * time.Hour)
	leaf, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: begin, NotAfter: end}, ca, stub.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	chain := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf}))
	asked.Status = certificatesv1.PodCertificateRequestStatus{
		Conditions:       []metav1.Condition{{Type: certificatesv1.PodCertificateRequestConditionTypeIssued, Status: metav1.ConditionTrue, Reason: "Issued", LastTransitionTime: metav1.Now()}},
		CertificateChain: chain, NotBefore: ptr.To(metav1.NewTime(begin)), NotAfter: ptr.To(metav1.NewTime(end)), BeginRefreshAt: ptr.To(metav1.NewTime(begin.Add(time.Hour))),
	}
	if _, err := requests.UpdateStatus(t.Context(), asked, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod := m.pod(t, "identity", 30*time.Second, podReady)
	read := func(path string) string {
		text, err := m.get("http://" + net.JoinHostPort(pod.Status.PodIP, "8080") + "/" + path)
		if err != nil {
			return err.Error()
		}
		return text
	}
	if got := read("ca.pem"); got != anchor || read("none.pem") != "" {
		t.Errorf("ca.pem: %s\nnone.pem: %s", got, read("none.pem"))
	}
	both := read("tls/both.pem")
	if _, err := tls.X509KeyPair([]byte(both), []byte(both)); err != nil || !strings.HasPrefix(both, "-----BEGIN PRIVATE KEY-----\n") || !strings.HasSuffix(both, "\n"+chain) {
		t.Errorf("the Pod's certificate is not what was issued: %v", err)
	}

	m.agent.Kill()
	_, bundle.Spec.TrustBundle = authority("second")
	if _, err := bundles.Update(t.Context(), bundle, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	m.start(t)
	eventually(t, 20*time.Second, "the bundle to follow", func() string {
		if got := read("ca.pem"); got != bundle.Spec.TrustBundle {
			return got
		}
		return ""
	})
	if read("tls/both.pem") != both {
		t.Error("a new agent replaced the certificate without need")
	}
	if list, err := requests.List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) != 1 {
		t.Errorf("a new agent asked for another certificate: %v", err)
	}
	m.kubectl(t, "", "delete", "pod", "--all")
	m.nothingLeft(t)
}

// envFilePod has variables from files that its init container writes, in memory and on the disk.
const envFilePod = `apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  nodeName: NODE
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  volumes: [{name: disk, emptyDir: {}}, {name: memory, emptyDir: {medium: Memory}}]
  initContainers:
  - name: writes
    image: host
    command: [sh, -c, "echo \"A='one' # first\" >/disk/env; echo \"B='two\nlines'\" >/memory/env; ln -s /etc/hostname /disk/link"]
    volumeMounts: [{name: disk, mountPath: /disk}, {name: memory, mountPath: /memory}]
  containers:
  - name: c
    image: host
    command: [sh, -c, 'printf "%s,%s,%s" "$A" "$B" "${C-unset}" >/dev/termination-log']
    env:
    - {name: A, valueFrom: {fileKeyRef: {volumeName: disk, path: PATH, key: A}}}
    - {name: B, valueFrom: {fileKeyRef: {volumeName: memory, path: env, key: B}}}
    - {name: C, valueFrom: {fileKeyRef: {volumeName: memory, path: none, key: C, optional: true}}}
`

// TestNodeEnvFiles: containers get variables from files that others wrote, and don't start where one is missing or leads elsewhere.
func TestNodeEnvFiles(t *testing.T) {
	t.Parallel()
	m := newPodMachine(t, "envfiles")
	for name, path := range map[string]string{"good": "env", "missing": "none", "link": "link"} {
		m.kubectl(t, strings.NewReplacer("NAME", name, "NODE", m.name, "PATH", path).Replace(envFilePod), "apply")
	}
	good := m.pod(t, "good", 30*time.Second, func(p *corev1.Pod) string {
		if p.Status.Phase != corev1.PodSucceeded {
			return "it has not ended"
		}
		return ""
	})
	if got := good.Status.ContainerStatuses[0].State.Terminated.Message; got != "one,two\nlines,unset" {
		t.Errorf("variables: %q", got)
	}
	for name, want := range map[string]string{"missing": `"none" not found`, "link": "escapes"} {
		p := m.pod(t, name, 30*time.Second, func(p *corev1.Pod) string {
			if len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].State.Waiting != nil && p.Status.ContainerStatuses[0].State.Waiting.Reason == "CreateContainerConfigError" {
				return ""
			}
			return "its container is not refused"
		})
		if message := p.Status.ContainerStatuses[0].State.Waiting.Message; !strings.Contains(message, "env A: ") || !strings.Contains(message, want) {
			t.Errorf("%s: %q", name, message)
		}
		eventually(t, 20*time.Second, "an event about "+name, func() string {
			if list := fmt.Sprint(m.events(t, name, "Failed")); !strings.Contains(list, want) {
				return list
			}
			return ""
		})
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
