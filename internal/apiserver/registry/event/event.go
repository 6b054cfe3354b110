// Package event describes Events: what happened to an object, told for a while. One stored object is served in two
// dresses, core/v1 and events.k8s.io/v1; the first is what is stored and what this package works on. It knows nothing
// of who records Events.
package event

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry"
)

// DefaultTTL is how long, in seconds, an Event is remembered if nobody says otherwise.
const DefaultTTL = 3600

type kind = registry.Kind[corev1.Event, *corev1.Event]

// New describes core/v1 Events, forgotten ttl seconds after their last change.
func New(ttl uint64) registry.Resource {
	k := describe(corev1.SchemeGroupVersion, ttl, func(store *genericregistry.Store) {
		store.CreateStrategy = lenientCreate{store.CreateStrategy}
	})
	k.ValidateUpdate = validateCoreUpdate
	return k
}

// NewEvents describes events.k8s.io/v1 Events. They are the objects that New describes, under stricter rules.
func NewEvents(ttl uint64) registry.Resource {
	k := describe(eventsv1.SchemeGroupVersion, ttl, func(*genericregistry.Store) {})
	k.Validate, k.ValidateUpdate = validateNew, validateUpdate
	return dressed{k}
}

func describe(served schema.GroupVersion, ttl uint64, setRules func(*genericregistry.Store)) *kind {
	return &kind{
		Served:   served,
		Plural:   "events",
		Singular: "event",
		KindName: "Event",
		// Whatever the dress, it is the core resource that is stored.
		StoredGroup:      ptr.To(corev1.GroupName),
		ShortNames:       []string{"ev"},
		NewList:          func() runtime.Object { return &corev1.EventList{} },
		Fields:           selectable,
		SelectableFields: selectableNames,
		Columns:          columns,
		CreateOnUpdate:   true,
		TTL:              func(*corev1.Event) uint64 { return ttl },
		Customize: func(store *genericregistry.Store, _ map[string]rest.Storage) error {
			customize(store)
			setRules(store)
			return nil
		},
	}
}

func customize(store *genericregistry.Store) {
	store.TableConvertor = nameLast{store.TableConvertor}
	store.DeleteStrategy = uncollected{store.DeleteStrategy}
}

// uncollected says that nothing depends on an Event, so a delete that asks to wait for dependents or to orphan them
// has nothing to wait for.
type uncollected struct{ rest.RESTDeleteStrategy }

func (uncollected) DefaultGarbageCollectionPolicy(context.Context) rest.GarbageCollectionPolicy {
	return rest.Unsupported
}

// dressed serves the core objects in another group: its own names for the fields, and the core group's place in the
// store.
type dressed struct{ *kind }

// AddToScheme teaches the scheme the names that events.k8s.io/v1 has for what can be selected by.
func (d dressed) AddToScheme(scheme *runtime.Scheme) error {
	return scheme.AddFieldLabelConversionFunc(d.Served.WithKind(d.KindName), func(label, value string) (string, string, error) {
		name, ok := eventsNames[label]
		if !ok {
			return "", "", fmt.Errorf("events cannot be selected by the field %q", label)
		}
		return name, value, nil
	})
}

// Storage builds the storage on the place where the core group keeps its Events.
func (d dressed) Storage(scheme *runtime.Scheme, getter generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	return d.kind.Storage(scheme, coreStore{getter})
}

type coreStore struct{ generic.RESTOptionsGetter }

func (s coreStore) GetRESTOptions(_ schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	return s.RESTOptionsGetter.GetRESTOptions(corev1.Resource("events"), example)
}

var selectableNames = []string{
	"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
	"involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath",
	"reason", "reportingComponent", "source", "type",
}

// eventsNames are the names of events.k8s.io/v1 for what selectable gives.
var eventsNames = map[string]string{
	"metadata.name":             "metadata.name",
	"metadata.namespace":        "metadata.namespace",
	"regarding.kind":            "involvedObject.kind",
	"regarding.namespace":       "involvedObject.namespace",
	"regarding.name":            "involvedObject.name",
	"regarding.uid":             "involvedObject.uid",
	"regarding.apiVersion":      "involvedObject.apiVersion",
	"regarding.resourceVersion": "involvedObject.resourceVersion",
	"regarding.fieldPath":       "involvedObject.fieldPath",
	"reason":                    "reason",
	"reportingController":       "reportingComponent",
	"type":                      "type",
}

func selectable(e *corev1.Event) fields.Set {
	about := e.InvolvedObject
	return fields.Set{
		"involvedObject.kind":            about.Kind,
		"involvedObject.namespace":       about.Namespace,
		"involvedObject.name":            about.Name,
		"involvedObject.uid":             string(about.UID),
		"involvedObject.apiVersion":      about.APIVersion,
		"involvedObject.resourceVersion": about.ResourceVersion,
		"involvedObject.fieldPath":       about.FieldPath,
		"reason":                         e.Reason,
		"reportingComponent":             e.ReportingController,
		"source":                         component(e),
		"type":                           e.Type,
	}
}

// component is who reported the Event, in the old place or in the new one.
func component(e *corev1.Event) string {
	if e.Source.Component != "" {
		return e.Source.Component
	}
	return e.ReportingController
}
