package audit

import (
	"encoding/json"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Path is where the API serves the Handler.
const Path = "/portal/v1/audit"

// Handler answers GET with a Report, and POST with one after repairs. Who may ask is for others to say.
func (a *Auditor) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodPost {
			w.Header().Set("Allow", "GET, POST")
			refuse(w, apierrors.NewMethodNotSupported(schema.GroupResource{Resource: "audit"}, r.Method))
			return
		}
		report, err := a.Audit(r.Context(), r.Method == http.MethodPost)
		if err != nil {
			refuse(w, apierrors.NewServiceUnavailable(err.Error()))
			return
		}
		answer(w, http.StatusOK, report)
	})
}

// refuse answers as the API does, so that clients find the message.
func refuse(w http.ResponseWriter, err *apierrors.StatusError) {
	status := err.Status()
	status.Kind, status.APIVersion = "Status", "v1"
	answer(w, int(status.Code), status)
}

func answer(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(body) // a client that has gone needs no answer
}
