package test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/internal/rbac"
	"portal/test/harness"
)

// grants is what there is of roles and bindings.
type grants struct {
	clusterRoles        map[string]rbacv1.ClusterRole
	roles               map[string]rbacv1.Role
	clusterRoleBindings map[string]rbacv1.ClusterRoleBinding
	roleBindings        map[string]rbacv1.RoleBinding
}

func readGrants(t *testing.T, client kubernetes.Interface) *grants {
	t.Helper()
	g := &grants{map[string]rbacv1.ClusterRole{}, map[string]rbacv1.Role{}, map[string]rbacv1.ClusterRoleBinding{}, map[string]rbacv1.RoleBinding{}}
	api, all := client.RbacV1(), metav1.ListOptions{}
	clusterRoles, err := api.ClusterRoles().List(t.Context(), all)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range clusterRoles.Items {
		g.clusterRoles[r.Name] = r
	}
	roles, err := api.Roles("").List(t.Context(), all)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range roles.Items {
		g.roles[r.Namespace+"/"+r.Name] = r
	}
	clusterRoleBindings, err := api.ClusterRoleBindings().List(t.Context(), all)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range clusterRoleBindings.Items {
		g.clusterRoleBindings[b.Name] = b
	}
	roleBindings, err := api.RoleBindings("").List(t.Context(), all)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range roleBindings.Items {
		g.roleBindings[b.Namespace+"/"+b.Name] = b
	}
	return g
}

// index has the grants as they will be when the controller has aggregated them.
func (g *grants) index(t *testing.T) *rbac.Index {
	t.Helper()
	x := rbac.NewIndex()
	var all []*rbacv1.ClusterRole
	for _, r := range g.clusterRoles {
		all = append(all, r.DeepCopy())
	}
	for range 4 { // roles that aggregate aggregated roles
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
	for _, r := range all {
		x.SetRole("", r.Name, r.Rules)
	}
	for _, r := range g.roles {
		x.SetRole(r.Namespace, r.Name, r.Rules)
	}
	for _, b := range g.clusterRoleBindings {
		x.SetBinding("", b.Name, b.RoleRef, b.Subjects)
	}
	for _, b := range g.roleBindings {
		x.SetBinding(b.Namespace, b.Name, b.RoleRef, b.Subjects)
	}
	return x
}

// whereabouts are the namespaces in which rights are compared; "": everywhere.
var whereabouts = []string{"", "a", "b", "kube-system"}

// gained are the rights that somebody has now and had not before, other than those that the one who acted had to give.
func gained(before, after *rbac.Index, actor string, tracked []rbac.User) (out []string) {
	for _, who := range tracked {
		for _, ns := range whereabouts {
			own, _ := before.Rules(who, ns)
			given, _ := before.Rules(identity(actor), ns)
			now, _ := after.Rules(who, ns)
			for _, r := range rbac.Missing(append(slices.Clone(own), given...), now) {
				out = append(out, fmt.Sprintf("%s in %q: %v", who.Name, ns, r))
			}
		}
	}
	return out
}

// identity is a user of the token file, who is in a group of their own.
func identity(name string) rbac.User {
	return rbac.User{Name: name, Groups: []string{name + "s", "system:authenticated"}}
}

// attacker is a user and what they may do.
type attacker struct {
	name      string
	clustered []rbacv1.PolicyRule // everywhere
	local     []rbacv1.PolicyRule // in namespace a
}

func allow(verbs, group, resources string, names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: strings.Split(verbs, ","), APIGroups: []string{group}, Resources: strings.Split(resources, ","), ResourceNames: names}
}

const (
	writes     = "create,update,patch,delete,deletecollection,get,list,watch"
	everyKind  = "roles,rolebindings,clusterroles,clusterrolebindings"
	localKinds = "roles,rolebindings"
)

