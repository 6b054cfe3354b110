package event

import (
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
)

var (
	moments = rapid.Custom(func(t *rapid.T) time.Time {
		return time.UnixMicro(rapid.Int64Range(0, 4e15).Draw(t, "micros")).UTC()
	})
	words      = rapid.StringMatching(`[a-zA-Z0-9./ -]{0,12}`)
	references = rapid.Custom(func(t *rapid.T) corev1.ObjectReference {
		return corev1.ObjectReference{
			Kind: words.Draw(t, "kind"), Namespace: words.Draw(t, "ns"), Name: words.Draw(t, "name"),
			UID: types.UID(words.Draw(t, "uid")), APIVersion: words.Draw(t, "apiVersion"),
			ResourceVersion: words.Draw(t, "rv"), FieldPath: words.Draw(t, "fieldPath"),
		}
	})
	anyEvent = rapid.Custom(func(t *rapid.T) corev1.Event {
		e := corev1.Event{
			ObjectMeta: metav1.ObjectMeta{
				Name: words.Draw(t, "name"), Namespace: words.Draw(t, "namespace"),
				Labels: rapid.MapOf(words, words).Draw(t, "labels"),
			},
			InvolvedObject:      references.Draw(t, "involved"),
			Reason:              words.Draw(t, "reason"),
			Message:             words.Draw(t, "message"),
			Source:              corev1.EventSource{Component: words.Draw(t, "component"), Host: words.Draw(t, "host")},
			FirstTimestamp:      metav1.NewTime(moments.Draw(t, "first")),
			LastTimestamp:       metav1.NewTime(moments.Draw(t, "last")),
			Count:               rapid.Int32().Draw(t, "count"),
			Type:                words.Draw(t, "type"),
			EventTime:           metav1.NewMicroTime(moments.Draw(t, "eventTime")),
			Action:              words.Draw(t, "action"),
			ReportingController: words.Draw(t, "controller"),
			ReportingInstance:   words.Draw(t, "instance"),
		}
		if rapid.Bool().Draw(t, "series") {
			e.Series = &corev1.EventSeries{Count: rapid.Int32().Draw(t, "n"), LastObservedTime: metav1.NewMicroTime(moments.Draw(t, "observed"))}
		}
		if rapid.Bool().Draw(t, "related") {
			ref := references.Draw(t, "relatedTo")
			e.Related = &ref
		}
		return e
	})
)

func testScheme(t testing.TB) *runtime.Scheme {
	scheme := runtime.NewScheme()
	if err := addTypes(scheme); err != nil {
		t.Fatal(err)
	}
	return scheme
}

// What the server does with an Event of the other group: out to the client, and back.
func TestRoundTrip(t *testing.T) {
	scheme := testScheme(t)
	rapid.Check(t, func(t *rapid.T) {
		in := anyEvent.Draw(t, "event")
		versioned, err := scheme.ConvertToVersion(&in, eventsv1.SchemeGroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		back, err := scheme.ConvertToVersion(versioned.(*eventsv1.Event), runtime.InternalGroupVersioner)
		if err != nil {
			t.Fatal(err)
		}
		out := back.(*corev1.Event)
		out.TypeMeta = in.TypeMeta
		if !equality.Semantic.DeepEqual(*out, in) {
			t.Fatalf("went in as %+v, came back as %+v", in, *out)
		}
	})
}

func TestRoundTripOfLists(t *testing.T) {
	scheme := testScheme(t)
	rapid.Check(t, func(t *rapid.T) {
		in := &corev1.EventList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: words.Draw(t, "continue")}}
		in.Items = rapid.SliceOfN(anyEvent, 0, 3).Draw(t, "items")
		versioned, err := scheme.ConvertToVersion(in, eventsv1.SchemeGroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		back, err := scheme.ConvertToVersion(versioned.(*eventsv1.EventList), runtime.InternalGroupVersioner)
		if err != nil {
			t.Fatal(err)
		}
		out := back.(*corev1.EventList)
		out.TypeMeta = in.TypeMeta
		if !equality.Semantic.DeepEqual(out, in) {
			t.Fatalf("went in as %+v, came back as %+v", in, out)
		}
	})
}

// A field that either type gains must be converted too: every field of a filled Event has to be filled on the other
// side.
func TestEveryFieldIsConverted(t *testing.T) {
	full := modern(func(e *corev1.Event) {
		e.Source = corev1.EventSource{Component: "c", Host: "h"}
		e.FirstTimestamp, e.LastTimestamp, e.Count = metav1.NewTime(noon), metav1.NewTime(noon), 2
		e.Series = &corev1.EventSeries{Count: 2, LastObservedTime: metav1.NewMicroTime(noon)}
		e.Related = &corev1.ObjectReference{Name: "r"}
	})
	mustBeFull(t, *full)
	var events eventsv1.Event
	toEvents(full, &events)
	mustBeFull(t, events)
	var core corev1.Event
	toCore(&events, &core)
	mustBeFull(t, core)
}

func mustBeFull(t *testing.T, e any) {
	t.Helper()
	v := reflect.ValueOf(e)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; name != "TypeMeta" && v.Field(i).IsZero() {
			t.Errorf("%s.%s is empty", strings.TrimPrefix(v.Type().String(), "*"), name)
		}
	}
}

func TestNoItemsStayNoItems(t *testing.T) {
	var out eventsv1.EventList
	toEventsList(&corev1.EventList{}, &out)
	if out.Items != nil {
		t.Error("nil items became an empty list")
	}
	toEventsList(&corev1.EventList{Items: []corev1.Event{}}, &out)
	if out.Items == nil {
		t.Error("an empty list became nil items")
	}
}
