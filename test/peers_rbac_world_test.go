//go:build peers

package test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/rbac"
)

// accessQuestion is what somebody may or may not do, as test/recorded/rbac/run.py writes it.
type accessQuestion struct {
	User     string   `json:"user,omitempty"`
	Groups   []string `json:"groups,omitempty"`
	Verb     string   `json:"verb"`
	Path     string   `json:"path,omitempty"`
	Group    string   `json:"group,omitempty"`
	Resource string   `json:"resource,omitempty"`
	Sub      string   `json:"sub,omitempty"`
	Name     string   `json:"name,omitempty"`
	NS       string   `json:"ns,omitempty"`
}

// rbacWorld is a seeded set of roles and bindings that changes from round to round, and knows what to ask about it. Everything
// in it has a name that begins with its prefix, and the prefix has no influence on anything else.
type rbacWorld struct {
	random *rand.Rand
	prefix string
	made   int

	clusterRoles        map[string]*rbacv1.ClusterRole
	roles               map[string]*rbacv1.Role
	clusterRoleBindings map[string]*rbacv1.ClusterRoleBinding
	roleBindings        map[string]*rbacv1.RoleBinding
}

// rbacChange is what a round changes, in the order in which it is done.
type rbacChange struct {
	remove  []string // paths
	objects []any
}

func newRBACWorld(seed uint64, prefix string) *rbacWorld {
	return &rbacWorld{
		random: rand.New(rand.NewPCG(seed, 14)), prefix: prefix,
		clusterRoles: map[string]*rbacv1.ClusterRole{}, roles: map[string]*rbacv1.Role{},
		clusterRoleBindings: map[string]*rbacv1.ClusterRoleBinding{}, roleBindings: map[string]*rbacv1.RoleBinding{},
	}
}

// The words that rules and questions are made of. Some match nothing that exists: an authorizer does not know what exists.
var (
	rbacVerbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}
	oddVerbs  = []string{"use", "bind", "escalate", "impersonate", "approve", "GET", "head", "frobnicate", "get "}
	apiGroups = []string{"", "apps", "discovery.k8s.io", "rbac.authorization.k8s.io", "example.org"}
	oddGroups = []string{"Apps", "core", "v1", "example.org.", "k8s.io"}
	rbacKinds = []string{"pods", "services", "configmaps", "secrets", "nodes", "deployments", "endpointslices", "roles", "widgets"}
	oddKinds  = []string{"Pods", "pod", "pods ", "*pods", "**", "pods.v1"}
	subs      = []string{"status", "scale", "log", "exec", "proxy", "*", "Status", "a/b"}
	names     = []string{"one", "two", "One", "three.four", "*"}
	urls      = []string{"/healthz", "/metrics", "/apis", "/version", "/logs/a", "/logs/a/b", "/logs", "/Healthz", "/", "/version/"}
	urlRules  = []string{"/healthz", "/healthz/*", "/metrics", "/apis/*", "/logs*", "/logs/*", "/logs/a/*", "/*", "*", "/version/", "healthz", "/logs/**", "/l*s/a", ""}
)

func (w *rbacWorld) chance(percent int) bool { return w.random.IntN(100) < percent }

func (w *rbacWorld) namespace() string { return w.prefix + "-" + pick(w.random, "a", "b", "c") }

// some picks up to n words, seldom the star among them, and more seldom something odd.
func (w *rbacWorld) some(n int, usual, odd []string) (out []string) {
	for range 1 + w.random.IntN(n) {
		word := pick(w.random, usual...)
		if w.chance(7) && len(odd) > 0 {
			word = pick(w.random, odd...)
		}
		if !slices.Contains(out, word) {
			out = append(out, word)
		}
	}
	if w.chance(8) {
		out = append(out, "*")
	}
	return out
}

