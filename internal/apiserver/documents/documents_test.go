package documents

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"github.com/emicklei/go-restful/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/endpoints/openapi"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler3"

	generated "portal/internal/apiserver/openapi"
)

// api is a small API whose documents are served.
type api struct {
	http.Handler
	*Documents
	custom atomic.Pointer[[]*apiextensionsv1.CustomResourceDefinition]
	// builds counts how often all schemas were made, and beforeBuild is called then.
	builds      atomic.Int32
	beforeBuild func()
}

func newAPI(t *testing.T) *api {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(appsv1.AddToScheme(scheme), corev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	a := &api{beforeBuild: func() {}}
	a.define()
	definitions := func(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
		a.builds.Add(1)
		a.beforeBuild()
		return generated.GetOpenAPIDefinitions(ref)
	}
	namer := openapi.NewDefinitionNamer(scheme)
	v2, v3 := genericserver.DefaultOpenAPIConfig(definitions, namer), genericserver.DefaultOpenAPIV3Config(definitions, namer)
	v3.Definitions = nil
	v2.Info.Version, v3.Info.Version = "v1", "v1"
	a.builds.Store(0)
	services := []*restful.WebService{
		service("/apis/apps/v1", "deployments", appsv1.Deployment{}), service("/api/v1", "services", corev1.Service{}),
	}
	a.Documents = New(Sources{
		Services: func() []*restful.WebService { return services },
		V2:       v2, V3: v3,
		Custom: func() []*apiextensionsv1.CustomResourceDefinition { return *a.custom.Load() },
	})
	paths := mux.NewPathRecorderMux("test")
	a.Install(paths)
	a.Handler = paths
	return a
}

func service(root, resource string, sample any) *restful.WebService {
	out := new(restful.WebService).Path(root)
	nothing := func(*restful.Request, *restful.Response) {}
	return out.Route(out.GET("/"+resource).Operation("list"+resource).To(nothing).Returns(http.StatusOK, "OK", sample).Produces(jsonType))
}

func (a *api) define(definitions ...*apiextensionsv1.CustomResourceDefinition) {
	a.custom.Store(&definitions)
}

// ask asks with headers that are given as pairs.
func (a *api) ask(url string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, url, nil)
	for pair := range slices.Chunk(headers, 2) {
		r.Header.Set(pair[0], pair[1])
	}
	w := httptest.NewRecorder()
	a.ServeHTTP(w, r)
	return w
}

// index maps the documents of version 3 to their addresses.
func (a *api) index(t *testing.T) map[string]string {
	t.Helper()
	w := a.ask("/openapi/v3")
	var index handler3.OpenAPIV3Discovery
	if err := json.Unmarshal(w.Body.Bytes(), &index); err != nil || w.Code != http.StatusOK {
		t.Fatal(w.Code, err)
	}
	out := map[string]string{}
	for name, at := range index.Paths {
		out[name] = at.ServerRelativeURL
	}
	return out
}

// definition of the tea of a group, with a field of its own.
func definition(name, group, field string) *apiextensionsv1.CustomResourceDefinition {
	names := apiextensionsv1.CustomResourceDefinitionNames{Plural: "teas", Singular: "tea", Kind: "Tea", ListKind: "TeaList"}
	schema := apiextensionsv1.JSONSchemaProps{Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{field: {Type: "string"}}}
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), ResourceVersion: "1"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Names: names, Scope: apiextensionsv1.NamespaceScoped,
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{
				{Name: "v1", Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &schema}},
				{Name: "v0"},
			},
		},
		Status: apiextensionsv1.CustomResourceDefinitionStatus{AcceptedNames: names},
	}
}

