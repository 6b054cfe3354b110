package test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"portal/test/harness"
)

// terminalOf runs kubectl with a server, with files that the test writes beside it.
type terminalOf struct {
	t       *testing.T
	env     []string
	kubectl []string
	dir     string
}

func newTerminal(t *testing.T, api *harness.API, kubectl []string) *terminalOf {
	dir := t.TempDir()
	return &terminalOf{t: t, env: []string{"KUBECONFIG=" + api.Kubeconfig, "HOME=" + dir}, kubectl: kubectl, dir: dir}
}

func (k *terminalOf) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(k.t.Context(), 2*time.Minute)
	defer cancel()
	return harness.Run(ctx, k.env, k.kubectl[0], append(k.kubectl[1:len(k.kubectl):len(k.kubectl)], args...)...)
}

// run expects success.
func (k *terminalOf) run(args ...string) string {
	k.t.Helper()
	out, err := k.try(args...)
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

// refused expects a failure that says something.
func (k *terminalOf) refused(says string, args ...string) {
	k.t.Helper()
	out, err := k.try(args...)
	if err == nil {
		k.t.Fatalf("kubectl %s succeeded: %s", strings.Join(args, " "), out)
	}
	if !strings.Contains(out, says) {
		k.t.Errorf("kubectl %s says\n%s\nand not %q", strings.Join(args, " "), out, says)
	}
}

// file writes a file and returns its path.
func (k *terminalOf) file(name, content string) string {
	k.t.Helper()
	path := filepath.Join(k.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		k.t.Fatal(err)
	}
	return path
}

// module is the folder of a module that test/crds requires.
func module(t *testing.T, path string) string {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", path)
	cmd.Dir = filepath.Join(harness.Root(), "test", "crds")
	cmd.Env = append(os.Environ(), "GOFLAGS=")
	out, err := cmd.Output()
	var answer struct{ Dir, Error string }
	if parseErr := json.Unmarshal(out, &answer); parseErr != nil || answer.Dir == "" {
		t.Fatalf("go mod download %s: %v %s", path, err, answer.Error)
	}
	return answer.Dir
}

// The definitions that the Gateway API and cert-manager publish install, validate, default, are explained and applied.
func TestPublishedCustomResources(t *testing.T) {
	t.Parallel()
	gateways := filepath.Join(module(t, "sigs.k8s.io/gateway-api"), "config", "crd", "standard")
	certificates := filepath.Join(module(t, "github.com/cert-manager/cert-manager"), "deploy", "crds")
	for variant, command := range kubectls(t) {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			k := newTerminal(t, startPortal(t), command)
			k.run("create", "namespace", "shop")
			install(k, gateways, "gateway.networking.k8s.io_*s.yaml")
			install(k, certificates, "*.yaml")
			k.run("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
			for _, group := range []string{"gateway.networking.k8s.io", "cert-manager.io", "acme.cert-manager.io"} {
				if out := k.run("api-resources", "--api-group="+group, "-o", "name"); !strings.Contains(out, group) {
					t.Errorf("api-resources lists nothing of %s: %s", group, out)
				}
			}
			t.Run("gateway", func(t *testing.T) { useGatewayAPI(&terminalOf{t, k.env, k.kubectl, k.dir}) })
			t.Run("certificates", func(t *testing.T) { useCertManager(&terminalOf{t, k.env, k.kubectl, k.dir}) })
		})
	}
}

// install applies the definitions among the files of a folder.
func install(k *terminalOf, dir, pattern string) {
	k.t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(paths) < 5 {
		k.t.Fatalf("%s has only %d definitions (%v)", dir, len(paths), err)
	}
	for _, path := range paths {
		if strings.Contains(path, "_vap_") {
			continue
		}
		// They are too large for the annotation of a client-side apply, and their own documentation says so.
		k.run("apply", "--server-side", "-f", path)
	}
}

const (
	goodGateway = `apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: shop, namespace: shop}
spec:
  gatewayClassName: any
  listeners: [{name: http, port: 80, protocol: HTTP}]
`
	goodRoute = `apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: shop, namespace: shop}
spec:
  parentRefs: [{name: shop}]
  rules: [{backendRefs: [{name: web, port: 80}]}]
`
)

