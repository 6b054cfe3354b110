package rbac

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
)

// User is who asks: a name and the groups they are in. A service account is a user of the name that ServiceAccountUser
// gives it.
type User struct {
	Name   string
	Groups []string
}

// ServiceAccountUser is the user name of a service account.
func ServiceAccountUser(namespace, name string) string {
	return "system:serviceaccount:" + namespace + ":" + name
}

// key names a role or binding; one without a namespace is a ClusterRole or ClusterRoleBinding.
type key struct{ namespace, name string }

func (k key) compare(o key) int {
	return cmp.Or(strings.Compare(k.namespace, o.namespace), strings.Compare(k.name, o.name))
}

// subject is a user or a group.
type subject struct {
	name  string
	group bool
}

// grant is a binding as one of its subjects sees it.
type grant struct{ binding, role key }

// Index has roles and bindings ready for questions: by subject and namespace, so that a question costs what the user's
// own bindings cost, however many there are. It may be read and changed at the same time.
type Index struct {
	mu       sync.RWMutex
	roles    map[key][]rbacv1.PolicyRule
	bindings map[key]bound
	// grants are those of a subject, by the namespace in which they hold; "": everywhere. Sorted by binding.
	grants map[subject]map[string][]grant
}

// bound is a binding as it was indexed.
type bound struct {
	role     key
	subjects []subject
}

// NewIndex returns one without roles and bindings.
func NewIndex() *Index {
	return &Index{
		roles: map[key][]rbacv1.PolicyRule{}, bindings: map[key]bound{}, grants: map[subject]map[string][]grant{},
	}
}

// SetRole adds or replaces a role; one without a namespace is a ClusterRole. The rules must not change afterwards.
func (x *Index) SetRole(namespace, name string, rules []rbacv1.PolicyRule) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.roles[key{namespace, name}] = rules
}

// Has says whether a role and a binding are known; an empty name is no question.
func (x *Index) Has(namespace, role, binding string) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	_, hasRole := x.roles[key{namespace, role}]
	_, hasBinding := x.bindings[key{namespace, binding}]
	return (role == "" || hasRole) && (binding == "" || hasBinding)
}

// DeleteRole removes a role. Bindings to it stay, and grant nothing.
func (x *Index) DeleteRole(namespace, name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.roles, key{namespace, name})
}

// SetBinding adds or replaces a binding; one without a namespace is a ClusterRoleBinding.
func (x *Index) SetBinding(namespace, name string, ref rbacv1.RoleRef, subjects []rbacv1.Subject) {
	at := key{namespace, name}
	b := bound{role: roleOf(namespace, ref)}
	for _, s := range subjects {
		if who, ok := subjectOf(s, namespace); ok && !slices.Contains(b.subjects, who) {
			b.subjects = append(b.subjects, who)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.remove(at)
	x.bindings[at] = b
	for _, who := range b.subjects {
		byNamespace := x.grants[who]
		if byNamespace == nil {
			byNamespace = map[string][]grant{}
			x.grants[who] = byNamespace
		}
		list := byNamespace[namespace]
		i, _ := slices.BinarySearchFunc(list, at, func(g grant, k key) int { return g.binding.compare(k) })
		byNamespace[namespace] = slices.Insert(list, i, grant{at, b.role})
	}
}

// DeleteBinding removes a binding.
func (x *Index) DeleteBinding(namespace, name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.remove(key{namespace, name})
}

func (x *Index) remove(at key) {
	for _, who := range x.bindings[at].subjects {
		byNamespace := x.grants[who]
		byNamespace[at.namespace] = slices.DeleteFunc(byNamespace[at.namespace], func(g grant) bool { return g.binding == at })
		if len(byNamespace[at.namespace]) == 0 {
			delete(byNamespace, at.namespace)
		}
		if len(byNamespace) == 0 {
			delete(x.grants, who)
		}
	}
	delete(x.bindings, at)
}

func roleOf(namespace string, ref rbacv1.RoleRef) key {
	if ref.Kind == "ClusterRole" {
		namespace = ""
	}
	return key{namespace, ref.Name}
}

// subjectOf reads a subject of a binding; a service account without a namespace is one of the binding's.
func subjectOf(s rbacv1.Subject, namespace string) (subject, bool) {
	switch s.Kind {
	case rbacv1.UserKind:
		return subject{name: s.Name}, true
	case rbacv1.GroupKind:
		return subject{name: s.Name, group: true}, true
	case rbacv1.ServiceAccountKind:
		namespace = cmp.Or(s.Namespace, namespace)
		return subject{name: ServiceAccountUser(namespace, s.Name)}, namespace != ""
	}
	return subject{}, false
}

// Authorize says whether a user may do something and by which binding, or which roles that could matter are missing.
func (x *Index) Authorize(u User, r *Request) (reason string, allowed bool, missing error) {
	x.visit(u, r.Namespace, func(g grant, who subject, rules []rbacv1.PolicyRule, found bool) bool {
		if !found {
			missing = cmp.Or(missing, x.noRole(g))
			return true
		}
		for i := range rules {
			if Allows(&rules[i], r) {
				reason, allowed = g.reason(who), true
				return false
			}
		}
		return true
	})
	if allowed {
		missing = nil
	}
	return reason, allowed, missing
}

// Rules are all that a user has in a namespace; without a namespace, everywhere. The error names a role that is missing.
func (x *Index) Rules(u User, namespace string) (out []rbacv1.PolicyRule, missing error) {
	x.visit(u, namespace, func(g grant, _ subject, rules []rbacv1.PolicyRule, found bool) bool {
		if !found {
			missing = cmp.Or(missing, x.noRole(g))
		}
		out = append(out, rules...)
		return true
	})
	return out, missing
}

// RoleRules are the rules of a role that a binding in a namespace refers to.
func (x *Index) RoleRules(namespace string, ref rbacv1.RoleRef) ([]rbacv1.PolicyRule, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	rules, ok := x.roles[roleOf(namespace, ref)]
	return rules, ok
}

// visit calls f with each grant of a user that holds in a namespace until f says that it has seen enough: first those that
// hold everywhere.
func (x *Index) visit(u User, namespace string, f func(grant, subject, []rbacv1.PolicyRule, bool) bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	places := []string{"", namespace}
	if namespace == "" {
		places = places[:1]
	}
	for _, place := range places {
		for i := -1; i < len(u.Groups); i++ {
			who := subject{name: u.Name}
			if i >= 0 {
				who = subject{name: u.Groups[i], group: true}
			}
			for _, g := range x.grants[who][place] {
				rules, found := x.roles[g.role]
				if !f(g, who, rules, found) {
					return
				}
			}
		}
	}
}

func (x *Index) noRole(g grant) error {
	return fmt.Errorf("%s refers to a %s that does not exist", g.bindingName(), g.roleName())
}

func (g grant) reason(who subject) string {
	kind := "User"
	if who.group {
		kind = "Group"
	}
	return fmt.Sprintf("RBAC: %s grants %s to %s %q", g.bindingName(), g.roleName(), kind, who.name)
}

func (g grant) bindingName() string { return kindName("RoleBinding", g.binding) }
func (g grant) roleName() string    { return kindName("Role", g.role) }

func kindName(kind string, k key) string {
	if k.namespace == "" {
		return fmt.Sprintf("Cluster%s %q", kind, k.name)
	}
	return fmt.Sprintf("%s %q", kind, k.namespace+"/"+k.name)
}
