package event

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/registrytest"
)

func addTypes(scheme *runtime.Scheme) error {
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, eventsv1.AddToScheme, AddConversions} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	for _, group := range []string{corev1.GroupName, eventsv1.GroupName} {
		scheme.AddKnownTypes(schema.GroupVersion{Group: group, Version: runtime.APIVersionInternal}, &corev1.Event{}, &corev1.EventList{})
	}
	return nil
}

var noon = time.Date(2026, 1, 2, 12, 0, 0, 123456000, time.UTC)

// modern is an Event that both dresses accept.
func modern(change ...func(*corev1.Event)) *corev1.Event {
	e := &corev1.Event{
		ObjectMeta:          metav1.ObjectMeta{Name: "e", Namespace: "ns"},
		InvolvedObject:      corev1.ObjectReference{Kind: "Service", Namespace: "ns", Name: "web"},
		EventTime:           metav1.NewMicroTime(noon),
		ReportingController: "example.com/portal",
		ReportingInstance:   "portal-1",
		Action:              "Claim",
		Reason:              "Claimed",
		Message:             "an address was claimed",
		Type:                corev1.EventTypeNormal,
	}
	for _, c := range change {
		c(e)
	}
	return e
}

// legacy is an Event as older clients write it.
func legacy(change ...func(*corev1.Event)) *corev1.Event {
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: "Old_Name", Namespace: "ns"},
		InvolvedObject: corev1.ObjectReference{Kind: "Service", Namespace: "ns", Name: "web"},
		FirstTimestamp: metav1.NewTime(noon),
		Count:          3,
	}
	for _, c := range change {
		c(e)
	}
	return e
}

func TestCreate(t *testing.T) {
	core := registrytest.For(t, New(DefaultTTL), addTypes)
	events := registrytest.For(t, NewEvents(DefaultTTL), addTypes)
	long := strings.Repeat("x", 129)
	for _, c := range []struct {
		name         string
		event        *corev1.Event
		core, events []string
	}{
		{name: "modern", event: modern()},
		{
			name: "legacy", event: legacy(),
			events: []string{
				"count FieldValueInvalid", "eventTime FieldValueRequired", "firstTimestamp FieldValueInvalid",
				"metadata.name FieldValueInvalid", "type FieldValueInvalid",
			},
		},
		{
			name:   "a name that no URL can carry",
			event:  modern(func(e *corev1.Event) { e.Name = "a/b" }),
			core:   []string{"metadata.name FieldValueInvalid"},
			events: []string{"metadata.name FieldValueInvalid"},
		},
		{
			name: "a bad label beside something worse",
			event: modern(func(e *corev1.Event) {
				e.Labels, e.Action = map[string]string{"a": "/"}, ""
			}),
			core:   []string{"action FieldValueRequired"},
			events: []string{"action FieldValueRequired", "metadata.labels FieldValueInvalid"},
		},
		{
			name:  "legacy elsewhere than its object",
			event: modern(func(e *corev1.Event) { e.EventTime = metav1.MicroTime{}; e.InvolvedObject.Namespace = "other" }),
			core:  []string{"involvedObject.namespace FieldValueInvalid"},
			events: []string{
				"eventTime FieldValueRequired", "involvedObject.namespace FieldValueInvalid",
			},
		},
		{
			name: "legacy about a cluster-wide object",
			event: modern(func(e *corev1.Event) {
				e.EventTime, e.Namespace, e.InvolvedObject.Namespace = metav1.MicroTime{}, "default", ""
			}),
			events: []string{"eventTime FieldValueRequired"},
		},
		{
			name:   "modern about a cluster-wide object",
			event:  modern(func(e *corev1.Event) { e.InvolvedObject.Namespace = "" }),
			core:   []string{"involvedObject.namespace FieldValueInvalid"},
			events: []string{"involvedObject.namespace FieldValueInvalid"},
		},
		{
			name:  "modern about a cluster-wide object in kube-system",
			event: modern(func(e *corev1.Event) { e.Namespace, e.InvolvedObject.Namespace = "kube-system", "" }),
		},
		{
			name:  "modern elsewhere than its object",
			event: modern(func(e *corev1.Event) { e.InvolvedObject.Namespace = "other" }),
		},
		{
			name: "nothing a modern one owes",
			event: modern(func(e *corev1.Event) {
				e.ReportingController, e.ReportingInstance, e.Action, e.Reason = "", "", "", ""
			}),
			core: []string{
				"action FieldValueRequired", "reason FieldValueRequired",
				"reportingComponent FieldValueInvalid", "reportingComponent FieldValueInvalid",
				"reportingComponent FieldValueRequired", "reportingInstance FieldValueRequired",
			},
			events: []string{
				"action FieldValueRequired", "reason FieldValueRequired",
				"reportingController FieldValueInvalid", "reportingController FieldValueInvalid",
				"reportingController FieldValueRequired", "reportingInstance FieldValueRequired",
			},
		},
		{
			name: "too long",
			event: modern(func(e *corev1.Event) {
				e.ReportingInstance, e.Action, e.Reason, e.Message = long, long, long, strings.Repeat("x", 1025)
			}),
			core: []string{
				"action FieldValueInvalid", "message FieldValueInvalid", "reason FieldValueInvalid",
				"reportingInstance FieldValueInvalid",
			},
			events: []string{
				"action FieldValueInvalid", "message FieldValueInvalid", "reason FieldValueInvalid",
				"reportingInstance FieldValueInvalid",
			},
		},
		{
			name:   "a series of one",
			event:  modern(func(e *corev1.Event) { e.Series = &corev1.EventSeries{Count: 1} }),
			events: []string{"series.count FieldValueInvalid", "series.lastObservedTime FieldValueRequired"},
		},
		{
			name: "a source and a last timestamp",
			event: modern(func(e *corev1.Event) {
				e.Source.Host, e.LastTimestamp = "node", metav1.NewTime(noon)
			}),
			events: []string{"lastTimestamp FieldValueInvalid", "source FieldValueInvalid"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := core.Create(t, c.event.DeepCopy()); !slices.Equal(got, c.core) {
				t.Errorf("core/v1 refused for %q, want %q", got, c.core)
			}
			if got := events.Create(t, c.event.DeepCopy()); !slices.Equal(got, c.events) {
				t.Errorf("events.k8s.io/v1 refused for %q, want %q", got, c.events)
			}
		})
	}
}

