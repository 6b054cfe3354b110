package rbac

import (
	"fmt"
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"pgregory.net/rapid"
)

func rule(verbs, groups, resources, names []string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: verbs, APIGroups: groups, Resources: resources, ResourceNames: names}
}

func paths(verbs []string, urls ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: verbs, NonResourceURLs: urls}
}

type list = []string

func TestMissing(t *testing.T) {
	for _, c := range []struct {
		name          string
		owned, wanted []rbacv1.PolicyRule
		missing       int
	}{
		{"nothing wanted", nil, nil, 0},
		{"nothing owned", nil, []rbacv1.PolicyRule{rule(list{"get", "list"}, list{""}, list{"pods"}, nil)}, 2},
		{
			"verbs from two rules",
			[]rbacv1.PolicyRule{rule(list{"get"}, list{""}, list{"pods"}, nil), rule(list{"list"}, list{""}, list{"pods"}, nil)},
			[]rbacv1.PolicyRule{rule(list{"get", "list"}, list{""}, list{"pods"}, nil)}, 0,
		},
		{
			"a name does not cover all names",
			[]rbacv1.PolicyRule{rule(list{"get"}, list{""}, list{"pods"}, list{"a"})},
			[]rbacv1.PolicyRule{rule(list{"get"}, list{""}, list{"pods"}, nil)}, 1,
		},
		{
			"a resource does not cover its subresource",
			[]rbacv1.PolicyRule{rule(list{"get"}, list{""}, list{"pods"}, nil)},
			[]rbacv1.PolicyRule{rule(list{"get"}, list{""}, list{"pods/log"}, nil)}, 1,
		},
		{
			"a subresource of everything",
			[]rbacv1.PolicyRule{rule(list{"get"}, list{"*"}, list{"*/scale"}, nil)},
			[]rbacv1.PolicyRule{rule(list{"get"}, list{"apps"}, list{"deployments/scale", "*/scale"}, nil)}, 0,
		},
		{
			"stars cover stars only",
			[]rbacv1.PolicyRule{rule(list{"get", "list"}, list{""}, list{"*"}, nil)},
			[]rbacv1.PolicyRule{rule(list{"*"}, list{""}, list{"*"}, nil)}, 1,
		},
		{"paths", []rbacv1.PolicyRule{paths(list{"get"}, "/a/*")}, []rbacv1.PolicyRule{paths(list{"get"}, "/a/b", "/a/*", "/b", "*")}, 2},
		{"a rule of nothing", nil, []rbacv1.PolicyRule{{Verbs: list{"get"}}}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := Missing(c.owned, c.wanted); len(got) != c.missing {
				t.Errorf("missing %v; want %d", got, c.missing)
			}
		})
	}
}

// TestMissingIsSound: whoever lacks nothing of a rule may do by their own rules whatever that rule allows.
func TestMissingIsSound(t *testing.T) {
	some := func(values ...string) *rapid.Generator[[]string] {
		return rapid.SliceOfN(rapid.SampledFrom(values), 0, 3)
	}
	rules := rapid.Custom(func(t *rapid.T) rbacv1.PolicyRule {
		if rapid.Bool().Draw(t, "path") {
			return paths(some("get", "put", "*").Draw(t, "verbs"), some("/a", "/a/*", "/a/b", "/*", "*").Draw(t, "urls")...)
		}
		return rule(some("get", "put", "*").Draw(t, "verbs"), some("", "apps", "*").Draw(t, "groups"),
			some("pods", "pods/log", "*/log", "*", "nodes").Draw(t, "resources"), some("one", "two").Draw(t, "names"))
	})
	requests := rapid.Custom(func(t *rapid.T) Request {
		r := Request{Verb: rapid.SampledFrom(list{"get", "put", "odd"}).Draw(t, "verb")}
		if r.NonResource = rapid.Bool().Draw(t, "path"); r.NonResource {
			r.Path = rapid.SampledFrom(list{"/a", "/a/b", "/a/b/c", "/b", "/"}).Draw(t, "path")
			return r
		}
		r.APIGroup = rapid.SampledFrom(list{"", "apps", "other"}).Draw(t, "group")
		r.Resource = rapid.SampledFrom(list{"pods", "nodes", "other"}).Draw(t, "resource")
		r.Subresource = rapid.SampledFrom(list{"", "log", "status"}).Draw(t, "subresource")
		r.Name = rapid.SampledFrom(list{"", "one", "three"}).Draw(t, "name")
		return r
	})
	rapid.Check(t, func(t *rapid.T) {
		owned := rapid.SliceOfN(rules, 0, 4).Draw(t, "owned")
		wanted := rules.Draw(t, "wanted")
		if len(Missing(owned, []rbacv1.PolicyRule{wanted})) > 0 {
			return
		}
		for range 20 {
			r := requests.Draw(t, "request")
			if Allows(&wanted, &r) && !slices.ContainsFunc(owned, func(o rbacv1.PolicyRule) bool { return Allows(&o, &r) }) {
				t.Fatalf("%v is covered by %v, but only the former allows %+v", wanted, owned, r)
			}
		}
	})
}

