package event

import (
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
)

// AddConversions teaches the scheme to change an Event's dress, both ways. What comes out may share memory with what
// went in, as conversions may.
func AddConversions(scheme *runtime.Scheme) error {
	for _, add := range []func(*runtime.Scheme) error{
		conversionOf(toEvents), conversionOf(toCore), conversionOf(toEventsList), conversionOf(toCoreList),
	} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	return nil
}

func conversionOf[In, Out any](convert func(*In, *Out)) func(*runtime.Scheme) error {
	return func(scheme *runtime.Scheme) error {
		return scheme.AddConversionFunc((*In)(nil), (*Out)(nil), func(in, out any, _ conversion.Scope) error {
			convert(in.(*In), out.(*Out))
			return nil
		})
	}
}

func toEvents(in *corev1.Event, out *eventsv1.Event) {
	out.ObjectMeta = in.ObjectMeta
	out.EventTime = in.EventTime
	out.Series = (*eventsv1.EventSeries)(in.Series)
	out.ReportingController = in.ReportingController
	out.ReportingInstance = in.ReportingInstance
	out.Action = in.Action
	out.Reason = in.Reason
	out.Regarding = in.InvolvedObject
	out.Related = in.Related
	out.Note = in.Message
	out.Type = in.Type
	out.DeprecatedSource = in.Source
	out.DeprecatedFirstTimestamp = in.FirstTimestamp
	out.DeprecatedLastTimestamp = in.LastTimestamp
	out.DeprecatedCount = in.Count
}

func toCore(in *eventsv1.Event, out *corev1.Event) {
	out.ObjectMeta = in.ObjectMeta
	out.EventTime = in.EventTime
	out.Series = (*corev1.EventSeries)(in.Series)
	out.ReportingController = in.ReportingController
	out.ReportingInstance = in.ReportingInstance
	out.Action = in.Action
	out.Reason = in.Reason
	out.InvolvedObject = in.Regarding
	out.Related = in.Related
	out.Message = in.Note
	out.Type = in.Type
	out.Source = in.DeprecatedSource
	out.FirstTimestamp = in.DeprecatedFirstTimestamp
	out.LastTimestamp = in.DeprecatedLastTimestamp
	out.Count = in.DeprecatedCount
}

func toEventsList(in *corev1.EventList, out *eventsv1.EventList) {
	out.ListMeta = in.ListMeta
	out.Items = convertAll(in.Items, toEvents)
}

func toCoreList(in *eventsv1.EventList, out *corev1.EventList) {
	out.ListMeta = in.ListMeta
	out.Items = convertAll(in.Items, toCore)
}

// convertAll keeps nil apart from empty: one is written "null", the other "[]".
func convertAll[In, Out any](in []In, convert func(*In, *Out)) []Out {
	if in == nil {
		return nil
	}
	out := make([]Out, len(in))
	for i := range in {
		convert(&in[i], &out[i])
	}
	return out
}
