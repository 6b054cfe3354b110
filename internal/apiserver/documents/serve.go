package documents

import (
	"bytes"
	"crypto/sha512"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/munnerz/goautoneg"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/handler3"
)

const (
	v2Path = "/openapi/v2"
	v3Path = "/openapi/v3"
)

// form is one of the encodings of a document.
type form int

const (
	asJSON form = iota
	asProtobuf
)

// offer is a media type that a document can be asked for as.
type offer struct {
	subtype string
	form    form
	// answered is the media type of the answer.
	answered string
}

// offers are the media types of an OpenAPI version, the first being for those who take anything. Older clients write an @.
func offers(version string) []offer {
	protobuf := "com.github.proto-openapi.spec." + version + ".v1.0+protobuf"
	return []offer{
		{"json", asJSON, jsonType},
		{protobuf, asProtobuf, "application/" + protobuf},
		{"com.github.proto-openapi.spec." + version + "@v1.0+protobuf", asProtobuf, "application/" + protobuf},
	}
}

const jsonType = "application/json"

var offersV2, offersV3 = offers("v2"), offers("v3")

func (d *Documents) serveV2(w http.ResponseWriter, r *http.Request) {
	d.serve(w, r, d.v2(), offersV2)
}

// serveV3 answers with one group version's document.
func (d *Documents) serveV3(w http.ResponseWriter, r *http.Request) {
	all := d.v3()
	d.forget(all)
	at := slices.IndexFunc(all, func(one recipe) bool { return one.name == r.URL.Path })
	if at < 0 {
		http.NotFound(w, r)
		return
	}
	d.serve(w, r, all[at], offersV3)
}

// serveIndex lists the documents of version 3, each with its hash.
func (d *Documents) serveIndex(w http.ResponseWriter, r *http.Request) {
	all := d.v3()
	d.forget(all)
	d.enter()
	defer d.leave()
	index := handler3.OpenAPIV3Discovery{Paths: map[string]handler3.OpenAPIV3DiscoveryGroupVersion{}}
	for _, one := range all {
		found, err := d.get(r.Context(), one, asJSON)
		if r.Context().Err() != nil {
			unavailable(w)
			return
		}
		if err == nil {
			name := strings.TrimPrefix(one.name, v3Path+"/")
			index.Paths[name] = handler3.OpenAPIV3DiscoveryGroupVersion{ServerRelativeURL: withHash(one.name, found.etag)}
		}
	}
	text, err := json.Marshal(index)
	if err != nil {
		klog.ErrorS(err, "index of OpenAPI documents could not be encoded")
		unavailable(w)
		return
	}
	tag := etag(text)
	w.Header().Set("Etag", strconv.Quote(tag))
	w.Header().Set("Content-Type", jsonType)
	http.ServeContent(w, r, "", d.indexModified(tag), bytes.NewReader(text))
}

// indexModified is since when the index is as it is now.
func (d *Documents) indexModified(tag string) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.index.etag != tag {
		d.index.etag, d.index.modified = tag, time.Now()
	}
	return d.index.modified
}

// serve answers with a document, in the form that the client likes best.
func (d *Documents) serve(w http.ResponseWriter, r *http.Request, one recipe, offers []offer) {
	w.Header().Add("Vary", "Accept")
	chosen, ok := choose(r.Header.Get("Accept"), offers)
	if !ok {
		w.WriteHeader(http.StatusNotAcceptable)
		return
	}
	found, err := d.get(r.Context(), one, chosen.form)
	if err != nil {
		unavailable(w)
		return
	}
	w.Header().Set("Content-Type", chosen.answered)
	// Both forms have the hash of the JSON: Vary keeps them apart.
	w.Header().Set("Etag", strconv.Quote(found.etag))
	if hash := r.URL.Query().Get("hash"); hash != "" && one.name != v2Path {
		if hash != found.etag {
			http.Redirect(w, r, withHash(one.name, found.etag), http.StatusMovedPermanently)
			return
		}
		w.Header().Set("Cache-Control", "public, immutable")
		w.Header().Set("Expires", time.Now().UTC().AddDate(1, 0, 0).Format(http.TimeFormat))
	}
	found.forms[chosen.form].serve(w, r, found.modified)
}

// choose returns the offer that an Accept header likes best.
func choose(accept string, offers []offer) (offer, bool) {
	if accept == "" {
		accept = "*/*"
	}
	for _, clause := range goautoneg.ParseAccept(accept) {
		for _, o := range offers {
			if (clause.Type == "application" || clause.Type == "*") && (clause.SubType == o.subtype || clause.SubType == "*") {
				return o, true
			}
		}
	}
	return offer{}, false
}

func withHash(name, etag string) string {
	at := url.URL{Path: path.Clean(name), RawQuery: url.Values{"hash": {etag}}.Encode()}
	return at.String()
}

func etag(data []byte) string { return fmt.Sprintf("%X", sha512.Sum512(data)) }

func unavailable(w http.ResponseWriter) {
	http.Error(w, "the OpenAPI document is not available", http.StatusServiceUnavailable)
}
