package aggregation

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/aggregator"
	"k8s.io/kube-openapi/pkg/cached"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// learned is what is known of another server's API.
type learned struct {
	at time.Time
	// current says that resources are what it has now, failed that they could not be read the last time.
	current   bool
	failed    bool
	resources []apidiscoveryv2.APIResourceDiscovery
	v2Tag     string
}

const (
	// learnInterval is how often another server's documents are read, and learnTimeout how long that may take.
	learnInterval = time.Minute
	learnTimeout  = 10 * time.Second
	// retryLearning is how soon it is tried again.
	retryLearning = 10 * time.Second
)

// reader is who reads OpenAPI documents for those who ask.
var reader = &user.DefaultInfo{Name: "system:aggregator", Groups: []string{user.AllAuthenticated}}

// learn reads discovery and OpenAPI when it is time to.
func (r *remote) learn(ctx context.Context, available bool) {
	if !available {
		if r.learned.current {
			r.learned.current, r.learned.at = false, time.Time{}
			r.publish(nil)
		}
		return
	}
	if time.Since(r.learned.at) < learnInterval {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, learnTimeout)
	defer cancel()
	resources, err := r.discover(ctx)
	if err != nil {
		if !r.learned.failed {
			klog.ErrorS(err, "discovery of an APIService failed, retrying", "apiService", r.name)
		}
		r.learned.at = time.Now().Add(retryLearning - learnInterval)
		r.learned.current, r.learned.failed = false, true
		r.publish(nil)
		return
	}
	r.learned.at, r.learned.resources, r.learned.current, r.learned.failed = time.Now(), resources, true, false
	r.publish(resources)
	r.learnV3(ctx)
	r.learnV2(ctx)
}

// learnV3 finds out whether there is an OpenAPI v3 document.
func (r *remote) learnV3(ctx context.Context) {
	got, err := r.get(ctx, "/openapi/v3", "application/json", "", maxDocument)
	var index handler3.OpenAPIV3Discovery
	if err != nil || json.Unmarshal(got.body, &index) != nil {
		r.v3.Store(nil)
		return
	}
	entry, ok := index.Paths[r.path()[1:]]
	at, err := url.Parse(entry.ServerRelativeURL)
	if !ok || err != nil {
		r.v3.Store(nil)
		return
	}
	// The hash alone is theirs: clients cache by it.
	query := url.Values{}
	if hash := at.Query().Get("hash"); hash != "" && len(hash) <= 256 {
		query.Set("hash", hash)
	}
	text := query.Encode()
	r.v3.Store(&text)
}

// learnV2 reads the OpenAPI v2 document, as far as it is about the group version.
func (r *remote) learnV2(ctx context.Context) {
	got, err := r.get(ctx, "/openapi/v2", "application/json", r.learned.v2Tag, maxDocument)
	if err != nil || got.notModified {
		return
	}
	document, err := readV2(got.body, r.path()+"/")
	if err != nil {
		klog.ErrorS(err, "OpenAPI document of an APIService is not usable", "apiService", r.name)
		return
	}
	r.learned.v2Tag = got.etag
	r.in.mu.Lock()
	defer r.in.mu.Unlock()
	if r.in.remotes[r.name] == r {
		r.in.v2.set(r.name, cached.Static(document, fmt.Sprintf("%x", sha256.Sum256(got.body))))
	}
}

// readV2 reads a document and keeps the paths below a prefix, with what they refer to. What others send must not end this process, whatever
// the libraries make of it.
func readV2(data []byte, prefix string) (out *spec.Swagger, err error) {
	defer func() {
		if p := recover(); p != nil {
			out, err = nil, fmt.Errorf("read it: %v", p)
		}
	}()
	var document spec.Swagger
	if err := json.Unmarshal(data, &document); err != nil {
		return nil, err
	}
	if document.Paths == nil {
		return nil, fmt.Errorf("it has no paths")
	}
	return aggregator.FilterSpecByPathsWithoutSideEffects(&document, []string{prefix}), nil
}

// openAPI is what answers for a path below /openapi/, or nil if the server's own documents do.
func (a *Aggregator) openAPI(v *view, rest string) http.Handler {
	if rest == "v2" {
		return a.v2.handler()
	}
	if rest == "v3" || rest == "v3/" {
		return v3Index{v, a.own.Handler}
	}
	for _, r := range v.remotes {
		if rest == "v3"+r.path() && r.v3.Load() != nil {
			return remoteHandler{remote: r, as: reader}
		}
	}
	return nil
}

// v3Index lists the OpenAPI v3 documents of this server and of others.
type v3Index struct {
	*view
	own http.Handler
}