// attackers may write roles and bindings, and lack most of what they could write into them.
var attackers = []attacker{
	{name: "local", local: []rbacv1.PolicyRule{
		allow(writes, rbacv1.GroupName, localKinds), allow("get,list", "", "pods"), allow("get", "", "configmaps", "one"),
	}},
	{name: "global", clustered: []rbacv1.PolicyRule{
		allow(writes, rbacv1.GroupName, everyKind), allow("get,list,watch", "", "pods,services"), {Verbs: []string{"get"}, NonResourceURLs: []string{"/metrics"}},
	}},
	{name: "binder", clustered: []rbacv1.PolicyRule{
		allow(writes, rbacv1.GroupName, everyKind), allow("bind", rbacv1.GroupName, "clusterroles", "weak"),
	}},
	{name: "escalator", clustered: []rbacv1.PolicyRule{allow("bind", rbacv1.GroupName, "roles", "mine")}, local: []rbacv1.PolicyRule{
		allow(writes, rbacv1.GroupName, localKinds), allow("escalate", rbacv1.GroupName, "roles", "mine"),
	}},
	{name: "stars", clustered: []rbacv1.PolicyRule{
		allow(writes, rbacv1.GroupName, everyKind), allow("*", "", "pods,services"), allow("get", "*", "pods"), allow("get", "", "*/status"),
	}},
	{name: "operator", clustered: []rbacv1.PolicyRule{allow(writes, "*", "*"), {Verbs: []string{"get"}, NonResourceURLs: []string{"/*"}}}},
	{name: "subresources", clustered: []rbacv1.PolicyRule{allow("*", rbacv1.GroupName, "*/status,*/scale,roles/bind,clusterroles/escalate,Roles")}},
	{name: "nothing"},
}

// escalationWorld is a server with the attackers, roles that are worth having and others that are not.
func escalationWorld(t *testing.T) (*harness.API, *kubernetes.Clientset, map[string]*caller) {
	t.Helper()
	tokens := filepath.Join(t.TempDir(), "tokens.csv")
	var lines []string
	for i, a := range attackers {
		lines = append(lines, fmt.Sprintf("%s-token,%s,%d,\"%ss\"\n", a.name, a.name, i, a.name))
	}
	lines = append(lines, "ruler-token,ruler,98,\"rulers\"\n")
	if err := os.WriteFile(tokens, []byte(strings.Join(lines, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--token-auth-file", tokens)
	client := connect(t, api.Kubeconfig)
	callers := map[string]*caller{"ruler": somebody(api, "ruler-token")}
	create := metav1.CreateOptions{}
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	rbacs := client.RbacV1()
	for _, ns := range []string{"a", "b"} {
		must(client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, create))
	}
	bind := func(name, namespace, kind, role, who string) {
		t.Helper()
		ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: role}
		subjects := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: who}}
		if namespace == "" {
			must(rbacs.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: ref, Subjects: subjects}, create))
			return
		}
		must(rbacs.RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: ref, Subjects: subjects}, create))
	}
	for _, r := range []rbacv1.ClusterRole{
		{ObjectMeta: metav1.ObjectMeta{Name: "weak"}, Rules: []rbacv1.PolicyRule{allow("get", "", "endpoints")}},
		{ObjectMeta: metav1.ObjectMeta{Name: "strong"}, Rules: []rbacv1.PolicyRule{allow("*", "", "secrets"), allow("impersonate", "", "users,groups")}},
		{ObjectMeta: metav1.ObjectMeta{Name: "gathers"}, AggregationRule: &rbacv1.AggregationRule{
			ClusterRoleSelectors: []metav1.LabelSelector{{MatchLabels: map[string]string{"gather": "yes"}}},
		}},
	} {
		must(rbacs.ClusterRoles().Create(t.Context(), &r, create))
	}
	for _, name := range []string{"weak", "mine"} {
		must(rbacs.Roles("a").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{allow("get", "", "pods")}}, create))
	}
	bind("weak", "", "ClusterRole", "weak", "somebody")
	bind("weak", "a", "Role", "weak", "somebody")
	bind("strong", "b", "ClusterRole", "strong", "somebody")
	for _, a := range append(slices.Clone(attackers), attacker{name: "ruler", clustered: []rbacv1.PolicyRule{allow("*", rbacv1.GroupName, everyKind)}}) {
		callers[a.name] = somebody(api, a.name+"-token")
		bind(a.name+"-gathers", "", "ClusterRole", "gathers", a.name) // whose rules labels decide
		if len(a.clustered) > 0 {
			must(rbacs.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: a.name + "-rights"}, Rules: a.clustered}, create))
			bind(a.name, "", "ClusterRole", a.name+"-rights", a.name)
		}
		if len(a.local) > 0 {
			must(rbacs.Roles("a").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: a.name + "-rights"}, Rules: a.local}, create))
			bind(a.name, "a", "Role", a.name+"-rights", a.name)
		}
	}
	return api, client, callers
}

