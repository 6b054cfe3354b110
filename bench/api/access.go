package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	clientset "k8s.io/client-go/kubernetes"

	"portal/bench/report"
	"portal/internal/apiserver/authz"
	"portal/internal/apiserver/authz/nodes"
	"portal/internal/rbac"
	"portal/internal/rbac/policy"
	"portal/test/harness"
)

const (
	// clientToken is that of the clients: an ordinary user, who may do what a role allows.
	clientToken = "bench-client"
	clientUser  = "bench"
	clientGroup = "bench:clients"
	// bindings that the clients' own is one of; a tenth of them hold in all namespaces.
	bindings = 1000
	// auditPolicy has one line written for each request that has been answered.
	auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
`
)

// accessFlags let the clients in, and turn the audit log on; both servers have them.
func accessFlags(dir string) ([]string, error) {
	tokens, rules := filepath.Join(dir, "bench-tokens.csv"), filepath.Join(dir, "audit-policy.yaml")
	users := fmt.Sprintf("%s,admin,1,system:masters\n%s,%s,2,%s\n", harness.KubeToken, clientToken, clientUser, clientGroup)
	if err := os.WriteFile(tokens, []byte(users), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(rules, []byte(auditPolicy), 0o600); err != nil {
		return nil, err
	}
	return []string{
		"--token-auth-file", tokens, "--audit-policy-file", rules, "--audit-log-path", filepath.Join(dir, "audit.log"),
	}, nil
}

// clientRules are what the clients may do.
func clientRules() []rbacv1.PolicyRule {
	all := []string{"*"}
	return []rbacv1.PolicyRule{
		{Verbs: all, APIGroups: []string{""}, Resources: []string{"namespaces", "services"}},
		{Verbs: all, APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}},
		{Verbs: []string{"create"}, APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}},
		{Verbs: []string{"get"}, NonResourceURLs: []string{"/debug/pprof/*"}},
	}
}

// otherRules are what each of the other bindings grants.
func otherRules(i int) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{Verbs: []string{"get", "list", "watch"}, APIGroups: []string{"", "apps"}, Resources: []string{"pods", "configmaps", "deployments"}},
		{Verbs: []string{"update"}, APIGroups: []string{"example.com"}, Resources: []string{fmt.Sprintf("things-%d", i)}},
	}
}

const otherRoles = 50

func clusterRole(name string, rules []rbacv1.PolicyRule) *rbacv1.ClusterRole {
	return &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}
}

// binding is one of the other bindings: to a user and a group of its own.
func binding(i int) (name, namespace string, role rbacv1.RoleRef, subjects []rbacv1.Subject) {
	if i%10 != 0 {
		namespace = namespaceOf(i / 10)
	}
	return fmt.Sprintf("bench-%d", i), namespace, roleRef(fmt.Sprintf("bench-%d", i%otherRoles)), []rbacv1.Subject{
		{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: fmt.Sprintf("user-%d", i)},
		{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: fmt.Sprintf("group-%d", i)},
	}
}

func roleRef(name string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}
}

func clientSubject() []rbacv1.Subject {
	return []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: clientGroup}}
}

// prepareAccess makes the namespaces, roles and bindings, and waits until the clients' binding counts.
func prepareAccess(ctx context.Context, s *subject) error {
	admin, err := clientset.NewForConfig(s.configOf(harness.KubeToken))
	if err != nil {
		return err
	}
	for i := range namespaces {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespaceOf(i)}}
		if _, err := admin.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("namespace %s: %w", ns.Name, err)
		}
	}
	v1 := admin.RbacV1()
	roles := []*rbacv1.ClusterRole{clusterRole(clientUser, clientRules())}
	for i := range otherRoles {
		roles = append(roles, clusterRole(fmt.Sprintf("bench-%d", i), otherRules(i)))
	}
	for _, role := range roles {
		if _, err := v1.ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("ClusterRole %s: %w", role.Name, err)
		}
	}
	bind := func(name, namespace string, role rbacv1.RoleRef, subjects []rbacv1.Subject) error {
		about := metav1.ObjectMeta{Name: name, Namespace: namespace}
		if namespace == "" {
			_, err := v1.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: about, RoleRef: role, Subjects: subjects}, metav1.CreateOptions{})
			return err
		}
		_, err := v1.RoleBindings(namespace).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: about, RoleRef: role, Subjects: subjects}, metav1.CreateOptions{})
		return err
	}
	for i := range bindings - 1 {
		if err := bind(binding(i)); err != nil {
			return fmt.Errorf("binding %d: %w", i, err)
		}
	}
	if err := bind(clientUser, "", roleRef(clientUser), clientSubject()); err != nil {
		return err
	}
	return waitAllowed(ctx, admin)
}

func waitAllowed(ctx context.Context, admin *clientset.Clientset) error {
	return report.Until(ctx, 30*time.Second, 20*time.Millisecond, func() error {
		answer, err := admin.AuthorizationV1().SubjectAccessReviews().Create(ctx, review(clientUser, clientGroup, "services"), metav1.CreateOptions{})
		if err == nil && !answer.Status.Allowed {
			err = fmt.Errorf("the role of user %s does not count after 30 seconds", clientUser)
		}
		return err
	})
}

func review(name, group, resource string) *authorizationv1.SubjectAccessReview {
	return &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: name, Groups: []string{group, user.AllAuthenticated},
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespaceOf(0), Verb: "create", Resource: resource},
	}}
}

// measureReviews asks the server, from a few clients, whether other users may do something: half of them may not.
func measureReviews(ctx context.Context, s *subject, at report.At, questions int) error {
	report.Logf("asking who may do what")
	const askers = 4
	took, errs := make([][]time.Duration, askers), make([]error, askers)
	var asking sync.WaitGroup
	for asker := range askers {
		client, err := s.client()
		if err != nil {
			return err
		}
		asking.Go(func() {
			for i := asker; i < questions && errs[asker] == nil; i += askers {
				who, group, allowed := clientUser, clientGroup, true
				if i/askers%2 == 1 {
					who, group, allowed = fmt.Sprintf("user-%d", i%bindings), fmt.Sprintf("group-%d", i%bindings), false
				}
				start := time.Now()
				answer, err := client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review(who, group, "services"), metav1.CreateOptions{})
				took[asker] = append(took[asker], time.Since(start))
				if err == nil && answer.Status.Allowed != allowed {
					err = fmt.Errorf("user %s: allowed %v, want %v", who, answer.Status.Allowed, allowed)
				}
				errs[asker] = err
			}
		})
	}
	begin := time.Now()
	asking.Wait()
	all := time.Since(begin)
	var times []time.Duration
	for asker := range askers {
		if errs[asker] != nil {
			return errs[asker]
		}
		times = append(times, took[asker]...)
	}
	at.Higher(s.name, "SubjectAccessReviews", float64(len(times))/all.Seconds(), "a second")
	at.Lower(s.name, "SubjectAccessReview, p50", report.Quantile(times, 0.5), "ms")
	at.Lower(s.name, "SubjectAccessReview, p99", report.Quantile(times, 0.99), "ms")
	return nil
}

// measureDecisions times single decisions of Portal's authorizers in this process, with the same roles and bindings: a request
// has too much else in it to tell.
func measureDecisions(at report.At) error {
	defaults, err := policy.Default()
	if err != nil {
		return err
	}
	index := rbac.NewIndex()
	for i := range defaults.ClusterRoles {
		index.SetRole("", defaults.ClusterRoles[i].Name, defaults.ClusterRoles[i].Rules)
	}
	for _, b := range defaults.ClusterRoleBindings {
		index.SetBinding("", b.Name, b.RoleRef, b.Subjects)
	}
	for i := range otherRoles {
		index.SetRole("", fmt.Sprintf("bench-%d", i), otherRules(i))
	}
	for i := range bindings - 1 {
		name, namespace, role, subjects := binding(i)
		index.SetBinding(namespace, name, role, subjects)
	}
	index.SetRole("", clientUser, clientRules())
	index.SetBinding("", clientUser, roleRef(clientUser), clientSubject())
	access, err := authz.NewAccess([]string{authz.ModeNode, authz.ModeRBAC}, authz.Authorizer{Index: index},
		nodes.Authorizer{Graph: nodes.NewGraph(), Rules: defaults.Rules("system:node")}, nil)
	if err != nil {
		return err
	}
	const samples = 500_000
	times := make([]time.Duration, 0, samples)
	for i := range samples {
		who := &user.DefaultInfo{Name: clientUser, Groups: []string{clientGroup, user.AllAuthenticated}}
		want := authorizer.DecisionAllow
		if i%2 == 1 {
			who = &user.DefaultInfo{Name: fmt.Sprintf("user-%d", i%bindings), Groups: []string{fmt.Sprintf("group-%d", i%bindings), user.AllAuthenticated}}
			want = authorizer.DecisionNoOpinion
		}
		request := authorizer.AttributesRecord{User: who, Verb: "create", Namespace: namespaceOf(i), Resource: "services", APIVersion: "v1", ResourceRequest: true}
		start := time.Now()
		got, _, _ := access.Authorize(context.Background(), request)
		times = append(times, time.Since(start))
		if got != want {
			return fmt.Errorf("user %s: decided %v, want %v", who.Name, got, want)
		}
	}
	at.Lower(portal, decisionP99, report.Quantile(times, 0.99)*1000, "µs")
	return nil
}
