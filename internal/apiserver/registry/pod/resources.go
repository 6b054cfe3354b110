package pod

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	resourcehelper "k8s.io/component-helpers/resource"

	"portal/internal/apiserver/registry/rules"
)

// qosClass says who goes first when a node runs short.
func qosClass(spec *corev1.PodSpec) corev1.PodQOSClass {
	if managed(spec.Resources) {
		return qosOf(spec.Resources)
	}
	var class corev1.PodQOSClass
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			one := qosOf(&list[i].Resources)
			if class != "" && one != class {
				return corev1.PodQOSBurstable
			}
			class = one
		}
	}
	orElse(&class, corev1.PodQOSBestEffort)
	return class
}

// managed says whether resources are given for the Pod as a whole.
func managed(r *corev1.ResourceRequirements) bool {
	if r == nil {
		return false
	}
	for _, list := range []corev1.ResourceList{r.Requests, r.Limits} {
		for name := range list {
			if resourcehelper.IsSupportedPodLevelResource(name) {
				return true
			}
		}
	}
	return false
}

func qosOf(r *corev1.ResourceRequirements) corev1.PodQOSClass {
	shape := func(name corev1.ResourceName) corev1.PodQOSClass {
		request, limit := r.Requests[name], r.Limits[name]
		switch {
		case !request.Equal(limit):
			return corev1.PodQOSBurstable
		case request.IsZero():
			return corev1.PodQOSBestEffort
		}
		return corev1.PodQOSGuaranteed
	}
	if cpu := shape(corev1.ResourceCPU); cpu == shape(corev1.ResourceMemory) {
		return cpu
	}
	return corev1.PodQOSBurstable
}

// defaultPodResources completes what was said for the Pod as a whole from what its containers say.
func defaultPodResources(spec *corev1.PodSpec) {
	r := spec.Resources
	if r == nil || len(r.Requests)+len(r.Limits) == 0 {
		return
	}
	sum := &corev1.Pod{Spec: corev1.PodSpec{Containers: spec.Containers, InitContainers: spec.InitContainers}}
	requested := resourcehelper.AggregateContainerRequests(sum, resourcehelper.PodResourcesOptions{})
	limited := resourcehelper.AggregateContainerLimits(sum, resourcehelper.PodResourcesOptions{})
	fill := func(list *corev1.ResourceList, from corev1.ResourceList, apply func(corev1.ResourceName) bool) {
		for name, quantity := range from {
			if _, there := (*list)[name]; there || !resourcehelper.IsSupportedPodLevelResource(name) || !apply(name) {
				continue
			}
			if *list == nil {
				*list = corev1.ResourceList{}
			}
			(*list)[name] = quantity.DeepCopy()
		}
	}
	fill(&r.Limits, limited, func(name corev1.ResourceName) bool {
		_, asked := r.Requests[name]
		return hugePages(name) && !asked
	})
	fill(&r.Requests, requested, overcommittable)
	fill(&r.Requests, r.Limits, func(corev1.ResourceName) bool { return true })
	// A limit for the whole follows only where every container has one, and is never below the request.
	for name, request := range r.Requests {
		total, limited := limited[name]
		if _, there := r.Limits[name]; there || !limited || !resourcehelper.IsSupportedPodLevelResource(name) || !everyContainerLimits(spec, name) {
			continue
		}
		if request.Cmp(total) > 0 {
			total = request
		}
		if r.Limits == nil {
			r.Limits = corev1.ResourceList{}
		}
		r.Limits[name] = total.DeepCopy()
	}
}

func everyContainerLimits(spec *corev1.PodSpec, name corev1.ResourceName) bool {
	for _, c := range containers(spec) {
		if _, limited := c.Resources.Limits[name]; !limited {
			return false
		}
	}
	return true
}

func hugePages(name corev1.ResourceName) bool {
	return strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix)
}

// overcommittable are the resources of which more may be promised than there is.
func overcommittable(name corev1.ResourceName) bool {
	return rules.NativeResource(name) && !hugePages(name)
}

