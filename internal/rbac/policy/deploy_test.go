package policy

import (
	"bytes"
	"errors"
	"io"
	"os"
	"reflect"
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"
)

// TestBalancerManifest: what deploy/lb/rbac.yaml grants in somebody else's Kubernetes is what the roles here grant, but less in kube-system: Leases and
// the Service of Ingresses are in a namespace of their own, and nothing is created.
func TestBalancerManifest(t *testing.T) {
	p, err := Portal()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]rbacv1.PolicyRule{}
	for _, r := range p.ClusterRoles {
		if r.Name == "system:portal:lb" || r.Name == "system:portal:lb-certificates" {
			want["ClusterRole "+r.Name] = r.Rules
		}
	}
	const own = "portal-lb"
	for _, r := range p.Roles {
		if r.Name != "system:portal:lb" {
			continue
		}
		for _, rule := range r.Rules {
			namespace := r.Namespace
			switch {
			case slices.Contains(rule.Resources, "leases"), slices.Contains(rule.Resources, "services"):
				namespace = own
			case slices.Contains(rule.Verbs, "create"):
				continue
			}
			key := "Role " + namespace + "/" + r.Name
			want[key] = append(want[key], rule)
		}
	}
	data, err := os.ReadFile("../../../deploy/lb/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]rbacv1.PolicyRule{}
	documents := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(data)))
	for {
		text := make([]byte, 64<<10)
		n, err := documents.Read(text)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		var object struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
			Rules             []rbacv1.PolicyRule `json:"rules"`
			Subjects          []rbacv1.Subject    `json:"subjects"`
		}
		if err := sigsyaml.Unmarshal(text[:n], &object); err != nil {
			t.Fatal(err)
		}
		key := object.Kind + " " + object.Name
		if object.Namespace != "" {
			key = object.Kind + " " + object.Namespace + "/" + object.Name
		}
		if object.Rules != nil {
			got[key] = object.Rules
		}
		for _, s := range object.Subjects {
			if s.Kind != "ServiceAccount" || s.Namespace != own || s.Name != own {
				t.Errorf("%s is for %+v", key, s)
			}
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("deploy/lb/rbac.yaml grants\n%+v\nwant\n%+v", got, want)
	}
}
