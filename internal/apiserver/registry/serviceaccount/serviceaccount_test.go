package serviceaccount

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func account(name string) *corev1.ServiceAccount {
	return &corev1.ServiceAccount{
		ObjectMeta:       metav1.ObjectMeta{Name: name, Namespace: "ns", ResourceVersion: "1"},
		Secrets:          []corev1.ObjectReference{{Name: "a", Namespace: "other", Kind: "Secret", UID: "1"}},
		ImagePullSecrets: []corev1.LocalObjectReference{{Name: "pull"}},
	}
}

func TestSecretsKeepOnlyTheirNames(t *testing.T) {
	rules := registrytest.For(t, New(nil), corev1.AddToScheme)
	created, updated := account("sa"), account("sa")
	if got := rules.Create(t, created); got != nil {
		t.Fatalf("refused for %q", got)
	}
	old := account("sa")
	old.UID = created.UID
	if got := rules.Update(t, updated, old); got != nil {
		t.Fatalf("refused for %q", got)
	}
	for _, sa := range []*corev1.ServiceAccount{created, updated} {
		if want := []corev1.ObjectReference{{Name: "a"}}; !slices.Equal(sa.Secrets, want) {
			t.Errorf("secrets are %v, want %v", sa.Secrets, want)
		}
		if len(sa.ImagePullSecrets) != 1 {
			t.Error("image pull secrets were lost")
		}
	}
}

func TestNames(t *testing.T) {
	rules := registrytest.For(t, New(nil), corev1.AddToScheme)
	for name, want := range map[string][]string{
		"a.b-c": nil,
		"A":     {"metadata.name FieldValueInvalid"},
		"a_b":   {"metadata.name FieldValueInvalid"},
	} {
		if got := rules.Create(t, account(name)); !slices.Equal(got, want) {
			t.Errorf("%s was refused for %q, want %q", name, got, want)
		}
	}
}

func TestWarnings(t *testing.T) {
	plain, marked := account("sa"), account("sa")
	marked.Annotations = map[string]string{enforceMountable: "true"}
	for _, c := range []struct {
		name     string
		now, old *corev1.ServiceAccount
		want     int
	}{
		{"new without", plain, nil, 0},
		{"new with", marked, nil, 1},
		{"added", marked, plain, 1},
		{"kept", marked, marked, 0},
		{"removed", plain, marked, 0},
	} {
		if got := warnings(t.Context(), c.now, c.old); len(got) != c.want {
			t.Errorf("%s: warned %q, want %d", c.name, got, c.want)
		}
	}
}
