package event

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
)

var doc = corev1.Event{}.SwaggerDoc()

var columns = []registry.Column[corev1.Event]{
	{Name: "Last Seen", Description: doc["lastTimestamp"], Cell: func(e *corev1.Event) any { return lastSeen(e) }},
	{Name: "Type", Description: doc["type"], Cell: func(e *corev1.Event) any { return e.Type }},
	{Name: "Reason", Description: doc["reason"], Cell: func(e *corev1.Event) any { return e.Reason }},
	{Name: "Object", Description: doc["involvedObject"], Cell: func(e *corev1.Event) any { return object(e) }},
	{
		Name: "Subobject", Wide: true, Description: corev1.ObjectReference{}.SwaggerDoc()["fieldPath"],
		Cell: func(e *corev1.Event) any { return e.InvolvedObject.FieldPath },
	},
	{Name: "Source", Wide: true, Description: doc["source"], Cell: func(e *corev1.Event) any { return source(e) }},
	{Name: "Message", Description: doc["message"], Cell: func(e *corev1.Event) any { return strings.TrimSpace(e.Message) }},
	{Name: "First Seen", Wide: true, Description: doc["firstTimestamp"], Cell: func(e *corev1.Event) any { return firstSeen(e) }},
	{Name: "Count", Wide: true, Description: doc["count"], Cell: func(e *corev1.Event) any { return count(e) }},
}

func firstSeen(e *corev1.Event) string {
	if e.FirstTimestamp.IsZero() {
		return registry.Since(metav1.Time(e.EventTime))
	}
	return registry.Since(e.FirstTimestamp)
}

func lastSeen(e *corev1.Event) string {
	switch {
	case e.Series != nil:
		return registry.Since(metav1.Time(e.Series.LastObservedTime))
	case e.LastTimestamp.IsZero():
		return firstSeen(e)
	}
	return registry.Since(e.LastTimestamp)
}

func count(e *corev1.Event) int64 {
	switch {
	case e.Series != nil:
		return int64(e.Series.Count)
	case e.Count == 0:
		// An Event of the newer kind counts nothing until it repeats.
		return 1
	}
	return int64(e.Count)
}

func object(e *corev1.Event) string {
	about := strings.ToLower(e.InvolvedObject.Kind)
	if e.InvolvedObject.Name != "" {
		about += "/" + e.InvolvedObject.Name
	}
	return about
}

func source(e *corev1.Event) string {
	instance := e.Source.Host
	if instance == "" {
		instance = e.ReportingInstance
	}
	if instance == "" {
		return component(e)
	}
	return component(e) + ", " + instance
}

// nameLast moves the name to the end and shows it only to those who ask for everything: what an Event is called says
// nothing about what happened.
type nameLast struct{ rest.TableConvertor }

func (c nameLast) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	table, err := c.TableConvertor.ConvertToTable(ctx, obj, options)
	if err != nil {
		return nil, err
	}
	if defs := table.ColumnDefinitions; len(defs) > 0 {
		name := defs[0]
		name.Priority = 1
		table.ColumnDefinitions = append(defs[1:], name)
	}
	for i, row := range table.Rows {
		table.Rows[i].Cells = append(row.Cells[1:], row.Cells[0])
	}
	return table, nil
}
