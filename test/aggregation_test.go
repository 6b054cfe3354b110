package test

import (
	"bufio"
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
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

const (
	toysGroup = "toys.example.com"
	toysAPI   = "/apis/" + toysGroup + "/v1"
)

// toys is a small API server behind a Service. It believes the request headers of whoever shows a certificate that the cluster says may
// speak for others.
type toys struct {
	t         *testing.T
	authority *x509.CertPool
	names     []string

	mu   sync.Mutex
	toys map[string]map[string]any
	// asked are the users who asked for toys.
	asked []string
	// instead, if set, answers instead.
	instead http.HandlerFunc
}

func (s *toys) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	instead := s.instead
	s.mu.Unlock()
	if instead != nil {
		instead(w, r)
		return
	}
	s.usual(w, r)
}

func (s *toys) usual(w http.ResponseWriter, r *http.Request) {
	if err := s.trusted(r); err != nil {
		http.Error(w, err.Error(), http.StatusUnauthorized)
		return
	}
	answer := func(v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
	resource := []map[string]any{{"name": "toys", "singularName": "toy", "namespaced": true, "kind": "Toy", "verbs": []string{"get", "list", "create", "delete"}}}
	prefix := toysAPI + "/namespaces/shop/toys"
	switch {
	case r.URL.Path == toysAPI:
		answer(map[string]any{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": toysGroup + "/v1", "resources": resource})
	case r.URL.Path == "/openapi/v2":
		answer(map[string]any{"swagger": "2.0", "info": map[string]any{"title": "Toys", "version": "v1"}, "paths": map[string]any{
			toysAPI + "/toys":         map[string]any{"get": map[string]any{"operationId": "listToys", "responses": map[string]any{"200": map[string]any{"description": "OK"}}}},
			"/apis/apps/v1/intruders": map[string]any{"get": map[string]any{"operationId": "intrude", "responses": map[string]any{"200": map[string]any{"description": "OK"}}}},
		}})
	case r.URL.Path == "/openapi/v3":
		answer(map[string]any{"paths": map[string]any{
			toysAPI[1:]:    map[string]any{"serverRelativeURL": "/openapi/v3" + toysAPI + "?hash=ABC"},
			"apis/apps/v1": map[string]any{"serverRelativeURL": "https://elsewhere.example.com/?hash=DEF"},
		}})
	case r.URL.Path == "/openapi/v3"+toysAPI:
		answer(map[string]any{"openapi": "3.0.0", "info": map[string]any{"title": "Toys of " + r.Header.Get("X-Remote-User"), "version": "v1"}})
	case strings.HasPrefix(r.URL.Path, prefix):
		s.serveToys(w, r, strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, prefix), "/"), answer)
	default:
		http.NotFound(w, r)
	}
}

// trusted checks the certificate of the server that passes requests on.
func (s *toys) trusted(r *http.Request) error {
	if len(r.TLS.PeerCertificates) == 0 {
		return fmt.Errorf("no certificate")
	}
	leaf := r.TLS.PeerCertificates[0]
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: s.authority, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return err
	}
	if !slices.Contains(s.names, leaf.Subject.CommonName) {
		return fmt.Errorf("%s may not speak for others", leaf.Subject.CommonName)
	}
	if len(r.Header["X-Remote-User"]) != 1 {
		return fmt.Errorf("users %q", r.Header["X-Remote-User"])
	}
	return nil
}

func (s *toys) serveToys(w http.ResponseWriter, r *http.Request, name string, answer func(any)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	who := r.Header.Get("X-Remote-User") + " of " + strings.Join(r.Header["X-Remote-Group"], ",")
	s.asked = append(s.asked, who)
	if strings.HasSuffix(name, "/connect") {
		echo(s.t, w, r)
		return
	}
	switch {
	case r.Method == http.MethodPost:
		var toy map[string]any
		if err := json.NewDecoder(r.Body).Decode(&toy); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		meta := toy["metadata"].(map[string]any)
		meta["annotations"] = map[string]any{"by": who}
		meta["namespace"] = "shop"
		s.toys[meta["name"].(string)] = toy
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(toy)
	case name == "":
		items := []any{}
		for _, toy := range s.toys {
			items = append(items, toy)
		}
		answer(map[string]any{"kind": "ToyList", "apiVersion": toysGroup + "/v1", "metadata": map[string]any{}, "items": items})
	case s.toys[name] == nil:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":"no such toy"}`)
	default:
		answer(s.toys[name])
	}
}