func TestNegotiation(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	const v2, v3 = "/openapi/v2", "/openapi/v3/apis/apps/v1"
	proto := func(version string) string {
		return "application/com.github.proto-openapi.spec." + version + "+protobuf"
	}
	for _, c := range []struct{ path, accept, want string }{
		{v2, "", jsonType}, {v2, "*/*", jsonType}, {v2, "application/*", jsonType}, {v2, jsonType, jsonType},
		{v2, proto("v2.v1.0"), proto("v2.v1.0")}, {v2, proto("v2@v1.0"), proto("v2.v1.0")},
		{v2, "application/json;q=0.5, " + proto("v2.v1.0"), proto("v2.v1.0")},
		{v2, "text/html", ""}, {v2, proto("v3.v1.0"), ""},
		{v3, "", jsonType}, {v3, proto("v3.v1.0"), proto("v3.v1.0")}, {v3, proto("v3@v1.0"), proto("v3.v1.0")},
		{v3, "text/html", ""}, {v3, proto("v2.v1.0"), ""},
	} {
		w := a.ask(c.path, "Accept", c.accept)
		if c.want == "" {
			if w.Code != http.StatusNotAcceptable {
				t.Errorf("%s as %q: %d, want 406", c.path, c.accept, w.Code)
			}
			continue
		}
		tag := w.Header().Get("Etag")
		if w.Code != http.StatusOK || w.Header().Get("Content-Type") != c.want || w.Body.Len() == 0 {
			t.Errorf("%s as %q: %d %s, want %s", c.path, c.accept, w.Code, w.Header().Get("Content-Type"), c.want)
		}
		if got := w.Header().Values("Vary"); !slices.Contains(got, "Accept") {
			t.Errorf("%s varies with %s", c.path, got)
		}
		if json := a.ask(c.path, "Accept", jsonType); tag != `"`+etag(json.Body.Bytes())+`"` {
			t.Errorf("%s as %q: the tag %s is not the hash of the JSON", c.path, c.accept, tag)
		}
		if w := a.ask(c.path, "Accept", c.accept, "If-None-Match", tag); w.Code != http.StatusNotModified || w.Body.Len() > 0 {
			t.Errorf("%s as %q: %d for a client that has it", c.path, c.accept, w.Code)
		}
	}
	if w := a.ask("/openapi/v3/apis/apps/v2"); w.Code != http.StatusNotFound {
		t.Errorf("a group version that is not served: %d", w.Code)
	}
}

func TestCompressed(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	plain := a.ask("/openapi/v2")
	for accept, want := range map[string]string{
		"gzip": "gzip", "deflate, GZIP;q=0.5": "gzip", "gzip; q=1": "gzip", "": "", "br": "", "gzip;q=0": "", "gzip; q=0.0": "", "gzip;q=x": "",
	} {
		w := a.ask("/openapi/v2", "Accept-Encoding", accept)
		if got := w.Header().Get("Content-Encoding"); got != want {
			t.Errorf("%q gets %q, want %q", accept, got, want)
		}
		body := w.Body.Bytes()
		if want == "gzip" {
			var err error
			if body, err = (&packed{body, int64(plain.Body.Len())}).unpack(); err != nil {
				t.Error(err)
			}
		}
		if !bytes.Equal(body, plain.Body.Bytes()) {
			t.Errorf("%q gets another document", accept)
		}
	}
	whole := plain.Body.String()
	if w := a.ask("/openapi/v2", "Range", "bytes=100-199"); w.Code != http.StatusPartialContent || w.Body.String() != whole[100:200] {
		t.Errorf("a range: %d", w.Code)
	}
	for _, encoding := range []string{"", "gzip"} {
		if w := a.ask("/openapi/v2", "Range", "bytes=9-9,3-3", "Accept-Encoding", encoding); w.Code != http.StatusOK {
			t.Errorf("two ranges with encoding %q: %d, want all", encoding, w.Code)
		}
	}
}

func TestUnpacking(t *testing.T) {
	t.Parallel()
	content := []byte(strings.Repeat("all work and no play ", 100))
	p, err := pack(content)
	if err != nil {
		t.Fatal(err)
	}
	if err := iotest.TestReader(&unpacking{packed: p}, content); err != nil {
		t.Error(err)
	}
}

func TestHashes(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	current := a.index(t)["apis/apps/v1"]
	w := a.ask(current)
	if w.Code != http.StatusOK || w.Header().Get("Cache-Control") != "public, immutable" || w.Header().Get("Expires") == "" {
		t.Errorf("the document at its hash: %d %v", w.Code, w.Header())
	}
	w = a.ask("/openapi/v3/apis/apps/v1?hash=OLD")
	if w.Code != http.StatusMovedPermanently || w.Header().Get("Location") != current || w.Header().Get("Cache-Control") != "" {
		t.Errorf("the document at an old hash: %d to %s, want %s", w.Code, w.Header().Get("Location"), current)
	}
	if w := a.ask("/openapi/v3/apis/apps/v1"); w.Code != http.StatusOK || w.Header().Get("Cache-Control") != "" {
		t.Errorf("the document without a hash: %d %v", w.Code, w.Header())
	}
	index := a.ask("/openapi/v3")
	if w := a.ask("/openapi/v3", "If-None-Match", index.Header().Get("Etag")); w.Code != http.StatusNotModified {
		t.Errorf("the index for a client that has it: %d", w.Code)
	}
}