func TestIndexForgets(t *testing.T) {
	x := NewIndex()
	pods := &Request{Verb: "get", Namespace: "ns", Resource: "pods"}
	ann := User{Name: "ann", Groups: list{"devs"}}
	ref := rbacv1.RoleRef{Kind: "Role", Name: "reader"}
	allowed := func() bool { _, ok, _ := x.Authorize(ann, pods); return ok }
	x.SetRole("ns", "reader", []rbacv1.PolicyRule{rule(list{"get"}, list{""}, list{"pods"}, nil)})
	x.SetBinding("ns", "b", ref, []rbacv1.Subject{{Kind: "Group", Name: "devs"}, {Kind: "User", Name: "ann"}, {Kind: "User", Name: "ann"}})
	if !allowed() {
		t.Fatal("a bound user is not allowed")
	}
	if elsewhere := *pods; true {
		elsewhere.Namespace = "other"
		if _, ok, _ := x.Authorize(ann, &elsewhere); ok {
			t.Error("a RoleBinding holds in another namespace")
		}
	}
	x.SetBinding("ns", "b", ref, []rbacv1.Subject{{Kind: "User", Name: "bob"}})
	if allowed() {
		t.Error("a replaced binding still grants to its former subjects")
	}
	x.DeleteBinding("ns", "b")
	if len(x.grants) > 0 || len(x.bindings) > 0 {
		t.Errorf("a deleted binding left %v", x.grants)
	}
	x.SetBinding("ns", "b", ref, []rbacv1.Subject{{Kind: "User", Name: "ann"}})
	x.DeleteRole("ns", "reader")
	if _, ok, missing := x.Authorize(ann, pods); ok || missing == nil {
		t.Errorf("a binding to a deleted role: allowed %v, %v", ok, missing)
	}
}

// BenchmarkAuthorize asks for a user with three bindings among many others.
func BenchmarkAuthorize(b *testing.B) {
	x := NewIndex()
	for i := range 1000 {
		x.SetRole("", fmt.Sprint("role", i), []rbacv1.PolicyRule{rule(list{"get", "list"}, list{""}, list{"pods", "services"}, nil)})
		x.SetBinding(fmt.Sprint("ns", i%50), fmt.Sprint("b", i), rbacv1.RoleRef{Kind: "ClusterRole", Name: fmt.Sprint("role", i)},
			[]rbacv1.Subject{{Kind: "User", Name: fmt.Sprint("user", i/3)}, {Kind: "Group", Name: fmt.Sprint("group", i%10)}})
	}
	u := User{Name: "user7", Groups: list{"group1", "group2", "system:authenticated"}}
	r := &Request{Verb: "delete", Namespace: "ns21", Resource: "pods", Name: "x"}
	for b.Loop() {
		x.Authorize(u, r)
	}
}
