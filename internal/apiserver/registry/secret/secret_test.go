package secret

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func secret(typ corev1.SecretType, data map[string]string, change ...func(*corev1.Secret)) *corev1.Secret {
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "ns", ResourceVersion: "1"},
		Type:       typ,
		StringData: data,
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	for _, c := range []struct {
		name   string
		secret *corev1.Secret
		want   []string
	}{
		{"empty", secret("", nil), nil},
		{"of a type nobody knows", secret("example.com/mine", nil), nil},
		{"bad key", secret("", map[string]string{"a/b": ""}), []string{"data[a/b] FieldValueInvalid"}},
		{"as big as allowed", secret("", map[string]string{"a": strings.Repeat("x", corev1.MaxSecretSize)}), nil},
		{"too big", secret("", map[string]string{"a": strings.Repeat("x", corev1.MaxSecretSize), "b": "x"}), []string{"data FieldValueTooLong"}},
		{
			"token of nobody", secret(corev1.SecretTypeServiceAccountToken, nil),
			[]string{"metadata.annotations[kubernetes.io/service-account.name] FieldValueRequired"},
		},
		{"token", secret(corev1.SecretTypeServiceAccountToken, nil, func(s *corev1.Secret) {
			s.Annotations = map[string]string{corev1.ServiceAccountNameKey: "default"}
		}), nil},
		{"dockercfg", secret(corev1.SecretTypeDockercfg, map[string]string{".dockercfg": "{}"}), nil},
		{"no dockercfg", secret(corev1.SecretTypeDockercfg, nil), []string{"data[.dockercfg] FieldValueRequired"}},
		{
			"dockercfg that is no object", secret(corev1.SecretTypeDockercfg, map[string]string{".dockercfg": "[]"}),
			[]string{"data[.dockercfg] FieldValueInvalid"},
		},
		{"docker config", secret(corev1.SecretTypeDockerConfigJson, map[string]string{".dockerconfigjson": `{"auths":{}}`}), nil},
		{
			"broken docker config", secret(corev1.SecretTypeDockerConfigJson, map[string]string{".dockerconfigjson": "{"}),
			[]string{"data[.dockerconfigjson] FieldValueInvalid"},
		},
		{"user with an empty name", secret(corev1.SecretTypeBasicAuth, map[string]string{"username": ""}), nil},
		{"password alone", secret(corev1.SecretTypeBasicAuth, map[string]string{"password": "p"}), nil},
		{
			"neither user nor password", secret(corev1.SecretTypeBasicAuth, nil),
			[]string{"data[password] FieldValueRequired", "data[username] FieldValueRequired"},
		},
		{"ssh key", secret(corev1.SecretTypeSSHAuth, map[string]string{"ssh-privatekey": "k"}), nil},
		{
			"empty ssh key", secret(corev1.SecretTypeSSHAuth, map[string]string{"ssh-privatekey": ""}),
			[]string{"data[ssh-privatekey] FieldValueRequired"},
		},
		{"tls", secret(corev1.SecretTypeTLS, map[string]string{"tls.crt": "", "tls.key": ""}), nil},
		{"no tls", secret(corev1.SecretTypeTLS, nil), []string{"data[tls.crt] FieldValueRequired", "data[tls.key] FieldValueRequired"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Create(t, c.secret); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

// An error must not tell what the Secret holds.
func TestErrorsKeepTheSecret(t *testing.T) {
	s := secret(corev1.SecretTypeDockercfg, nil)
	s.Data = map[string][]byte{".dockercfg": []byte(`{"a":hunter2}`)}
	errs := validate(t.Context(), s)
	// A decoder that quotes the first character it cannot read would already tell something.
	if len(errs) != 1 || strings.Contains(errs.ToAggregate().Error(), "'h'") || strings.Contains(errs.ToAggregate().Error(), "hunter2") {
		t.Errorf("errors are %v", errs)
	}
}

func TestDefaults(t *testing.T) {
	s := secret("", map[string]string{"a": "written", "b": "new"})
	s.Data = map[string][]byte{"a": []byte("old"), "c": []byte("kept")}
	setDefaults(s)
	if s.Type != corev1.SecretTypeOpaque || s.StringData != nil {
		t.Errorf("type is %q, stringData %v", s.Type, s.StringData)
	}
	for key, want := range map[string]string{"a": "written", "b": "new", "c": "kept"} {
		if string(s.Data[key]) != want {
			t.Errorf("data[%s] is %q, want %q", key, s.Data[key], want)
		}
	}
	empty := secret("", nil)
	setDefaults(empty)
	if empty.Data != nil {
		t.Error("data was made from nothing")
	}
}

func TestUpdate(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	frozen := func(s *corev1.Secret) { s.Immutable = new(true) }
	data := map[string]string{"a": "1"}
	for _, c := range []struct {
		name     string
		old, now *corev1.Secret
		want     []string
	}{
		{"data", secret("", data), secret("", map[string]string{"b": "2"}), nil},
		{"type", secret("", data), secret("other", data), []string{"type FieldValueInvalid"}},
		{"type left out", secret("other", data), secret("", data), []string{"type FieldValueInvalid"}},
		{"frozen, as it was", secret("", data, frozen), secret("", data, frozen), nil},
		{"frozen, data", secret("", data, frozen), secret("", nil, frozen), []string{"data FieldValueForbidden"}},
		{"frozen, thawed", secret("", data, frozen), secret("", data), []string{"immutable FieldValueForbidden"}},
		{"freeze", secret("", data), secret("", nil, frozen), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			setDefaults(c.old)
			if got := rules.Update(t, c.now, c.old); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestWarnings(t *testing.T) {
	broken := secret(corev1.SecretTypeTLS, nil)
	if got := warnings(t.Context(), broken, nil); len(got) != 1 {
		t.Errorf("an unusable key pair gave %q", got)
	}
	if got := warnings(t.Context(), secret(corev1.SecretTypeOpaque, nil), nil); got != nil {
		t.Errorf("an opaque Secret gave %q", got)
	}
	good := secret(corev1.SecretTypeTLS, nil)
	good.Data = keyPair(t)
	if got := warnings(t.Context(), good, nil); got != nil {
		t.Errorf("a good key pair gave %q", got)
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	s := secret("", map[string]string{"a": "1"})
	setDefaults(s)
	row := rules.Row(t, s)
	if row["Name"] != "s" || row["Type"] != "Opaque" || row["Data"] != int64(1) || row["Age"] != "<unknown>" {
		t.Errorf("row is %v", row)
	}
}