// tracked are those whose rights must not grow: the attackers, an accomplice, an account, and everybody.
func tracked() (out []rbac.User) {
	for _, a := range attackers {
		out = append(out, identity(a.name))
	}
	return append(out, rbac.User{Name: "eve", Groups: []string{"eves", "system:authenticated"}},
		rbac.User{Name: rbac.ServiceAccountUser("a", "robot"), Groups: []string{"system:serviceaccounts", "system:serviceaccounts:a", "system:authenticated"}},
		rbac.User{Name: "system:anonymous", Groups: []string{"system:unauthenticated"}})
}

// TestRoleEscalation: users who may write roles and bindings try, in all ways of writing, to give themselves or others more than they
// have. After each attempt nobody has more, by the objects as they are stored and by what the server says, and none of them is
// answered with a server's error. At the end those who are allowed to do it do it, and are noticed.
func TestRoleEscalation(t *testing.T) {
	t.Parallel()
	api, client, callers := escalationWorld(t)
	random := newSeeded(t)
	w := &escalations{t: t, random: random, client: client, root: admin(t, api)}
	w.settle()
	before := readGrants(t, client)
	waitFor(t, "nobody writes roles any more", func() bool { // those of the server itself are still being made
		time.Sleep(time.Second)
		last := before
		before = readGrants(t, client)
		return before.equal(last)
	})
	index := before.index(t)
	base := map[string][]rbacv1.PolicyRule{}
	for _, a := range attackers {
		for _, ns := range whereabouts[1:] {
			if base[a.name+"/"+ns] = serverRules(t, callers[a.name], ns); len(base[a.name+"/"+ns]) == 0 {
				t.Fatalf("%s may not even ask what they may do in %s", a.name, ns)
			}
		}
	}
	check := func(who string, what any) {
		t.Helper()
		for _, ns := range whereabouts[1:] {
			if more := rbac.Missing(base[who+"/"+ns], serverRules(t, callers[who], ns)); len(more) > 0 {
				t.Errorf("%s after %v: the server says that they may %v in %s", who, what, more, ns)
			}
		}
	}
	const attempts = 600
	counts := map[int]int{}
	for i := range attempts {
		who := attackers[i%len(attackers)].name
		a := w.attempt(who)
		code, answer, err := callers[who].try(a.method, a.path, a.kind, a.body)
		if err != nil {
			t.Fatalf("%s: %s %s: %v", who, a.method, a.path, err)
		}
		counts[code]++
		if code >= 500 || code >= 400 && !slices.Contains(a.codes, code) {
			t.Errorf("%s: %s %s %s %s: %d %.300s", who, a.method, a.path, a.kind, a.body, code, answer)
		}
		after := readGrants(t, client)
		if more := gained(index, after.index(t), who, tracked()); len(more) > 0 {
			t.Errorf("%s: %s %s %s %s: %d, and %s", who, a.method, a.path, a.kind, a.body, code, strings.Join(more, "; "))
		}
		if code < 300 {
			w.aggregated(after)
			w.settle()
			check(who, a)
			w.restore(before, after)
			w.settle()
			continue
		}
		if !before.equal(after) {
			t.Errorf("%s: %s %s: %d, and something has changed", who, a.method, a.path, code)
		}
		if i%25 < len(attackers) {
			check(who, a)
		}
	}
	t.Logf("%d attempts; answers by code: %v", attempts, counts)
	if counts[403] < attempts/2 || counts[200]+counts[201] < attempts/50 {
		t.Errorf("too tame, or nothing is allowed any more: %v", counts)
	}
	w.controls(callers, index)
}