func TestDefinitionsComeAndGo(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	const path = "/apis/example.com/v1/namespaces/{namespace}/teas"
	v2 := a.ask("/openapi/v2").Body.String()
	before := a.index(t)

	tea := definition("teas.example.com", "example.com", "leaves")
	a.define(tea)
	with := a.index(t)
	at := with["apis/example.com/v1"]
	if doc := a.ask(at).Body.String(); !strings.Contains(doc, path) || !strings.Contains(doc, `"leaves"`) {
		t.Error("a new definition is not in version 3")
	}
	if _, ok := with["apis/example.com/v0"]; ok {
		t.Error("a version that is not served has a document")
	}
	if with["apis/apps/v1"] != before["apis/apps/v1"] {
		t.Error("a definition changes others' documents")
	}
	doc := a.ask("/openapi/v2")
	if text := doc.Body.String(); !strings.Contains(text, path) || !strings.Contains(text, `"leaves"`) || !strings.Contains(text, "/apis/apps/v1/deployments") {
		t.Error("a new definition is not in version 2")
	}

	// A change that documents do not show: the same documents.
	tea = tea.DeepCopy()
	tea.ResourceVersion, tea.Labels = "2", map[string]string{"a": "b"}
	a.define(tea)
	if again := a.ask("/openapi/v2", "If-None-Match", doc.Header().Get("Etag")); again.Code != http.StatusNotModified {
		t.Errorf("version 2 after a change of labels: %d", again.Code)
	}
	if again := a.index(t)["apis/example.com/v1"]; again != at {
		t.Errorf("version 3 after a change of labels: %s", again)
	}
	// And one that they show.
	changed := definition("teas.example.com", "example.com", "sugar")
	changed.ResourceVersion = "3"
	a.define(changed)
	if doc := a.ask(at); doc.Code != http.StatusMovedPermanently {
		t.Errorf("the old hash after a change: %d", doc.Code)
	}
	if doc := a.ask("/openapi/v2").Body.String(); !strings.Contains(doc, `"sugar"`) || strings.Contains(doc, `"leaves"`) {
		t.Error("a changed definition is not in version 2")
	}

	a.define()
	if _, ok := a.index(t)["apis/example.com/v1"]; ok || a.ask(at).Code != http.StatusNotFound {
		t.Error("a deleted definition is in version 3")
	}
	if a.ask("/openapi/v2").Body.String() != v2 {
		t.Error("a deleted definition is in version 2")
	}
	if len(a.kept) != 3 {
		t.Errorf("%d documents are kept, want 3", len(a.kept))
	}
}

// TestDefinitionsThatDoNotFit: two of one kind in one group cannot be described together. Others are.
func TestDefinitionsThatDoNotFit(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.define(definition("a.example.com", "example.com", "x"), definition("b.example.com", "example.com", "y"),
		definition("teas.example.org", "example.org", "z"), definition("teas.apps", "apps", "own"))
	index := a.index(t)
	if _, ok := index["apis/example.com/v1"]; ok || len(index) != 3 {
		t.Errorf("index: %v", index)
	}
	if w := a.ask("/openapi/v3/apis/example.com/v1"); w.Code != http.StatusServiceUnavailable {
		t.Errorf("the document that could not be built: %d", w.Code)
	}
	if doc := a.ask(index["apis/apps/v1"]).Body.String(); !strings.Contains(doc, "/apis/apps/v1/deployments") || strings.Contains(doc, "teas") {
		t.Error("a definition changes the document of a group version that the server serves itself")
	}
	if doc := a.ask("/openapi/v2"); doc.Code != http.StatusOK || !strings.Contains(doc.Body.String(), "example.org/v1") {
		t.Errorf("version 2: %d", doc.Code)
	}
}

// TestManyAsk: those who ask for the same build it once, and nobody waits who asks for what is there.
func TestManyAsk(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	if a.ask("/openapi/v3/api/v1").Code != http.StatusOK || a.builds.Load() != 1 {
		t.Fatalf("%d builds for one document", a.builds.Load())
	}
	started, proceed := make(chan struct{}), make(chan struct{})
	a.beforeBuild = sync.OnceFunc(func() {
		close(started)
		<-proceed
	})
	var group sync.WaitGroup
	var failed atomic.Int32
	for i := range 20 {
		group.Go(func() {
			if a.ask([]string{"/openapi/v2", "/openapi/v3/apis/apps/v1"}[i%2]).Code != http.StatusOK {
				failed.Add(1)
			}
		})
	}
	<-started
	if w := a.ask("/openapi/v3/api/v1"); w.Code != http.StatusOK {
		t.Errorf("a document that is there: %d", w.Code)
	}
	close(proceed)
	group.Wait()
	if failed.Load() > 0 || a.builds.Load() != 3 {
		t.Errorf("%d of 20 requests failed, %d builds, want 3", failed.Load(), a.builds.Load())
	}
	if a.asking != 0 || a.definitions != nil {
		t.Error("schemas are kept after the last build")
	}
}
