package apiserver

import (
	"reflect"
	"strings"
	"testing"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Every kind and every list needs its entry under the internal version: where one is missing creation still works, but
// patches fail and the watch cache cannot decode.
func TestEveryKindHasAnInternalEntry(t *testing.T) {
	scheme := newScheme()
	for _, group := range groups {
		internal := schema.GroupVersion{Group: group.version.Group, Version: runtime.APIVersionInternal}
		known := scheme.KnownTypes(internal)
		for kind, goType := range scheme.KnownTypes(group.version) {
			if goType.PkgPath() == "k8s.io/apimachinery/pkg/apis/meta/v1" {
				continue
			}
			hub, ok := known[kind]
			if !ok {
				t.Errorf("%s %s has no internal entry", group.version, kind)
				continue
			}
			scaler := group.version == autoscalingv1.SchemeGroupVersion && strings.HasPrefix(kind, "HorizontalPodAutoscaler")
			if hub != goType && group.version != eventsv1.SchemeGroupVersion && !scaler {
				t.Errorf("%s %s is %s inside and %s outside: it would have to be converted", group.version, kind, hub, goType)
			}
		}
	}
}

// What is served can be made, listed and stored: a resource whose kind or list is not in the scheme would fail at the
// first request.
func TestEveryResourceIsInTheScheme(t *testing.T) {
	scheme := newScheme()
	s := &Server{opts: &completed{Options: DefaultOptions()}, tracker: &tracker{}}
	resources := s.resources(nil)
	if err := addResources(scheme, resources); err != nil {
		t.Fatal(err)
	}
	seen := map[schema.GroupVersionResource]bool{}
	for _, r := range resources {
		at := r.GroupVersion().WithResource(r.Name())
		if seen[at] {
			t.Errorf("%s is served twice", at)
		}
		seen[at] = true
		if len(scheme.KnownTypes(r.GroupVersion())) == 0 {
			t.Errorf("%s: the scheme does not know its group", at)
		}
	}
}

// A List's defaults are those of its items.
func TestListsAreDefaulted(t *testing.T) {
	scheme := newScheme()
	s := &Server{opts: &completed{Options: DefaultOptions()}, tracker: &tracker{}}
	if err := addResources(scheme, s.resources(nil)); err != nil {
		t.Fatal(err)
	}
	obj, err := scheme.New(schema.GroupVersionKind{Version: "v1", Kind: "ServiceList"})
	if err != nil {
		t.Fatal(err)
	}
	items := reflect.ValueOf(obj).Elem().FieldByName("Items")
	items.Set(reflect.MakeSlice(items.Type(), 1, 1))
	scheme.Default(obj)
	if got := items.Index(0).FieldByName("Spec").FieldByName("SessionAffinity").String(); got != "None" {
		t.Errorf("an item of a ServiceList has sessionAffinity %q", got)
	}
}