func TestUpdate(t *testing.T) {
	core := registrytest.For(t, New(DefaultTTL), addTypes)
	events := registrytest.For(t, NewEvents(DefaultTTL), addTypes)
	for _, c := range []struct {
		name     string
		old, now *corev1.Event
		events   []string
	}{
		{name: "a legacy one kept as it is", old: legacy(), now: legacy()},
		{
			name: "a legacy one counted on", old: legacy(), now: legacy(func(e *corev1.Event) { e.Count++ }),
			events: []string{"count FieldValueInvalid"},
		},
		{
			name: "another reason", old: modern(), now: modern(func(e *corev1.Event) { e.Reason = "Freed" }),
			events: []string{"reason FieldValueInvalid"},
		},
		{
			name: "a repetition", old: modern(),
			now: modern(func(e *corev1.Event) {
				e.Series = &corev1.EventSeries{Count: 2, LastObservedTime: metav1.NewMicroTime(noon)}
			}),
		},
		{
			name: "a broken series", old: modern(),
			now:    modern(func(e *corev1.Event) { e.Series = &corev1.EventSeries{Count: 1} }),
			events: []string{"series.count FieldValueInvalid", "series.lastObservedTime FieldValueRequired"},
		},
		{
			name: "a broken series kept",
			old:  modern(func(e *corev1.Event) { e.Series = &corev1.EventSeries{Count: 1} }),
			now:  modern(func(e *corev1.Event) { e.Series = &corev1.EventSeries{Count: 1} }),
		},
		{
			name: "nanoseconds lost on the way",
			old:  modern(func(e *corev1.Event) { e.EventTime = metav1.NewMicroTime(noon.Add(7)) }),
			now:  modern(),
		},
		{
			name: "a microsecond later", old: modern(),
			now:    modern(func(e *corev1.Event) { e.EventTime = metav1.NewMicroTime(noon.Add(time.Microsecond)) }),
			events: []string{"eventTime FieldValueInvalid"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.old.ResourceVersion = "1"
			if got := core.Update(t, c.now.DeepCopy(), c.old); got != nil {
				t.Errorf("core/v1 refused for %q", got)
			}
			if got := events.Update(t, c.now.DeepCopy(), c.old); !slices.Equal(got, c.events) {
				t.Errorf("events.k8s.io/v1 refused for %q, want %q", got, c.events)
			}
		})
	}
}

func TestEveryFieldButSeriesIsImmutable(t *testing.T) {
	events := registrytest.For(t, NewEvents(DefaultTTL), addTypes)
	old := modern(func(e *corev1.Event) { e.ResourceVersion = "1" })
	typ := reflect.TypeFor[corev1.Event]()
	for i := range typ.NumField() {
		name := typ.Field(i).Name
		if name == "TypeMeta" || name == "ObjectMeta" || name == "Series" {
			continue
		}
		now := old.DeepCopy()
		reflect.ValueOf(now).Elem().Field(i).SetZero()
		if reflect.DeepEqual(now, old) {
			switch f := reflect.ValueOf(now).Elem().FieldByName(name).Addr().Interface().(type) {
			case *metav1.Time:
				*f = metav1.NewTime(noon)
			case *int32:
				*f = 5
			case *corev1.EventSource:
				f.Host = "node"
			case **corev1.ObjectReference:
				*f = &corev1.ObjectReference{Name: "x"}
			}
		}
		if events.Update(t, now, old) == nil {
			t.Errorf("%s could be changed", name)
		}
	}
}

