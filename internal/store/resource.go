package store

import (
	"context"
	"strings"

	"google.golang.org/grpc/metadata"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// resource is one resource's storage in etcd, below its watch cache.
type resource struct {
	storage.Interface
	store    *Store
	progress *progress
	// stream names the resource's own stream of watches in etcd's client.
	stream string
	vital  bool
}

func newResource(raw storage.Interface, store *Store, name schema.GroupResource, vital bool) *resource {
	r := &resource{Interface: raw, store: store, stream: name.String(), vital: vital}
	r.progress = newProgress(r.RequestWatchProgress)
	return r
}

func (r *resource) close() { r.progress.close() }

// onStream puts watches of this resource, and questions about their progress, on a stream of their own: etcd's client
// wakes every watch of a stream with each answer about progress.
func (r *resource) onStream(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "portal-resource", r.stream)
}

// RequestWatchProgress asks etcd to tell this resource's watches how far they are.
func (r *resource) RequestWatchProgress(ctx context.Context) error {
	return r.Interface.RequestWatchProgress(r.onStream(ctx))
}

// GetCurrentResourceVersion begins a consistent read from the watch cache, which waits until the cache's watch has come
// as far as etcd. The watch of a resource that was not written lately only says so when asked, and the cache does that
// every 100 ms: ask now.
func (r *resource) GetCurrentResourceVersion(ctx context.Context) (uint64, error) {
	revision, err := r.Interface.GetCurrentResourceVersion(ctx)
	if err == nil {
		r.progress.request()
	}
	return revision, err
}

// Create writes a new object. Vital ones may use the reserve of an etcd at its quota.
func (r *resource) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return r.Interface.Create(exempt(ctx, &r.vital), key, obj, out, ttl)
}

// GuaranteedUpdate changes an object. Objects that are being deleted may use the reserve of an etcd at its quota: the
// write is a step on the way to their removal.
func (r *resource) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, try storage.UpdateFunc, cached runtime.Object,
) error {
	allowed := r.vital
	return r.Interface.GuaranteedUpdate(exempt(ctx, &allowed), key, out, ignoreNotFound, preconditions,
		func(old runtime.Object, response storage.ResponseMeta) (runtime.Object, *uint64, error) {
			updated, ttl, err := try(old, response)
			if err == nil {
				accessor, notMeta := meta.Accessor(updated)
				allowed = r.vital || notMeta == nil && accessor.GetDeletionTimestamp() != nil
			}
			return updated, ttl, err
		}, cached)
}

// Watch ends when etcd turns out to have been restored to an older revision, and refuses revisions that etcd has not
// reached: both make the watch cache list again.
func (r *resource) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	history := r.store.History()
	if err := r.store.checkRevision(ctx, opts.ResourceVersion); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(r.onStream(ctx))
	stop := context.AfterFunc(history, cancel)
	watching, err := r.Interface.Watch(ctx, key, opts)
	if err != nil {
		stop()
		cancel()
		return nil, err
	}
	return &endingWatch{Interface: watching, end: func() {
		stop()
		cancel()
	}}, nil
}

// endingWatch releases what the watch held beside itself.
type endingWatch struct {
	watch.Interface
	end func()
}

func (w *endingWatch) Stop() {
	w.Interface.Stop()
	w.end()
}

// checked is a watch cache that refuses watches from a revision that etcd has not reached. They come from clients of
// before a restore, and would hear nothing until the new history has grown that far. Told that the version has expired,
// clients list again.
type checked struct {
	storage.Interface
	store *Store
	// below is the storage without the cache.
	below storage.Interface
	past  *rewound
}

func (c checked) Get(ctx context.Context, key string, opts storage.GetOptions, into runtime.Object) error {
	if err := c.past.wait(ctx); err != nil {
		return err
	}
	return c.Interface.Get(ctx, key, opts, into)
}

// GetList lists. A cache that can't be filled because an object is damaged says so with "try again"; trying again does not
// help, and the storage itself names every such object.
func (c checked) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	if err := c.past.wait(ctx); err != nil {
		return err
	}
	err := c.Interface.GetList(ctx, key, opts, list)
	if apierrors.IsTooManyRequests(err) && strings.Contains(err.Error(), "corrupt object") {
		return c.below.GetList(ctx, key, opts, list)
	}
	return err
}

func (c checked) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	if err := c.past.wait(ctx); err != nil {
		return nil, err
	}
	if err := c.store.checkRevision(ctx, opts.ResourceVersion); err != nil {
		return nil, err
	}
	return c.Interface.Watch(ctx, key, opts)
}

func (s *Store) checkRevision(ctx context.Context, resourceVersion string) error {
	return s.revisions.check(ctx, resourceVersion, func(ctx context.Context) error {
		_, err := s.client.KV.Get(ctx, Prefix)
		return err
	})
}
