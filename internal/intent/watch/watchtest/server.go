// Package watchtest is an API server of a hundred lines for tests of what watches one: lists in pages, watches from a
// version, forgets history on request, can be killed and come back with another store.
package watchtest

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"sort"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// Server serves Services, EndpointSlices, Namespaces, Nodes, Pods and ServiceCIDRs.
type Server struct {
	// Old: it serves no ServiceCIDRs, and knows no watches that begin with all objects.
	Old bool
	// Forbidden is a resource that nobody may read; empty: none.
	Forbidden string
	mu        sync.Mutex
	version   int
	oldest    int // events up to here are forgotten
	objects   map[string]map[string]runtime.Object
	events    []event
	changed   chan struct{}

	addr   string
	server *http.Server
	// refusals watches will be answered with the status refusal.
	refusals, refusal int
	// lists are the queries of all lists, a page at a time.
	lists []string
}

// Refuse lets the next n watches fail with a status, as a server does that is not yet ready.
func (s *Server) Refuse(n, status int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refusals, s.refusal = n, status
}

// refuses says with which status a watch is to fail; 0: none.
func (s *Server) refuses() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refusals == 0 {
		return 0
	}
	s.refusals--
	return s.refusal
}

// Lists returns the queries of the lists since the last call, a page at a time.
func (s *Server) Lists() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.lists
	s.lists = nil
	return out
}

type event struct {
	version  int
	resource string
	kind     string
	object   []byte
}

var kinds = map[string][2]string{
	"services": {"v1", "Service"}, "namespaces": {"v1", "Namespace"}, "nodes": {"v1", "Node"}, "pods": {"v1", "Pod"},
	"endpointslices": {"discovery.k8s.io/v1", "EndpointSlice"},
	"servicecidrs":   {"networking.k8s.io/v1", "ServiceCIDR"},
}

// New returns a server with a store that holds the namespaces kube-system and default, listening nowhere yet. Its
// versions begin at first.
func New(first int, uid string) *Server {
	s := &Server{version: first, oldest: first, objects: map[string]map[string]runtime.Object{}, changed: make(chan struct{})}
	for r := range kinds {
		s.objects[r] = map[string]runtime.Object{}
	}
	s.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kube-system", UID: types.UID(uid)}})
	s.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	return s
}

// Start listens, on the given address or one of the system's choice, and returns what a client needs.
func (s *Server) Start(addr string) (*rest.Config, error) {
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	s.addr = l.Addr().String()
	s.server = &http.Server{Handler: s}
	go s.server.Serve(l)
	return &rest.Config{Host: "http://" + s.addr}, nil
}

// Addr is where the server listens, or last listened.
func (s *Server) Addr() string { return s.addr }

// Kill ends the server and every connection to it.
func (s *Server) Kill() { s.server.Close() }

func resourceOf(o runtime.Object) string {
	switch o.(type) {
	case *corev1.Service:
		return "services"
	case *discoveryv1.EndpointSlice:
		return "endpointslices"
	case *corev1.Namespace:
		return "namespaces"
	case *corev1.Node:
		return "nodes"
	case *corev1.Pod:
		return "pods"
	case *networkingv1.ServiceCIDR:
		return "servicecidrs"
	}
	panic(fmt.Sprintf("watchtest serves no %T", o))
}

func keyOf(o runtime.Object) string {
	m := o.(metav1.Object)
	return m.GetNamespace() + "/" + m.GetName()
}

// Put adds or replaces objects.
func (s *Server) Put(objects ...runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range objects {
		r, k := resourceOf(o), keyOf(o)
		kind := "MODIFIED"
		if s.objects[r][k] == nil {
			kind = "ADDED"
		}
		s.version++
		s.record(r, kind, o)
		s.objects[r][k] = o
	}
	s.wake()
}

// Delete removes objects.
func (s *Server) Delete(objects ...runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range objects {
		r := resourceOf(o)
		s.version++
		s.record(r, "DELETED", o)
		delete(s.objects[r], keyOf(o))
	}
	s.wake()
}

// Forget drops the history: who watches from before must list again. Watches are ended.
func (s *Server) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events, s.oldest = nil, s.version
	s.wake()
}

