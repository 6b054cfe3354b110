package aggregation

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kube-openapi/pkg/cached"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/utils/ptr"
)

var toys = schema.GroupVersion{Group: "toys.example.com", Version: "v1"}

func registered() *apiService {
	return &apiService{
		ObjectMeta: metav1.ObjectMeta{Name: nameOf(toys)},
		Spec: apiregistrationv1.APIServiceSpec{
			Group: toys.Group, Version: toys.Version, GroupPriorityMinimum: 100, VersionPriority: 10, InsecureSkipTLSVerify: true,
			Service: &apiregistrationv1.ServiceReference{Namespace: "shop", Name: "toys", Port: ptr.To[int32](443)},
		},
	}
}

// cluster is what an Aggregator reads of a cluster with one Service.
type cluster struct {
	service *corev1.Service
	slices  []*discoveryv1.EndpointSlice
	at      string
}

func (c *cluster) aggregator() *Aggregator {
	return New(Options{
		Service: func(_, name string) (*corev1.Service, error) {
			if c.service == nil {
				return nil, apierrors.NewNotFound(corev1.Resource("services"), name)
			}
			return c.service, nil
		},
		Slices:      func(string, string) ([]*discoveryv1.EndpointSlice, error) { return c.slices, nil },
		Resolve:     func(string, string, int32) (*url.URL, error) { return &url.URL{Host: c.at}, nil },
		Certificate: func() (cert, key []byte) { return nil, nil },
	})
}

// TestCheck: why a group version is not available is said with Kubernetes' reasons.
func TestCheck(t *testing.T) {
	service := func(port int32) *corev1.Service {
		return &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, Ports: []corev1.ServicePort{{Name: "https", Port: port}}}}
	}
	slice := func(ready bool, port string) []*discoveryv1.EndpointSlice {
		return []*discoveryv1.EndpointSlice{{
			Ports:     []discoveryv1.EndpointPort{{Name: &port, Port: ptr.To[int32](8443)}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		}}
	}
	says := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, body) }
	}
	const good = `{"kind":"APIResourceList","groupVersion":"toys.example.com/v1","resources":[]}`
	for name, c := range map[string]struct {
		service *corev1.Service
		slices  []*discoveryv1.EndpointSlice
		serves  http.HandlerFunc
		change  func(*apiService)
		want    string
	}{
		"no Service":        {nil, nil, nil, nil, "ServiceNotFound"},
		"another port":      {service(8443), nil, nil, nil, "ServicePortError"},
		"no slices":         {service(443), nil, nil, nil, "EndpointsNotFound"},
		"none ready":        {service(443), slice(false, "https"), nil, nil, "MissingEndpoints"},
		"another name":      {service(443), slice(true, "metrics"), nil, nil, "MissingEndpoints"},
		"answers":           {service(443), slice(true, "https"), says(good), nil, "Passed"},
		"garbage":           {service(443), slice(true, "https"), says("\x00{["), nil, "FailedDiscoveryCheck"},
		"without end":       {service(443), slice(true, "https"), says(`{"groupVersion":"toys.example.com/v1","x":"` + strings.Repeat("x", maxProbe) + `"}`), nil, "FailedDiscoveryCheck"},
		"another group":     {service(443), slice(true, "https"), says(`{"groupVersion":"apps/v1"}`), nil, "FailedDiscoveryCheck"},
		"an error":          {service(443), slice(true, "https"), http.NotFound, nil, "FailedDiscoveryCheck"},
		"a redirect":        {service(443), slice(true, "https"), http.RedirectHandler("/elsewhere", http.StatusFound).ServeHTTP, nil, "FailedDiscoveryCheck"},
		"not who it is":     {service(443), slice(true, "https"), says(good), func(s *apiService) { s.Spec.InsecureSkipTLSVerify = false }, "FailedDiscoveryCheck"},
		"no CA in caBundle": {service(443), slice(true, "https"), says(good), func(s *apiService) { s.Spec.CABundle = []byte("x") }, "FailedDiscoveryCheck"},
	} {
		t.Run(name, func(t *testing.T) {
			at := &cluster{service: c.service, slices: c.slices}
			if c.serves != nil {
				server := httptest.NewTLSServer(c.serves)
				defer server.Close()
				at.at = server.Listener.Addr().String()
			}
			object := registered()
			if c.change != nil {
				c.change(object)
			}
			found := newRemote(at.aggregator(), object, func() {}).check(t.Context())
			if found.reason != c.want || found.available() != (c.want == "Passed") || found.message == "" {
				t.Errorf("%+v, want %s", found, c.want)
			}
		})
	}
}

