package store

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	"k8s.io/client-go/tools/cache"
)

// RESTOptions gives every resource its storage: etcd, the claims above it where the resource has any, and the watch
// cache above that.
type RESTOptions struct {
	Store *Store
	// Codec encodes objects of a group as they are stored.
	Codec func(group string) runtime.Codec
	// Paths are where objects are kept, below Prefix, where it is not the resource's name.
	Paths map[schema.GroupResource]string
	// Claimers are the resources with claims.
	Claimers map[schema.GroupResource]Claimer
	// OnRead completes objects as they come from etcd, for what older writers left out.
	OnRead map[schema.GroupResource]func(runtime.Object)
	// Uncached resources are read from etcd: objects with a time to live, which are written much and read rarely.
	Uncached map[schema.GroupResource]bool
}

var _ generic.RESTOptionsGetter = &RESTOptions{}

// leases groups objects with a time to live, so that not every one needs a lease of its own.
var leases = etcd3.LeaseManagerConfig{ReuseDurationSeconds: 60, MaxObjectCount: 1000}

// GetRESTOptions is asked once for each resource.
func (o *RESTOptions) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	path, ok := o.Paths[resource]
	if !ok {
		path = resource.Resource
	}
	codec := completing{o.Codec(resource.Group), o.OnRead[resource]}
	return generic.RESTOptions{
		StorageConfig: &storagebackend.ConfigForResource{
			Config: storagebackend.Config{
				Prefix:              Prefix,
				Codec:               codec,
				EventsHistoryWindow: storagebackend.DefaultEventsHistoryWindow,
				LeaseManagerConfig:  leases,
			},
			GroupResource: resource,
		},
		Decorator:               o.decorate,
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 8,
		ResourcePrefix:          "/" + path,
		CountMetricPollPeriod:   time.Minute,
	}, nil
}

// completing is a codec whose decoded objects are as the API's inside expects them: without kind and version, which
// answers get when they are written, and completed. Doing it here and not in answers keeps it out of reads, which share
// what the watch cache decoded once.
type completing struct {
	runtime.Codec
	complete func(runtime.Object)
}

func (c completing) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object,
) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, kind, err := c.Codec.Decode(data, defaults, into)
	if err != nil {
		return obj, kind, err
	}
	obj.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	if c.complete != nil {
		c.complete(obj)
	}
	return obj, kind, nil
}

func (o *RESTOptions) decorate(config *storagebackend.ConfigForResource, prefix string,
	keyOf func(runtime.Object) (string, error), newFunc, newListFunc func() runtime.Object,
	attributes storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
) (storage.Interface, factory.DestroyFunc, error) {
	versioner := storage.APIObjectVersioner{}
	raw, err := etcd3.New(o.Store.client, o.Store.compaction, config.Codec, newFunc, newListFunc, config.Prefix, prefix,
		config.GroupResource, identity.NewEncryptCheckTransformer(), config.LeaseManagerConfig,
		etcd3.NewDefaultDecoder(config.Codec, versioner), versioner)
	if err != nil {
		return nil, nil, err
	}
	o.Store.progress.use(raw.RequestWatchProgress)
	var below storage.Interface = prompt{raw, o.Store.progress}
	if claims, ok := o.Claimers[config.GroupResource]; ok {
		below = &claiming{Interface: below, claims: claims, versioner: versioner}
	}
	if o.Uncached[config.GroupResource] {
		return below, sync.OnceFunc(raw.Close), nil
	}
	c, err := cacher.NewCacherFromConfig(cacher.Config{
		Storage:             below,
		Versioner:           versioner,
		GroupResource:       config.GroupResource,
		EventsHistoryWindow: config.EventsHistoryWindow,
		ResourcePrefix:      prefix,
		KeyFunc:             keyOf,
		NewFunc:             newFunc,
		NewListFunc:         newListFunc,
		GetAttrsFunc:        attributes,
		IndexerFuncs:        triggers,
		Indexers:            indexers,
		Codec:               config.Codec,
	})
	if err != nil {
		raw.Close()
		return nil, nil, err
	}
	delegator := cacher.NewCacheDelegator(c, below)
	return delegator, sync.OnceFunc(func() {
		delegator.Stop()
		c.Stop()
		raw.Close()
	}), nil
}
