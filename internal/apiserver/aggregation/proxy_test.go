package aggregation

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes/scheme"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// passedOn is what the other server was asked.
type passedOn struct {
	URI    string
	Header http.Header
}

// TestPassedOn: requests to a group version of others reach them as whoever asks, whatever the client sends besides, and no others do.
func TestPassedOn(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("redirect") != "" {
			http.Redirect(w, r, "https://elsewhere.example.com/", http.StatusTemporaryRedirect)
			return
		}
		_ = json.NewEncoder(w).Encode(passedOn{r.RequestURI, r.Header})
	}))
	defer server.Close()
	a := (&cluster{at: server.Listener.Addr().String()}).aggregator()
	a.Serializer = scheme.Codecs
	r := newRemote(a, registered(), func() {})
	a.view.Store(&view{remotes: map[schema.GroupVersion]*remote{toys: r}})
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	ask := func(path string, header ...string) *httptest.ResponseRecorder {
		req := httptest.NewRequest(http.MethodGet, "https://portal"+path, nil)
		for i := 0; i < len(header); i += 2 {
			req.Header.Add(header[i], header[i+1])
		}
		ann := &user.DefaultInfo{Name: "ann", UID: "7", Groups: []string{"devs", "all"}, Extra: map[string][]string{"Team": {"blue"}}}
		w := httptest.NewRecorder()
		a.Handler(next).ServeHTTP(w, req.WithContext(request.WithUser(req.Context(), ann)))
		return w
	}

	if w := ask("/apis/toys.example.com/v1/toys"); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), `"kind":"Status"`) {
		t.Errorf("before it was found available: %d %s", w.Code, w.Body)
	}
	r.state.Store(&condition{status: apiregistrationv1.ConditionTrue})
	for name, header := range map[string][]string{
		"plain":               nil,
		"says who it is":      {"X-Remote-User", "eve", "X-Remote-Group", "system:masters", "X-Remote-Uid", "0", "X-Remote-Extra-Team", "red"},
		"has headers dropped": {"Connection", "X-Remote-User, X-Remote-Group, X-Remote-Uid, X-Remote-Extra-Team"},
	} {
		w := ask("/apis/toys.example.com/v1/toys?limit=5", header...)
		var got passedOn
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || w.Code != http.StatusOK {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
			continue
		}
		if got.URI != "/apis/toys.example.com/v1/toys?limit=5" {
			t.Errorf("%s: asks for %s", name, got.URI)
		}
		for key, want := range map[string][]string{
			"X-Remote-User": {"ann"}, "X-Remote-Group": {"devs", "all"}, "X-Remote-Uid": {"7"}, "X-Remote-Extra-Team": {"blue"},
		} {
			if !slices.Equal(got.Header[key], want) {
				t.Errorf("%s: %s is %q, want %q", name, key, got.Header[key], want)
			}
		}
	}
	for path, want := range map[string]int{
		"/apis/toys.example.com/v1":                            http.StatusOK,
		"/apis/toys.example.com/v1/":                           http.StatusOK,
		"/apis/toys.example.com/v1/toys?redirect=1":            http.StatusBadGateway,
		"/apis/toys.example.com/v1/namespaces/a/../b/toys":     http.StatusBadRequest,
		"/apis/toys.example.com/v1/namespaces/a/%2e%2e/b/toys": http.StatusBadRequest,
		"/apis/toys.example.com/v1//toys":                      http.StatusBadRequest,
		"/apis/toys.example.com/v2/toys":                       http.StatusTeapot,
		"/apis/toys.example.com.evil/v1/toys":                  http.StatusTeapot,
		"/apis/apps/v1/deployments":                            http.StatusTeapot,
		"/apisx/toys.example.com/v1/toys":                      http.StatusTeapot,
		"/api/v1/pods":                                         http.StatusTeapot,
		"/openapi/v3/apis/apps/v1":                             http.StatusTeapot,
	} {
		if w := ask(path); w.Code != want || w.Header().Get("Location") != "" {
			t.Errorf("%s: status %d, want %d (%s)", path, w.Code, want, w.Header().Get("Location"))
		}
	}

	server.Close()
	if w := ask("/apis/toys.example.com/v1/toys"); w.Code != http.StatusServiceUnavailable || len(r.poke) != 1 {
		t.Errorf("a server that is gone: %d, to be checked: %d", w.Code, len(r.poke))
	}
}