// echo takes the connection over and sends back what it gets.
func echo(t *testing.T, w http.ResponseWriter, r *http.Request) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		t.Error(err)
		return
	}
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nX-User: %s\r\n\r\n", r.Header.Get("Upgrade"), r.Header.Get("X-Remote-User"))
	go func() {
		defer conn.Close()
		_, _ = io.Copy(conn, buffered)
	}()
}

func (s *toys) answer(instead http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instead = instead
}

func (s *toys) users() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}

// serve serves it with a certificate for a name, and returns the port.
func (s *toys) serve(t *testing.T, name string) (port string, authority []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "toys"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{name},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(s)
	_ = server.Listener.Close()
	if server.Listener, err = net.Listen("tcp", nodeAddress+":0"); err != nil {
		t.Fatal(err)
	}
	server.EnableHTTP2 = true
	server.TLS = &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert,
	}
	server.StartTLS()
	t.Cleanup(func() {
		s.answer(http.NotFound)
		server.CloseClientConnections()
		server.Close()
	})
	_, port, err = net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

const toysService = `apiVersion: v1
kind: Service
metadata: {name: toys, namespace: shop}
spec: {ports: [{name: https, port: 443}]}
`

const toysSlice = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: toys-1, namespace: shop, labels: {kubernetes.io/service-name: toys}}
addressType: IPv4
ports: [{name: https, port: %s}]
endpoints: [{addresses: ["` + nodeAddress + `"], conditions: {ready: true}}]
`

const toysRegistered = `apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: %s}
spec:
  group: %s
  version: %s
  groupPriorityMinimum: 100
  versionPriority: 10
  service: {namespace: shop, name: toys}
  caBundle: %s
