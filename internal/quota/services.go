package quota

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
)

var (
	serviceCount     = generic.ObjectCountQuotaResourceNameFor(corev1.Resource("services"))
	serviceResources = []corev1.ResourceName{
		serviceCount, corev1.ResourceServices, corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers,
	}
)

// serviceEvaluator counts Services, their node ports and load balancers.
type serviceEvaluator struct {
	unscoped
	list generic.ListFuncByNamespace
}

var _ quota.Evaluator = &serviceEvaluator{}

func (e *serviceEvaluator) GroupResource() schema.GroupResource { return corev1.Resource("services") }

// Handles updates too: they may change the type.
func (e *serviceEvaluator) Handles(a admission.Attributes) bool {
	return a.GetSubresource() == "" && (a.GetOperation() == admission.Create || a.GetOperation() == admission.Update)
}

func (e *serviceEvaluator) Matches(q *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(q, item, e.MatchingResources, generic.MatchesNoScopeFunc)
}

func (e *serviceEvaluator) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	return quota.Intersection(input, serviceResources)
}

// Usage counts node ports by what the Service asks for: when it is created, they are not allocated yet.
func (e *serviceEvaluator) Usage(item runtime.Object) (corev1.ResourceList, error) {
	svc, ok := item.(*corev1.Service)
	if !ok {
		return nil, fmt.Errorf("%T is no Service", item)
	}
	ports, balancers := 0, 0
	switch svc.Spec.Type {
	case corev1.ServiceTypeNodePort:
		ports = len(svc.Spec.Ports)
	case corev1.ServiceTypeLoadBalancer:
		balancers, ports = 1, len(svc.Spec.Ports)
		if allocate := svc.Spec.AllocateLoadBalancerNodePorts; allocate != nil && !*allocate {
			ports = 0
			for _, p := range svc.Spec.Ports {
				if p.NodePort != 0 {
					ports++
				}
			}
		}
	}
	return corev1.ResourceList{
		serviceCount: number(1), corev1.ResourceServices: number(1),
		corev1.ResourceServicesNodePorts: number(ports), corev1.ResourceServicesLoadBalancers: number(balancers),
	}, nil
}

func (e *serviceEvaluator) UsageStats(options quota.UsageStatsOptions) (quota.UsageStats, error) {
	return generic.CalculateUsageStats(options, e.list, generic.MatchesNoScopeFunc, e.Usage)
}
