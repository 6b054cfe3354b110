package apiserver

import (
	"bytes"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
)

// typedPatch begins what the library says of a server-side apply whose object does not fit its schema: a list with the
// same key twice, a field that there is not.
const typedPatch = "failed to create typed patch object"

// applyPatch begins the content types of server-side apply, in YAML and CBOR.
const applyPatch = "application/apply-patch+"

// ownMistakes answers 400 where the library answers a server-side apply with 500 although the mistake is the user's.
func ownMistakes(next http.Handler, codecs serializer.CodecFactory) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPatch || !strings.HasPrefix(r.Header.Get("Content-Type"), applyPatch) {
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
		if err != nil || !ok || !strings.HasPrefix(status.Message, typedPatch) {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = w.Write(held.body.Bytes())
			return
		}
		w.Header().Del("Content-Length")
		responsewriters.ErrorNegotiated(apierrors.NewBadRequest(status.Message), codecs, schema.GroupVersion{Version: "v1"}, w, r)
	})
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