func (w *rbacWorld) rule(namespaced bool) rbacv1.PolicyRule {
	if !namespaced && w.chance(30) {
		return rbacv1.PolicyRule{Verbs: w.some(2, []string{"get", "post", "put", "head"}, oddVerbs), NonResourceURLs: w.someURLs()}
	}
	r := rbacv1.PolicyRule{Verbs: w.some(4, rbacVerbs, oddVerbs), APIGroups: w.some(2, apiGroups, oddGroups), Resources: w.some(3, rbacKinds, oddKinds)}
	for i := range r.Resources {
		if w.chance(30) {
			r.Resources[i] = pick(w.random, r.Resources[i], "*", "*", r.Resources[i]) + "/" + pick(w.random, subs...)
		}
	}
	if w.chance(5) {
		r.Resources = append(r.Resources, pick(w.random, "*/*", "/", "pods/", "/status", ""))
	}
	switch {
	case w.chance(25):
		r.ResourceNames = w.some(2, names, nil)
	case w.chance(3):
		r.ResourceNames = []string{""}
	}
	return r
}

func (w *rbacWorld) someURLs() (out []string) {
	for range 1 + w.random.IntN(2) {
		out = append(out, pick(w.random, urlRules...))
	}
	return out
}

func (w *rbacWorld) rules(namespaced bool) (out []rbacv1.PolicyRule) {
	for range w.random.IntN(4) {
		out = append(out, w.rule(namespaced))
	}
	return append(out, w.rule(namespaced))
}

func (w *rbacWorld) name(kind string) string {
	w.made++
	return fmt.Sprintf("%s-%s%d", w.prefix, kind, w.made)
}

// part is the label by which aggregation stays among the roles of this world; level keeps it from going round in a circle.
const (
	partLabel  = "test.portal.dev/part"
	levelLabel = "test.portal.dev/level"
)

func (w *rbacWorld) labels(level string) map[string]string {
	out := map[string]string{partLabel: "yes", levelLabel: level}
	if w.chance(60) {
		out["color"] = pick(w.random, "red", "green", "blue")
	}
	if w.chance(30) {
		out["big"] = ""
	}
	return out
}

// selector picks roles of a level.
func (w *rbacWorld) selector(level string) metav1.LabelSelector {
	s := metav1.LabelSelector{MatchLabels: map[string]string{partLabel: "yes", levelLabel: level}}
	switch w.random.IntN(5) {
	case 0:
		s.MatchLabels["color"] = pick(w.random, "red", "green", "blue", "Red")
	case 1:
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "color", Operator: metav1.LabelSelectorOpIn, Values: []string{"red", "blue"}}}
	case 2:
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "color", Operator: metav1.LabelSelectorOpNotIn, Values: []string{"red"}}}
	case 3:
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "big", Operator: metav1.LabelSelectorOpExists}}
	case 4:
		s.MatchExpressions = []metav1.LabelSelectorRequirement{
			{Key: "big", Operator: metav1.LabelSelectorOpDoesNotExist}, {Key: "color", Operator: metav1.LabelSelectorOpIn, Values: []string{"green"}},
		}
	}
	return s
}

var rbacVersion = rbacv1.SchemeGroupVersion.String()

func (w *rbacWorld) newClusterRole(level string) *rbacv1.ClusterRole {
	r := &rbacv1.ClusterRole{
		TypeMeta:   metav1.TypeMeta{APIVersion: rbacVersion, Kind: "ClusterRole"},
		ObjectMeta: metav1.ObjectMeta{Name: w.name("cr"), Labels: w.labels(level)},
	}
	below := map[string]string{"1": "0", "2": "1"}[level]
	if below == "" {
		r.Rules = w.rules(false)
	} else {
		r.AggregationRule = &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{w.selector(below)}}
		if w.chance(30) {
			r.AggregationRule.ClusterRoleSelectors = append(r.AggregationRule.ClusterRoleSelectors, w.selector(below))
		}
	}
	w.clusterRoles[r.Name] = r
	return r
}

func (w *rbacWorld) newRole() *rbacv1.Role {
	r := &rbacv1.Role{
		TypeMeta:   metav1.TypeMeta{APIVersion: rbacVersion, Kind: "Role"},
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace(), Name: w.name("r")}, Rules: w.rules(true),
	}
	w.roles[r.Namespace+"/"+r.Name] = r
	return r
}