// TestGroups: groups are ordered by the highest priority of their versions, and versions by their own.
func TestGroups(t *testing.T) {
	of := func(group, version string, p priority) ranked {
		return ranked{schema.GroupVersion{Group: group, Version: version}, p, false}
	}
	groups := groupsOf([]ranked{
		of("metrics.k8s.io", "v1beta1", priority{100, 100}), of("apps", "v1", priority{17800, 15}), of("", "v1", priority{18000, 1}),
		of("b.example.com", "v1beta1", custom), of("b.example.com", "v1", custom), of("a.example.com", "v1", custom),
		of("a.example.com", "v2alpha1", priority{18000, 1}),
	})
	var got []string
	for _, g := range groups {
		for _, v := range g.Versions {
			got = append(got, v.GroupVersion)
		}
		if g.PreferredVersion != g.Versions[0] {
			t.Errorf("%s prefers %s", g.Name, g.PreferredVersion.Version)
		}
	}
	want := []string{"a.example.com/v1", "a.example.com/v2alpha1", "apps/v1", "b.example.com/v1", "b.example.com/v1beta1", "metrics.k8s.io/v1beta1"}
	if !slices.Equal(got, want) {
		t.Errorf("groups are %q, want %q", got, want)
	}
}

// TestCorrect: the server keeps its own APIServices, and leaves alone what an administrator made.
func TestCorrect(t *testing.T) {
	apps := schema.GroupVersion{Group: "apps", Version: "v1"}
	a := New(Options{})
	a.builtIn = map[schema.GroupVersion]bool{apps: true}
	want := local(apps, priority{17800, 15}, onStart)
	boats := local(schema.GroupVersion{Group: "sea.example.com", Version: "v1"}, custom, whileServed)
	with := func(s *apiService, change func(*apiService)) *apiService {
		s = s.DeepCopy()
		change(s)
		return s
	}
	elsewhere := func(s *apiService) {
		s.Labels, s.Spec.Service = nil, &apiregistrationv1.ServiceReference{Namespace: "shop", Name: "toys"}
	}
	for name, c := range map[string]struct {
		have, want *apiService
		writes     bool
	}{
		"missing":                          {nil, want, true},
		"as it should be":                  {want.DeepCopy(), want, false},
		"with a note":                      {with(want, func(s *apiService) { s.Annotations = map[string]string{"a": "b"} }), want, false},
		"another priority":                 {with(want, func(s *apiService) { s.Spec.VersionPriority = 1 }), want, true},
		"built in, given to others":        {with(want, elsewhere), want, true},
		"of a definition, given to others": {with(boats, elsewhere), boats, false},
		"of a definition, changed":         {with(boats, func(s *apiService) { s.Spec.VersionPriority = 1 }), boats, true},
	} {
		if write := a.correct(t.Context(), c.have, c.want); (write != nil) != c.writes {
			t.Errorf("%s: writes %t", name, write != nil)
		}
	}
}

// TestTogether: all work is done, and what another server did meanwhile is no mistake.
func TestTogether(t *testing.T) {
	done := make(chan int, 20)
	var work []func() error
	for i := range 20 {
		work = append(work, func() error {
			done <- i
			switch i {
			case 3:
				return apierrors.NewAlreadyExists(schema.GroupResource{}, "x")
			case 4:
				return errors.New("disk full")
			}
			return nil
		})
	}
	if err := together(work); err == nil || err.Error() != "disk full" || len(done) != 20 {
		t.Errorf("%v after %d", err, len(done))
	}
	if err := together(nil); err != nil {
		t.Error(err)
	}
}

