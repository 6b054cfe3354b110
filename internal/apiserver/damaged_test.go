package apiserver

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"portal/internal/store"
)

// TestADamagedObjectCanBeDeleted: also a Namespace, which has a way of its own of being deleted, and without which no list of them
// could be had any more.
func TestADamagedObjectCanBeDeleted(t *testing.T) {
	t.Parallel()
	s := start(t, testOptions(t))
	ask := func(method, path, body string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+s.loopback.BearerToken)
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		s.generic.Handler.ServeHTTP(w, r)
		return w
	}
	for key, path := range map[string]string{
		"/namespaces/broken": "/api/v1/namespaces/broken", "/configmaps/default/broken": "/api/v1/namespaces/default/configmaps/broken",
	} {
		if _, err := s.store.Client().Put(t.Context(), store.Prefix+key, "garbage"); err != nil {
			t.Fatal(err)
		}
		const insist = `{"kind":"DeleteOptions","apiVersion":"v1","ignoreStoreReadErrorWithClusterBreakingPotential":true}`
		if w := ask(http.MethodDelete, path, insist); w.Code != 200 {
			t.Errorf("%s is not deleted: %d %s", path, w.Code, w.Body)
		}
		if w := ask(http.MethodGet, path, ""); w.Code != 404 {
			t.Errorf("%s is still there: %d %s", path, w.Code, w.Body)
		}
	}
}