// standard are the names without a domain that mean something somewhere, if not in a container.
var standard = map[corev1.ResourceName]bool{
	corev1.ResourceCPU: true, corev1.ResourceMemory: true, corev1.ResourceEphemeralStorage: true,
	corev1.ResourceRequestsCPU: true, corev1.ResourceRequestsMemory: true, corev1.ResourceRequestsEphemeralStorage: true,
	corev1.ResourceLimitsCPU: true, corev1.ResourceLimitsMemory: true, corev1.ResourceLimitsEphemeralStorage: true,
	corev1.ResourcePods: true, corev1.ResourceQuotas: true, corev1.ResourceServices: true,
	corev1.ResourceReplicationControllers: true, corev1.ResourceSecrets: true, corev1.ResourceConfigMaps: true,
	corev1.ResourcePersistentVolumeClaims: true, corev1.ResourceStorage: true, corev1.ResourceRequestsStorage: true,
	corev1.ResourceServicesNodePorts: true, corev1.ResourceServicesLoadBalancers: true,
}

func validateResourceName(at *field.Path, name corev1.ResourceName) field.ErrorList {
	errs := rules.QualifiedName(at, string(name))
	if len(errs) == 0 && !strings.Contains(string(name), "/") && !standard[name] && !hugePages(name) &&
		!strings.HasPrefix(string(name), corev1.ResourceRequestsHugePagesPrefix) {
		errs = append(errs, field.Invalid(at, name, "must be a resource that Kubernetes knows, or have a domain: example.com/"+string(name)))
	}
	return errs
}

func validateContainerResourceName(at *field.Path, name corev1.ResourceName) field.ErrorList {
	errs := validateResourceName(at, name)
	switch {
	case strings.Contains(string(name), "/"):
		if !rules.NativeResource(name) && !rules.ExtendedResource(name) {
			errs = append(errs, field.Invalid(at, name, "must not begin with \"requests.\" and must stay a qualified name behind it"))
		}
	case name != corev1.ResourceCPU && name != corev1.ResourceMemory && name != corev1.ResourceEphemeralStorage && !hugePages(name):
		errs = append(errs, field.Invalid(at, name, "must be cpu, memory, ephemeral-storage or hugepages-<size>, or have a domain"))
	}
	return errs
}

func validatePodResourceName(at *field.Path, name corev1.ResourceName) field.ErrorList {
	errs := validateResourceName(at, name)
	if len(errs) == 0 && !resourcehelper.IsSupportedPodLevelResource(name) {
		errs = append(errs, field.NotSupported(at, name, slices.Sorted(maps.Keys(resourcehelper.SupportedPodLevelResources()))))
	}
	return errs
}

func validateQuantity(at *field.Path, name corev1.ResourceName, quantity resource.Quantity) field.ErrorList {
	errs := rules.Quantity(at, name, quantity)
	if hugePages(name) && !wholePages(name, quantity) {
		errs = append(errs, field.Invalid(at, quantity.String(), "must be a multiple of the page size that the name says"))
	}
	return errs
}

func wholePages(name corev1.ResourceName, quantity resource.Quantity) bool {
	page, err := resource.ParseQuantity(strings.TrimPrefix(string(name), corev1.ResourceHugePagesPrefix))
	if err != nil || page.Sign() <= 0 || page.MilliValue()%1000 != 0 {
		return false
	}
	return quantity.Value()%page.Value() == 0
}

type nameRule func(*field.Path, corev1.ResourceName) field.ErrorList

