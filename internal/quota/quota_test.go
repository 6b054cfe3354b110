package quota

import (
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	clocktesting "k8s.io/utils/clock/testing"
)

var now = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

func list(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

func pod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a"}, {Name: "b"}}}}
	for _, f := range change {
		f(p)
	}
	return p
}

func resources(requests, limits corev1.ResourceList) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: requests, Limits: limits}
	}
}

// spell is a list as text: quantities that are equal may differ in how they are kept.
func spell(l corev1.ResourceList) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(l)) {
		q := l[name]
		out = append(out, string(name)+"="+q.String())
	}
	return strings.Join(out, " ")
}

func evaluatorOf(t *testing.T, name string, objects ...runtime.Object) quota.Evaluator {
	t.Helper()
	lister := func(schema.GroupVersionResource) generic.ListFuncByNamespace {
		return func(string) ([]runtime.Object, error) { return objects, nil }
	}
	for _, e := range Evaluators(lister, clocktesting.NewFakePassiveClock(now)) {
		if e.GroupResource().Resource == name {
			return e
		}
	}
	t.Fatalf("no evaluator of %s", name)
	return nil
}

func TestUsage(t *testing.T) {
	service := func(kind corev1.ServiceType, allocate *bool, nodePorts ...int32) *corev1.Service {
		s := &corev1.Service{Spec: corev1.ServiceSpec{Type: kind, AllocateLoadBalancerNodePorts: allocate}}
		for _, p := range nodePorts {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{NodePort: p})
		}
		return s
	}
	for name, c := range map[string]struct {
		of   string
		obj  runtime.Object
		want corev1.ResourceList
	}{
		"a Pod that asks for nothing": {"pods", pod(), list("count/pods", "1", "pods", "1")},
		"a Pod that asks": {"pods", pod(resources(list("cpu", "500m", "example.com/gpu", "2", "hugepages-2Mi", "4Mi"), list("cpu", "1", "memory", "1Gi", "example.com/gpu", "2"))),
			list("count/pods", "1", "pods", "1", "cpu", "500m", "requests.cpu", "500m", "limits.cpu", "1", "limits.memory", "1Gi",
				"requests.example.com/gpu", "2", "hugepages-2Mi", "4Mi", "requests.hugepages-2Mi", "4Mi")},
		"a Pod that has ended": {"pods", pod(resources(list("cpu", "1"), nil), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }), list("count/pods", "1")},
		"a Pod that should have ended": {"pods", pod(func(p *corev1.Pod) {
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.NewTime(now.Add(-31*time.Second))), new(int64(30))
		}), list("count/pods", "1")},
		"a Pod that is ending": {"pods", pod(func(p *corev1.Pod) {
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.NewTime(now.Add(-29*time.Second))), new(int64(30))
		}), list("count/pods", "1", "pods", "1")},
		"a Pod that may take its time": {"pods", pod(func(p *corev1.Pod) {
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = new(metav1.NewTime(now.Add(-time.Hour))), new(int64(math.MaxInt64))
		}), list("count/pods", "1", "pods", "1")},
		"a cluster IP": {"services", service(corev1.ServiceTypeClusterIP, nil, 0), list("count/services", "1", "services", "1", "services.nodeports", "0", "services.loadbalancers", "0")},
		"node ports":   {"services", service(corev1.ServiceTypeNodePort, nil, 0, 0), list("count/services", "1", "services", "1", "services.nodeports", "2", "services.loadbalancers", "0")},
		"a balancer":   {"services", service(corev1.ServiceTypeLoadBalancer, nil, 0), list("count/services", "1", "services", "1", "services.nodeports", "1", "services.loadbalancers", "1")},
		"a balancer without node ports": {"services", service(corev1.ServiceTypeLoadBalancer, new(false), 0, 30000),
			list("count/services", "1", "services", "1", "services.nodeports", "1", "services.loadbalancers", "1")},
		"a Secret": {"secrets", &corev1.Secret{}, list("count/secrets", "1", "secrets", "1")},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := evaluatorOf(t, c.of).Usage(c.obj)
			if err != nil || spell(got) != spell(c.want) {
				t.Errorf("uses %s (%v), want %s", spell(got), err, spell(c.want))
			}
		})
	}
}

