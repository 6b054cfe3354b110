//go:build peers

package test

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/internal/controllers/aggregation"
	"portal/test/harness"
)

var (
	rbacSeed   = flag.Uint64("peers.seed", 0, "seed of the roles, bindings and questions; 0: another each time")
	rbacRecord = flag.String("peers.record", "", "write 500 questions and kube-apiserver's answers to this file, for test/recorded/rbac")
)

const (
	rbacRounds    = 6
	rbacQuestions = 1000 // of a round
)

// reviewer is one of the two servers that are asked the same.
type reviewer struct {
	name   string
	client *kubernetes.Clientset
	raw    *caller
	api    *harness.API
}

// rbacReviewers are kube-apiserver, whose roles kube-controller-manager aggregates, and Portal.
func rbacReviewers(t *testing.T) (kube, portal reviewer) {
	t.Helper()
	dir := t.TempDir()
	need(t, harness.Peer("kube-apiserver"), "peers")
	api, err := harness.StartKubeAPIServer(dir, startEtcd(t, 1)[0].ClientURL, "--authorization-mode", "Node") // besides RBAC
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	startPeer(t, dir, "kube-controller-manager", "--kubeconfig", api.Kubeconfig, "--authentication-kubeconfig", api.Kubeconfig,
		"--authorization-kubeconfig", api.Kubeconfig, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(harness.FreePort()),
		"--cert-dir", filepath.Join(dir, "kcm"), "--leader-elect=false", "--controllers", "clusterrole-aggregation-controller")
	kube = reviewer{"kube-apiserver", connect(t, api.Kubeconfig), somebody(api, harness.KubeToken), api}
	own := startPortal(t, "--controllers", aggregation.Name)
	return kube, reviewer{"Portal", connect(t, own.Kubeconfig), admin(t, own), own}
}

