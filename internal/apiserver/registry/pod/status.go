package pod

import (
	"context"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"

	"portal/internal/apiserver/registry/rules"
	"portal/internal/restarts"
)

// validateStatus validates what a node reports.
func validateStatus(_ context.Context, pod, old *corev1.Pod) field.ErrorList {
	status, before := &pod.Status, &old.Status
	errs := rules.MetaUpdate(pod, old)
	errs = append(errs, validateAnnotationUpdate(pod, old)...)
	errs = append(errs, validateConditions(status.Conditions)...)
	errs = append(errs, validateNomination(pod, old)...)
	errs = append(errs, rules.NotNegative(atStatus.Child("observedGeneration"), status.ObservedGeneration)...)
	if status.QOSClass != before.QOSClass {
		errs = append(errs, field.Invalid(atStatus.Child("qosClass"), status.QOSClass, "follows from the spec"))
	}
	errs = append(errs, validateEnded(atStatus.Child("containerStatuses"), status.ContainerStatuses, before.ContainerStatuses, &old.Spec,
		old.Spec.Containers)...)
	errs = append(errs, validateEnded(atStatus.Child("initContainerStatuses"), status.InitContainerStatuses, before.InitContainerStatuses,
		&old.Spec, old.Spec.InitContainers)...)
	errs = append(errs, validateClaimStatuses(status.ResourceClaimStatuses, pod.Spec.ResourceClaims)...)
	errs = append(errs, validateUsers(atStatus.Child("containerStatuses"), status.ContainerStatuses)...)
	errs = append(errs, validateUsers(atStatus.Child("initContainerStatuses"), status.InitContainerStatuses)...)
	errs = append(errs, validatePodIPs(status, before)...)
	return append(errs, validateHostIPs(status, before)...)
}

func validateConditions(conditions []corev1.PodCondition) field.ErrorList {
	var errs field.ErrorList
	for i, condition := range conditions {
		at := atStatus.Child("conditions").Index(i)
		errs = append(errs, rules.NotNegative(at.Child("observedGeneration"), condition.ObservedGeneration)...)
		errs = append(errs, rules.QualifiedName(at.Child("Type"), string(condition.Type))...)
	}
	return errs
}

func validateNomination(pod, old *corev1.Pod) field.ErrorList {
	name := pod.Status.NominatedNodeName
	if name == "" || name == old.Status.NominatedNodeName {
		return nil
	}
	at := atStatus.Child("nominatedNodeName")
	errs := rules.NodeName(at, name)
	if old.Spec.NodeName != "" {
		errs = append(errs, field.Forbidden(at, "is for a Pod without a node"))
	}
	return errs
}

// validateEnded keeps a container that ended for good ended.
func validateEnded(at *field.Path, now, was []corev1.ContainerStatus, spec *corev1.PodSpec, list []corev1.Container) field.ErrorList {
	if restartsAll(spec) {
		return nil
	}
	var errs field.ErrorList
	for i, old := range was {
		if old.State.Terminated == nil {
			continue
		}
		j := slices.IndexFunc(now, func(s corev1.ContainerStatus) bool { return s.Name == old.Name && s.State.Terminated == nil })
		if j < 0 {
			continue
		}
		k := slices.IndexFunc(list, func(c corev1.Container) bool { return c.Name == old.Name })
		if k < 0 || !restarts.After(&list[k], spec, old.State.Terminated.ExitCode) {
			errs = append(errs, field.Forbidden(at.Index(i).Child("state"), "ended, and its restart policy says that it is not started again"))
		}
	}
	return errs
}

// restartsAll says whether the end of some container starts all of them again.
func restartsAll(spec *corev1.PodSpec) bool {
	for _, c := range containers(spec) {
		if restarts.MayRestartAll(c) {
			return true
		}
	}
	return false
}

func validateClaimStatuses(statuses []corev1.PodResourceClaimStatus, claims []corev1.PodResourceClaim) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, status := range statuses {
		at := atStatus.Child("resourceClaimStatuses").Index(i)
		if !slices.ContainsFunc(claims, func(c corev1.PodResourceClaim) bool { return c.Name == status.Name }) {
			errs = append(errs, field.Invalid(at.Child("name"), status.Name, "must be in spec.resourceClaims"))
		}
		if seen[status.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), status.Name))
		}
		seen[status.Name] = true
		if status.ResourceClaimName != nil {
			errs = append(errs, rules.DNSSubdomain(at.Child("resourceClaimName"), *status.ResourceClaimName)...)
		}
	}
	return errs
}

func validateUsers(list *field.Path, statuses []corev1.ContainerStatus) field.ErrorList {
	var errs field.ErrorList
	for i := range statuses {
		if statuses[i].User == nil || statuses[i].User.Linux == nil {
			continue
		}
		user, at := statuses[i].User.Linux, list.Index(i).Child("user", "linux")
		if user.UID < 0 || user.UID > math.MaxUint32 {
			errs = append(errs, field.Invalid(at.Child("uid"), user.UID, "must be a user's number"))
		}
		errs = append(errs, rules.Each(at.Child("gid"), user.GID, validation.IsValidGroupID(user.GID))...)
		for j, group := range user.SupplementalGroups {
			errs = append(errs, rules.Each(at.Child("supplementalGroups").Index(j), group, validation.IsValidGroupID(group))...)
		}
	}
	return errs
}

// each is what a function says of each element; never nil.
func each[E any](list []E, text func(E) string) []string {
	out := make([]string, len(list))
	for i := range list {
		out[i] = text(list[i])
	}
	return out
}

func validatePodIPs(status, before *corev1.PodStatus) field.ErrorList {
	ip := func(a corev1.PodIP) string { return a.IP }
	at, now := atStatus.Child("podIPs"), each(status.PodIPs, ip)
	errs := validateIPs(at, now, each(before.PodIPs, ip))
	switch {
	case (status.PodIP == "") != (len(now) == 0):
		errs = append(errs, field.Invalid(at, now, "must be there together with podIP"))
	case len(now) > 0 && status.PodIP != now[0]:
		errs = append(errs, field.Invalid(at.Index(0).Child("ip"), now[0], "must be podIP"))
	}
	return errs
}

func validateHostIPs(status, before *corev1.PodStatus) field.ErrorList {
	ip := func(a corev1.HostIP) string { return a.IP }
	at, now := atStatus.Child("hostIPs"), each(status.HostIPs, ip)
	errs := validateIPs(at, now, each(before.HostIPs, ip))
	if len(now) > 0 && status.HostIP != now[0] {
		errs = append(errs, field.Invalid(at.Index(0).Child("ip"), now[0], "must be hostIP"))
	}
	return errs
}

func validateIPs(at *field.Path, now, was []string) field.ErrorList {
	var errs field.ErrorList
	for i, ip := range now {
		errs = append(errs, rules.IP(at.Index(i), ip, was...)...)
	}
	return append(errs, rules.OnePerFamily(at, now, utilnet.IPFamilyOfString)...)
}
