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
	"k8s.io/apiserver/pkg/storage/value"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/client-go/tools/cache"
)

// RESTOptions gives every resource its storage: etcd, the claims above it where the resource has any, and the watch
// cache above that.
type RESTOptions struct {
	Store *Store
	// Counts learns how many objects a resource has, for estimates of what a list costs.
	Counts flowcontrolrequest.StorageObjectCountTracker
	// Codec encodes a resource's objects in the version in which they are stored, and decodes them from any.
	Codec func(schema.GroupResource) runtime.Codec
	// Paths are where objects are kept below Prefix, if it is not where path says.
	Paths map[schema.GroupResource]string
	// Unqualified groups have their resources kept under their plural names alone.
	Unqualified map[string]bool
	// Places are the resources of Unqualified groups, by where they are kept below Prefix.
	Places map[string]schema.GroupResource
	// Transformers encrypt a resource's objects, and the claims that are kept with them; nil stores all as they are.
	Transformers value.ResourceTransformers
	// ClaimPaths are where claims are kept that are no objects, and the resource whose transformer they share.
	ClaimPaths map[string]schema.GroupResource
	// Claimers are the resources with claims.
	Claimers map[schema.GroupResource]Claimer
	// OnRead completes objects as they come from etcd, for what older writers left out.
	OnRead map[schema.GroupResource]func(runtime.Object)
	// Uncached resources are read from etcd: objects with a time to live, which are written much and read rarely.
	Uncached map[schema.GroupResource]bool
	// Vital resources are written even when the embedded etcd is at its quota, from its reserve: what the controllers
	// need to go on working, and so to delete.
	Vital map[schema.GroupResource]bool

	mu         sync.Mutex
	registered map[schema.GroupResource]string
}

var _ generic.RESTOptionsGetter = &RESTOptions{}

// leases groups objects with a time to live, so that not every one needs a lease of its own.
var leases = etcd3.LeaseManagerConfig{ReuseDurationSeconds: 60, MaxObjectCount: 1000}

// GetRESTOptions is asked once for each resource.
func (o *RESTOptions) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	path, err := o.register(resource)
	if err != nil {
		return generic.RESTOptions{}, err
	}
	return o.options(resource, path, completing{o.Codec(resource), o.OnRead[resource]}), nil
}

// CustomResources gives storage to the resources that users define. Their codec decodes objects as they are, without a type
// in Go; whoever serves them completes it.
type CustomResources struct {
	*RESTOptions
	Codec runtime.Codec
}

// GetRESTOptions is asked once for each resource, and again when it was defined anew.
func (c *CustomResources) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	path, err := c.register(resource)
	if err != nil {
		return generic.RESTOptions{}, err
	}
	return c.options(resource, path, c.Codec), nil
}

func (o *RESTOptions) options(resource schema.GroupResource, path string, codec runtime.Codec) generic.RESTOptions {
	return generic.RESTOptions{
		StorageConfig: &storagebackend.ConfigForResource{
			Config: storagebackend.Config{
				Prefix:              Prefix,
				Codec:               codec,
				EventsHistoryWindow: storagebackend.DefaultEventsHistoryWindow,

				StorageObjectCountTracker: o.Counts,
				LeaseManagerConfig:        leases,
			},
			GroupResource: resource,
		},
		Decorator:               o.decorate,
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 8,
		ResourcePrefix:          "/" + path,
		CountMetricPollPeriod:   time.Minute,
	}
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
	// What can't be decrypted or decoded is told apart from other failures, so that an administrator can delete it.
	raw, err := etcd3.New(o.Store.client, o.Store.compaction, config.Codec, newFunc, newListFunc, config.Prefix, prefix,
		config.GroupResource, etcd3.WithCorruptObjErrorHandlingTransformer(o.transformer(config.GroupResource)), config.LeaseManagerConfig,
		etcd3.WithCorruptObjErrorHandlingDecoder(etcd3.NewDefaultDecoder(config.Codec, versioner)), versioner)
	if err != nil {
		return nil, nil, err
	}
	deleting := etcd3.NewStoreWithUnsafeCorruptObjectDeletion(raw, config.GroupResource)
	direct := newResource(deleting, o.Store, config.GroupResource, o.Vital[config.GroupResource])
	var below storage.Interface = direct
	if claims, ok := o.Claimers[config.GroupResource]; ok {
		below = &claiming{Interface: below, claims: claims, versioner: versioner, seal: o.seal}
	}
	if o.Uncached[config.GroupResource] {
		return below, sync.OnceFunc(func() {
			direct.close()
			raw.Close()
		}), nil
	}
	before := rewind(below, o.Store)
	c, err := cacher.NewCacherFromConfig(cacher.Config{
		Storage:             before,
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
		before.end()
		raw.Close()
		return nil, nil, err
	}
	delegator := cacher.NewCacheDelegator(c, below)
	before.fills(c)
	return checked{delegator, o.Store, below, before}, sync.OnceFunc(func() {
		before.end()
		delegator.Stop()
		c.Stop()
		direct.close()
		raw.Close()
	}), nil
}