func useGatewayAPI(k *terminalOf) {
	k.run("apply", "--server-side", "--field-manager=ours", "-f", k.file("gateway.yaml", goodGateway))
	k.run("apply", "--server-side", "--field-manager=ours", "-f", k.file("route.yaml", goodRoute))
	if got := k.run("get", "httproute", "shop", "-n", "shop", "-o", "jsonpath={.spec.rules[0].matches[0].path.type}"); got != "PathPrefix" {
		k.t.Errorf("the default path match is %q, want PathPrefix", got)
	}
	// A list by key has two owners.
	k.run("apply", "--server-side", "--field-manager=theirs", "-f", k.file("listener.yaml",
		strings.Replace(goodGateway, "{name: http, port: 80, protocol: HTTP}", "{name: alt, port: 8080, protocol: HTTP}", 1)))
	if got := k.run("get", "gateway", "shop", "-n", "shop", "-o", "jsonpath={.spec.listeners[*].name}"); got != "http alt" {
		k.t.Errorf("two appliers made listeners %q, want both", got)
	}
	// Older versions are the same objects.
	if got := k.run("get", "gateways.v1beta1.gateway.networking.k8s.io", "-n", "shop", "-o", "jsonpath={.items[*].apiVersion}"); got != "gateway.networking.k8s.io/v1beta1" {
		k.t.Errorf("as v1beta1 it is %q", got)
	}
	if out := k.run("get", "gateway", "-n", "shop"); !strings.Contains(out, "PROGRAMMED") {
		k.t.Errorf("the columns are not the definition's: %s", out)
	}
	bad := k.file("bad.yaml", strings.Replace(goodGateway, "port: 80,", "port: 80, tls: {mode: Terminate},", 1))
	k.refused("tls must not be specified for protocols ['HTTP', 'TCP', 'UDP']", "apply", "--server-side", "--field-manager=ours", "-f", bad)
	k.refused("spec.listeners[0].port", "apply", "--server-side", "--field-manager=ours", "-f", k.file("port.yaml", strings.Replace(goodGateway, "80", "80000", 1)))
	k.refused(`.spec.listener: field not declared in schema`, "apply", "--server-side", "-f", k.file("field.yaml", strings.Replace(goodGateway, "listeners", "listener", 1)))
	if out := k.run("explain", "httproute.spec.rules.matches.path"); !strings.Contains(out, "value\t<string>") {
		k.t.Errorf("explain: %s", out)
	}
}

func useCertManager(k *terminalOf) {
	const good = `apiVersion: cert-manager.io/v1
kind: Certificate
metadata: {name: shop, namespace: shop}
spec: {secretName: shop-tls, dnsNames: [shop.example.com], issuerRef: {name: ours}}
`
	k.run("apply", "-f", k.file("certificate.yaml", good))
	k.run("apply", "--server-side", "--force-conflicts", "-f", k.file("certificate.yaml", strings.Replace(good, "shop.example", "www.example", 1)))
	if out := k.run("get", "cert", "-n", "shop", "-o", "wide"); !strings.Contains(out, "shop-tls") || !strings.Contains(out, "ISSUER") {
		k.t.Errorf("the columns are not the definition's: %s", out)
	}
	k.refused("spec.secretName: Required value", "apply", "-f", k.file("bad.yaml", strings.Replace(good, "secretName: shop-tls, ", "", 1)))
	k.refused("Unsupported value", "apply", "-f", k.file("usage.yaml", strings.Replace(good, "issuerRef:", "usages: [flying], issuerRef:", 1)))
	k.run("patch", "certificate", "shop", "-n", "shop", "--subresource=status", "--type=merge", "-p", `{"status":{"revision":2}}`)
	if got := k.run("get", "certificate", "shop", "-n", "shop", "-o", "jsonpath={.status.revision} {.metadata.generation}"); got != "2 2" {
		k.t.Errorf("status and generation are %q, want 2 2", got)
	}
	if out := k.run("explain", "certificate.spec.issuerRef"); !strings.Contains(out, "kind\t<string>") {
		k.t.Errorf("explain: %s", out)
	}
}

// webhookServer answers on loopback with a certificate of its own, and returns its address and the authority to trust.
func webhookServer(t *testing.T, handler http.Handler) (url string, authority []byte) {
	t.Helper()
	return webhookServerAt(t, "127.0.0.1:0", handler)
}

