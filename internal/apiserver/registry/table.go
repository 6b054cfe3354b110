package registry

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Age is the column that says how long ago an object was made.
func Age[T any, P Object[T]]() Column[T] {
	return Column[T]{
		Name:        "Age",
		Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"],
		Cell:        func(t *T) any { return Since(P(t).GetCreationTimestamp()) },
	}
}

// Since is a moment as people read it in a table: "5m", "3d4h", or "<unknown>" where there is none.
func Since(t metav1.Time) string {
	if t.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(time.Since(t.Time))
}

// table converts objects of a Kind into rows.
type table[T any, P Object[T]] struct{ kind *Kind[T, P] }

// ConvertToTable answers a request for a table with the Kind's columns.
func (c table[T, P]) ConvertToTable(_ context.Context, object, options runtime.Object) (*metav1.Table, error) {
	out := &metav1.Table{}
	if list, err := meta.ListAccessor(object); err == nil {
		out.ResourceVersion = list.GetResourceVersion()
		out.Continue = list.GetContinue()
		out.RemainingItemCount = list.GetRemainingItemCount()
	} else if one, err := meta.CommonAccessor(object); err == nil {
		out.ResourceVersion = one.GetResourceVersion()
	}
	if opt, ok := options.(*metav1.TableOptions); !ok || !opt.NoHeaders {
		out.ColumnDefinitions = c.headers()
	}
	row := func(o runtime.Object) error {
		p := o.(P)
		cells := make([]any, 0, len(c.kind.Columns)+1)
		cells = append(cells, p.GetName())
		for _, col := range c.kind.Columns {
			cells = append(cells, col.Cell((*T)(p)))
		}
		out.Rows = append(out.Rows, metav1.TableRow{Cells: cells, Object: runtime.RawExtension{Object: o}})
		return nil
	}
	if meta.IsListType(object) {
		return out, meta.EachListItem(object, row)
	}
	return out, row(object)
}

func (c table[T, P]) headers() []metav1.TableColumnDefinition {
	out := make([]metav1.TableColumnDefinition, 0, len(c.kind.Columns)+1)
	out = append(out, metav1.TableColumnDefinition{
		Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"],
	})
	for _, col := range c.kind.Columns {
		def := metav1.TableColumnDefinition{Name: col.Name, Type: col.Type, Format: col.Format, Description: col.Description}
		if def.Type == "" {
			def.Type = "string"
		}
		if col.Wide {
			def.Priority = 1
		}
		out = append(out, def)
	}
	return out
}

// Table converts objects of a type that is no resource by itself into rows.
func Table[T any, P Object[T]](columns ...Column[T]) rest.TableConvertor {
	return table[T, P]{kind: &Kind[T, P]{Columns: columns}}
}
