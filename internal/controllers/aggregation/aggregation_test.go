package aggregation

import (
	"context"
	"sync"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
)

// TestRulesFollow: an aggregated role has the rules of the roles that its selector matches, also of those that come and go.
func TestRulesFollow(t *testing.T) {
	part := func(name, resource string) *rbacv1.ClusterRole {
		return &rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"part": "yes"}},
			Rules:      []rbacv1.PolicyRule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{resource}}},
		}
	}
	whole := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "whole"},
		AggregationRule: &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{
			{MatchLabels: map[string]string{"part": "yes"}},
		}},
	}
	client := fake.NewClientset(whole, part("a", "pods"))
	factory := informers.NewSharedInformerFactory(client, 0)
	c, err := New(client, factory)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	factory.Start(ctx.Done())
	running.Go(func() { _ = c.Run(ctx) })
	roles := client.RbacV1().ClusterRoles()
	expect := func(resources ...string) {
		t.Helper()
		var got []string
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			r, err := roles.Get(ctx, "whole", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			got = nil
			for _, rule := range r.Rules {
				got = append(got, rule.Resources...)
			}
			if len(got) == len(resources) {
				break
			}
		}
		for i, want := range resources {
			if i >= len(got) || got[i] != want {
				t.Fatalf("rules for %q, want %q", got, resources)
			}
		}
	}
	expect("pods")
	if _, err := roles.Create(ctx, part("b", "services"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("pods", "services")
	if err := roles.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("services")
}
