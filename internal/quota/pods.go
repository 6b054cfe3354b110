package quota

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/utils/clock"
)

var (
	podCount     = generic.ObjectCountQuotaResourceNameFor(corev1.Resource("pods"))
	podResources = []corev1.ResourceName{
		podCount, corev1.ResourcePods,
		corev1.ResourceCPU, corev1.ResourceRequestsCPU, corev1.ResourceLimitsCPU,
		corev1.ResourceMemory, corev1.ResourceRequestsMemory, corev1.ResourceLimitsMemory,
		corev1.ResourceEphemeralStorage, corev1.ResourceRequestsEphemeralStorage, corev1.ResourceLimitsEphemeralStorage,
	}
	// required are what every container must say if a quota limits it. It is so for historical reasons, and for no other.
	required = []corev1.ResourceName{
		corev1.ResourceCPU, corev1.ResourceRequestsCPU, corev1.ResourceLimitsCPU,
		corev1.ResourceMemory, corev1.ResourceRequestsMemory, corev1.ResourceLimitsMemory,
	}
	// both are the resources that quotas limit by requests and by limits.
	both = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}
)

const (
	requestsOf = corev1.DefaultResourceRequestsPrefix
	limitsOf   = "limits."
)

// podEvaluator counts Pods and what they request.
type podEvaluator struct {
	list  generic.ListFuncByNamespace
	clock clock.PassiveClock
}

var _ quota.Evaluator = &podEvaluator{}

func (e *podEvaluator) GroupResource() schema.GroupResource { return corev1.Resource("pods") }

// Handles what can change what a Pod uses, or which scopes it is in.
func (e *podEvaluator) Handles(a admission.Attributes) bool {
	switch a.GetSubresource() {
	case "":
		if a.GetOperation() == admission.Update {
			pod, ok := a.GetObject().(*corev1.Pod)
			old, oldOK := a.GetOldObject().(*corev1.Pod)
			return ok && oldOK && terminating(pod) != terminating(old)
		}
		return a.GetOperation() == admission.Create
	case "resize":
		return a.GetOperation() == admission.Update
	}
	return false
}

// Constraints wants every container to request and limit what a quota limits, if it is CPU or memory and the Pod as a whole
// does not say.
func (e *podEvaluator) Constraints(limited []corev1.ResourceName, item runtime.Object) error {
	pod, err := podOf(item)
	if err != nil || resourcehelper.IsPodLevelResourcesSet(pod) {
		return err
	}
	missing := map[corev1.ResourceName][]string{}
	for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		said := compute(c.Resources.Requests, c.Resources.Limits)
		for _, name := range quota.Intersection(limited, required) {
			if _, ok := said[name]; !ok {
				missing[name] = append(missing[name], c.Name)
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		slices.Sort(missing[name])
		parts = append(parts, fmt.Sprintf("%s for: %s", name, strings.Join(slices.Compact(missing[name]), ",")))
	}
	return fmt.Errorf("must specify %s", strings.Join(parts, "; "))
}

func (e *podEvaluator) Matches(q *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(q, item, e.MatchingResources, inScope)
}

func (e *podEvaluator) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	out := quota.Intersection(input, podResources)
	for _, name := range input {
		if hugePages(strings.TrimPrefix(string(name), requestsOf)) || extended(name) {
			out = append(out, name)
		}
	}
	return out
}

func (e *podEvaluator) MatchingScopes(item runtime.Object, scopes []corev1.ScopedResourceSelectorRequirement) (out []corev1.ScopedResourceSelectorRequirement, err error) {
	for _, scope := range scopes {
		matches, err := inScope(scope, item)
		if err != nil {
			return nil, err
		}
		if matches {
			out = append(out, scope)
		}
	}
	return out, nil
}

func (e *podEvaluator) UncoveredQuotaScopes(limited, covered []corev1.ScopedResourceSelectorRequirement) (out []corev1.ScopedResourceSelectorRequirement, err error) {
	for _, scope := range limited {
		if !slices.ContainsFunc(covered, func(c corev1.ScopedResourceSelectorRequirement) bool { return c.ScopeName == scope.ScopeName }) {
			out = append(out, scope)
		}
	}
	return out, nil
}

// Usage is one Pod, and what it requests as long as it can run.
func (e *podEvaluator) Usage(item runtime.Object) (corev1.ResourceList, error) {
	pod, err := podOf(item)
	if err != nil {
		return nil, err
	}
	out := corev1.ResourceList{podCount: number(1)}
	if over(pod, e.clock.Now()) {
		return out, nil
	}
	opts := resourcehelper.PodResourcesOptions{UseStatusResources: true}
	maps.Copy(out, compute(resourcehelper.PodRequests(pod, opts), resourcehelper.PodLimits(pod, opts)))
	out[corev1.ResourcePods] = number(1)
	return out, nil
}