func validateResources(at *field.Path, r *corev1.ResourceRequirements, name nameRule, claims map[string]bool) field.ErrorList {
	var errs field.ErrorList
	compute, huge := false, false
	each := func(at *field.Path, list corev1.ResourceList) {
		for _, n := range slices.Sorted(maps.Keys(list)) {
			errs = append(errs, name(at.Key(string(n)), n)...)
			errs = append(errs, validateQuantity(at.Key(string(n)), n, list[n])...)
			compute = compute || n == corev1.ResourceCPU || n == corev1.ResourceMemory
			huge = huge || hugePages(n)
		}
	}
	limits, requests := at.Child("limits"), at.Child("requests")
	each(limits, r.Limits)
	each(requests, r.Requests)
	for _, n := range slices.Sorted(maps.Keys(r.Requests)) {
		request := r.Requests[n]
		limit, limited := r.Limits[n]
		switch {
		case !limited && !overcommittable(n):
			errs = append(errs, field.Required(limits, fmt.Sprintf("%s cannot be promised twice, so the limit is the request", n)))
		case limited && !overcommittable(n) && request.Cmp(limit) != 0:
			errs = append(errs, field.Invalid(requests, request.String(), fmt.Sprintf("must equal the limit of %s, %s", n, limit.String())))
		case limited && request.Cmp(limit) > 0:
			errs = append(errs, field.Invalid(requests, request.String(), fmt.Sprintf("must not be above the limit of %s, %s", n, limit.String())))
		}
	}
	if huge && !compute {
		errs = append(errs, field.Forbidden(at, "huge pages need cpu or memory beside them"))
	}
	return append(errs, validateClaimsUsed(at.Child("claims"), r.Claims, claims)...)
}

// validateClaimsUsed wants each claim to be one of the Pod's, and no part of one to be named twice.
func validateClaimsUsed(at *field.Path, used []corev1.ResourceClaim, claims map[string]bool) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, claim := range used {
		at := at.Index(i)
		if claim.Name == "" {
			errs = append(errs, field.Required(at, ""))
			continue
		}
		key := claim.Name
		if !seen[claim.Name] {
			if claim.Request != "" {
				errs = append(errs, rules.DNSLabel(at.Child("request"), claim.Request)...)
				key += "/" + claim.Request
			}
			for other := range seen {
				if other == key || claim.Request == "" && strings.HasPrefix(other, claim.Name+"/") {
					errs = append(errs, field.Duplicate(at, key))
				}
			}
			seen[key] = true
		} else {
			errs = append(errs, field.Duplicate(at, claim.Name))
		}
		if !claims[claim.Name] {
			errs = append(errs, field.NotFound(at, claim.Name))
		}
	}
	return errs
}

// validatePodResources validates what is said for the Pod as a whole against what its containers say.
func validatePodResources(spec *corev1.PodSpec, claims map[string]bool) field.ErrorList {
	r := spec.Resources
	if r == nil {
		return nil
	}
	at := atSpec.Child("resources")
	var errs field.ErrorList
	if r.Claims != nil {
		errs = append(errs, field.Forbidden(at.Child("claims"), "belong to containers"))
	}
	errs = append(errs, validateResources(at, r, validatePodResourceName, claims)...)
	sum := &corev1.Pod{Spec: *spec}
	for name, total := range resourcehelper.AggregateContainerRequests(sum, resourcehelper.PodResourcesOptions{}) {
		if request, asked := r.Requests[name]; asked && total.Cmp(request) > 0 {
			errs = append(errs, field.Invalid(at.Child("requests").Key(string(name)), request.String(),
				"must not be below what the containers ask for together, "+total.String()))
		}
	}
	for name, total := range resourcehelper.AggregateContainerLimits(sum, resourcehelper.PodResourcesOptions{}) {
		if limit, limited := r.Limits[name]; limited && hugePages(name) && total.Cmp(limit) > 0 {
			errs = append(errs, field.Invalid(at.Child("limits").Key(string(name)), limit.String(),
				"must not be below the containers' limits together, "+total.String()))
		}
	}
	for i := range spec.Containers {
		for name, one := range spec.Containers[i].Resources.Limits {
			if limit, limited := r.Limits[name]; limited && one.Cmp(limit) > 0 {
				errs = append(errs, field.Invalid(at.Child("containers").Index(i).Key(string(name)).Child("limits"), one.String(),
					"must not be above the Pod's limit, "+limit.String()))
			}
		}
	}
	return errs
}
