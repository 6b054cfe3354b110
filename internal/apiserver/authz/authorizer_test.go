package authz

import (
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"portal/internal/rbac"
	"portal/internal/rbac/policy"
)

func question(who *user.DefaultInfo, verb, resource string) authorizer.AttributesRecord {
	return authorizer.AttributesRecord{User: who, Verb: verb, Namespace: "ns", Resource: resource, ResourceRequest: true}
}

// TestFollowsTheAPI: what a user may do changes with roles and bindings in the API, and with their deletion.
func TestFollowsTheAPI(t *testing.T) {
	client := fake.NewClientset()
	factory := informers.NewSharedInformerFactory(client, 0)
	z := Authorizer{rbac.NewIndex()}
	if err := Follow(factory, z.Index); err != nil {
		t.Fatal(err)
	}
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())
	ann := &user.DefaultInfo{Name: "ann", Groups: []string{"devs"}}
	expect := func(want authorizer.Decision) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			got, reason, err := z.Authorize(t.Context(), question(ann, "get", "pods"))
			if err == nil && got == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("decided %v (%s, %v), want %v", got, reason, err, want)
			}
		}
	}
	expect(authorizer.DecisionNoOpinion)
	role := &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "reader"},
		Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"pods"}}},
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "readers"}, Subjects: []rbacv1.Subject{{Kind: "Group", Name: "devs"}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "reader"},
	}
	v1 := client.RbacV1()
	if _, err := v1.Roles("ns").Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := v1.RoleBindings("ns").Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	expect(authorizer.DecisionAllow)
	if rules, _, incomplete, err := z.RulesFor(t.Context(), ann, "ns"); len(rules) != 1 || incomplete || err != nil {
		t.Errorf("rules %v, incomplete %v, %v", rules, incomplete, err)
	}
	if err := v1.RoleBindings("ns").Delete(t.Context(), "readers", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	expect(authorizer.DecisionNoOpinion)
	root := &user.DefaultInfo{Name: "root", Groups: []string{user.SystemPrivilegedGroup}}
	if got, _, _ := z.Authorize(t.Context(), question(root, "delete", "nodes")); got != authorizer.DecisionAllow {
		t.Errorf("a member of system:masters: %v", got)
	}
}

// TestDefaultsAreRepaired: what is missing comes back, what was added stays, and what an administrator keeps is left alone.
func TestDefaultsAreRepaired(t *testing.T) {
	client := fake.NewClientset()
	p, err := policy.Default()
	if err != nil {
		t.Fatal(err)
	}
	ensureAll := func() {
		t.Helper()
		for _, o := range Defaults(client, p) {
			if err := o.Ensure(t.Context()); err != nil {
				t.Fatalf("%s: %v", o.Name, err)
			}
		}
	}
	ensureAll()
	roles := client.RbacV1().ClusterRoles()
	get := func(name string) *rbacv1.ClusterRole {
		t.Helper()
		r, err := roles.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	write := func(r *rbacv1.ClusterRole) {
		t.Helper()
		if _, err := roles.Update(t.Context(), r, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	own := rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{"example.com"}, Resources: []string{"things"}}
	dns := get("system:kube-dns")
	dns.Rules, dns.Labels = []rbacv1.PolicyRule{own}, nil
	write(dns)
	kept := get("system:node-proxier")
	kept.Rules, kept.Annotations = nil, map[string]string{rbacv1.AutoUpdateAnnotationKey: "false"}
	write(kept)
	if err := roles.Delete(t.Context(), "view", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ensureAll()
	repaired := get("system:kube-dns")
	if len(rbac.Missing(repaired.Rules, append([]rbacv1.PolicyRule{own}, wanted(p, "system:kube-dns")...))) > 0 || repaired.Labels == nil {
		t.Errorf("repaired to %+v", repaired)
	}
	if r := get("system:node-proxier"); len(r.Rules) > 0 {
		t.Errorf("a role that is kept was repaired: %v", r.Rules)
	}
	if r := get("view"); r.AggregationRule == nil {
		t.Error("a deleted role came back without its aggregation rule")
	}
}

func wanted(p *policy.Policy, name string) []rbacv1.PolicyRule {
	for _, r := range p.ClusterRoles {
		if r.Name == name {
			return r.Rules
		}
	}
	return nil
}
