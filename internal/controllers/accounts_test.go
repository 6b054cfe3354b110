package controllers

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"

	"portal/internal/rbac/policy"
)

// TestAccounts: every controller has an account, which has a role, and docs/security.md says which.
func TestAccounts(t *testing.T) {
	p, err := policy.Default()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range Names() {
		account := accounts[name]
		if account == "" {
			t.Errorf("%s has no account", name)
			continue
		}
		bound := func(s rbacv1.Subject) bool {
			return s.Kind == rbacv1.ServiceAccountKind && s.Namespace == "kube-system" && s.Name == account
		}
		if !slices.ContainsFunc(p.ClusterRoleBindings, func(b rbacv1.ClusterRoleBinding) bool { return slices.ContainsFunc(b.Subjects, bound) }) &&
			!slices.ContainsFunc(p.RoleBindings, func(b rbacv1.RoleBinding) bool { return slices.ContainsFunc(b.Subjects, bound) }) {
			t.Errorf("%s is %s, which has no role", name, account)
		}
		if row := fmt.Sprintf("| `%s` | `%s` |", name, account); !strings.Contains(string(doc), row) {
			t.Errorf("docs/security.md has no row %s", row)
		}
	}
	for name := range accounts {
		if !slices.Contains(Names(), name) {
			t.Errorf("there is an account for %s, which does not exist", name)
		}
	}
}