// TestPeersRBAC asks kube-apiserver and Portal who may do what, thousands of times, while roles and bindings change, and requires
// the same answers: to reviews, to requests of those users, and to who asks for all their rules.
func TestPeersRBAC(t *testing.T) {
	t.Parallel()
	seed := cmp.Or(*rbacSeed, uint64(time.Now().UnixNano()))
	t.Logf("seed %d", seed)
	kube, portal := rbacReviewers(t)
	if *rbacRecord != "" {
		recordRBAC(t, kube, seed)
	}
	world := newRBACWorld(seed, "g")
	both := []reviewer{kube, portal}
	for _, j := range both {
		for _, ns := range []string{"g-a", "g-b", "g-c"} {
			if _, err := j.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	asked, allowed, requests, forbidden := 0, 0, 0, 0
	for round := range rbacRounds {
		change := world.round()
		aggregated, err := world.aggregated()
		if err != nil {
			t.Fatal(err)
		}
		for _, j := range both {
			j.apply(t, change, aggregated, round)
		}
		questions := make([]accessQuestion, rbacQuestions)
		for i := range questions {
			questions[i] = world.ask(aggregated)
		}
		want, got := kube.reviewAll(t, questions), portal.reviewAll(t, questions)
		for i, q := range questions {
			if asked++; want[i].allowed {
				allowed++
			}
			if want[i] != got[i] {
				t.Errorf("round %d: %+v: Portal says %+v, kube-apiserver %+v", round, q, got[i], want[i])
			}
		}
		n, f := sameRequests(t, kube, portal, questions)
		requests, forbidden = requests+n, forbidden+f
		sameRules(t, kube, portal, questions[:40])
	}
	t.Logf("%d questions, %d allowed; %d requests, %d forbidden", asked, allowed, requests, forbidden)
	if asked < 5000 || allowed < asked/3 || allowed > asked*2/3 {
		t.Errorf("%d of %d questions are allowed: too tame", allowed, asked)
	}
	if requests < 500 || forbidden < requests/5 || forbidden > requests*4/5 {
		t.Errorf("%d of %d requests are forbidden: too tame", forbidden, requests)
	}
}

// apply makes a change, and returns when the server decides by it.
func (j reviewer) apply(t *testing.T, c rbacChange, aggregated map[string][]rbacv1.PolicyRule, round int) {
	t.Helper()
	for _, path := range c.remove {
		if code, answer := j.raw.ask(t, "DELETE", path, ""); code != http.StatusOK {
			t.Fatalf("%s: DELETE %s: %d %s", j.name, path, code, answer)
		}
	}
	for _, o := range c.objects {
		j.put(t, o)
	}
	within(t, j.name+" does not aggregate", func() error {
		// kube-controller-manager applies what it aggregates: a role that is deleted at that moment is created again.
		for _, path := range c.remove {
			code, answer := j.raw.ask(t, "GET", path, "")
			if code == http.StatusNotFound {
				continue
			}
			if code == http.StatusOK && j.name != "kube-apiserver" {
				t.Errorf("%s: %s came back: %s", j.name, path, answer)
			}
			j.raw.ask(t, "DELETE", path, "")
			return fmt.Errorf("%s is there: %d", path, code)
		}
		list, err := j.client.RbacV1().ClusterRoles().List(t.Context(), metav1.ListOptions{LabelSelector: partLabel})
		if err != nil {
			return err
		}
		for _, r := range list.Items {
			if want, ok := aggregated[r.Name]; ok && !sameSet(ruleTexts(r.Rules), ruleTexts(want)) {
				return fmt.Errorf("%s has %v, want %v", r.Name, r.Rules, want)
			}
		}
		return nil
	})
	// Authorizers learn by watching, in the order in which objects of a kind were written. When the last of each kind counts,
	// all do.
	last := fmt.Sprintf("g-last%d", round)
	rules := []rbacv1.PolicyRule{{Verbs: []string{"get"}, APIGroups: []string{"last.example.org"}, Resources: []string{"lasts"}}}
	meta := metav1.ObjectMeta{Name: last, Namespace: "g-a"}
	type kind = metav1.TypeMeta
	j.put(t, &rbacv1.ClusterRole{TypeMeta: kind{APIVersion: rbacVersion, Kind: "ClusterRole"}, ObjectMeta: metav1.ObjectMeta{Name: last}, Rules: rules})
	j.put(t, &rbacv1.Role{TypeMeta: kind{APIVersion: rbacVersion, Kind: "Role"}, ObjectMeta: meta, Rules: rules})
	j.put(t, &rbacv1.ClusterRoleBinding{
		TypeMeta: kind{APIVersion: rbacVersion, Kind: "ClusterRoleBinding"}, ObjectMeta: metav1.ObjectMeta{Name: last},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: last},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: last}},
	})
	j.put(t, &rbacv1.RoleBinding{
		TypeMeta: kind{APIVersion: rbacVersion, Kind: "RoleBinding"}, ObjectMeta: meta,
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: last},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: last + "-in"}},
	})
	within(t, j.name+" does not follow", func() error {
		for _, q := range []accessQuestion{{User: last}, {User: last + "-in", NS: "g-a"}} {
			q.Verb, q.Group, q.Resource = "get", "last.example.org", "lasts"
			if a := j.review(t, q); !a.allowed {
				return fmt.Errorf("%+v: %+v", q, a)
			}
		}
		return nil
	})
}

// put creates or replaces a role or binding.
func (j reviewer) put(t *testing.T, o any) {
	t.Helper()
	body, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	named := o.(metav1.Object)
	plural := strings.ToLower(reflect.TypeOf(o).Elem().Name()) + "s"
	path := rbacAPI + "/" + plural + "/" + named.GetName()
	if ns := named.GetNamespace(); ns != "" {
		path = rbacAPI + "/namespaces/" + ns + "/" + plural + "/" + named.GetName()
	}
	code, answer := j.raw.ask(t, "PUT", path, string(body))
	if code != http.StatusOK && code != http.StatusCreated {
		t.Fatalf("%s: PUT %s: %d %s", j.name, path, code, answer)
	}
}

// decision is what a server says to a question.
type decision struct {
	allowed, denied, failed bool
	code                    int32
}

func (j reviewer) review(t *testing.T, q accessQuestion) decision {
	spec := authorizationv1.SubjectAccessReviewSpec{User: q.User, Groups: q.Groups}
	if q.Path != "" {
		spec.NonResourceAttributes = &authorizationv1.NonResourceAttributes{Path: q.Path, Verb: q.Verb}
	} else {
		spec.ResourceAttributes = &authorizationv1.ResourceAttributes{
			Verb: q.Verb, Group: q.Group, Resource: q.Resource, Subresource: q.Sub, Name: q.Name, Namespace: q.NS,
		}
	}
	answer, err := j.client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{Spec: spec}, metav1.CreateOptions{})
	if status, ok := err.(interface{ Status() metav1.Status }); ok {
		return decision{code: status.Status().Code}
	}
	if err != nil {
		t.Errorf("%s: %+v: %v", j.name, q, err)
		return decision{}
	}
	return decision{answer.Status.Allowed, answer.Status.Denied, answer.Status.EvaluationError != "", http.StatusCreated}
}