// TestMergedV2: the server's own paths stay, others' come in addition, and a document that makes no sense is left out.
func TestMergedV2(t *testing.T) {
	document := func(title string, paths ...string) string {
		all := map[string]any{}
		for _, p := range paths {
			all[p] = map[string]any{"get": map[string]any{"operationId": title, "responses": map[string]any{"200": map[string]any{"description": "OK"}}}}
		}
		out, err := json.Marshal(map[string]any{"swagger": "2.0", "info": map[string]any{"title": title, "version": "1"}, "paths": all})
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	own := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Etag", `"1"`)
		_, _ = fmt.Fprint(w, document("own", "/apis/apps/v1/deployments"))
	})
	m := newMergedV2(own)
	if m.handler() != nil {
		t.Error("something is merged before anybody else has a document")
	}
	theirs, err := readV2([]byte(document("theirs", "/apis/toys.example.com/v1/toys", "/apis/apps/v1/deployments")), "/apis/toys.example.com/v1/")
	if err != nil {
		t.Fatal(err)
	}
	m.set("toys", cached.Static(theirs, "2"))
	m.set("broken", cached.Static[*spec.Swagger](nil, "3"))
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "/openapi/v2", nil)
	r.Header.Set("Accept", "application/json")
	m.handler().ServeHTTP(w, r)
	var got struct {
		Info  struct{ Title string }
		Paths map[string]map[string]struct{ OperationID string }
	}
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatalf("%v: %s", err, w.Body)
	}
	if got.Info.Title != "own" || len(got.Paths) != 2 || got.Paths["/apis/apps/v1/deployments"]["get"].OperationID != "own" {
		t.Errorf("merged: %+v", got)
	}
	m.set("toys", nil)
	m.set("broken", nil)
	if m.handler() != nil {
		t.Error("still merging when nobody else has a document")
	}
	for _, bad := range []string{"", "x", "[]", `{"paths": 1}`, `{}`} {
		if _, err := readV2([]byte(bad), "/"); err == nil {
			t.Errorf("%q is taken for a document", bad)
		}
	}
}

// FuzzDocuments: whatever another server says about itself, it ends nothing here.
func FuzzDocuments(f *testing.F) {
	f.Add([]byte(`{"groupVersion":"toys.example.com/v1","resources":[{"name":"a/b/c"},{"name":""}]}`))
	f.Add([]byte(`{"items":[{"metadata":{"name":"toys.example.com"},"versions":[{"version":"v1"}]}]}`))
	f.Add([]byte(`{"swagger":"2.0","paths":{"/apis/toys.example.com/v1/x":{"get":{"parameters":[{"$ref":"#/x"}]}}},"definitions":{"x":{"$ref":"#/definitions/x"}}}`))
	var body []byte
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/apis" {
			w.Header().Set("Content-Type", "application/json;"+aggregatedKind)
		}
		_, _ = w.Write(body)
	}))
	server.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	server.StartTLS()
	f.Cleanup(server.Close)
	own := &spec.Swagger{SwaggerProps: spec.SwaggerProps{Swagger: "2.0"}}
	f.Fuzz(func(t *testing.T, data []byte) {
		body = data
		r := newRemote((&cluster{at: server.Listener.Addr().String()}).aggregator(), registered(), func() {})
		defer r.transport.CloseIdleConnections()
		_, _ = r.discover(t.Context())
		r.learnV3(t.Context())
		if document, err := readV2(data, r.path()+"/"); err == nil {
			_, _, _ = mergeV2([]cached.Result[*spec.Swagger]{{Value: own, Etag: "1"}, {Value: document, Etag: "2"}})
		}
	})
}
