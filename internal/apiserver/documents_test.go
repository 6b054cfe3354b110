package apiserver

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/kube-openapi/pkg/handler3"

	"portal/internal/apiserver/documents"
)

// TestDocumentsAreTheLibrarys: every OpenAPI document is, byte for byte, what the library makes of the same API.
func TestDocumentsAreTheLibrarys(t *testing.T) {
	t.Parallel()
	s := start(t, testOptions(t))
	theirs := mux.NewPathRecorderMux("library")
	library := routes.OpenAPI{Config: s.documented.V2, V3Config: s.documented.V3}
	library.InstallV2(s.generic.Handler.GoRestfulContainer, theirs)
	library.InstallV3(s.generic.Handler.GoRestfulContainer, theirs)
	ours := mux.NewPathRecorderMux("ours")
	sources := s.documented
	sources.Custom = func() []*apiextensionsv1.CustomResourceDefinition { return nil } // the library adds them elsewhere
	documents.New(sources).Install(ours)

	get := func(from http.Handler, path, accept string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.Header.Set("Accept", accept)
		w := httptest.NewRecorder()
		from.ServeHTTP(w, r)
		return w
	}
	compare := func(path, accept string) {
		a, b := get(ours, path, accept), get(theirs, path, accept)
		if a.Code != http.StatusOK || !bytes.Equal(a.Body.Bytes(), b.Body.Bytes()) {
			t.Errorf("%s as %s differs: %d, %d bytes, the library has %d", path, accept, a.Code, a.Body.Len(), b.Body.Len())
		}
		for _, header := range []string{"Content-Type", "Etag", "Content-Length", "Cache-Control"} {
			if a.Header().Get(header) != b.Header().Get(header) {
				t.Errorf("%s as %s has %s %q, the library %q", path, accept, header, a.Header().Get(header), b.Header().Get(header))
			}
		}
	}
	compare("/openapi/v2", "application/json")
	compare("/openapi/v3", "application/json")
	var index handler3.OpenAPIV3Discovery
	if err := json.Unmarshal(get(theirs, "/openapi/v3", "").Body.Bytes(), &index); err != nil || len(index.Paths) < 20 {
		t.Fatalf("%d documents: %v", len(index.Paths), err)
	}
	for _, at := range index.Paths {
		compare(at.ServerRelativeURL, "application/json")
	}
	const protobuf = "application/com.github.proto-openapi.spec.v3.v1.0+protobuf"
	compare(index.Paths["apis/discovery.k8s.io/v1"].ServerRelativeURL, protobuf)
}
