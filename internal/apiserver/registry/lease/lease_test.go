package lease

import (
	"slices"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func lease(spec coordinationv1.LeaseSpec) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "l", Namespace: "ns", ResourceVersion: "1"}, Spec: spec}
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), coordinationv1.AddToScheme)
	for _, c := range []struct {
		name string
		spec coordinationv1.LeaseSpec
		want []string
	}{
		{"empty", coordinationv1.LeaseSpec{}, nil},
		{"held", coordinationv1.LeaseSpec{HolderIdentity: new("me"), LeaseDurationSeconds: new(int32(1)), LeaseTransitions: new(int32(0))}, nil},
		{"for no time", coordinationv1.LeaseSpec{LeaseDurationSeconds: new(int32(0))}, []string{"spec.leaseDurationSeconds FieldValueInvalid"}},
		{"less than never changed", coordinationv1.LeaseSpec{LeaseTransitions: new(int32(-1))}, []string{"spec.leaseTransitions FieldValueInvalid"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Create(t, lease(c.spec)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

// Coordinated leader election is off: what only it reads is dropped, unless the store has it from elsewhere.
func TestCoordinationIsDropped(t *testing.T) {
	rules := registrytest.For(t, New(), coordinationv1.AddToScheme)
	spec := coordinationv1.LeaseSpec{Strategy: new(coordinationv1.OldestEmulationVersion), PreferredHolder: new("you")}
	created := lease(spec)
	if got := rules.Create(t, created); got != nil || created.Spec.Strategy != nil || created.Spec.PreferredHolder != nil {
		t.Errorf("created as %v (%q)", created.Spec, got)
	}
	updated := lease(spec)
	if got := rules.Update(t, updated, lease(coordinationv1.LeaseSpec{})); got != nil || updated.Spec.Strategy != nil {
		t.Errorf("updated to %v (%q)", updated.Spec, got)
	}
	kept := lease(spec)
	if got := rules.Update(t, kept, lease(spec)); got != nil || kept.Spec.Strategy == nil || kept.Spec.PreferredHolder == nil {
		t.Errorf("kept as %v (%q)", kept.Spec, got)
	}
}

func TestStrategies(t *testing.T) {
	for _, c := range []struct {
		spec coordinationv1.LeaseSpec
		want string
	}{
		{coordinationv1.LeaseSpec{Strategy: new(coordinationv1.CoordinatedLeaseStrategy("example.com/mine"))}, ""},
		{coordinationv1.LeaseSpec{Strategy: new(coordinationv1.CoordinatedLeaseStrategy("mine"))}, "spec.strategy.strategy"},
		{coordinationv1.LeaseSpec{Strategy: new(coordinationv1.CoordinatedLeaseStrategy("a/b/c"))}, "spec.strategy.strategy"},
		{coordinationv1.LeaseSpec{PreferredHolder: new("you")}, "spec.preferredHolder"},
	} {
		got := ""
		for _, err := range validate(t.Context(), lease(c.spec)) {
			got = err.Field
		}
		if got != c.want {
			t.Errorf("%+v was refused at %q, want %q", c.spec, got, c.want)
		}
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), coordinationv1.AddToScheme)
	if row := rules.Row(t, lease(coordinationv1.LeaseSpec{HolderIdentity: new("me")})); row["Holder"] != "me" || row["Name"] != "l" {
		t.Errorf("row is %v", row)
	}
	if row := rules.Row(t, lease(coordinationv1.LeaseSpec{})); row["Holder"] != "" {
		t.Errorf("row of a free lease is %v", row)
	}
}