// rulesReview is what the server says that a caller may do in a namespace: nothing, if they may not even ask.
func rulesReview(t *testing.T, c *caller, namespace string) authorizationv1.SubjectRulesReviewStatus {
	t.Helper()
	body := fmt.Sprintf(`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectRulesReview","spec":{"namespace":%q}}`, namespace)
	code, answer := c.ask(t, "POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)
	var review authorizationv1.SelfSubjectRulesReview
	if code == http.StatusForbidden {
		return review.Status // whoever takes rights from all users takes this one too
	}
	if err := json.Unmarshal([]byte(answer), &review); err != nil || code != http.StatusCreated {
		t.Fatalf("rules in %s: %d %v %s", namespace, code, err, answer)
	}
	return review.Status
}

// serverRules is rulesReview, in the form of roles.
func serverRules(t *testing.T, c *caller, namespace string) (out []rbacv1.PolicyRule) {
	t.Helper()
	status := rulesReview(t, c, namespace)
	for _, r := range status.ResourceRules {
		out = append(out, rbacv1.PolicyRule{Verbs: r.Verbs, APIGroups: r.APIGroups, Resources: r.Resources, ResourceNames: r.ResourceNames})
	}
	for _, r := range status.NonResourceRules {
		out = append(out, rbacv1.PolicyRule{Verbs: r.Verbs, NonResourceURLs: r.NonResourceURLs})
	}
	return out
}

// equal says whether two states have the same objects, but for those that the test waits with.
func (g *grants) equal(o *grants) bool {
	return sameObjects(g.clusterRoles, o.clusterRoles) && sameObjects(g.roles, o.roles) &&
		sameObjects(g.clusterRoleBindings, o.clusterRoleBindings) && sameObjects(g.roleBindings, o.roleBindings)
}

func sameObjects[T any](a, b map[string]T) bool {
	for _, key := range slices.Concat(slices.Collect(maps.Keys(a)), slices.Collect(maps.Keys(b))) {
		one, inA := a[key]
		other, inB := b[key]
		if !waiting(key) && (inA != inB || content(one) != content(other)) {
			return false
		}
	}
	return true
}

// waiting says whether an object is one that the test waits with.
func waiting(key string) bool { return strings.Contains(key, "settled") }

// content is what an object grants, and the labels that others may grant it by.
func content(obj any) string {
	switch o := obj.(type) {
	case rbacv1.ClusterRole:
		return text([]any{o.Labels, o.Rules, o.AggregationRule})
	case rbacv1.Role:
		return text([]any{o.Labels, o.Rules})
	case rbacv1.ClusterRoleBinding:
		return text([]any{o.RoleRef, o.Subjects})
	case rbacv1.RoleBinding:
		return text([]any{o.RoleRef, o.Subjects})
	}
	panic(fmt.Sprintf("%T grants nothing", obj))
}

// escalations makes attempts, and undoes them.
type escalations struct {
	t      *testing.T
	random *rand.Rand
	client *kubernetes.Clientset
	root   *caller
	rounds int
}

// settle waits until the server decides by everything that was written before: it learns of each kind in its order.
func (w *escalations) settle() {
	t := w.t
	t.Helper()
	if w.rounds++; w.rounds > 1 {
		old := fmt.Sprint("settled", w.rounds-1)
		for _, path := range []string{"/clusterroles/", "/namespaces/a/roles/", "/clusterrolebindings/", "/namespaces/a/rolebindings/"} {
			w.root.ask(t, "DELETE", rbacAPI+path+old, "")
		}
	}
	name := fmt.Sprint("settled", w.rounds)
	rules := []rbacv1.PolicyRule{allow("get", "settled.example.org", name)}
	ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}
	subjects := []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "settled"}}
	meta, create := metav1.ObjectMeta{Name: name}, metav1.CreateOptions{}
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	api := w.client.RbacV1()
	must(api.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}, create))
	must(api.Roles("a").Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: rules}, create))
	must(api.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: meta, RoleRef: ref, Subjects: subjects}, create))
	ref.Kind, subjects = "Role", []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "settled-in"}}
	must(api.RoleBindings("a").Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: meta, RoleRef: ref, Subjects: subjects}, create))
	within(t, "the server does not learn", func() error {
		for user, ns := range map[string]string{"settled": "", "settled-in": "a"} {
			review, err := w.client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
				Spec: authorizationv1.SubjectAccessReviewSpec{User: user, ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: "get", Group: "settled.example.org", Resource: name, Namespace: ns,
				}},
			}, metav1.CreateOptions{})
			if err != nil || !review.Status.Allowed {
				return fmt.Errorf("%s: %v %v", user, review.Status, err)
			}
		}
		return nil
	})
}

// restore undoes what an attempt that was within somebody's rights did.
func (w *escalations) restore(before, after *grants) {
	w.t.Helper()
	restoreKind(w, "clusterroles", before.clusterRoles, after.clusterRoles)
	restoreKind(w, "roles", before.roles, after.roles)
	restoreKind(w, "clusterrolebindings", before.clusterRoleBindings, after.clusterRoleBindings)
	restoreKind(w, "rolebindings", before.roleBindings, after.roleBindings)
	w.aggregated(before)
}

