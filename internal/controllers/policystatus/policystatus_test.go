package policystatus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// services is a resolver that knows Services, once it works.
type services struct{ failures atomic.Int64 }

func (s *services) ResolveSchema(schema.GroupVersionKind) (*spec.Schema, error) {
	if s.failures.Add(-1) >= 0 {
		return nil, errors.New("the API is away")
	}
	object := func(properties map[string]spec.Schema) spec.Schema {
		return spec.Schema{SchemaProps: spec.SchemaProps{Type: []string{"object"}, Properties: properties}}
	}
	out := object(map[string]spec.Schema{"spec": object(map[string]spec.Schema{"type": *spec.StringProperty()})})
	return &out, nil
}

func policy(name, expression string) *admissionregistrationv1.ValidatingAdmissionPolicy {
	return &admissionregistrationv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1},
		Spec: admissionregistrationv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionregistrationv1.MatchResources{ResourceRules: []admissionregistrationv1.NamedRuleWithOperations{{
				RuleWithOperations: admissionregistrationv1.RuleWithOperations{
					Operations: []admissionregistrationv1.OperationType{"CREATE"},
					Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"services"}},
				},
			}}},
			Validations: []admissionregistrationv1.Validation{{Expression: expression}},
		},
	}
}

// TestStatus: a policy's status says what does not fit, for the generation that was checked, also when types could not be read at first.
func TestStatus(t *testing.T) {
	client := fake.NewClientset(policy("right", "object.spec.type == 'ClusterIP'"), policy("wrong", "object.spec.typo == 1"))
	factory := informers.NewSharedInformerFactory(client, 0)
	c, err := New(client, factory)
	if err != nil {
		t.Fatal(err)
	}
	kinds := meta.NewDefaultRESTMapper([]schema.GroupVersion{corev1.SchemeGroupVersion})
	kinds.Add(corev1.SchemeGroupVersion.WithKind("Service"), meta.RESTScopeNamespace)
	resolver := &services{}
	resolver.failures.Store(3)
	c.kinds, c.schemas = kinds, resolver
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	factory.Start(ctx.Done())
	running.Go(func() { _ = c.Run(ctx) })

	policies := client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	expect := func(name string, generation int64, warnings int) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			p, err := policies.Get(t.Context(), name, metav1.GetOptions{})
			if err == nil {
				err = fmt.Errorf("status %+v", p.Status)
				found := 0
				if p.Status.TypeChecking != nil {
					found = len(p.Status.TypeChecking.ExpressionWarnings)
				}
				if p.Status.ObservedGeneration == generation && found == warnings {
					return
				}
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	expect("right", 1, 0)
	expect("wrong", 1, 1)
	p, err := policies.Get(t.Context(), "wrong", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if ref := p.Status.TypeChecking.ExpressionWarnings[0].FieldRef; ref != "spec.validations[0].expression" {
		t.Errorf("the warning is about %s", ref)
	}
	p.Spec.Validations[0].Expression, p.Generation = "object.spec.type != ''", 2
	if _, err := policies.Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("wrong", 2, 0)
}