// reviewAll asks all questions, several at a time.
func (j reviewer) reviewAll(t *testing.T, questions []accessQuestion) []decision {
	t.Helper()
	out := make([]decision, len(questions))
	const clients = 8
	var all sync.WaitGroup
	for c := range clients {
		all.Go(func() {
			for i := c; i < len(questions); i += clients {
				out[i] = j.review(t, questions[i])
			}
		})
	}
	all.Wait()
	return out
}

// servedBoth are resources that both servers have, by group and with the path to them.
var servedBoth = map[string]string{
	"/pods": "/api/v1", "/services": "/api/v1", "/configmaps": "/api/v1", "/secrets": "/api/v1", "/nodes": "/api/v1",
	"discovery.k8s.io/endpointslices": "/apis/discovery.k8s.io/v1", "rbac.authorization.k8s.io/roles": rbacAPI,
}

// sameRequests has the users of the questions do what they ask about, as far as both servers have it, and compares who is
// forbidden. Nothing is changed by it.
func sameRequests(t *testing.T, kube, portal reviewer, questions []accessQuestion) (n, forbidden int) {
	t.Helper()
	for _, q := range questions {
		method, path, ok := requestOf(q)
		if !ok || q.User == "" || strings.TrimSpace(q.User) != q.User {
			continue
		}
		header := http.Header{"Impersonate-User": {q.User}}
		if len(q.Groups) > 0 {
			header["Impersonate-Group"] = q.Groups
		}
		body := "{}"
		if method == "DELETE" { // a body would replace the parameters in the path, and nothing would be dry about it
			body = ""
		}
		var codes []int
		for _, j := range []reviewer{kube, portal} {
			code, _, err := j.raw.with(header).try(method, path, kindOf(method), body)
			if err != nil {
				t.Fatalf("%s: %s %s as %v: %v", j.name, method, path, header, err)
			}
			codes = append(codes, code)
		}
		n++
		if codes[0] == http.StatusForbidden {
			forbidden++
		}
		if (codes[0] == http.StatusForbidden) != (codes[1] == http.StatusForbidden) || codes[1] >= 500 {
			t.Errorf("%s %s as %v: %d at Portal, %d at kube-apiserver", method, path, header, codes[1], codes[0])
		}
	}
	return n, forbidden
}

// requestOf is the request that a question is about.
func requestOf(q accessQuestion) (method, path string, ok bool) {
	if q.Path != "" {
		ok = slices.Contains([]string{"get", "post", "put", "delete", "head"}, q.Verb) && strings.HasPrefix(q.Path, "/") &&
			!strings.HasPrefix(q.Path, "/api") && q.Path != "/"
		return strings.ToUpper(q.Verb), (&url.URL{Path: q.Path}).EscapedPath(), ok
	}
	root, ok := servedBoth[q.Group+"/"+q.Resource]
	// The namespace and the name are part of the path, and neither can be empty in it.
	named := q.Name
	if named == "" {
		named = "some"
	}
	clustered := q.Resource == "nodes"
	if !ok || clustered != (q.NS == "") || strings.Contains(q.Sub+q.Name, "*") || strings.Contains(q.Sub, "/") {
		return "", "", false
	}
	place := root
	if !clustered {
		place += "/namespaces/" + q.NS
	}
	collection := place + "/" + q.Resource
	one := collection + "/" + named
	if q.Sub != "" {
		one += "/" + q.Sub
	}
	switch q.Verb {
	case "get":
		return "GET", one, q.Sub != "proxy" && q.Sub != "exec"
	case "list":
		return "GET", collection, q.Sub == ""
	case "create":
		return "POST", collection + "?dryRun=All", q.Sub == ""
	case "update":
		return "PUT", one + "?dryRun=All", q.Sub != "proxy"
	case "patch":
		return "PATCH", one + "?dryRun=All", q.Sub != "proxy"
	case "delete":
		return "DELETE", one + "?dryRun=All", q.Sub == ""
	case "deletecollection":
		return "DELETE", collection + "?dryRun=All", q.Sub == ""
	}
	return "", "", false
}

