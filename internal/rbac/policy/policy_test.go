package policy

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"

	"portal/internal/identity"
)

// TestDocument compares the table of Portal's own roles in docs/security.md with the roles.
func TestDocument(t *testing.T) {
	p, err := Portal()
	if err != nil {
		t.Fatal(err)
	}
	type named struct {
		namespace, name string
		rules           []rbacv1.PolicyRule
		who             []string
		labels          map[string]string
	}
	var all []*named
	find := func(namespace, name string) *named {
		i := slices.IndexFunc(all, func(n *named) bool { return n.namespace == namespace && n.name == name })
		if i < 0 { // one of Kubernetes'
			all = append(all, &named{namespace: namespace, name: name})
			i = len(all) - 1
		}
		return all[i]
	}
	for _, r := range p.ClusterRoles {
		find("", r.Name).rules, find("", r.Name).labels = r.Rules, r.Labels
	}
	for _, r := range p.Roles {
		find(r.Namespace, r.Name).rules = r.Rules
	}
	for _, b := range p.ClusterRoleBindings {
		r := find("", b.RoleRef.Name)
		r.who = append(r.who, subjects(b.Subjects)...)
	}
	for _, b := range p.RoleBindings {
		r := find(b.Namespace, b.RoleRef.Name)
		r.who = append(r.who, subjects(b.Subjects)...)
	}
	var want []string
	for _, r := range all {
		where, may := "", []string{"as in Kubernetes"}
		if r.namespace != "" {
			where = "`" + r.namespace + "`"
		}
		if r.rules != nil {
			may = nil
		}
		for _, rule := range r.rules {
			may = append(may, text(rule))
		}
		switch {
		case r.name == identity.MachineLB || r.name == identity.LBCertificates:
			r.who = append(r.who, "nobody by default")
		case r.labels[rbacv1.GroupName+"/aggregate-to-view"] == "true":
			r.who = append(r.who, "who has `view`")
		case len(r.who) == 0:
			t.Errorf("nobody has the role %s", r.name)
		}
		want = append(want, fmt.Sprintf("| `%s` | %s | %s | %s |", r.name, where, strings.Join(may, "; "), strings.Join(r.who, ", ")))
	}
	data, err := os.ReadFile("../../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(data), "| role | in | may | who |\n|---|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	have := strings.Split(strings.TrimSpace(table), "\n")
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		t.Errorf("the table of roles in docs/security.md should be\n%s\nand is\n%s", strings.Join(want, "\n"), strings.Join(have, "\n"))
	}
}

func subjects(list []rbacv1.Subject) (out []string) {
	for _, s := range list {
		kind := map[string]string{"User": "user", "Group": "group", "ServiceAccount": "account"}[s.Kind]
		out = append(out, kind+" `"+s.Name+"`")
	}
	return out
}

// text is a rule in few words.
func text(r rbacv1.PolicyRule) string {
	out := strings.Join(r.Verbs, ", ") + " `" + strings.Join(r.Resources, "`, `") + "`"
	if group := strings.Join(r.APIGroups, ", "); group != "" {
		out += " (" + group + ")"
	}
	if len(r.ResourceNames) > 0 {
		out += " named `" + strings.Join(r.ResourceNames, "`, `") + "`"
	}
	return out
}

// TestNobodyIsMaster: no binding makes one of Portal's parts an administrator, and none of Portal's roles has a wildcard.
func TestNobodyIsMaster(t *testing.T) {
	p, err := Portal()
	if err != nil {
		t.Fatal(err)
	}
	check := func(name string, rules []rbacv1.PolicyRule) {
		for _, r := range rules {
			for _, word := range slices.Concat(r.Verbs, r.APIGroups, r.Resources, r.NonResourceURLs) {
				if strings.Contains(word, "*") || word == "escalate" || word == "bind" || word == "impersonate" {
					t.Errorf("%s has %q", name, word)
				}
			}
		}
	}
	for _, r := range p.ClusterRoles {
		check(r.Name, r.Rules)
	}
	for _, r := range p.Roles {
		check(r.Name, r.Rules)
	}
	for _, b := range p.ClusterRoleBindings {
		if b.RoleRef.Name == "cluster-admin" {
			t.Errorf("%s makes administrators", b.Name)
		}
	}
}
