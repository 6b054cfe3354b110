package apiserver

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// start runs a server in this process until the test ends.
func start(t testing.TB, opts Options) *Server {
	t.Helper()
	s, stop := startStoppable(t, opts)
	t.Cleanup(stop)
	return s
}

// startStoppable is start for a test that ends the server itself, or has something done before it runs.
func startStoppable(t testing.TB, opts Options, prepare ...func(*Server)) (*Server, func()) {
	t.Helper()
	s, err := New(context.Background(), opts)
	if err != nil {
		t.Fatal(err)
	}
	for _, do := range prepare {
		do(s)
	}
	ctx, stop := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- s.Run(ctx, Hooks{
			Ready: func(context.Context) error { close(ready); return nil },
			Work:  func(ctx context.Context) error { <-ctx.Done(); return nil },
		})
	}()
	end := func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	return s, end
}

// testOptions keep a server's files in a folder of the test's.
func testOptions(t testing.TB) Options {
	opts := DefaultOptions()
	opts.DataDir = t.TempDir()
	opts.Listen = "127.0.0.1:0"
	return opts
}

// inProcess runs a server and returns what answers requests.
func inProcess(t testing.TB) func(method, path, contentType string, body []byte) *httptest.ResponseRecorder {
	t.Helper()
	s := start(t, testOptions(t))
	return func(method, path, contentType string, body []byte) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, bytes.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+s.loopback.BearerToken)
		r.Header.Set("Content-Type", contentType)
		w := httptest.NewRecorder()
		s.generic.Handler.ServeHTTP(w, r)
		return w
	}
}

const (
	servicesPath = "/api/v1/namespaces/default/services"
	strategic    = "application/strategic-merge-patch+json"
)

// requests are the ways in which a body reaches a Service.
var requests = []struct{ method, path, contentType string }{
	{http.MethodPost, servicesPath, "application/json"},
	{http.MethodPost, servicesPath, "application/yaml"},
	{http.MethodPost, servicesPath, "application/vnd.kubernetes.protobuf"},
	{http.MethodPut, servicesPath + "/s", "application/json"},
	{http.MethodPatch, servicesPath + "/s", "application/merge-patch+json"},
	{http.MethodPatch, servicesPath + "/s", "application/strategic-merge-patch+json"},
	{http.MethodPatch, servicesPath + "/s", "application/json-patch+json"},
	{http.MethodPatch, servicesPath + "/s?fieldManager=f&force=true", "application/apply-patch+yaml"},
	{http.MethodPatch, servicesPath + "/s/status", "application/merge-patch+json"},
	{http.MethodDelete, servicesPath + "/s", "application/json"},
}

// FuzzRequest sends whatever a stranger may send to a real server: it never panics and never answers 5xx.
func FuzzRequest(f *testing.F) {
	whole := `{"apiVersion":"v1","kind":"Service","metadata":{"name":"s"},"spec":{"type":"LoadBalancer","ports":[{"name":"a","port":80,` +
		`"targetPort":"web","nodePort":30080},{"name":"b","port":80,"protocol":"UDP"}],"ipFamilyPolicy":"PreferDualStack","externalTrafficPolicy":"Local",` +
		`"sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":10}},"loadBalancerSourceRanges":["10.0.0.0/8"]}}`
	for i := range requests {
		f.Add(byte(i), []byte(whole))
		f.Add(byte(i), []byte(`{"spec":{"type":"ExternalName","externalName":"a.b","ports":null}}`))
		f.Add(byte(i), []byte(`[{"op":"replace","path":"/spec/ports/0/nodePort","value":-1}]`))
		f.Add(byte(i), []byte(`{"spec":{"ports":[null,{"name":"x"}],"$patch":"merge"},"metadata":{"$deleteFromPrimitiveList/finalizers":["a"]}}`))
		f.Add(byte(i), []byte("k8s\x00\n\r\n\x02v1\x12\x07Service\x12\x05\n\x03\n\x01s"))
		f.Add(byte(i), []byte("apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {clusterIP: None, clusterIPs: [None, None]}\n"))
	}
	send := inProcess(f)
	f.Fuzz(func(t *testing.T, which byte, body []byte) {
		r := requests[int(which)%len(requests)]
		if r.method != http.MethodPost { // mostly it is there still, and this a conflict
			send(http.MethodPost, servicesPath, "application/json", []byte(whole))
		}
		if w := send(r.method, r.path, r.contentType, body); w.Code >= 500 {
			t.Fatalf("%s %s answers %d to\n%q\n%s", r.method, r.path, w.Code, body, w.Body)
		}
	})
}