// subject is a user, a group or an account of this world; some names differ in case only.
func (w *rbacWorld) subject(namespace string) rbacv1.Subject {
	switch w.random.IntN(4) {
	case 0:
		name := w.prefix + "-" + pick(w.random, "devs", "Devs", "ops")
		if w.chance(20) {
			name = pick(w.random, "system:authenticated", "system:serviceaccounts", "system:serviceaccounts:"+w.namespace(), "system:unauthenticated")
		}
		return rbacv1.Subject{Kind: "Group", APIGroup: rbacv1.GroupName, Name: name}
	case 1:
		s := rbacv1.Subject{Kind: "ServiceAccount", Namespace: w.namespace(), Name: pick(w.random, "robot", "default")}
		if namespace != "" && w.chance(20) {
			s.Namespace = "" // that of the binding
		}
		return s
	}
	name := w.prefix + "-" + pick(w.random, "ann", "Ann", "bob", "cat", "dan")
	if w.chance(10) {
		name = rbac.ServiceAccountUser(w.namespace(), "robot") // an account may be named as a user too
	}
	return rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: name}
}

func (w *rbacWorld) subjects(namespace string) (out []rbacv1.Subject) {
	for range 1 + w.random.IntN(3) {
		out = append(out, w.subject(namespace))
	}
	return out
}

// ref is a role to bind: mostly one that exists.
func (w *rbacWorld) ref(namespace string) rbacv1.RoleRef {
	ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole"}
	if namespace != "" && w.chance(40) {
		ref.Kind = "Role"
		for _, key := range sortedKeys(w.roles) {
			if r := w.roles[key]; r.Namespace == namespace && (ref.Name == "" || w.chance(40)) {
				ref.Name = r.Name
			}
		}
	} else if len(w.clusterRoles) > 0 {
		ref.Name = pick(w.random, sortedKeys(w.clusterRoles)...)
	}
	if ref.Name == "" || w.chance(8) {
		ref.Name = w.prefix + "-missing"
	}
	return ref
}

func (w *rbacWorld) newBinding() *rbacv1.RoleBinding {
	b := &rbacv1.RoleBinding{
		TypeMeta:   metav1.TypeMeta{APIVersion: rbacVersion, Kind: "RoleBinding"},
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace(), Name: w.name("rb")},
	}
	b.RoleRef, b.Subjects = w.ref(b.Namespace), w.subjects(b.Namespace)
	w.roleBindings[b.Namespace+"/"+b.Name] = b
	return b
}

func (w *rbacWorld) newClusterBinding() *rbacv1.ClusterRoleBinding {
	b := &rbacv1.ClusterRoleBinding{
		TypeMeta:   metav1.TypeMeta{APIVersion: rbacVersion, Kind: "ClusterRoleBinding"},
		ObjectMeta: metav1.ObjectMeta{Name: w.name("crb")}, RoleRef: w.ref(""), Subjects: w.subjects(""),
	}
	w.clusterRoleBindings[b.Name] = b
	return b
}