`

const toyRights = `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: toys}
rules: [{apiGroups: [toys.example.com], resources: [toys], verbs: [get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: toys}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: toys}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: alice}]
`

// An API server behind a Service is part of the API: found, asked as whoever asks, by those who may, and missed by nobody else when it is
// away or misbehaves.
func TestAPIServiceOfService(t *testing.T) {
	t.Parallel()
	if !inNamespace(t) {
		return
	}
	network(t)
	api := startPortal(t)
	k := newTerminal(t, api, []string{harness.Portal(), "kubectl"})
	available := func() string {
		out, _ := k.try("get", "apiservice", "v1."+toysGroup, "--no-headers")
		return out
	}
	becomes := func(want string) {
		t.Helper()
		waitFor(t, "the APIService is "+want, func() bool { return strings.Contains(available(), want) })
	}

	// What the server serves itself is registered.
	var local string
	waitFor(t, "the server's own group versions are registered", func() bool {
		local = k.run("get", "apiservices")
		return strings.Contains(local, "v1.apps") && strings.Contains(local, "v1.apiextensions.k8s.io") && strings.Contains(local, "v1. ")
	})
	if strings.Contains(local, "False") || !strings.HasPrefix(local, "NAME") || !strings.Contains(local, "Local") || !strings.Contains(local, "AVAILABLE") {
		t.Errorf("own APIServices:\n%s", local)
	}

	server := &toys{t: t, authority: x509.NewCertPool(), toys: map[string]map[string]any{}}
	server.authority.AppendCertsFromPEM([]byte(k.run("get", "configmap", "extension-apiserver-authentication", "-n", "kube-system", "-o", "jsonpath={.data.requestheader-client-ca-file}")))
	if err := json.Unmarshal([]byte(k.run("get", "configmap", "extension-apiserver-authentication", "-n", "kube-system", "-o", "jsonpath={.data.requestheader-allowed-names}")), &server.names); err != nil {
		t.Fatal(err)
	}
	port, authority := server.serve(t, "toys.shop.svc")
	bundle := base64.StdEncoding.EncodeToString(authority)
	k.run("create", "namespace", "shop")

	// Away, for reasons that it says.
	k.run("apply", "-f", k.file("toys.yaml", fmt.Sprintf(toysRegistered, "v1."+toysGroup, toysGroup, "v1", bundle)))
	becomes("False (ServiceNotFound)")
	k.run("apply", "-f", k.file("service.yaml", toysService))
	becomes("False (EndpointsNotFound)")
	k.refused("is not available: EndpointsNotFound", "get", "--raw", toysAPI+"/namespaces/shop/toys")
	k.run("apply", "-f", k.file("slice.yaml", fmt.Sprintf(toysSlice, port)))
	becomes("True")

	// There: found by discovery in both forms, and used as whoever asks.
	waitFor(t, "discovery lists toys", func() bool {
		out, err := k.try("api-resources", "--api-group="+toysGroup, "-o", "name", "--cached=false")
		return err == nil && strings.Contains(out, "toys."+toysGroup)
	})
	if out := k.run("get", "--raw", "/apis"); !strings.Contains(out, `"`+toysGroup+`/v1"`) || !strings.Contains(out, `"apps/v1"`) {
		t.Errorf("/apis is %s", out)
	}
	if out := k.run("get", "--raw", "/apis/"+toysGroup); !strings.Contains(out, `"preferredVersion"`) {
		t.Errorf("/apis/%s is %s", toysGroup, out)
	}
	toy := fmt.Sprintf("apiVersion: %s/v1\nkind: Toy\nmetadata: {name: train, namespace: shop}\n", toysGroup)
	k.run("create", "--validate=false", "-f", k.file("toy.yaml", toy))
	if out := k.run("get", "toys", "-n", "shop", "-o", "jsonpath={.items[*].metadata.annotations.by}"); out != "portal-admin of system:masters,system:authenticated" {
		t.Errorf("the toy was made by %q", out)
	}

	// Who may not is refused here, and the other server never hears of it. Nobody can say that they are somebody else.
	k.refused("forbidden", "get", "toys", "-n", "shop", "--as=alice")
	if slices.ContainsFunc(server.users(), func(who string) bool { return strings.Contains(who, "alice") }) {
		t.Error("a request that is not allowed was passed on")
	}
	k.run("apply", "-f", k.file("rights.yaml", toyRights))
	waitFor(t, "alice may read", func() bool {
		out, err := k.try("get", "toys", "-n", "shop", "--as=alice", "-o", "name")
		return err == nil && strings.Contains(out, "train")
	})
	k.refused("forbidden", "create", "--validate=false", "-f", k.file("toy.yaml", toy), "--as=alice")
	config, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.NextProtos = []string{"http/1.1"} // HTTP/2 has no Connection header
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	spoof, err := http.NewRequest(http.MethodGet, api.URL+toysAPI+"/namespaces/shop/toys", nil)
	if err != nil {
		t.Fatal(err)
	}
	spoof.Header.Set("X-Remote-User", "mallory")
	spoof.Header.Set("X-Remote-Group", "mallorys")
	spoof.Header.Set("Connection", "X-Remote-User, X-Remote-Group")
	if resp, err := client.Do(spoof); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("with headers of one's own: %v %v", resp, err)
	}
	if last := server.users(); last[len(last)-1] != "portal-admin of system:masters,system:authenticated" {
		t.Errorf("a client that says who it is is passed on as %q", last[len(last)-1])
	}
	// The path that was authorized is the one that is passed on.
	dotted, err := http.NewRequest(http.MethodGet, api.URL+toysAPI+"/namespaces/shop/toys", nil)
	if err != nil {
		t.Fatal(err)
	}
	dotted.URL.Opaque = "//" + strings.TrimPrefix(api.URL, "https://") + toysAPI + "/namespaces/other/toys/../../shop/toys"
	if resp, err := client.Do(dotted); err != nil || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a path with ..: %v %v", resp, err)
	}

	checkToysOpenAPI(t, k)
	for _, protocol := range []string{"websocket", "SPDY/3.1"} {
		upgradeThrough(t, config, protocol)
	}
	misbehave(t, k, server, becomes)

	// Away again, and gone: the rest of the API is untouched throughout.
	k.run("delete", "-f", k.file("slice.yaml", fmt.Sprintf(toysSlice, port)))
	becomes("False (EndpointsNotFound)")
	if out := k.run("get", "--raw", "/apis"); !strings.Contains(out, toysGroup) {
		t.Error("a group whose server is away vanishes")
	}
	k.run("get", "deployments", "-A")
	k.run("delete", "apiservice", "v1."+toysGroup)
	waitFor(t, "the group is gone", func() bool {
		out, err := k.try("get", "--raw", "/apis")
		return err == nil && !strings.Contains(out, toysGroup)
	})
	if _, err := k.try("get", "--raw", toysAPI); err == nil {
		t.Error("it is still served")
	}
}

// checkToysOpenAPI looks for the other server's documents, as far as they are about its own group version.
func checkToysOpenAPI(t *testing.T, k *terminalOf) {
	t.Helper()
	var v2 string
	waitFor(t, "OpenAPI v2 has both servers' paths", func() bool {
		out, err := k.try("get", "--raw", "/openapi/v2")
		v2 = out
		return err == nil && strings.Contains(out, toysAPI+"/toys") && strings.Contains(out, "/apis/apps/v1/deployments")
	})
	if strings.Contains(v2, "intruders") {
		t.Error("OpenAPI v2 has paths of another group that the server claims")
	}
	index := k.run("get", "--raw", "/openapi/v3")
	if !strings.Contains(index, "/openapi/v3"+toysAPI+"?hash=ABC") || strings.Contains(index, "elsewhere") || !strings.Contains(index, `"apis/apps/v1"`) {
		t.Errorf("OpenAPI v3 lists %s", index)
	}
	if out := k.run("get", "--raw", "/openapi/v3"+toysAPI); !strings.Contains(out, "Toys of system:aggregator") {
		t.Errorf("the OpenAPI v3 document is %s", out)
	}
}

// upgradeThrough takes a connection over, through the server.
func upgradeThrough(t *testing.T, config *rest.Config, protocol string) {
	t.Helper()
	at, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	secure, err := rest.TLSConfigFor(config)
	if err != nil {
		t.Fatal(err)
	}
	secure.NextProtos = []string{"http/1.1"}
	conn, err := tls.Dial("tcp", at.Host, secure)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	_, err = fmt.Fprintf(conn, "GET %s/namespaces/shop/toys/train/connect HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: %s\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Remote-User: mallory\r\n\r\n", toysAPI, at.Host, protocol)
	if err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(conn)
	resp, err := http.ReadResponse(reader, nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("X-User") != "portal-admin" {
		t.Fatalf("%s: status %d as %q", protocol, resp.StatusCode, resp.Header.Get("X-User"))
	}
	for range 3 {
		_, _ = io.WriteString(conn, "choo-choo\n")
		if line, err := reader.ReadString('\n'); err != nil || line != "choo-choo\n" {
			t.Fatalf("%s: %q %v", protocol, line, err)
		}
	}
}

// misbehave has the other server answer nonsense, hang, send clients elsewhere and claim a built-in group. Nobody else notices.
func misbehave(t *testing.T, k *terminalOf, server *toys, becomes func(string)) {
	t.Helper()
	others := func(when string) {
		t.Helper()
		if out := k.run("get", "--raw", "/apis"); !strings.Contains(out, `"apps/v1"`) {
			t.Errorf("%s: /apis is %s", when, out)
		}
		k.run("get", "deployments", "-A")
		if out := k.run("get", "--raw", "/openapi/v2"); !strings.Contains(out, "/apis/apps/v1/deployments") {
			t.Errorf("%s: OpenAPI v2 lacks deployments", when)
		}
	}
	well := func() {
		t.Helper()
		server.answer(nil)
		becomes("True")
	}
	server.answer(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("\x00\xff{\"kind\": [[[[garbage"))
	})
	becomes("False (FailedDiscoveryCheck)")
	others("garbage")
	well()

	hanging := make(chan struct{})
	server.answer(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hanging:
		case <-r.Context().Done():
		}
	})
	becomes("False (FailedDiscoveryCheck)")
	others("hangs")
	close(hanging)
	well()

	// A redirect is not passed on: clients would follow it with their credentials.
	server.answer(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/namespaces/") {
			http.Redirect(w, r, "https://elsewhere.example.com/", http.StatusFound)
			return
		}
		server.usual(w, r)
	})
	out, err := k.try("get", "--raw", toysAPI+"/namespaces/shop/toys")
	if err == nil || strings.Contains(out, "elsewhere") || !strings.Contains(out, "redirect") {
		t.Errorf("a redirect: %v %s", err, out)
	}
	well()

	// The group of a built-in resource, in what it says of itself ...
	server.answer(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"apps/v1","resources":[{"name":"deployments","namespaced":true,"kind":"Toy","verbs":["get"]}]}`)
	})
	becomes("False (FailedDiscoveryCheck)")
	others("says that it is apps/v1")
	well()
	// ... and in what an administrator registers: the server's own stays, and is put right.
	bundle := k.run("get", "apiservice", "v1."+toysGroup, "-o", "jsonpath={.spec.caBundle}")
	k.run("apply", "--server-side", "--force-conflicts", "-f", k.file("apps.yaml", fmt.Sprintf(toysRegistered, "v1.apps", "apps", "v1", bundle)))
	others("is registered for apps/v1")
	waitFor(t, "the APIService of a built-in group version is put right", func() bool {
		return strings.Contains(k.run("get", "apiservice", "v1.apps", "--no-headers"), "Local")
	})
	k.run("delete", "apiservice", "v1.apps")
	waitFor(t, "the APIService of a built-in group version comes back", func() bool {
		out, err := k.try("get", "apiservice", "v1.apps", "--no-headers")
		return err == nil && strings.Contains(out, "True")
	})
	others("is no longer registered for apps/v1")
}

