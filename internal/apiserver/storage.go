package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/klog/v2"

	"portal/internal/audit"
	"portal/internal/store"
)

// StoragePath is where the server answers `portal storage`: GET for the status, POST to defrag and reencrypt, GET of snapshot.
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
func storageHandler(s *store.Store, e *encryption) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+StoragePath, func(w http.ResponseWriter, r *http.Request) {
		status, err := s.Status(r.Context())
		if err == nil {
			status.Encryption, err = e.status(r.Context())
		}
		answerStorage(w, status, err)
	})
	mux.HandleFunc("POST "+StoragePath+"/reencrypt", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		lines, flush := json.NewEncoder(w), http.NewResponseController(w).Flush
		tell := func(now store.Reencryption) {
			_ = lines.Encode(now) // a client that has gone ends the context
			_ = flush()
		}
		end, err := e.reencrypt(r.Context(), tell)
		if err != nil {
			end.Error = err.Error()
		}
		tell(end)
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

// OpenedStorage is a storage that was opened beside a server, with its encryption configuration if there is one.
type OpenedStorage struct {
	*store.Store
	opts   EncryptionOptions
	config *encryptionConfig
	view   *store.RESTOptions
	stop   context.CancelFunc
}

// OpenStorage opens a storage without a server. encryptionFile is the server's --encryption-provider-config, or "".
func OpenStorage(ctx context.Context, opts store.Options, encryptionFile string) (_ *OpenedStorage, err error) {
	o := &OpenedStorage{opts: EncryptionOptions{ConfigFile: encryptionFile}}
	ctx, o.stop = context.WithCancel(ctx)
	defer func() {
		if err != nil {
			o.stop()
		}
	}()
	var transformers value.ResourceTransformers
	if encryptionFile != "" {
		if o.config, err = readEncryptionConfig(o.opts); err != nil {
			return nil, err
		}
		loaded, err := encryptionconfig.LoadEncryptionConfig(ctx, encryptionFile, false, serverID())
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", encryptionFlag, encryptionFile, err)
		}
		transformers = encryptionconfig.StaticTransformers(loaded.Transformers)
	}
	if o.Store, err = store.Attach(ctx, opts); err != nil {
		return nil, err
	}
	o.view = storageView(o.Store, transformers)
	return o, nil
}

// Close closes it.
func (o *OpenedStorage) Close() {
	o.stop()
	o.Store.Close()
}

// Status describes the storage, and what is encrypted with which key.
func (o *OpenedStorage) Status(ctx context.Context) (store.Status, error) {
	status, err := o.Store.Status(ctx)
	if err != nil {
		return status, err
	}
	status.Encryption, err = surveyed(ctx, o.view, &store.Encryption{Config: o.opts.ConfigFile})
	return status, err
}

// Reencrypt rewrites everything that is encrypted in another way than new values.
func (o *OpenedStorage) Reencrypt(ctx context.Context, tell func(store.Reencryption)) (store.Reencryption, error) {
	if o.view.Transformers == nil {
		return store.Reencryption{}, fmt.Errorf("%s: must name the file to encrypt with", encryptionFlag)
	}
	if err := o.readable(ctx); err != nil {
		return store.Reencryption{}, err
	}
	if err := o.view.RegisterKeys(ctx, o.config.entries); err != nil {
		return store.Reencryption{}, err
	}
	return o.view.Reencrypt(ctx, o.config.entries, tell)
}

// readable makes sure that the configuration can decrypt what is stored, before anything is checked or changed.
func (o *OpenedStorage) readable(ctx context.Context) error {
	usage, err := o.view.Survey(ctx, false)
	if err != nil {
		return err
	}
	lost := slices.DeleteFunc(usage, func(u store.Usage) bool { return !u.Lost() })
	return explainLost(o.opts, o.config, lost)
}

// Audit checks the claims, and repairs what is safe.
func (o *OpenedStorage) Audit(ctx context.Context, nodePorts string) (audit.Report, error) {
	ports, err := utilnet.ParsePortRange(nodePorts)
	if err != nil {
		return audit.Report{}, fmt.Errorf("--service-node-port-range %q: %w", nodePorts, err)
	}
	if err := o.readable(ctx); err != nil {
		return audit.Report{}, err
	}
	scheme := newScheme()
	codec := storageCodecs(scheme, serializer.NewCodecFactory(scheme))
	return audit.New(audit.Options{
		KV: o.view.KV(), Core: codec(corev1.Resource("services")), Networking: codec(networkingv1.Resource("ipaddresses")), NodePorts: *ports,
	}).Audit(ctx, true)
}
