package review

import (
	"context"
	"errors"
	"slices"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
)

// A question is validated, then rejected or admitted, and only then answered; what stops it comes back.
func TestOrder(t *testing.T) {
	var seen []string
	refuse, deny := errors.New("refused"), errors.New("denied")
	for _, c := range []struct {
		name                  string
		invalid               bool
		refused, denied, want error
		order                 []string
	}{
		{name: "answered", order: []string{"validate", "refuse", "admit", "answer"}},
		{name: "invalid", invalid: true, order: []string{"validate"}},
		{name: "refused", refused: refuse, want: refuse, order: []string{"validate", "refuse"}},
		{name: "denied", denied: deny, want: deny, order: []string{"validate", "refuse", "admit"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			seen = nil
			q := &Question[authenticationv1.TokenReview, *authenticationv1.TokenReview]{
				Served: authenticationv1.SchemeGroupVersion,
				Plural: "tokenreviews",
				Validate: func(context.Context, *authenticationv1.TokenReview) field.ErrorList {
					seen = append(seen, "validate")
					if c.invalid {
						return field.ErrorList{field.Required(field.NewPath("spec"), "")}
					}
					return nil
				},
				Refuse: func(context.Context, *authenticationv1.TokenReview) error {
					seen = append(seen, "refuse")
					return c.refused
				},
				Answer: func(_ context.Context, r *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
					seen = append(seen, "answer")
					r.Status.Authenticated = true
					return r, nil
				},
			}
			storage, err := q.Storage(nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			admit := func(context.Context, runtime.Object) error {
				seen = append(seen, "admit")
				return c.denied
			}
			got, err := storage["tokenreviews"].(rest.Creater).Create(t.Context(), &authenticationv1.TokenReview{}, admit, &metav1.CreateOptions{})
			if !slices.Equal(seen, c.order) {
				t.Errorf("went %q, want %q", seen, c.order)
			}
			if c.invalid != apierrors.IsInvalid(err) || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("error is %v", err)
			}
			if (err == nil) != (got != nil) {
				t.Errorf("got %v and %v", got, err)
			}
		})
	}
}
