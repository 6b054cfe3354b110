package storageversionmigration

import (
	"slices"
	"testing"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func of(group, resource string) *migration {
	return &migration{
		ObjectMeta: metav1.ObjectMeta{Name: "m", ResourceVersion: "1"},
		Spec:       storagemigrationv1.StorageVersionMigrationSpec{Resource: metav1.GroupResource{Group: group, Resource: resource}},
	}
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), storagemigrationv1.AddToScheme)
	for name, c := range map[string]struct {
		migration *migration
		want      []string
	}{
		"of the core group":  {of("", "secrets"), nil},
		"of another group":   {of("example.com", "widgets"), nil},
		"of nothing":         {of("", ""), []string{"spec.resource.resource FieldValueRequired"}},
		"of a strange name":  {of("", "Secrets/status"), []string{"spec.resource.resource FieldValueInvalid"}},
		"of a strange group": {of("Example", "widgets"), []string{"spec.resource.group FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			c.migration.Status.ResourceVersion = "7"
			if got := rules.Create(t, c.migration); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
			if c.migration.Status.ResourceVersion != "" {
				t.Error("users set the status")
			}
		})
	}
	if got := rules.Update(t, of("", "configmaps"), of("", "secrets")); !slices.Equal(got, []string{"spec FieldValueInvalid"}) {
		t.Errorf("another resource is refused for %q", got)
	}
}

// How a migration ended, and up to which version it writes, stands.
func TestStatus(t *testing.T) {
	with := func(version string, conditions ...storagemigrationv1.MigrationConditionType) *migration {
		m := of("", "secrets")
		m.Status.ResourceVersion = version
		for _, c := range conditions {
			m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
				Type: string(c), Status: metav1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.Now(),
			})
		}
		return m
	}
	for name, c := range map[string]struct {
		m, old *migration
		fine   bool
	}{
		"begins":               {with("7", storagemigrationv1.MigrationRunning), with(""), true},
		"succeeds":             {with("7", storagemigrationv1.MigrationSucceeded), with("7", storagemigrationv1.MigrationRunning), true},
		"another version":      {with("8"), with("7"), false},
		"no version":           {with("x"), with(""), false},
		"both ends":            {with("7", storagemigrationv1.MigrationSucceeded, storagemigrationv1.MigrationFailed), with("7"), false},
		"succeeds no longer":   {with("7"), with("7", storagemigrationv1.MigrationSucceeded), false},
		"has failed no longer": {with("7", storagemigrationv1.MigrationSucceeded), with("7", storagemigrationv1.MigrationFailed), false},
	} {
		t.Run(name, func(t *testing.T) {
			if errs := validateStatus(c.m, c.old); (len(errs) == 0) != c.fine {
				t.Errorf("%v", errs)
			}
		})
	}
	if got := state(with("7", storagemigrationv1.MigrationFailed)); got != "Failed" {
		t.Error(got)
	}
}
