package lb

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"portal/internal/lb/compile"
	"portal/internal/lb/spec"
)

// TestProblemEvents: a problem is said once while it lasts, and again when it comes back or another process leads.
func TestProblemEvents(t *testing.T) {
	recorder := record.NewFakeRecorder(100)
	said := func() (out []string) {
		for {
			select {
			case e := <-recorder.Events:
				out = append(out, e)
			default:
				return out
			}
		}
	}
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{UID: "1"}}
	in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{UID: "2"}}
	one := compile.Problem{Service: svc, Problem: spec.Problem{Reason: "A", Message: "first"}}
	two := compile.Problem{Ingress: in, Problem: spec.Problem{Reason: "A", Message: "first"}}
	three := compile.Problem{Service: svc, Problem: spec.Problem{Reason: "A", Message: "second"}}
	events := problemEvents{}
	for i, step := range []struct {
		problems []compile.Problem
		want     []string
	}{
		{[]compile.Problem{one, two, one}, []string{"Warning A first", "Warning A first"}},
		{[]compile.Problem{one, two}, nil},
		{[]compile.Problem{one, two, three}, []string{"Warning A second"}},
		{[]compile.Problem{one}, nil},
		{[]compile.Problem{one, three}, []string{"Warning A second"}},
	} {
		events.record(recorder, step.problems)
		if got := said(); !slices.Equal(got, step.want) {
			t.Errorf("step %d: %q, want %q", i, got, step.want)
		}
	}
	events.forget()
	events.record(recorder, []compile.Problem{one})
	if got := said(); len(got) != 1 {
		t.Errorf("for another leader: %q", got)
	}
}