// sameRules has users ask for all that they may do in a namespace.
func sameRules(t *testing.T, kube, portal reviewer, questions []accessQuestion) {
	t.Helper()
	for _, q := range questions {
		if q.User == "" || q.NS == "" {
			continue
		}
		header := http.Header{"Impersonate-User": {q.User}}
		if len(q.Groups) > 0 {
			header["Impersonate-Group"] = q.Groups
		}
		want, got := rulesReview(t, kube.raw.with(header), q.NS), rulesReview(t, portal.raw.with(header), q.NS)
		if w, g := resourceTexts(want.ResourceRules), resourceTexts(got.ResourceRules); !sameSet(w, g) {
			t.Errorf("rules of %v in %s: Portal says %q, kube-apiserver %q", header, q.NS, g, w)
		}
		if w, g := pathTexts(want.NonResourceRules), pathTexts(got.NonResourceRules); !sameSet(w, g) {
			t.Errorf("paths of %v in %s: Portal says %q, kube-apiserver %q", header, q.NS, g, w)
		}
		if want.Incomplete != got.Incomplete || (want.EvaluationError == "") != (got.EvaluationError == "") {
			t.Errorf("rules of %v in %s: Portal says incomplete %v, %q, kube-apiserver %v, %q", header, q.NS,
				got.Incomplete, got.EvaluationError, want.Incomplete, want.EvaluationError)
		}
	}
}

func ruleTexts(rules []rbacv1.PolicyRule) (out []string) {
	for _, r := range rules {
		out = append(out, fmt.Sprintf("%q %q %q %q %q", r.Verbs, r.APIGroups, r.Resources, r.ResourceNames, r.NonResourceURLs))
	}
	return out
}

func resourceTexts(rules []authorizationv1.ResourceRule) (out []string) {
	for _, r := range rules {
		out = append(out, fmt.Sprintf("%q %q %q %q", sorted(r.Verbs), sorted(r.APIGroups), sorted(r.Resources), sorted(r.ResourceNames)))
	}
	return out
}

func pathTexts(rules []authorizationv1.NonResourceRule) (out []string) {
	for _, r := range rules {
		out = append(out, fmt.Sprintf("%q %q", sorted(r.Verbs), sorted(r.NonResourceURLs)))
	}
	return out
}

func sorted(list []string) []string { return slices.Sorted(slices.Values(list)) }

// sameSet says whether two lists have the same members: order and repetition mean nothing.
func sameSet(a, b []string) bool {
	return slices.Equal(slices.Compact(sorted(a)), slices.Compact(sorted(b)))
}

func sortedKeys[T any](m map[string]T) []string { return slices.Sorted(maps.Keys(m)) }

// recordRBAC has run.py ask kube-apiserver about the first two rounds of the world.
func recordRBAC(t *testing.T, kube reviewer, seed uint64) {
	t.Helper()
	type rulesQuestion struct {
		Rules string         `json:"rules"`
		As    map[string]any `json:"as"`
	}
	type phase struct {
		Remove     []string `json:"remove,omitempty"`
		Objects    []any    `json:"objects"`
		Aggregated []string `json:"aggregated"`
		Ask        []any    `json:"ask"`
	}
	world := newRBACWorld(seed, "{p}")
	var phases []phase
	for range 2 {
		change := world.round()
		aggregated, err := world.aggregated()
		if err != nil {
			t.Fatal(err)
		}
		p := phase{Remove: change.remove, Objects: change.objects, Aggregated: sortedKeys(aggregated)}
		if len(phases) == 0 {
			for _, ns := range []string{"c", "b", "a"} {
				namespace := map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]string{"name": "{p}-" + ns}}
				p.Objects = append([]any{namespace}, p.Objects...)
			}
		}
		seen := map[string]bool{}
		for len(p.Ask) < 250 {
			q := world.ask(aggregated)
			if text := fmt.Sprintf("%q", q); !seen[text] {
				seen[text] = true
				p.Ask = append(p.Ask, q)
			}
		}
		for _, who := range []string{"ann", "Ann", "bob", "cat", "dan"} {
			for _, ns := range []string{"{p}-a", "{p}-b"} {
				p.Ask = append(p.Ask, rulesQuestion{ns, map[string]any{"user": "{p}-" + who, "groups": []string{"{p}-devs"}}})
			}
		}
		phases = append(phases, p)
	}
	cases, err := json.Marshal([]any{map[string]any{"name": "world/generated", "each": true, "seed": seed, "phases": phases}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "cases.json")
	write(t, file, string(cases))
	out, err := harness.Run(t.Context(), []string{"KUBECONFIG=" + kube.api.Kubeconfig, "PYTHONDONTWRITEBYTECODE=1"},
		"python3", harness.Recorded("rbac", "run.py"), "record", file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(*rbacRecord, []byte(out), 0o644); err != nil {
		t.Fatal(err)
	}
}