func (s *Server) record(resource, kind string, o runtime.Object) {
	o.(metav1.Object).SetResourceVersion(strconv.Itoa(s.version))
	o.GetObjectKind().SetGroupVersionKind(schema.FromAPIVersionAndKind(kinds[resource][0], kinds[resource][1]))
	raw, _ := json.Marshal(o)
	s.events = append(s.events, event{s.version, resource, kind, raw})
}

func (s *Server) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	w.Header().Set("Content-Type", "application/json")
	for i, p := range parts {
		if _, ok := kinds[p]; !ok {
			continue
		}
		if s.Old && p == "servicecidrs" {
			status(w, http.StatusNotFound, metav1.StatusReasonNotFound)
			return
		}
		if p == s.Forbidden {
			status(w, http.StatusForbidden, metav1.StatusReasonForbidden)
			return
		}
		switch {
		case len(parts) > i+1:
			s.get(w, p, "/"+parts[i+1])
		case r.URL.Query().Get("watch") == "true" || r.URL.Query().Get("watch") == "1":
			s.watch(w, r, p)
		default:
			s.list(w, r, p)
		}
		return
	}
	w.WriteHeader(http.StatusNotFound)
}

func (s *Server) get(w http.ResponseWriter, resource, key string) {
	s.mu.Lock()
	o := s.objects[resource][key]
	s.mu.Unlock()
	if o == nil {
		status(w, http.StatusNotFound, metav1.StatusReasonNotFound)
		return
	}
	json.NewEncoder(w).Encode(o)
}

func status(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reason,
	})
}

func (s *Server) list(w http.ResponseWriter, r *http.Request, resource string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists = append(s.lists, resource+"?"+r.URL.RawQuery)
	if s.ahead(r) {
		tooLarge(w)
		return
	}
	limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	after := r.URL.Query().Get("continue")
	var keys []string
	for k := range s.objects[resource] {
		if k > after && !strings.Contains(r.URL.RawQuery, "labelSelector=portal.invalid") {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	meta := metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}
	if limit > 0 && len(keys) > limit {
		keys = keys[:limit]
		meta.Continue = keys[limit-1]
	}
	items := []runtime.Object{}
	for _, k := range keys {
		items = append(items, s.objects[resource][k])
	}
	json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": kinds[resource][0], "kind": kinds[resource][1] + "List", "metadata": meta, "items": items,
	})
}

// ahead says whether a request asks for a version that is yet to come.
func (s *Server) ahead(r *http.Request) bool {
	wanted, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	return wanted > s.version
}

func tooLarge(w http.ResponseWriter) {
	w.WriteHeader(http.StatusGatewayTimeout)
	json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusGatewayTimeout, Reason: metav1.StatusReasonTimeout,
		Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge}}},
	})
}

// initialEvents answers a watch that begins with all objects of a selector that matches none: with the end of them.
func (s *Server) initialEvents(w http.ResponseWriter, r *http.Request, resource string) {
	s.mu.Lock()
	ahead, version := s.ahead(r), s.version
	s.mu.Unlock()
	switch {
	case s.Old:
		status(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case ahead:
		tooLarge(w)
	default:
		fmt.Fprintf(w, "{\"type\":\"BOOKMARK\",\"object\":{\"apiVersion\":%q,\"kind\":%q,\"metadata\":{\"resourceVersion\":\"%d\",\"annotations\":{\"k8s.io/initial-events-end\":\"true\"}}}}\n",
			kinds[resource][0], kinds[resource][1], version)
	}
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, resource string) {
	if code := s.refuses(); code != 0 {
		status(w, code, metav1.StatusReasonUnknown)
		return
	}
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	s.mu.Lock()
	gone := from < s.oldest
	s.mu.Unlock()
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		s.initialEvents(w, r, resource)
		return
	}
	if gone {
		status(w, http.StatusGone, metav1.StatusReasonExpired)
		return
	}
	w.(http.Flusher).Flush()
	for {
		s.mu.Lock()
		changed, lost := s.changed, from < s.oldest
		i := sort.Search(len(s.events), func(i int) bool { return s.events[i].version > from })
		pending := s.events[i:len(s.events):len(s.events)]
		s.mu.Unlock()
		if lost {
			return
		}
		for _, e := range pending {
			from = e.version
			if e.resource == resource {
				if _, err := fmt.Fprintf(w, "{\"type\":%q,\"object\":%s}\n", e.kind, e.object); err != nil {
					return
				}
			}
		}
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}