// ServeHTTP answers.
func (x v3Index) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var index handler3.OpenAPIV3Discovery
	answer := ask(x.own, r)
	if answer.code != http.StatusOK || json.Unmarshal(answer.body.Bytes(), &index) != nil || index.Paths == nil {
		maps.Copy(w.Header(), answer.header)
		w.WriteHeader(answer.code)
		_, _ = w.Write(answer.body.Bytes()) // a client that has gone needs no answer
		return
	}
	for _, remote := range x.remotes {
		if query := remote.v3.Load(); query != nil {
			at := url.URL{Path: "/openapi/v3" + remote.path(), RawQuery: *query}
			index.Paths[remote.path()[1:]] = handler3.OpenAPIV3DiscoveryGroupVersion{ServerRelativeURL: at.String()}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(index)
}

// recorded is an answer in memory.
type recorded struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (r *recorded) Header() http.Header { return r.header }

func (r *recorded) WriteHeader(code int) { r.code = code }

func (r *recorded) Write(data []byte) (int, error) { return r.body.Write(data) }

// ask has a handler of this server answer a request in memory, uncompressed.
func ask(handler http.Handler, r *http.Request) *recorded {
	out := &recorded{header: http.Header{}, code: http.StatusOK}
	asked := r.Clone(r.Context())
	asked.Header.Del("Accept-Encoding")
	asked.Header.Del("If-None-Match")
	handler.ServeHTTP(out, asked)
	return out
}

// mergedV2 is the OpenAPI v2 document of this server together with those of others. It is made when somebody asks, and costs nothing as
// long as nobody else has one.
type mergedV2 struct {
	own     http.Handler
	mu      sync.Mutex
	others  map[string]cached.Value[*spec.Swagger]
	serving atomic.Pointer[http.Handler]
}

func newMergedV2(own http.Handler) *mergedV2 {
	return &mergedV2{own: own, others: map[string]cached.Value[*spec.Swagger]{}}
}

// handler answers for /openapi/v2; nil if nothing has to be merged.
func (m *mergedV2) handler() http.Handler {
	if h := m.serving.Load(); h != nil {
		return *h
	}
	return nil
}

// set replaces another server's document; nil removes it.
func (m *mergedV2) set(name string, document cached.Value[*spec.Swagger]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if document == nil {
		if _, ok := m.others[name]; !ok {
			return
		}
		delete(m.others, name)
	} else {
		m.others[name] = document
	}
	if len(m.others) == 0 {
		m.serving.Store(nil)
		return
	}
	// The own one first: of two paths the first stays.
	parts := []cached.Value[*spec.Swagger]{&ownV2{m: m}}
	for _, name := range slices.Sorted(maps.Keys(m.others)) {
		parts = append(parts, m.others[name])
	}
	var taken http.Handler
	handler.NewOpenAPIServiceLazy(cached.MergeList(mergeV2, parts)).RegisterOpenAPIVersionedService("/openapi/v2", takeHandler{&taken})
	m.serving.Store(&taken)
}

// takeHandler takes the handler that is registered.
type takeHandler struct{ to *http.Handler }

// Handle takes it.
func (t takeHandler) Handle(_ string, h http.Handler) { *t.to = h }

// mergeV2 merges documents. One that cannot be merged is left out.
func mergeV2(results []cached.Result[*spec.Swagger]) (*spec.Swagger, string, error) {
	own, tag, err := results[0].Get()
	if err != nil {
		return nil, "", err
	}
	merged := *own
	merged.Paths, merged.Definitions, merged.Parameters = nil, nil, nil
	tags := sha256.New()
	for _, result := range results {
		document, tag, err := result.Get()
		if err == nil {
			err = mergeInto(&merged, document)
		}
		if err != nil {
			klog.ErrorS(err, "an OpenAPI document could not be merged, it is left out")
			continue
		}
		tags.Write([]byte(tag))
	}
	return &merged, fmt.Sprintf("%s-%x", tag, tags.Sum(nil)), nil
}

func mergeInto(merged, document *spec.Swagger) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("merge it: %v", p)
		}
	}()
	next := *merged
	if err := aggregator.MergeSpecsIgnorePathConflictRenamingDefinitionsAndParameters(&next, document); err != nil {
		return err
	}
	*merged = next
	return nil
}

// ownV2 is this server's own document, read anew when it has changed.
type ownV2 struct {
	m    *mergedV2
	mu   sync.Mutex
	tag  string
	last *spec.Swagger
}

var _ cached.Value[*spec.Swagger] = &ownV2{}

// Get reads it.
func (o *ownV2) Get() (*spec.Swagger, string, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r, err := http.NewRequest(http.MethodGet, "/openapi/v2", nil)
	if err != nil {
		return nil, "", err
	}
	r.Header.Set("Accept", "application/json")
	answer := ask(o.m.own, r)
	tag := answer.header.Get("Etag")
	switch {
	case answer.code != http.StatusOK:
		return nil, "", fmt.Errorf("the server's own OpenAPI document: status %d", answer.code)
	case tag != "" && tag == o.tag:
		return o.last, o.tag, nil
	}
	var document spec.Swagger
	if err := json.Unmarshal(answer.body.Bytes(), &document); err != nil {
		return nil, "", fmt.Errorf("the server's own OpenAPI document: %w", err)
	}
	o.last, o.tag = &document, tag
	return o.last, o.tag, nil
}
