// Package policy has the roles and bindings that every cluster starts with, and says what to do when a stored one has
// lost some of its rules or subjects. It writes nothing itself.
package policy

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/rbac"
)

// kubernetes.json is what Kubernetes 1.37 starts with, so that its components and its users find the roles they know.
//
//go:embed kubernetes.json
var kubernetes []byte

// portal.json is what Portal's own parts need besides.
//
//go:embed portal.json
var portal []byte

const (
	bootstrapping = "kubernetes.io/bootstrapping"
	// autoUpdate is the annotation by which an administrator keeps a default from being repaired: "false".
	autoUpdate = rbacv1.AutoUpdateAnnotationKey
)

// Selector matches the labels of the objects of the default policy.
const Selector = bootstrapping + "=rbac-defaults"

// Policy is a set of roles and bindings.
type Policy struct {
	ClusterRoles        []rbacv1.ClusterRole        `json:"clusterroles"`
	Roles               []rbacv1.Role               `json:"roles"`
	ClusterRoleBindings []rbacv1.ClusterRoleBinding `json:"clusterrolebindings"`
	RoleBindings        []rbacv1.RoleBinding        `json:"rolebindings"`
}

// Default is what every cluster starts with: Kubernetes' policy and Portal's own.
func Default() (*Policy, error) {
	all, err := read(kubernetes)
	if err != nil {
		return nil, err
	}
	own, err := Portal()
	if err != nil {
		return nil, err
	}
	all.ClusterRoles = append(all.ClusterRoles, own.ClusterRoles...)
	all.Roles = append(all.Roles, own.Roles...)
	all.ClusterRoleBindings = append(all.ClusterRoleBindings, own.ClusterRoleBindings...)
	all.RoleBindings = append(all.RoleBindings, own.RoleBindings...)
	return all, nil
}

// Portal is the part of Default that Kubernetes does not have.
func Portal() (*Policy, error) { return read(portal) }

func read(data []byte) (*Policy, error) {
	p := &Policy{}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(p); err != nil {
		return nil, fmt.Errorf("default roles: %w", err)
	}
	for i := range p.ClusterRoles {
		mark(&p.ClusterRoles[i])
	}
	for i := range p.Roles {
		mark(&p.Roles[i])
	}
	for i := range p.ClusterRoleBindings {
		mark(&p.ClusterRoleBindings[i])
	}
	for i := range p.RoleBindings {
		mark(&p.RoleBindings[i])
	}
	return p, nil
}

// Rules are those of a default ClusterRole; none if there is no such role.
func (p *Policy) Rules(clusterRole string) []rbacv1.PolicyRule {
	for i := range p.ClusterRoles {
		if p.ClusterRoles[i].Name == clusterRole {
			return p.ClusterRoles[i].Rules
		}
	}
	return nil
}

// Namespaces are those that have roles or bindings of their own.
func (p *Policy) Namespaces() []string {
	names := map[string]bool{}
	for i := range p.Roles {
		names[p.Roles[i].Namespace] = true
	}
	for i := range p.RoleBindings {
		names[p.RoleBindings[i].Namespace] = true
	}
	return slices.Sorted(maps.Keys(names))
}

func mark(o metav1.Object) {
	labels := map[string]string{bootstrapping: "rbac-defaults"}
	maps.Copy(labels, o.GetLabels())
	o.SetLabels(labels)
	o.SetAnnotations(map[string]string{autoUpdate: "true"})
}

// Kept says whether an administrator has asked that a default object be left as it is.
func Kept(o metav1.Object) bool { return o.GetAnnotations()[autoUpdate] == "false" }

// RepairMarks adds the labels and annotations of the default object that a stored one lacks, and says whether it lacked any.
func RepairMarks(have, want metav1.Object) bool {
	labels, missingLabels := union(have.GetLabels(), want.GetLabels())
	annotations, missingAnnotations := union(have.GetAnnotations(), want.GetAnnotations())
	have.SetLabels(labels)
	have.SetAnnotations(annotations)
	return missingLabels || missingAnnotations
}

func union(have, want map[string]string) (out map[string]string, changed bool) {
	out = maps.Clone(want)
	maps.Copy(out, have)
	return out, len(out) != len(have)
}

// RepairRules returns what a role's rules should be: those that it has, and the default ones that they don't cover. The
// second result says whether anything was missing.
func RepairRules(have, want []rbacv1.PolicyRule) ([]rbacv1.PolicyRule, bool) {
	missing := rbac.Missing(have, want)
	return append(slices.Clone(have), missing...), len(missing) > 0
}

// RepairSubjects returns what a binding's subjects should be: those that it has, and the default ones that it lacks.
func RepairSubjects(have, want []rbacv1.Subject) (out []rbacv1.Subject, changed bool) {
	out = slices.Clone(have)
	for _, s := range want {
		if !slices.Contains(have, s) {
			out, changed = append(out, s), true
		}
	}
	return out, changed
}

// RepairSelectors returns what a role's aggregation rule should be: the selectors that it has, and the default ones that it
// lacks.
func RepairSelectors(have, want *rbacv1.AggregationRule) (out *rbacv1.AggregationRule, changed bool) {
	if have == nil {
		return want.DeepCopy(), true
	}
	out = have.DeepCopy()
	for _, s := range want.ClusterRoleSelectors {
		if !slices.ContainsFunc(have.ClusterRoleSelectors, func(h metav1.LabelSelector) bool { return equality.Semantic.DeepEqual(h, s) }) {
			out.ClusterRoleSelectors, changed = append(out.ClusterRoleSelectors, s), true
		}
	}
	return out, changed
}