func (e *podEvaluator) UsageStats(options quota.UsageStatsOptions) (quota.UsageStats, error) {
	return generic.CalculateUsageStats(options, e.list, inScope, e.Usage)
}

func podOf(item runtime.Object) (*corev1.Pod, error) {
	pod, ok := item.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("%T is no Pod", item)
	}
	return pod, nil
}

// compute puts requests and limits under the names that quotas have for them.
func compute(requests, limits corev1.ResourceList) corev1.ResourceList {
	out := corev1.ResourceList{}
	for _, name := range both {
		if request, ok := requests[name]; ok {
			out[name], out[requestsOf+name] = request, request
		}
		if limit, ok := limits[name]; ok {
			out[limitsOf+name] = limit
		}
	}
	for name, request := range requests {
		switch {
		case hugePages(string(name)):
			out[name], out[requestsOf+name] = request, request
		case extended(requestsOf + name):
			out[requestsOf+name] = request
		}
	}
	return out
}

func hugePages(name string) bool { return strings.HasPrefix(name, corev1.ResourceHugePagesPrefix) }

// extended says whether a quota's name is that of what a device or an administrator adds to nodes.
func extended(name corev1.ResourceName) bool {
	rest, ok := strings.CutPrefix(string(name), requestsOf)
	return ok && strings.Contains(rest, "/") && !strings.Contains(rest, corev1.ResourceDefaultNamespacePrefix)
}

// over says that a Pod has ended, or should have.
func over(pod *corev1.Pod, now time.Time) bool {
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return true
	}
	if pod.DeletionTimestamp == nil || pod.DeletionGracePeriodSeconds == nil {
		return false
	}
	return now.Sub(pod.DeletionTimestamp.Time).Seconds() > float64(*pod.DeletionGracePeriodSeconds) // it may be more than a Duration holds
}

// inScope says whether a Pod is in a scope of a quota.
func inScope(scope corev1.ScopedResourceSelectorRequirement, item runtime.Object) (bool, error) {
	pod, err := podOf(item)
	if err != nil {
		return false, err
	}
	switch scope.ScopeName {
	case corev1.ResourceQuotaScopeTerminating:
		return terminating(pod), nil
	case corev1.ResourceQuotaScopeNotTerminating:
		return !terminating(pod), nil
	case corev1.ResourceQuotaScopeBestEffort:
		return bestEffort(pod), nil
	case corev1.ResourceQuotaScopeNotBestEffort:
		return !bestEffort(pod), nil
	case corev1.ResourceQuotaScopePriorityClass:
		return ofClass(pod.Spec.PriorityClassName, scope), nil
	case corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return reachesOut(pod.Spec.Affinity), nil
	}
	return false, nil
}

// terminating says that a Pod ends by itself.
func terminating(pod *corev1.Pod) bool {
	return pod.Spec.ActiveDeadlineSeconds != nil && *pod.Spec.ActiveDeadlineSeconds >= 0
}

// bestEffort says that a Pod is promised no CPU and no memory.
func bestEffort(pod *corev1.Pod) bool {
	all := []corev1.ResourceRequirements{}
	if pod.Spec.Resources != nil {
		all = append(all, *pod.Spec.Resources)
	}
	for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		all = append(all, c.Resources)
	}
	for _, r := range all {
		for _, list := range []corev1.ResourceList{r.Requests, r.Limits} {
			if list.Cpu().Sign() > 0 || list.Memory().Sign() > 0 {
				return false
			}
		}
	}
	return true
}

func ofClass(class string, scope corev1.ScopedResourceSelectorRequirement) bool {
	switch scope.Operator {
	case corev1.ScopeSelectorOpExists:
		return class != ""
	case corev1.ScopeSelectorOpDoesNotExist:
		return class == ""
	case corev1.ScopeSelectorOpIn:
		return class != "" && slices.Contains(scope.Values, class)
	case corev1.ScopeSelectorOpNotIn:
		return class == "" || !slices.Contains(scope.Values, class)
	}
	return false
}

// reachesOut says that an affinity is to Pods of other namespaces.
func reachesOut(a *corev1.Affinity) bool {
	if a == nil {
		return false
	}
	var terms []corev1.PodAffinityTerm
	add := func(hard []corev1.PodAffinityTerm, soft []corev1.WeightedPodAffinityTerm) {
		terms = append(terms, hard...)
		for _, w := range soft {
			terms = append(terms, w.PodAffinityTerm)
		}
	}
	if a.PodAffinity != nil {
		add(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution, a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	if a.PodAntiAffinity != nil {
		add(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution, a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	return slices.ContainsFunc(terms, func(t corev1.PodAffinityTerm) bool { return len(t.Namespaces) > 0 || t.NamespaceSelector != nil })
}