// round changes the world: what there is gets other rules, labels and subjects or goes, and more comes.
func (w *rbacWorld) round() (c rbacChange) {
	for _, name := range sortedKeys(w.clusterRoles) {
		r := w.clusterRoles[name]
		switch {
		case w.chance(15):
			delete(w.clusterRoles, name)
			c.remove = append(c.remove, rbacAPI+"/clusterroles/"+name)
		case w.chance(25):
			next := r.DeepCopy()
			next.Labels = w.labels(r.Labels[levelLabel])
			if next.AggregationRule == nil {
				next.Rules = w.rules(false)
			}
			w.clusterRoles[name] = next
			c.objects = append(c.objects, next)
		}
	}
	for _, name := range sortedKeys(w.roles) {
		r := w.roles[name]
		switch {
		case w.chance(15):
			delete(w.roles, name)
			c.remove = append(c.remove, rbacAPI+"/namespaces/"+r.Namespace+"/roles/"+r.Name)
		case w.chance(25):
			next := r.DeepCopy()
			next.Rules = w.rules(true)
			w.roles[name] = next
			c.objects = append(c.objects, next)
		}
	}
	for _, name := range sortedKeys(w.roleBindings) {
		b := w.roleBindings[name]
		switch {
		case w.chance(40):
			delete(w.roleBindings, name)
			c.remove = append(c.remove, rbacAPI+"/namespaces/"+b.Namespace+"/rolebindings/"+b.Name)
		case w.chance(30):
			next := b.DeepCopy()
			next.Subjects = w.subjects(b.Namespace)
			w.roleBindings[name] = next
			c.objects = append(c.objects, next)
		}
	}
	for _, name := range sortedKeys(w.clusterRoleBindings) {
		b := w.clusterRoleBindings[name]
		switch {
		case w.chance(50):
			delete(w.clusterRoleBindings, name)
			c.remove = append(c.remove, rbacAPI+"/clusterrolebindings/"+name)
		case w.chance(30):
			next := b.DeepCopy()
			next.Subjects = w.subjects("")
			w.clusterRoleBindings[name] = next
			c.objects = append(c.objects, next)
		}
	}
	for range 10 {
		c.objects = append(c.objects, w.newClusterRole("0"), w.newRole())
	}
	c.objects = append(c.objects, w.newClusterRole("1"), w.newClusterRole("1"), w.newClusterRole("1"), w.newClusterRole("2"))
	for range 8 {
		c.objects = append(c.objects, w.newBinding(), w.newBinding(), w.newClusterBinding())
	}
	return c
}

// aggregated are the rules that the roles of this world have once they are aggregated.
func (w *rbacWorld) aggregated() (map[string][]rbacv1.PolicyRule, error) {
	out := map[string][]rbacv1.PolicyRule{}
	for _, level := range []string{"1", "2"} {
		var all []*rbacv1.ClusterRole
		for _, name := range sortedKeys(w.clusterRoles) {
			r := w.clusterRoles[name].DeepCopy()
			if r.AggregationRule != nil {
				r.Rules = out[name]
			}
			all = append(all, r)
		}
		for _, r := range all {
			if r.Labels[levelLabel] != level {
				continue
			}
			rules, err := rbac.Aggregate(r, all)
			if err != nil {
				return nil, err
			}
			out[r.Name] = rules
		}
	}
	return out, nil
}

// ask makes a question. Most are derived from what somebody is granted, half of these with one thing changed.
func (w *rbacWorld) ask(aggregated map[string][]rbacv1.PolicyRule) accessQuestion {
	q := w.derive(aggregated)
	if q.Path != "" { // it is in no namespace
		q.Group, q.Resource, q.Sub, q.Name, q.NS = "", "", "", "", ""
	}
	return q
}

func (w *rbacWorld) derive(aggregated map[string][]rbacv1.PolicyRule) accessQuestion {
	q := w.stranger()
	if w.chance(12) {
		return q
	}
	var ref rbacv1.RoleRef
	var subjects []rbacv1.Subject
	namespace := ""
	if w.chance(35) {
		b := w.clusterRoleBindings[pick(w.random, sortedKeys(w.clusterRoleBindings)...)]
		ref, subjects = b.RoleRef, b.Subjects
		q.NS = pick(w.random, "", w.namespace())
	} else {
		b := w.roleBindings[pick(w.random, sortedKeys(w.roleBindings)...)]
		ref, subjects, namespace = b.RoleRef, b.Subjects, b.Namespace
		q.NS = namespace
	}
	var rules []rbacv1.PolicyRule
	if ref.Kind == "Role" {
		if r := w.roles[namespace+"/"+ref.Name]; r != nil {
			rules = r.Rules
		}
	} else if r := w.clusterRoles[ref.Name]; r != nil {
		if rules = r.Rules; r.AggregationRule != nil {
			rules = aggregated[r.Name]
		}
	}
	w.identify(&q, pick(w.random, subjects...), namespace)
	if len(rules) == 0 {
		return q
	}
	w.follow(&q, pick(w.random, rules...))
	if w.chance(50) {
		w.spoil(&q)
	}
	return q
}

