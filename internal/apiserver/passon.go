package apiserver

import (
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/apiserver/registry/connect"
)

// passingOn keeps requests that the server passes on away from what looks into the API's own: their bodies and answers are others', and
// may be without end. It also refuses what is no resource of the API, for both.
func passingOn(api, examined http.Handler, codecs serializer.CodecFactory) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, _ := request.RequestInfoFrom(r.Context())
		switch {
		case isPath(info):
			refusal := apierrors.NewBadRequest(fmt.Sprintf("%q: no namespace has this name", info.Namespace))
			responsewriters.ErrorNegotiated(refusal, codecs, schema.GroupVersion{Version: "v1"}, w, r)
		case connect.Subresource(info):
			api.ServeHTTP(w, r)
		case isEphemeral(info):
			responsewriters.ErrorNegotiated(noEphemeralContainers, codecs, schema.GroupVersion{Version: "v1"}, w, r)
		default:
			examined.ServeHTTP(w, r)
		}
	})
}

// isPath is about namespaces that the storage would take for steps in a path, and refuse with 500. The library checks names, but not them.
func isPath(info *request.RequestInfo) bool {
	return info != nil && (info.Namespace == "." || info.Namespace == "..")
}

func isEphemeral(info *request.RequestInfo) bool {
	return info != nil && info.IsResourceRequest && info.APIGroup == corev1.GroupName && info.Resource == "pods" && info.Subresource == "ephemeralcontainers"
}

// noEphemeralContainers is 404 without a name, from which clients see that there is no such thing rather than no such Pod.
var noEphemeralContainers = &apierrors.StatusError{ErrStatus: metav1.Status{
	Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
	Message: "pods/ephemeralcontainers: ephemeral containers are not supported by this server; use kubectl exec, or a copy of the Pod (kubectl debug --copy-to)",
}}
