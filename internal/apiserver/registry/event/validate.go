package event

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry/rules"
)

const (
	maxReportingInstance = 128
	maxAction            = 128
	maxReason            = 128
	maxNote              = 1024
)

// lenientCreate validates a new Event of core/v1. Its metadata has only the rules of k8s.io/apiserver, that hold for
// everything: clients older than events.k8s.io put anything into a name that a URL can carry.
type lenientCreate struct{ rest.RESTCreateStrategy }

func (lenientCreate) Validate(_ context.Context, obj runtime.Object) field.ErrorList {
	return validateAlways(obj.(*corev1.Event), "reportingComponent")
}

// validateCoreUpdate validates an update through core/v1: there an Event may be changed at will.
func validateCoreUpdate(_ context.Context, e, _ *corev1.Event) field.ErrorList {
	return validateAlways(e, "reportingComponent")
}

// validateAlways are the rules that every Event keeps in either dress. An eventTime tells an Event of the newer kind,
// that owes more. reporter is what the dress calls the reporting controller.
func validateAlways(e *corev1.Event, reporter string) field.ErrorList {
	if e.EventTime.IsZero() {
		return validateOldPlace(e)
	}
	errs := validateNewPlace(e)
	errs = append(errs, required(field.NewPath(reporter), e.ReportingController)...)
	errs = append(errs, rules.QualifiedName(field.NewPath(reporter), e.ReportingController)...)
	errs = append(errs, required(field.NewPath("reportingInstance"), e.ReportingInstance)...)
	errs = append(errs, atMost(field.NewPath("reportingInstance"), e.ReportingInstance, maxReportingInstance)...)
	errs = append(errs, required(field.NewPath("action"), e.Action)...)
	errs = append(errs, atMost(field.NewPath("action"), e.Action, maxAction)...)
	errs = append(errs, required(field.NewPath("reason"), e.Reason)...)
	errs = append(errs, atMost(field.NewPath("reason"), e.Reason, maxReason)...)
	return append(errs, atMost(field.NewPath("message"), e.Message, maxNote)...)
}

// validateOldPlace wants the Event beside the object it is about. An Event about a cluster-wide object goes to
// "default".
func validateOldPlace(e *corev1.Event) field.ErrorList {
	about := e.InvolvedObject.Namespace
	if about == e.Namespace || about == "" && e.Namespace == metav1.NamespaceDefault {
		return nil
	}
	return misplaced(e)
}

// validateNewPlace also lets an Event of the newer kind live anywhere, as long as it names a namespace.
func validateNewPlace(e *corev1.Event) field.ErrorList {
	if e.InvolvedObject.Namespace != "" || e.Namespace == metav1.NamespaceDefault || e.Namespace == metav1.NamespaceSystem {
		return nil
	}
	return misplaced(e)
}

func misplaced(e *corev1.Event) field.ErrorList {
	return field.ErrorList{field.Invalid(field.NewPath("involvedObject", "namespace"), e.InvolvedObject.Namespace,
		fmt.Sprintf("the Event is in namespace %q, where the object it is about is not", e.Namespace))}
}

// validateNew validates a new Event of events.k8s.io/v1. Those that came through core/v1 may be updated without keeping
// to all of it.
func validateNew(_ context.Context, e *corev1.Event) field.ErrorList {
	errs := append(rules.Finalizers(e), validateAlways(e, "reportingController")...)
	errs = append(errs, validateSeries(e.Series)...)
	if e.EventTime.IsZero() {
		errs = append(errs, field.Required(field.NewPath("eventTime"), "when it was first seen"))
	}
	if e.Type != corev1.EventTypeNormal && e.Type != corev1.EventTypeWarning {
		errs = append(errs, field.Invalid(field.NewPath("type"), e.Type, "must be Normal or Warning"))
	}
	for _, old := range []struct {
		name string
		set  bool
	}{
		{"firstTimestamp", !e.FirstTimestamp.IsZero()},
		{"lastTimestamp", !e.LastTimestamp.IsZero()},
		{"count", e.Count != 0},
		{"source", e.Source != corev1.EventSource{}},
	} {
		if old.set {
			errs = append(errs, field.Invalid(field.NewPath(old.name), "", "belongs to the older kind of Event; leave it out"))
		}
	}
	return errs
}

// validateUpdate lets an Event of events.k8s.io/v1 only grow: a repetition is recorded in its series.
func validateUpdate(_ context.Context, e, old *corev1.Event) field.ErrorList {
	errs := append(rules.Finalizers(e), validateAlways(e, "reportingController")...)
	if !equality.Semantic.DeepEqual(e.Series, old.Series) {
		errs = append(errs, validateSeries(e.Series)...)
	}
	for _, f := range []struct {
		name     string
		now, was any
	}{
		{"involvedObject", e.InvolvedObject, old.InvolvedObject},
		{"reason", e.Reason, old.Reason},
		{"message", e.Message, old.Message},
		{"source", e.Source, old.Source},
		{"firstTimestamp", e.FirstTimestamp, old.FirstTimestamp},
		{"lastTimestamp", e.LastTimestamp, old.LastTimestamp},
		{"count", e.Count, old.Count},
		{"type", e.Type, old.Type},
		{"eventTime", micro(e.EventTime), micro(old.EventTime)},
		{"action", e.Action, old.Action},
		{"related", e.Related, old.Related},
		{"reportingController", e.ReportingController, old.ReportingController},
		{"reportingInstance", e.ReportingInstance, old.ReportingInstance},
	} {
		errs = append(errs, validation.ValidateImmutableField(f.now, f.was, field.NewPath(f.name))...)
	}
	return errs
}

// micro cuts a moment to microseconds: JSON carries no more, so a client that sends back what it read has changed
// nothing.
func micro(t metav1.MicroTime) metav1.MicroTime {
	return metav1.NewMicroTime(t.Truncate(time.Microsecond).UTC())
}

func validateSeries(s *corev1.EventSeries) field.ErrorList {
	if s == nil {
		return nil
	}
	var errs field.ErrorList
	if s.Count < 2 {
		errs = append(errs, field.Invalid(field.NewPath("series", "count"), s.Count, "a series has at least 2"))
	}
	if s.LastObservedTime.IsZero() {
		errs = append(errs, field.Required(field.NewPath("series", "lastObservedTime"), "when it was last seen"))
	}
	return errs
}

func required(path *field.Path, value string) field.ErrorList {
	if value != "" {
		return nil
	}
	return field.ErrorList{field.Required(path, "an Event with an eventTime has one")}
}

func atMost(path *field.Path, value string, limit int) field.ErrorList {
	if len(value) <= limit {
		return nil
	}
	return field.ErrorList{field.Invalid(path, "", fmt.Sprintf("has %d bytes; at most %d are allowed", len(value), limit))}
}