func TestFieldSelectors(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		addTypes, New(DefaultTTL).AddToScheme, NewEvents(DefaultTTL).AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	given := selectable(modern())
	for _, c := range []struct {
		gv          schema.GroupVersion
		label, want string
	}{
		{corev1.SchemeGroupVersion, "involvedObject.name", "involvedObject.name"},
		{corev1.SchemeGroupVersion, "source", "source"},
		{corev1.SchemeGroupVersion, "regarding.name", ""},
		{eventsv1.SchemeGroupVersion, "regarding.name", "involvedObject.name"},
		{eventsv1.SchemeGroupVersion, "reportingController", "reportingComponent"},
		{eventsv1.SchemeGroupVersion, "metadata.namespace", "metadata.namespace"},
		{eventsv1.SchemeGroupVersion, "involvedObject.name", ""},
		{eventsv1.SchemeGroupVersion, "source", ""},
	} {
		got, _, err := scheme.ConvertFieldLabel(c.gv.WithKind("Event"), c.label, "x")
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: %s means %q (%v), want %q", c.gv, c.label, got, err, c.want)
		}
	}
	for _, name := range selectableNames {
		if _, ok := given[name]; !ok {
			t.Errorf("%s can be asked for but is never given", name)
		}
	}
	if got := given["source"]; got != "example.com/portal" {
		t.Errorf("without a source component, source is %q; want the reporting controller", got)
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(DefaultTTL), addTypes)
	ago := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	for _, c := range []struct {
		name  string
		event *corev1.Event
		want  map[string]any
	}{
		{
			"modern", modern(func(e *corev1.Event) {
				e.EventTime = metav1.NewMicroTime(ago(5 * time.Minute))
				e.InvolvedObject.FieldPath = "spec"
				e.Message = " text\n"
			}), map[string]any{
				"Last Seen": "5m", "First Seen": "5m", "Count": int64(1), "Object": "service/web", "Subobject": "spec",
				"Source": "example.com/portal, portal-1", "Message": "text", "Reason": "Claimed", "Type": "Normal", "Name": "e",
			},
		},
		{
			"series", modern(func(e *corev1.Event) {
				e.EventTime = metav1.NewMicroTime(ago(5 * time.Minute))
				e.Series = &corev1.EventSeries{Count: 9, LastObservedTime: metav1.NewMicroTime(ago(10 * time.Second))}
			}), map[string]any{"Last Seen": "10s", "First Seen": "5m", "Count": int64(9)},
		},
		{
			"legacy", legacy(func(e *corev1.Event) {
				e.FirstTimestamp, e.LastTimestamp = metav1.NewTime(ago(2*time.Hour)), metav1.NewTime(ago(3*time.Minute))
				e.Source = corev1.EventSource{Component: "kubelet", Host: "n1"}
				e.InvolvedObject.Name = ""
			}), map[string]any{
				"Last Seen": "3m", "First Seen": "120m", "Count": int64(3), "Object": "service", "Source": "kubelet, n1",
			},
		},
		{
			"empty", &corev1.Event{}, map[string]any{
				"Last Seen": "<unknown>", "First Seen": "<unknown>", "Count": int64(1), "Object": "", "Source": "",
			},
		},
	} {
		got := rules.Row(t, c.event)
		for col, want := range c.want {
			if got[col] != want {
				t.Errorf("%s: %s is %v, want %v", c.name, col, got[col], want)
			}
		}
	}
}

func TestColumnOrder(t *testing.T) {
	rules := registrytest.For(t, New(DefaultTTL), addTypes)
	store := rules.Storage["events"].(*registry.REST)
	table, err := store.ConvertToTable(t.Context(), &corev1.EventList{Items: []corev1.Event{*modern()}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range table.ColumnDefinitions {
		name := c.Name
		if c.Priority > 0 {
			name = "(" + name + ")"
		}
		got = append(got, name)
	}
	want := []string{
		"Last Seen", "Type", "Reason", "Object", "(Subobject)", "(Source)", "Message", "(First Seen)", "(Count)", "(Name)",
	}
	if !slices.Equal(got, want) {
		t.Errorf("columns are %q, want %q", got, want)
	}
	if cells := table.Rows[0].Cells; len(cells) != len(want) || cells[len(cells)-1] != "e" {
		t.Errorf("cells are %v", cells)
	}
}