// TestMistakesAreTheUsers demands a 4xx where the library by itself answers 500.
func TestMistakesAreTheUsers(t *testing.T) {
	send := inProcess(t)
	for _, c := range []struct {
		name, method, path, contentType, body string
		want                                  int
	}{
		{
			"apply with the same port twice", http.MethodPatch, servicesPath + "/s?fieldManager=m", "application/apply-patch+yaml",
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":"s"},"spec":{"ports":[{"port":443,"name":"a"},{"port":443,"name":"b"}]}}`, 400,
		},
		{"a list's element without its key", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"ports":[{"name":"x"}]}}`, 400},
		{"null in a list", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"ports":[null]}}`, 400},
		{"a number in a list", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"ports":[1]}}`, 400},
		{"a number for an object", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":1}`, 422},
		{"a number for a list", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"ports":1}}`, 422},
		{"an object for a list", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"ports":{"port":1}}}`, 422},
		{"a directive that there is not", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"$patch":"melt"}}`, 400},
		{"a directive of a wrong type", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"$patch":1}}`, 400},
		{"keys to retain that are no list", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"$retainKeys":1}}`, 400},
		{"an order that is no list", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"$setElementOrder/ports":1}}`, 400},
		{"an order without the key", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"$setElementOrder/ports":[{"a":1}]}}`, 400},
		{"an order that is another", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"$setElementOrder/ports":[{"port":1}],"ports":[{"port":2}]}}`, 400},
		{"a field that there is not, with a list", http.MethodPatch, servicesPath + "/kubernetes", strategic, `{"spec":{"nope":[{"a":1}]}}`, 200},
		{"not an object", http.MethodPost, servicesPath, "application/json", `[]`, 400},
		{"protobuf that is none", http.MethodPost, servicesPath, "application/vnd.kubernetes.protobuf", "k8s\x00garbage", 400},
		{
			"an object as it was read", http.MethodPost, servicesPath, "application/json",
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":"s","resourceVersion":"5"},"spec":{"ports":[{"port":80}]}}`, 400,
		},
		{"a JSON patch of nothing", http.MethodPatch, servicesPath + "/kubernetes", "application/json-patch+json", `[{"op":"remove","path":"/spec/nope/0"}]`, 422},
	} {
		if w := send(c.method, c.path, c.contentType, []byte(c.body)); w.Code != c.want {
			t.Errorf("%s: %d, want %d: %s", c.name, w.Code, c.want, strings.TrimSpace(w.Body.String()))
		}
	}
}

// TestNamesThatArePaths: what leads out of its place, however it is written, is nothing that the API has.
func TestNamesThatArePaths(t *testing.T) {
	send := inProcess(t)
	const namespaced = "/api/v1/namespaces/%s/"
	configMap := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"}}`
	for _, name := range []string{"%2e", "%2e%2e", "%2E.", "%2e%2e%2fkube-system", "a%2f%2e%2e"} {
		in := strings.ReplaceAll(namespaced, "%s", name)
		for _, c := range []struct{ method, path, contentType, body string }{
			{http.MethodGet, in + "pods", "", ""},
			{http.MethodGet, in + "pods?watch=1", "", ""},
			{http.MethodGet, in + "pods/x", "", ""},
			{http.MethodGet, in + "pods/x/log", "", ""},
			{http.MethodGet, in + "services/x/proxy/", "", ""},
			{http.MethodGet, "/api/v1/watch/namespaces/" + name + "/pods", "", ""},
			{http.MethodPost, in + "configmaps", "application/json", configMap},
			{http.MethodPost, in + "pods/x/exec?command=true&stdout=1", "", ""},
			{http.MethodPatch, in + "configmaps/x", "application/merge-patch+json", "{}"},
			{http.MethodPatch, in + "configmaps/x?fieldManager=f", "application/apply-patch+yaml", configMap},
			{http.MethodPut, in + "configmaps/x", "application/json", configMap},
			{http.MethodDelete, in + "configmaps/x", "application/json", "{}"},
			{http.MethodDelete, in + "configmaps", "application/json", "{}"},
			{http.MethodGet, "/api/v1/namespaces/default/configmaps/" + name, "", ""},
			{http.MethodDelete, "/api/v1/nodes/" + name, "application/json", "{}"},
			{http.MethodGet, "/api/v1/namespaces/" + name, "", ""},
		} {
			if w := send(c.method, c.path, c.contentType, []byte(c.body)); w.Code != http.StatusBadRequest && w.Code != http.StatusNotFound && w.Code != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d: %s", c.method, c.path, w.Code, strings.TrimSpace(w.Body.String()))
			}
		}
	}
}