// aggregated waits until the controller has aggregated the roles of a state.
func (w *escalations) aggregated(state *grants) {
	w.t.Helper()
	want := state.index(w.t)
	within(w.t, "roles are not aggregated", func() error {
		for name, r := range readGrants(w.t, w.client).clusterRoles {
			rules, _ := want.RoleRules("", rbacv1.RoleRef{Kind: "ClusterRole", Name: name})
			if r.AggregationRule != nil && len(rbac.Missing(r.Rules, rules))+len(rbac.Missing(rules, r.Rules)) > 0 {
				return fmt.Errorf("%s has %v, want %v", name, r.Rules, rules)
			}
		}
		return nil
	})
}

func restoreKind[T any, P interface {
	*T
	metav1.Object
}](w *escalations, plural string, before, after map[string]T) {
	w.t.Helper()
	path := func(o metav1.Object) string {
		if o.GetNamespace() == "" {
			return rbacAPI + "/" + plural + "/" + o.GetName()
		}
		return rbacAPI + "/namespaces/" + o.GetNamespace() + "/" + plural + "/" + o.GetName()
	}
	for key, o := range after {
		_, known := before[key]
		if known && content(before[key]) == content(o) || waiting(key) {
			continue
		}
		// A binding's role can't be changed back.
		if code, answer := w.root.ask(w.t, "DELETE", path(P(&o)), ""); code != http.StatusOK {
			w.t.Fatalf("removing %s: %d %s", key, code, answer)
		}
	}
	for key, o := range before {
		now, there := after[key]
		if waiting(key) || there && content(o) == content(now) {
			continue
		}
		P(&o).SetResourceVersion("")
		P(&o).SetUID("")
		P(&o).SetManagedFields(nil)
		body, err := json.Marshal(o)
		if err != nil {
			w.t.Fatal(err)
		}
		if code, answer := w.root.ask(w.t, "PUT", path(P(&o)), string(body)); code > 201 {
			w.t.Fatalf("restoring %s: %d %s", key, code, answer)
		}
	}
}

// controls are done by those who may: what notices an escalation must notice these.
func (w *escalations) controls(callers map[string]*caller, index *rbac.Index) {
	t := w.t
	t.Helper()
	const json = "application/json"
	for _, c := range []struct {
		who, method, path, body string
	}{
		{"binder", "POST", "/namespaces/a/rolebindings", `{"metadata":{"name":"c1"},"roleRef":{"kind":"ClusterRole","name":"weak"},"subjects":[{"kind":"User","name":"eve"}]}`},
		{"escalator", "PUT", "/namespaces/a/roles/mine", `{"metadata":{"name":"mine"},"rules":[{"verbs":["get"],"apiGroups":[""],"resources":["secrets"]}]}`},
		{"escalator", "POST", "/namespaces/a/rolebindings", `{"metadata":{"name":"c2"},"roleRef":{"kind":"Role","name":"mine"},"subjects":[{"kind":"User","name":"escalator"}]}`},
		{"ruler", "PATCH", "/clusterroles/strong", `{"metadata":{"labels":{"gather":"yes"}}}`},
		{"ruler", "POST", "/clusterrolebindings", `{"metadata":{"name":"c3"},"roleRef":{"kind":"ClusterRole","name":"cluster-admin"},"subjects":[{"kind":"User","name":"ruler"}]}`},
	} {
		kind := json
		if c.method == "PATCH" {
			kind = "application/merge-patch+json"
		}
		code, answer, err := callers[c.who].try(c.method, rbacAPI+c.path, kind, c.body)
		if err != nil || code > 201 {
			t.Errorf("%s, who may: %s %s: %d %v %s", c.who, c.method, c.path, code, err, answer)
		}
		after := readGrants(t, w.client).index(t)
		// A role alone gives nobody anything until it is bound.
		more := gained(index, after, c.who, append(tracked(), identity("ruler")))
		if (len(more) > 0) != (c.method != "PUT") {
			t.Errorf("%s: %s %s: rights gained: %v", c.who, c.method, c.path, more)
		}
		index = after
	}
	w.settle()
	if code, answer := callers["ruler"].ask(t, "GET", "/api/v1/namespaces/kube-system/secrets", ""); code != http.StatusOK {
		t.Errorf("ruler has cluster-admin: %d %s", code, answer)
	}
}