func TestScopes(t *testing.T) {
	ends := func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64(60)) }
	class := func(p *corev1.Pod) { p.Spec.PriorityClassName = "high" }
	far := func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{
			{PodAffinityTerm: corev1.PodAffinityTerm{Namespaces: []string{"other"}}}}}}
	}
	exists := corev1.ScopeSelectorOpExists
	for _, c := range []struct {
		scope  corev1.ResourceQuotaScope
		op     corev1.ScopeSelectorOperator
		values []string
		pod    *corev1.Pod
		want   bool
	}{
		{"Terminating", exists, nil, pod(ends), true}, {"Terminating", exists, nil, pod(), false},
		{"NotTerminating", exists, nil, pod(ends), false}, {"NotTerminating", exists, nil, pod(), true},
		{"BestEffort", exists, nil, pod(), true}, {"BestEffort", exists, nil, pod(resources(list("cpu", "1"), nil)), false},
		{"BestEffort", exists, nil, pod(resources(list("example.com/gpu", "1"), nil)), true},
		{"NotBestEffort", exists, nil, pod(resources(nil, list("memory", "1"))), true}, {"NotBestEffort", exists, nil, pod(), false},
		{"PriorityClass", exists, nil, pod(class), true}, {"PriorityClass", exists, nil, pod(), false},
		{"PriorityClass", corev1.ScopeSelectorOpIn, []string{"high"}, pod(class), true}, {"PriorityClass", corev1.ScopeSelectorOpIn, []string{"low"}, pod(class), false},
		{"PriorityClass", corev1.ScopeSelectorOpNotIn, []string{"low"}, pod(class), true}, {"PriorityClass", corev1.ScopeSelectorOpDoesNotExist, nil, pod(), true},
		{"CrossNamespacePodAffinity", exists, nil, pod(far), true}, {"CrossNamespacePodAffinity", exists, nil, pod(), false},
	} {
		quota := &corev1.ResourceQuota{Status: corev1.ResourceQuotaStatus{Hard: list("pods", "1")}}
		quota.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{{ScopeName: c.scope, Operator: c.op, Values: c.values}}}
		if got, err := evaluatorOf(t, "pods").Matches(quota, c.pod); err != nil || got != c.want {
			t.Errorf("%s %s %v: %v (%v)", c.scope, c.op, c.values, got, err)
		}
	}
}

// A quota on CPU or memory has every container say how much it wants; others do not.
func TestContainersMustSay(t *testing.T) {
	e := evaluatorOf(t, "pods")
	half := pod(resources(list("cpu", "1"), nil))
	if err := e.Constraints([]corev1.ResourceName{"requests.cpu", "pods", "requests.example.com/gpu"}, half); err == nil || err.Error() != "must specify requests.cpu for: b" {
		t.Errorf("%v", err)
	}
	if err := e.Constraints([]corev1.ResourceName{"pods", "requests.ephemeral-storage"}, pod()); err != nil {
		t.Error(err)
	}
	whole := pod(func(p *corev1.Pod) { p.Spec.Resources = &corev1.ResourceRequirements{Requests: list("cpu", "1")} })
	if err := e.Constraints([]corev1.ResourceName{"requests.cpu"}, whole); err != nil {
		t.Errorf("the Pod says it for its containers: %v", err)
	}
}

func TestSums(t *testing.T) {
	e := evaluatorOf(t, "pods", pod(resources(list("cpu", "500m"), nil)), pod(resources(list("cpu", "250m"), nil)), pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }))
	got, err := e.UsageStats(quota.UsageStatsOptions{Namespace: "ns", Resources: []corev1.ResourceName{"pods", "requests.cpu", "count/pods"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := spell(quota.Mask(got.Used, []corev1.ResourceName{"pods", "requests.cpu", "count/pods"})); got != "count/pods=3 pods=2 requests.cpu=750m" {
		t.Errorf("%s", got)
	}
}
