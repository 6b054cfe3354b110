package test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestDrainNode: kubectl drain evicts no more Pods than their budget allows, and goes on when it allows more.
func TestDrainNode(t *testing.T) {
	t.Parallel()
	k, client := workloads(t)
	k.run("create", "deployment", "web", "--image=web:1", "--replicas=3")
	k.run("rollout", "status", "deployment/web", "--timeout=60s")
	k.run("create", "poddisruptionbudget", "web", "--selector=app=web", "--min-available=3")
	counted := func(allowed string) {
		t.Helper()
		within(t, "the budget is counted", func() error {
			b, err := client.PolicyV1().PodDisruptionBudgets("default").Get(t.Context(), "web", metav1.GetOptions{})
			if err != nil {
				return err
			}
			if got := fmt.Sprintf("%d/%d, %d allowed", b.Status.CurrentHealthy, b.Status.DesiredHealthy, b.Status.DisruptionsAllowed); got != allowed {
				return errors.New(got)
			}
			return nil
		})
	}
	counted("3/3, 0 allowed")
	pods := podsOf(t, client, "app=web")
	evict := func(name string, options *metav1.DeleteOptions) error {
		return client.CoreV1().Pods("default").EvictV1(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: name}, DeleteOptions: options})
	}
	if err := evict(pods[0].Name, nil); !apierrors.IsTooManyRequests(err) || !apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause) {
		t.Errorf("a Pod that must stay: %v", err)
	}
	if out, err := k.try("drain", pods[0].Spec.NodeName, "--timeout=3s"); err == nil || !strings.Contains(out, "disruption budget") {
		t.Errorf("drain of a node whose Pod must stay: %v\n%s", err, out)
	}
	k.run("uncordon", pods[0].Spec.NodeName)

	k.run("patch", "pdb", "web", "-p", `{"spec":{"minAvailable":2}}`)
	counted("3/2, 1 allowed")
	if err := evict(pods[0].Name, &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		t.Errorf("dry run: %v", err)
	}
	other := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions("not-its-uid")}
	if err := evict(pods[0].Name, &other); !apierrors.IsConflict(err) {
		t.Errorf("another Pod's uid: %v", err)
	}
	counted("3/2, 1 allowed") // neither has used anything up
	// Of several at a time only one is allowed.
	var mu sync.Mutex
	var group sync.WaitGroup
	gone := 0
	for _, pod := range podsOf(t, client, "app=web") {
		group.Go(func() {
			err := evict(pod.Name, nil)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				gone++
			case !apierrors.IsTooManyRequests(err):
				t.Errorf("evicting %s: %v", pod.Name, err)
			}
		})
	}
	group.Wait()
	if gone != 1 {
		t.Errorf("%d Pods were evicted at a time", gone)
	}
	counted("3/2, 1 allowed") // replaced
	k.run("drain", "n1", "--timeout=60s")
	for _, pod := range podsOf(t, client, "app=web") {
		if pod.Spec.NodeName == "n1" {
			t.Errorf("Pod %s is still on n1", pod.Name)
		}
	}
	// A share depends on what the Deployment wants, not on what is there.
	k.run("delete", "pdb", "web")
	k.run("create", "poddisruptionbudget", "web", "--selector=app=web", "--max-unavailable=50%")
	counted("3/1, 2 allowed")
	k.run("scale", "deployment/web", "--replicas=6")
	counted("6/3, 3 allowed")
	if out := k.run("get", "pdb"); !strings.Contains(out, "ALLOWED DISRUPTIONS") || !strings.Contains(out, "50%") {
		t.Errorf("kubectl get pdb:\n%s", out)
	}
}
