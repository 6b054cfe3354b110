package rbac_test

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/rbac"
	"portal/internal/rbac/policy"
)

// TestRecorded asks what Kubernetes 1.37 was asked in the recorded worlds of roles and bindings, made by hand and by a generator, and in the
// one that has only its default roles.
func TestRecorded(t *testing.T) {
	for file, least := range map[string]int{"cases.json": 1000, "generated.json": 500} {
		t.Run(file, func(t *testing.T) { askRecorded(t, file, least) })
	}
}

func askRecorded(t *testing.T, file string, least int) {
	data, err := os.ReadFile("../../test/recorded/rbac/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name   string
		Phases []struct {
			Objects []object
			Remove  []string
			Ask     []json.RawMessage
		}
	}
	data = bytes.ReplaceAll(data, []byte("{p}"), []byte("run1")) // the prefix of a run
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	asked := 0
	for _, c := range cases {
		// The others are requests, which need a server.
		if !strings.HasPrefix(c.Name, "world/") && !strings.HasPrefix(c.Name, "bootstrap/") {
			continue
		}
		w := newWorld(t)
		for _, phase := range c.Phases {
			for _, path := range phase.Remove {
				w.remove(path)
			}
			for _, o := range phase.Objects {
				w.set(o)
			}
			w.aggregate(t)
			for _, raw := range phase.Ask {
				var q question
				if err := json.Unmarshal(raw, &q); err != nil {
					t.Fatalf("%s: %v in %s", c.Name, err, raw)
				}
				want, ok := q.Want.(bool)
				if !ok {
					continue // who may not even ask
				}
				asked++
				if got := w.allowed(q); got != want {
					t.Errorf("%s: %+v: %v", c.Name, q, got)
				}
			}
		}
	}
	if asked < least {
		t.Errorf("%d questions were asked; want %d", asked, least)
	}
}

// object is a role or a binding of any kind.
type object struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta
	Rules           []rbacv1.PolicyRule
	AggregationRule *rbacv1.AggregationRule
	RoleRef         rbacv1.RoleRef
	Subjects        []rbacv1.Subject
}

type question struct {
	User, Verb, Path, Group, Resource, Sub, Name, NS, Via string
	Groups                                                []string
	Want                                                  any
}

type world struct {
	index    *rbac.Index
	clusters map[string]*rbacv1.ClusterRole
}

func newWorld(t *testing.T) *world {
	p, err := policy.Default()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{rbac.NewIndex(), map[string]*rbacv1.ClusterRole{}}
	for i := range p.ClusterRoles {
		w.clusters[p.ClusterRoles[i].Name] = &p.ClusterRoles[i]
	}
	for _, b := range p.ClusterRoleBindings {
		w.index.SetBinding("", b.Name, b.RoleRef, b.Subjects)
	}
	for _, r := range p.Roles {
		w.index.SetRole(r.Namespace, r.Name, r.Rules)
	}
	for _, b := range p.RoleBindings {
		w.index.SetBinding(b.Namespace, b.Name, b.RoleRef, b.Subjects)
	}
	return w
}

func (w *world) set(o object) {
	switch o.Kind {
	case "Role":
		w.index.SetRole(o.Metadata.Namespace, o.Metadata.Name, o.Rules)
	case "ClusterRole":
		w.clusters[o.Metadata.Name] = &rbacv1.ClusterRole{ObjectMeta: o.Metadata, Rules: o.Rules, AggregationRule: o.AggregationRule}
	case "RoleBinding", "ClusterRoleBinding":
		w.index.SetBinding(o.Metadata.Namespace, o.Metadata.Name, o.RoleRef, o.Subjects)
	}
}

// remove removes what a path of the API leads to.
func (w *world) remove(path string) {
	parts := strings.Split(path, "/")
	namespace, plural, name := "", parts[len(parts)-2], parts[len(parts)-1]
	if i := slices.Index(parts, "namespaces"); i >= 0 {
		namespace = parts[i+1]
	}
	switch plural {
	case "roles":
		w.index.DeleteRole(namespace, name)
	case "clusterroles":
		delete(w.clusters, name)
		w.index.DeleteRole("", name)
	case "rolebindings", "clusterrolebindings":
		w.index.DeleteBinding(namespace, name)
	}
}

// aggregate repeats until nothing changes, as controllers that watch do.
func (w *world) aggregate(t *testing.T) {
	for range 5 {
		var all []*rbacv1.ClusterRole
		for _, r := range w.clusters {
			all = append(all, r)
		}
		for _, r := range all {
			if r.AggregationRule != nil {
				rules, err := rbac.Aggregate(r, all)
				if err != nil {
					t.Fatal(err)
				}
				r.Rules = rules
			}
		}
	}
	for name, r := range w.clusters {
		w.index.SetRole("", name, r.Rules)
	}
}

func (w *world) allowed(q question) bool {
	groups := q.Groups
	if q.Via == "self" {
		groups = append(slices.Clone(groups), "system:authenticated")
	}
	r := &rbac.Request{Verb: q.Verb, NonResource: q.Path != "", Path: q.Path, Namespace: q.NS, APIGroup: q.Group, Resource: q.Resource, Subresource: q.Sub, Name: q.Name}
	_, allowed, _ := w.index.Authorize(rbac.User{Name: q.User, Groups: groups}, r)
	return allowed || slices.Contains(groups, "system:masters")
}
