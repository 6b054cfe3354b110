package service

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// A request is charged once, however many attempts it takes, and not before it was admitted.
func TestChargedOnce(t *testing.T) {
	var told []bool
	refusal := errors.New("no")
	validate := func(ctx context.Context) error {
		told = append(told, Charged(ctx))
		return refusal
	}
	c := &charge{}
	create := c.create(func(ctx context.Context, _ runtime.Object) error { return validate(ctx) })
	update := c.update(func(ctx context.Context, _, _ runtime.Object) error { return validate(ctx) })
	version := func(v string) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{ResourceVersion: v}}
	}
	for _, step := range []struct {
		refusal error
		do      func() error
	}{
		{refusal, func() error { return create(t.Context(), version("")) }},
		{nil, func() error { return create(t.Context(), version("")) }},
		{nil, func() error { return create(t.Context(), version("")) }},
		{nil, func() error { return update(t.Context(), version("1"), version("1")) }},
		{nil, func() error { return update(t.Context(), version("1"), version("1")) }},
		{nil, func() error { return update(t.Context(), version("2"), version("2")) }},
	} {
		refusal = step.refusal
		if err := step.do(); !errors.Is(err, refusal) {
			t.Fatal(err)
		}
	}
	if want := "[false false true false true false]"; fmt.Sprint(told) != want {
		t.Errorf("charged before: %v, not %s", told, want)
	}
	if (&charge{}).create(nil) != nil || (&charge{}).update(nil) != nil {
		t.Error("a validation was made up")
	}
}