// The group versions of custom resources are registered while they are served.
func TestAPIServicesOfCustomResources(t *testing.T) {
	t.Parallel()
	k := newTerminal(t, startPortal(t), []string{harness.Portal(), "kubectl"})
	definition := k.file("crd.yaml", `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.sea.example.com}
spec:
  group: sea.example.com
  scope: Namespaced
  names: {plural: boats, kind: Boat}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
`)
	k.run("apply", "-f", definition)
	waitFor(t, "the group version is registered", func() bool {
		out, err := k.try("get", "apiservice", "v1.sea.example.com", "-o", "jsonpath={.metadata.labels} {.status.conditions[0].reason}")
		return err == nil && strings.Contains(out, `"kube-aggregator.kubernetes.io/automanaged":"true"`) && strings.Contains(out, "Local")
	})
	k.run("delete", "-f", definition)
	waitFor(t, "it goes with the definition", func() bool {
		_, err := k.try("get", "apiservice", "v1.sea.example.com")
		return err != nil
	})
	// What was built in stays as it is, and is not registered twice.
	if out := k.run("get", "apiservice", "v1.apps", "-o", `jsonpath={.metadata.labels.kube-aggregator\.kubernetes\.io/automanaged} {.spec.groupPriorityMinimum} {.spec.versionPriority}`); out != "onstart 17800 15" {
		t.Errorf("v1.apps is %q", out)
	}
	k.refused("spec.groupPriorityMinimum", "create", "--validate=false", "-f", k.file("bad.yaml", "apiVersion: apiregistration.k8s.io/v1\nkind: APIService\nmetadata: {name: v1.x.example.com}\nspec: {group: x.example.com, version: v1, versionPriority: 1}\n"))
}
