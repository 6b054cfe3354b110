package apiserver

import (
	"io"
	"net/http"
)

// customResourcesPath is where kubectl looks for a kind that discovery doesn't have. Without an answer its user reads that
// CustomResourceDefinitions could not be listed, instead of that there is no such kind.
const customResourcesPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// noCustomResources answers that there are none. They are not served, so discovery does not list them.
func noCustomResources(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		http.Error(w, "custom resources are not served", http.StatusMethodNotAllowed)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"kind":"CustomResourceDefinitionList","apiVersion":"apiextensions.k8s.io/v1","metadata":{"resourceVersion":"1"},"items":[]}`)
}
