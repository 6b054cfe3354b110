package resourcequota

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func limited(hard map[corev1.ResourceName]string, scopes ...corev1.ResourceQuotaScope) *resourceQuota {
	q := &resourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "q", Namespace: "ns", ResourceVersion: "1"}, Spec: corev1.ResourceQuotaSpec{Scopes: scopes, Hard: corev1.ResourceList{}}}
	for name, amount := range hard {
		q.Spec.Hard[name] = resource.MustParse(amount)
	}
	return q
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	type hard = map[corev1.ResourceName]string
	selected := func(r corev1.ScopedResourceSelectorRequirement) *resourceQuota {
		q := limited(hard{"pods": "1"})
		q.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{r}}
		return q
	}
	for name, c := range map[string]struct {
		quota *resourceQuota
		want  []string
	}{
		"empty": {limited(nil), nil},
		"all kinds": {limited(hard{
			"pods": "1", "requests.cpu": "500m", "limits.memory": "1Gi", "count/widgets.example.com": "2", "requests.example.com/gpu": "1",
			"hugepages-2Mi": "4Mi", "requests.hugepages-2Mi": "4Mi", "services.nodeports": "0",
		}), nil},
		"an unknown name":       {limited(hard{"widgets": "1"}), []string{"spec.hard[widgets] FieldValueInvalid"}},
		"a strange name":        {limited(hard{"a b": "1"}), []string{"spec.hard[a b] FieldValueInvalid"}},
		"half a Pod":            {limited(hard{"pods": "500m"}), []string{"spec.hard[pods] FieldValueInvalid"}},
		"less than nothing":     {limited(hard{"cpu": "-1"}), []string{"spec.hard[cpu] FieldValueInvalid"}},
		"scoped":                {limited(hard{"pods": "1", "cpu": "1"}, "NotBestEffort", "Terminating"), nil},
		"an unknown scope":      {limited(hard{"pods": "1"}, "Slow"), []string{"spec.scopes FieldValueInvalid"}},
		"opposites":             {limited(hard{"pods": "1"}, "BestEffort", "NotBestEffort"), []string{"spec.scopes FieldValueInvalid"}},
		"a scope beside":        {limited(hard{"cpu": "1"}, "BestEffort"), []string{"spec.scopes FieldValueInvalid"}},
		"a scope of Services":   {limited(hard{"services": "1"}, "Terminating"), []string{"spec.scopes FieldValueInvalid"}},
		"a class":               {selected(corev1.ScopedResourceSelectorRequirement{ScopeName: "PriorityClass", Operator: "In", Values: []string{"high"}}), nil},
		"no class":              {selected(corev1.ScopedResourceSelectorRequirement{ScopeName: "PriorityClass", Operator: "In"}), []string{"spec.scopeSelector.matchExpressions.values FieldValueRequired"}},
		"a class too many":      {selected(corev1.ScopedResourceSelectorRequirement{ScopeName: "PriorityClass", Operator: "Exists", Values: []string{"x"}}), []string{"spec.scopeSelector.matchExpressions.values FieldValueInvalid"}},
		"no such operator":      {selected(corev1.ScopedResourceSelectorRequirement{ScopeName: "PriorityClass", Operator: "Is"}), []string{"spec.scopeSelector.matchExpressions.operator FieldValueInvalid"}},
		"values where none are": {selected(corev1.ScopedResourceSelectorRequirement{ScopeName: "BestEffort", Operator: "In", Values: []string{"x"}}), []string{"spec.scopeSelector.matchExpressions.operator FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			c.quota.Status.Used = corev1.ResourceList{"pods": resource.MustParse("1")}
			if got := rules.Create(t, c.quota); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
			if c.quota.Status.Used != nil {
				t.Error("users set the status")
			}
		})
	}
	if got := rules.Update(t, limited(hard{"pods": "2"}, "BestEffort"), limited(hard{"pods": "1"}, "Terminating")); !slices.Equal(got, []string{"spec.scopes FieldValueInvalid"}) {
		t.Errorf("other scopes are refused for %q", got)
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	q := limited(nil)
	q.Status = corev1.ResourceQuotaStatus{
		Hard: corev1.ResourceList{"pods": resource.MustParse("5"), "requests.cpu": resource.MustParse("1"), "limits.cpu": resource.MustParse("2")},
		Used: corev1.ResourceList{"pods": resource.MustParse("3"), "requests.cpu": resource.MustParse("500m"), "limits.cpu": resource.MustParse("0")},
	}
	if row := rules.Row(t, q); row["Request"] != "pods: 3/5, requests.cpu: 500m/1" || row["Limit"] != "limits.cpu: 0/2" {
		t.Errorf("%v", row)
	}
}
