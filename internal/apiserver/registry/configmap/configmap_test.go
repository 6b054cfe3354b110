package configmap

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func configMap(change func(*corev1.ConfigMap)) *corev1.ConfigMap {
	c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "ns", ResourceVersion: "1"}}
	change(c)
	return c
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	half := strings.Repeat("x", corev1.MaxSecretSize/2)
	for _, c := range []struct {
		name   string
		change func(*corev1.ConfigMap)
		want   []string
	}{
		{"empty", func(*corev1.ConfigMap) {}, nil},
		{"good keys", func(c *corev1.ConfigMap) {
			c.Data = map[string]string{"a": "", "A_b-c.d": "", ".hidden": "", "-": ""}
		}, nil},
		{"bad keys", func(c *corev1.ConfigMap) {
			c.Data = map[string]string{"a b": ""}
			c.BinaryData = map[string][]byte{"..": nil}
		}, []string{"binaryData[..] FieldValueInvalid", "data[a b] FieldValueInvalid"}},
		{"a key in both", func(c *corev1.ConfigMap) {
			c.Data = map[string]string{"a": ""}
			c.BinaryData = map[string][]byte{"a": nil}
		}, []string{"data[a] FieldValueInvalid"}},
		{"just small enough", func(c *corev1.ConfigMap) {
			c.Data = map[string]string{"a": half}
			c.BinaryData = map[string][]byte{"b": []byte(half)}
		}, nil},
		{"too big together", func(c *corev1.ConfigMap) {
			c.Data = map[string]string{"a": half}
			c.BinaryData = map[string][]byte{"b": []byte(half + "x")}
		}, []string{"[] FieldValueTooLong"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Create(t, configMap(c.change)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestImmutable(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	full := func(c *corev1.ConfigMap) {
		c.Immutable = new(true)
		c.Data = map[string]string{"a": "1"}
		c.BinaryData = map[string][]byte{"b": {1}}
	}
	for _, c := range []struct {
		name   string
		change func(*corev1.ConfigMap)
		want   []string
	}{
		{"as it was", full, nil},
		{"a label", func(c *corev1.ConfigMap) { full(c); c.Labels = map[string]string{"a": "b"} }, nil},
		{"everything", func(*corev1.ConfigMap) {}, []string{
			"binaryData FieldValueForbidden", "data FieldValueForbidden", "immutable FieldValueForbidden",
		}},
		{"no longer", func(c *corev1.ConfigMap) { full(c); c.Immutable = new(false) }, []string{"immutable FieldValueForbidden"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Update(t, configMap(c.change), configMap(full)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
	bare := configMap(func(c *corev1.ConfigMap) { c.Immutable = new(true) })
	empty := configMap(func(c *corev1.ConfigMap) { c.Immutable, c.Data = new(true), map[string]string{} })
	if got := rules.Update(t, empty, bare); got != nil {
		t.Errorf("empty data for none was refused for %q", got)
	}
	mutable := configMap(func(c *corev1.ConfigMap) { full(c); c.Immutable = nil })
	if got := rules.Update(t, configMap(func(*corev1.ConfigMap) {}), mutable); got != nil {
		t.Errorf("a mutable ConfigMap could not be changed: %q", got)
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	row := rules.Row(t, configMap(func(c *corev1.ConfigMap) {
		c.Data = map[string]string{"a": "1", "b": "2"}
		c.BinaryData = map[string][]byte{"c": nil}
	}))
	if row["Name"] != "c" || row["Data"] != int64(3) || row["Age"] != "<unknown>" {
		t.Errorf("row is %v", row)
	}
}