// identify makes the question that of a subject.
func (w *rbacWorld) identify(q *accessQuestion, s rbacv1.Subject, namespace string) {
	switch s.Kind {
	case "User":
		q.User = s.Name
	case "Group":
		q.Groups = append(q.Groups, s.Name)
	default:
		if s.Namespace != "" {
			namespace = s.Namespace
		}
		q.User = rbac.ServiceAccountUser(namespace, s.Name)
		if w.chance(50) {
			q.Groups = append(q.Groups, "system:serviceaccounts", "system:serviceaccounts:"+namespace)
		}
	}
}

// follow asks for what a rule allows. What stands for more than one thing becomes one of them.
func (w *rbacWorld) follow(q *accessQuestion, r rbacv1.PolicyRule) {
	one := func(list, others []string) string {
		word := pick(w.random, list...)
		if word == "*" {
			word = pick(w.random, others...)
		}
		return word
	}
	q.Verb = one(r.Verbs, append(slices.Clone(rbacVerbs), oddVerbs...))
	if len(r.NonResourceURLs) > 0 {
		path := one(r.NonResourceURLs, urls)
		if at := strings.IndexByte(path, '*'); at >= 0 {
			path = path[:at] + pick(w.random, "", "x", "a/b", "a", "*")
		}
		if path == "" {
			path = "/"
		}
		q.Path, q.Group, q.Resource, q.Sub, q.Name, q.NS = path, "", "", "", "", ""
		return
	}
	q.Path = ""
	q.Group = one(r.APIGroups, apiGroups)
	q.Resource, q.Sub, _ = strings.Cut(one(r.Resources, rbacKinds), "/")
	if q.Resource == "*" {
		q.Resource = pick(w.random, rbacKinds...)
	}
	if q.Sub == "*" && w.chance(70) {
		q.Sub = pick(w.random, subs...)
	}
	if len(r.ResourceNames) > 0 {
		q.Name = pick(w.random, r.ResourceNames...)
	}
}

// spoil changes one thing.
func (w *rbacWorld) spoil(q *accessQuestion) {
	if q.Path != "" {
		switch w.random.IntN(4) {
		case 0:
			q.Verb = pick(w.random, "get", "post", "delete", "GET")
		case 1:
			q.Path += pick(w.random, "/", "x", "/x")
		case 2:
			q.Path = pick(w.random, urls...)
		default:
			q.User, q.Groups = w.prefix+"-nobody", nil
		}
		return
	}
	switch w.random.IntN(8) {
	case 0:
		q.Verb = pick(w.random, append(slices.Clone(oddVerbs), rbacVerbs...)...)
	case 1:
		q.Group = pick(w.random, append(slices.Clone(oddGroups), apiGroups...)...)
	case 2:
		q.Resource = pick(w.random, append(slices.Clone(oddKinds), rbacKinds...)...)
	case 3:
		q.Sub = pick(w.random, append([]string{""}, subs...)...)
	case 4:
		q.Name = pick(w.random, append([]string{""}, names...)...)
	case 5:
		q.NS = pick(w.random, "", w.namespace(), "kube-system", w.prefix+"-A")
	case 6:
		q.User = strings.Replace(q.User, "-a", "-A", 1)
		q.Groups = nil
	default:
		q.User, q.Groups = w.prefix+"-nobody", []string{"system:authenticated"}
	}
}

// stranger asks for anything.
func (w *rbacWorld) stranger() accessQuestion {
	q := accessQuestion{User: w.prefix + "-" + pick(w.random, "ann", "Ann", "bob", "cat", "dan", "nobody"), Verb: pick(w.random, rbacVerbs...)}
	if w.chance(40) {
		q.Groups = append(q.Groups, pick(w.random, "system:authenticated", w.prefix+"-devs", w.prefix+"-ops", w.prefix+"-Devs"))
	}
	if w.chance(20) {
		q.Path = pick(w.random, urls...)
		return q
	}
	q.Group, q.Resource, q.NS = pick(w.random, apiGroups...), pick(w.random, rbacKinds...), pick(w.random, "", w.namespace(), "kube-system")
	if w.chance(25) {
		q.Sub = pick(w.random, subs...)
	}
	if w.chance(50) {
		q.Name = pick(w.random, names...)
	}
	return q
}
