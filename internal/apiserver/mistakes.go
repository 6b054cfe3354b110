package apiserver

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
)

// applyMistakes are in what the library says of a server-side apply whose object does not fit its schema: a list with the
// same key twice, a field that there is not.
var applyMistakes = []string{"failed to create typed patch object"}

// strategicMistakes are in what the library says of a strategic merge patch that can't be merged: an element of a list
// without its key, a null or a number where an object belongs, a directive ($patch, $retainKeys, $setElementOrder) that
// means nothing.
var strategicMistakes = []string{
	"does not contain declared merge key", "cannot find merge key", "cannot merge lists without merge key",
	"expected a ", "is not a map", "unknown type:", "unknown patch type:", "invalid element type in merging list",
	"list element types are not identical", "no elements in any of the given slices", "unexpected patch strategy",
	"invalid value for special key", "merging lists cannot yet be specified", "doesn't match $setElementOrder",
	"fail to find unknown prefix", "are not deep equal", "unable to find api field in struct",
}

// versionMistakes are in what the library says of a resourceVersion that is no number.
var versionMistakes = []string{"strconv.ParseUint: parsing"}

// createMistakes are in what the library says of a new object that was copied from one that exists.
var createMistakes = []string{"resourceVersion should not be set on objects to be created"}

// mistakesOf are the parts of a failure's message by which a patch of a content type turns out to be the user's mistake.
func mistakesOf(contentType string) []string {
	kind, _, _ := strings.Cut(contentType, ";")
	switch kind = strings.TrimSpace(kind); {
	case strings.HasPrefix(kind, "application/apply-patch+"):
		return slices.Concat(applyMistakes, versionMistakes)
	case kind == string(types.StrategicMergePatchType):
		return slices.Concat(strategicMistakes, versionMistakes)
	}
	return versionMistakes
}

// ownMistakes answers 400 where the library answers 500 although the mistake is the user's.
func ownMistakes(next http.Handler, codecs serializer.CodecFactory) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var mistakes []string
		switch r.Method {
		case http.MethodPatch:
			mistakes = mistakesOf(r.Header.Get("Content-Type"))
		case http.MethodPut:
			mistakes = versionMistakes
		case http.MethodPost:
			if r.Header.Get("Upgrade") == "" { // else it takes over the connection
				mistakes = createMistakes
			}
		case http.MethodGet:
			if version := r.URL.Query().Get("resourceVersion"); version != "" && !isNumber(version) {
				refusal := apierrors.NewBadRequest(fmt.Sprintf("resourceVersion %q: must be a number, as the API gave it", version))
				responsewriters.ErrorNegotiated(refusal, codecs, schema.GroupVersion{Version: "v1"}, w, r)
				return
			}
		}
		if mistakes == nil {
			next.ServeHTTP(w, r)
			return
		}
		held := &failureHolder{ResponseWriter: w}
		next.ServeHTTP(held, r)
		if !held.failed {
			return
		}
		obj, _, err := codecs.UniversalDeserializer().Decode(held.body.Bytes(), nil, nil)
		status, ok := obj.(*metav1.Status)
		if err != nil || !ok || !slices.ContainsFunc(mistakes, func(m string) bool { return strings.Contains(status.Message, m) }) {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = w.Write(held.body.Bytes())
			return
		}
		what := "the request does not fit the object: "
		if strings.Contains(status.Message, versionMistakes[0]) {
			what = "metadata.resourceVersion must be a number, as the API gave it: "
		}
		w.Header().Del("Content-Length")
		responsewriters.ErrorNegotiated(apierrors.NewBadRequest(what+status.Message), codecs,
			schema.GroupVersion{Version: "v1"}, w, r)
	})
}

func isNumber(text string) bool {
	_, err := strconv.ParseUint(text, 10, 64)
	return err == nil
}

// failureHolder keeps back an answer of 500 until somebody has looked at it. Others pass.
type failureHolder struct {
	http.ResponseWriter
	failed bool
	body   bytes.Buffer
}

func (h *failureHolder) WriteHeader(code int) {
	if h.failed = code == http.StatusInternalServerError; !h.failed {
		h.ResponseWriter.WriteHeader(code)
	}
}

func (h *failureHolder) Write(data []byte) (int, error) {
	if h.failed {
		return h.body.Write(data)
	}
	return h.ResponseWriter.Write(data)
}

// Unwrap lets http.ResponseController find what is below.
func (h *failureHolder) Unwrap() http.ResponseWriter { return h.ResponseWriter }
