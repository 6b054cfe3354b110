// Package documents serves the API's OpenAPI documents: /openapi/v2, /openapi/v3 and one below it for each group version.
//
// A document is built when somebody asks for it, and kept as compressed bytes. As the structures that the libraries build
// it from it would take twenty times as much memory, in servers that are hardly ever asked. The package knows routes and
// definitions of custom resources; it must not know what the resources are, nor who may read about them.
package documents

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/emicklei/go-restful/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/common"
)

// Sources are what documents are built from.
type Sources struct {
	// Services have the routes of what the server serves itself. They do not change once somebody asks.
	Services func() []*restful.WebService
	V2       *common.Config
	// V3 need not have Definitions: they are made for each build.
	V3 *common.OpenAPIV3Config
	// Custom are the definitions whose resources are served. They are not modified.
	Custom func() []*apiextensionsv1.CustomResourceDefinition
}

// Documents are the OpenAPI documents of one API server.
type Documents struct {
	from Sources
	// building is held by who builds a document. One at a time bounds the memory that this takes.
	building chan struct{}

	mu   sync.Mutex
	kept map[string]*document
	// index is what the index was when it was last asked for.
	index struct {
		etag     string
		modified time.Time
	}
	// asking counts those who may build, definitions are what they share.
	asking      int
	definitions map[string]common.OpenAPIDefinition
}

// New makes the documents of an API. It builds none.
func New(from Sources) *Documents {
	return &Documents{from: from, building: make(chan struct{}, 1), kept: map[string]*document{}}
}

// Mux is where documents are served.
type Mux interface {
	Handle(path string, handler http.Handler)
	HandlePrefix(path string, handler http.Handler)
}

// Install serves the documents.
func (d *Documents) Install(mux Mux) {
	mux.Handle(v2Path, http.HandlerFunc(d.serveV2))
	mux.Handle(v3Path, http.HandlerFunc(d.serveIndex))
	mux.HandlePrefix(v3Path+"/", http.HandlerFunc(d.serveV3))
}

// document is one document in the forms that were asked for. It is not changed.
type document struct {
	// version tells what it was built from.
	version  string
	etag     string
	modified time.Time
	forms    [2]encoded
}

// encoded is one form of a document, or why there is none. That is kept too: the next attempt would end the same way.
type encoded struct {
	*packed
	err error
}

func (e encoded) isMade() bool { return e.packed != nil || e.err != nil }

// recipe is how one document is made.
type recipe struct {
	name string
	// version changes when the document may.
	version string
	// json builds the document.
	json func() ([]byte, error)
	// protobuf encodes what json built.
	protobuf func([]byte) ([]byte, error)
}

// get returns a document in the form that is asked for, and builds it if it is not there.
func (d *Documents) get(ctx context.Context, r recipe, f form) (*document, error) {
	if found := d.find(r, f); found != nil {
		return found, found.forms[f].err
	}
	d.enter()
	defer d.leave()
	select {
	case d.building <- struct{}{}:
		defer func() { <-d.building }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	// Another request may have built it meanwhile.
	if found := d.find(r, f); found != nil {
		return found, found.forms[f].err
	}
	made := d.make(r, f)
	err := made.forms[f].err
	if err != nil {
		klog.ErrorS(err, "OpenAPI document could not be built, it is left out", "document", r.name)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kept[r.name] = made
	return made, err
}

// find returns a document if it is there, current, and in the form that is asked for.
func (d *Documents) find(r recipe, f form) *document {
	if found := d.last(r.name); found != nil && found.version == r.version && found.forms[f].isMade() {
		return found
	}
	return nil
}

// last returns what is kept of a document, current or not.
func (d *Documents) last(name string) *document {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.kept[name]
}

// make builds a document, or what is missing of it.
func (d *Documents) make(r recipe, f form) *document {
	var out document
	var text []byte
	if before := d.last(r.name); before != nil && before.version == r.version {
		out = *before
		text, out.forms[f].err = out.forms[asJSON].unpack()
	} else {
		out, text = d.makeJSON(r, before)
	}
	if f == asProtobuf && !out.forms[f].isMade() {
		data, err := r.protobuf(text)
		out.forms[f] = encode(data, err)
	}
	return &out
}

// makeJSON builds a document in its first form.
func (d *Documents) makeJSON(r recipe, before *document) (document, []byte) {
	text, err := r.json()
	out := document{version: r.version, modified: time.Now()}
	out.forms[asJSON] = encode(text, err)
	if err := out.forms[asJSON].err; err != nil {
		out.forms[asProtobuf].err = err
		return out, nil
	}
	out.etag = etag(text)
	if before != nil && before.etag == out.etag {
		// Definitions changed in what the document does not show.
		out.modified, out.forms = before.modified, before.forms
	}
	return out, text
}

func encode(data []byte, err error) encoded {
	if err != nil {
		return encoded{err: err}
	}
	kept, err := pack(data)
	return encoded{kept, err}
}

// enter and leave surround a request for documents that may have to be built. Those that come together share the
// definitions, which the last one drops.
func (d *Documents) enter() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asking++
}

func (d *Documents) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.asking--; d.asking == 0 {
		d.definitions = nil
	}
}

// forget drops documents of group versions that are no more.
func (d *Documents) forget(now []recipe) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name := range d.kept {
		gone := func(r recipe) bool { return r.name == name }
		if name != v2Path && !slices.ContainsFunc(now, gone) {
			delete(d.kept, name)
		}
	}
}

// custom are the definitions, in an order that does not change.
func (d *Documents) custom() []*apiextensionsv1.CustomResourceDefinition {
	out := slices.Clone(d.from.Custom())
	slices.SortFunc(out, func(a, b *apiextensionsv1.CustomResourceDefinition) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// version of what is built from definitions.
func version(definitions []*apiextensionsv1.CustomResourceDefinition) string {
	var out strings.Builder
	for _, c := range definitions {
		fmt.Fprintf(&out, "%s/%s ", c.UID, c.ResourceVersion)
	}
	return out.String()
}
