package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/klog/v2"

	"portal/internal/audit"
	"portal/internal/store"
)

// StoragePath is where the server answers `portal storage`: GET for the status, POST to defrag, GET of snapshot.
const StoragePath = "/portal/v1/storage"

// storageCheck is the part of /readyz that fails while etcd refuses writes.
const storageCheck = "storage-writable"

// sayWhy puts the reason for refused writes into /readyz. k8s.io/apiserver withholds reasons there, because everybody may
// ask; this one is no secret, and whoever asks needs it.
func sayWhy(next http.Handler, s *store.Store) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz" || s.Writable() == nil {
			next.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(&reasonWriter{ResponseWriter: w, store: s}, r)
	})
}

type reasonWriter struct {
	http.ResponseWriter
	store *store.Store
}

func (w *reasonWriter) Write(data []byte) (int, error) {
	if err := w.store.Writable(); err != nil {
		withheld := []byte("[-]" + storageCheck + " failed: reason withheld")
		told := []byte("[-]" + storageCheck + " failed: " + err.Error())
		if _, err := w.ResponseWriter.Write(bytes.ReplaceAll(data, withheld, told)); err != nil {
			return 0, err
		}
		return len(data), nil
	}
	return w.ResponseWriter.Write(data)
}

// storageHandler answers `portal storage` of a running server.
func storageHandler(s *store.Store) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+StoragePath, func(w http.ResponseWriter, r *http.Request) {
		status, err := s.Status(r.Context())
		answerStorage(w, status, err)
	})
	mux.HandleFunc("POST "+StoragePath+"/defrag", func(w http.ResponseWriter, r *http.Request) {
		status, err := s.Defragment(r.Context())
		answerStorage(w, status, err)
	})
	mux.HandleFunc("GET "+StoragePath+"/snapshot", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/octet-stream")
		if err := s.Snapshot(r.Context(), w); err != nil {
			klog.ErrorS(err, "snapshot of the storage failed")
			panic(http.ErrAbortHandler) // the client must not take what it has for the whole
		}
	})
	return mux
}

func answerStorage(w http.ResponseWriter, status store.Status, err error) {
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		refused := apierrors.NewServiceUnavailable(err.Error()).Status()
		refused.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "Status"})
		w.WriteHeader(http.StatusServiceUnavailable)
		_ = json.NewEncoder(w).Encode(refused) // a client that has gone needs no answer
		return
	}
	_ = json.NewEncoder(w).Encode(status)
}

// AuditStorage checks the claims in a storage that no server uses, and repairs what is safe.
func AuditStorage(ctx context.Context, s *store.Store, nodePorts string) (audit.Report, error) {
	ports, err := utilnet.ParsePortRange(nodePorts)
	if err != nil {
		return audit.Report{}, fmt.Errorf("--service-node-port-range %q: %w", nodePorts, err)
	}
	scheme := newScheme()
	codec := storageCodecs(scheme, serializer.NewCodecFactory(scheme))
	return audit.New(audit.Options{
		KV: s.Client().KV, Core: codec(corev1.Resource("services")), Networking: codec(networkingv1.Resource("ipaddresses")), NodePorts: *ports,
	}).Audit(ctx, true)
}
