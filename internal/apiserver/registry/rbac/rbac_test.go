package rbac

import (
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/apiserver/authz"
	"portal/internal/apiserver/registry/registrytest"
	"portal/internal/rbac"
)

func pods(verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: verbs, APIGroups: []string{""}, Resources: []string{"pods"}}
}

func TestValidation(t *testing.T) {
	g := &Guard{}
	named := metav1.ObjectMeta{Name: "x:Y", Namespace: "ns"}
	ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "r"}
	roles := registrytest.For(t, NewRole(g), rbacv1.AddToScheme)
	for _, c := range []struct {
		name string
		rule rbacv1.PolicyRule
		want []string
	}{
		{"fine", pods("get"), nil},
		{"nothing", rbacv1.PolicyRule{}, []string{"rules[0].apiGroups FieldValueRequired", "rules[0].resources FieldValueRequired", "rules[0].verbs FieldValueRequired"}},
		{"paths", rbacv1.PolicyRule{Verbs: []string{"get"}, NonResourceURLs: []string{"/x"}}, []string{"rules[0].nonResourceURLs FieldValueInvalid"}},
	} {
		if got := roles.Create(t, &rbacv1.Role{ObjectMeta: named, Rules: []rbacv1.PolicyRule{c.rule}}); !slices.Equal(got, c.want) {
			t.Errorf("%s: refused for %q, want %q", c.name, got, c.want)
		}
	}
	bindings := registrytest.For(t, NewRoleBinding(g), rbacv1.AddToScheme)
	for _, c := range []struct {
		name string
		who  rbacv1.Subject
		want []string
	}{
		{"user", rbacv1.Subject{Kind: "User", Name: "ann"}, nil},
		{"account", rbacv1.Subject{Kind: "ServiceAccount", Name: "robot"}, nil},
		{"nobody", rbacv1.Subject{Kind: "Group"}, []string{"subjects[0].name FieldValueRequired"}},
		{"machine", rbacv1.Subject{Kind: "Machine", Name: "m"}, []string{"subjects[0].kind FieldValueNotSupported"}},
	} {
		if got := bindings.Create(t, &rbacv1.RoleBinding{ObjectMeta: named, RoleRef: ref, Subjects: []rbacv1.Subject{c.who}}); !slices.Equal(got, c.want) {
			t.Errorf("%s: refused for %q, want %q", c.name, got, c.want)
		}
	}
}

// TestGuard: nobody grants or binds what they don't have, unless they may escalate or bind.
func TestGuard(t *testing.T) {
	x := rbac.NewIndex()
	x.SetRole("ns", "reader", []rbacv1.PolicyRule{pods("get")})
	x.SetRole("ns", "writer", []rbacv1.PolicyRule{pods("delete")})
	x.SetBinding("ns", "b", rbacv1.RoleRef{Kind: "Role", Name: "reader"}, []rbacv1.Subject{{Kind: "User", Name: "ann"}, {Kind: "User", Name: "eve"}})
	x.SetRole("ns", "escalator", []rbacv1.PolicyRule{{Verbs: []string{"escalate", "bind"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"roles"}}})
	x.SetBinding("ns", "e", rbacv1.RoleRef{Kind: "Role", Name: "escalator"}, []rbacv1.Subject{{Kind: "User", Name: "eve"}})
	g := &Guard{Index: x, Authorizer: authz.Authorizer{Index: x}}
	for _, c := range []struct {
		who, groups string
		allowed     bool
	}{{"ann", "", false}, {"eve", "", true}, {"root", user.SystemPrivilegedGroup, true}} {
		ctx := request.WithUser(t.Context(), &user.DefaultInfo{Name: c.who, Groups: []string{c.groups}})
		ctx = request.WithRequestInfo(ctx, &request.RequestInfo{})
		if err := g.mayGrant(ctx, "roles", "ns", "new", []rbacv1.PolicyRule{pods("delete")}); (err == nil) != c.allowed || err != nil && !apierrors.IsForbidden(err) {
			t.Errorf("%s grants: %v", c.who, err)
		}
		if err := g.mayBind(ctx, "rolebindings", "ns", "new", rbacv1.RoleRef{Kind: "Role", Name: "writer"}); (err == nil) != c.allowed {
			t.Errorf("%s binds: %v", c.who, err)
		}
		if c.who != "root" {
			if err := g.mayGrant(ctx, "roles", "ns", "new", []rbacv1.PolicyRule{pods("get")}); err != nil {
				t.Errorf("%s grants what they have: %v", c.who, err)
			}
		}
	}
	if err := g.mayGrant(t.Context(), "roles", "ns", "new", nil); err == nil {
		t.Error("a request without a user may grant")
	}
}