// webhookServerAt is webhookServer at an address. Its certificate is also that of the Services hook and away in the namespace hooks.
func webhookServerAt(t *testing.T, address string, handler http.Handler) (url string, authority []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "webhook"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"hook.hooks.svc", "away.hooks.svc"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(handler)
	_ = server.Listener.Close()
	if server.Listener, err = net.Listen("tcp", address); err != nil {
		t.Fatal(err)
	}
	server.EnableHTTP2 = true
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// converter is a webhook that keeps a temperature in v1 as "21C" and in v2 as a number.
type converter struct{ asked atomic.Int64 }

func (c *converter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.asked.Add(1)
	var review apiextensionsv1.ConversionReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	answer := &apiextensionsv1.ConversionResponse{UID: review.Request.UID, Result: metav1.Status{Status: metav1.StatusSuccess}}
	for _, raw := range review.Request.Objects {
		obj := &unstructured.Unstructured{}
		if err := obj.UnmarshalJSON(raw.Raw); err != nil {
			answer.Result = metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
			break
		}
		obj.SetAPIVersion(review.Request.DesiredAPIVersion)
		spec, _, _ := unstructured.NestedMap(obj.Object, "spec")
		switch value := spec["temperature"].(type) {
		case string:
			var degrees int64
			_, _ = fmt.Sscanf(value, "%dC", &degrees)
			spec["temperature"] = degrees
		case int64:
			spec["temperature"] = fmt.Sprintf("%dC", value)
		}
		obj.Object["spec"] = spec
		answer.ConvertedObjects = append(answer.ConvertedObjects, runtime.RawExtension{Object: obj})
	}
	review.Request, review.Response = nil, answer
	_ = json.NewEncoder(w).Encode(review)
}

const roomsDefinition = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: rooms.house.example.com}
spec:
  group: house.example.com
  scope: Namespaced
  names: {plural: rooms, singular: room, kind: Room, listKind: RoomList}
  conversion:
    strategy: Webhook
    webhook: {conversionReviewVersions: [v1], clientConfig: {url: %s/convert, caBundle: %s}}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {temperature: {type: string}}}}}}}
  - {name: v2, served: true, storage: false, schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {temperature: {type: integer}}}}}}}
`

// A webhook converts between versions: on writes, reads, lists and watches. Custom resources outlive the server, are
// collected with their owners, and go with their namespace.
func TestCustomResourcesLive(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	dir := t.TempDir()
	port := harness.FreePort()
	api, err := harness.StartPortalAt(dir, port)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { api.Kill() })
	k := newTerminal(t, api, []string{harness.Portal(), "kubectl"})
	hook := &converter{}
	url, authority := webhookServer(t, hook)
	k.run("apply", "-f", k.file("rooms.yaml", fmt.Sprintf(roomsDefinition, url, base64.StdEncoding.EncodeToString(authority))))
	k.run("wait", "--for=condition=Established", "crd/rooms.house.example.com", "--timeout=60s")
	k.run("create", "namespace", "home")
	k.run("apply", "-f", k.file("kitchen.yaml", "apiVersion: house.example.com/v2\nkind: Room\nmetadata: {name: kitchen, namespace: home}\nspec: {temperature: 21}\n"))
	expect := func(version, want string) {
		t.Helper()
		if got := k.run("get", "rooms."+version+".house.example.com", "-n", "home", "-o", "jsonpath={.items[*].spec.temperature}"); got != want {
			t.Errorf("in %s the temperature is %q, want %q", version, got, want)
		}
	}
	expect("v1", "21C")
	expect("v2", "21")
	if hook.asked.Load() == 0 {
		t.Error("the webhook was never asked")
	}
	k.refused("spec.temperature", "apply", "-f", k.file("bad.yaml", "apiVersion: house.example.com/v2\nkind: Room\nmetadata: {name: bad, namespace: home}\nspec: {temperature: warm}\n"))

	if err := api.Stop(30 * time.Second); err != nil {
		t.Fatal(err)
	}
	if api, err = harness.StartPortalAt(dir, port); err != nil {
		t.Fatal(err)
	}
	expect("v1", "21C") // as soon as the server says that it is ready
	expect("v2", "21")

	uid := k.run("get", "room", "kitchen", "-n", "home", "-o", "jsonpath={.metadata.uid}")
	k.run("apply", "-f", k.file("owned.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: owned\n  namespace: home\n  ownerReferences: [{apiVersion: house.example.com/v1, kind: Room, name: kitchen, uid: "+uid+"}]\n"))
	k.run("delete", "room", "kitchen", "-n", "home")
	waitFor(t, "the garbage collector deletes what a custom resource owned", func() bool {
		out, err := k.try("get", "configmap", "owned", "-n", "home")
		return err != nil && strings.Contains(out, "NotFound")
	})
	k.run("apply", "-f", filepath.Join(k.dir, "kitchen.yaml"))
	k.run("delete", "namespace", "home", "--timeout=60s")
	if out := k.run("get", "rooms", "-A", "-o", "name"); strings.Contains(out, "kitchen") {
		t.Errorf("left of the namespace: %s", out)
	}
}
