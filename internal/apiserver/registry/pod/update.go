package pod

import (
	"context"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
	"portal/internal/externalpod"
)

var atAnnotations = field.NewPath("metadata", "annotations")

// validateUpdate validates what may become of a Pod that runs: new images, less time, more tolerations, fewer gates.
func validateUpdate(_ context.Context, pod, old *corev1.Pod) field.ErrorList {
	errs := rules.MetaUpdate(pod, old)
	errs = append(errs, rules.Meta(pod, true, apivalidation.NameIsDNSSubdomain)...)
	errs = append(errs, validateAnnotations(pod.Annotations, &pod.Spec)...)
	errs = append(errs, validateSpec(&pod.Spec, &pod.ObjectMeta)...)
	errs = append(errs, validateAnnotationUpdate(pod, old)...)
	errs = append(errs, validateClasses(&pod.Spec)...)

	more, same := validateSameContainers(&pod.Spec, &old.Spec)
	errs = append(errs, more...)
	if !same {
		return errs
	}
	more, sound := validateDeadline(pod.Spec.ActiveDeadlineSeconds, old.Spec.ActiveDeadlineSeconds)
	errs = append(errs, more...)
	if !sound {
		return errs
	}
	errs = append(errs, validateMoreTolerations(pod.Spec.Tolerations, old.Spec.Tolerations)...)
	errs = append(errs, validateFewerGates(pod.Spec.SchedulingGates, old.Spec.SchedulingGates)...)
	return append(errs, validateUnchanged(&pod.Spec, &old.Spec)...)
}

// validateClasses validates what a create looks up instead.
func validateClasses(spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	if spec.PriorityClassName != "" {
		errs = append(errs, rules.DNSSubdomain(atSpec.Child("priorityClassName"), spec.PriorityClassName)...)
	}
	if spec.PreemptionPolicy != nil {
		errs = append(errs, rules.RequiredOneOf(atSpec.Child("preemptionPolicy"), *spec.PreemptionPolicy, corev1.PreemptLowerPriority,
			corev1.PreemptNever)...)
	}
	if spec.RuntimeClassName != nil {
		errs = append(errs, rules.DNSSubdomain(atSpec.Child("runtimeClassName"), *spec.RuntimeClassName)...)
	}
	if spec.Overhead != nil {
		errs = append(errs, validateResources(atSpec.Child("overhead"), &corev1.ResourceRequirements{Limits: spec.Overhead},
			validateContainerResourceName, nil)...)
	}
	return errs
}

func validateSameContainers(spec, old *corev1.PodSpec) (errs field.ErrorList, same bool) {
	for _, list := range []struct {
		name     string
		now, was []corev1.Container
	}{{"containers", spec.Containers, old.Containers}, {"initContainers", spec.InitContainers, old.InitContainers}} {
		at := atSpec.Child(list.name)
		if len(list.now) != len(list.was) {
			return append(errs, field.Forbidden(at, "containers can be neither added nor removed: make another Pod")), false
		}
		for i := range list.now {
			image := list.now[i].Image
			if image == "" {
				errs = append(errs, field.Required(at.Index(i).Child("image"), ""))
			}
			if strings.TrimSpace(image) != image {
				errs = append(errs, field.Invalid(at.Index(i).Child("image"), image, "must not begin or end with white space"))
			}
		}
	}
	return errs, true
}

// validateDeadline lets a deadline be set, and brought nearer.
func validateDeadline(now, was *int64) (errs field.ErrorList, sound bool) {
	at := atSpec.Child("activeDeadlineSeconds")
	switch {
	case now == nil && was == nil:
	case now == nil:
		return field.ErrorList{field.Invalid(at, nil, "cannot be taken back")}, true
	case *now < 0 || *now > math.MaxInt32:
		return field.ErrorList{field.Invalid(at, *now, validation.InclusiveRangeError(0, math.MaxInt32))}, false
	case was != nil && *was < *now:
		return field.ErrorList{field.Invalid(at, *now, "cannot be later than it was")}, false
	}
	return nil, true
}

func validateMoreTolerations(now, was []corev1.Toleration) field.ErrorList {
	at := atSpec.Child("tolerations")
	for _, old := range was {
		if !slices.ContainsFunc(now, func(t corev1.Toleration) bool {
			t.TolerationSeconds = old.TolerationSeconds
			return t == old
		}) {
			return field.ErrorList{field.Forbidden(at, "may be added, and change their tolerationSeconds; no more")}
		}
	}
	return validateTolerations(at, now)
}

func validateFewerGates(now, was []corev1.PodSchedulingGate) field.ErrorList {
	last := map[string]int{}
	for i, gate := range now {
		last[gate.Name] = i
	}
	for _, gate := range was {
		delete(last, gate.Name)
	}
	var errs field.ErrorList
	for _, name := range slices.Sorted(maps.Keys(last)) {
		errs = append(errs, field.Forbidden(atSpec.Child("schedulingGates").Index(last[name]).Child("name"), "gates can only be removed"))
	}
	return errs
}

// validateUnchanged compares what is left when everything that may change is taken away.
func validateUnchanged(spec, old *corev1.PodSpec) field.ErrorList {
	if equality.Semantic.DeepEqual(*spec, *old) {
		return nil
	}
	var errs field.ErrorList
	rest := spec.DeepCopy()
	for i := range rest.Containers {
		rest.Containers[i].Image = old.Containers[i].Image
	}
	for i := range rest.InitContainers {
		rest.InitContainers[i].Image = old.InitContainers[i].Image
	}
	rest.ActiveDeadlineSeconds = old.ActiveDeadlineSeconds
	rest.SchedulingGates = old.SchedulingGates
	rest.Tolerations = old.Tolerations
	if period := old.TerminationGracePeriodSeconds; period != nil && *period < 0 && rest.TerminationGracePeriodSeconds != nil && *rest.TerminationGracePeriodSeconds == 1 {
		rest.TerminationGracePeriodSeconds = period
	}
	if len(old.SchedulingGates) > 0 {
		errs = validateGated(rest, old)
	}
	if !equality.Semantic.DeepEqual(*rest, *old) {
		errs = append(errs, field.Forbidden(atSpec, "of a Pod only image of containers and initContainers, activeDeadlineSeconds, "+
			"tolerations (to add some) and schedulingGates (to remove some) can be changed: make another Pod"))
	}
	return errs
}

// validateGated lets a Pod that waits at a gate be narrowed to fewer nodes. What it validated, it takes away from rest.
func validateGated(rest, old *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	for key, value := range old.NodeSelector {
		if now, there := rest.NodeSelector[key]; !there || now != value {
			errs = append(errs, field.Invalid(atSpec.Child("nodeSelector"), rest.NodeSelector, "can only be added to"))
			break
		}
	}
	rest.NodeSelector = old.NodeSelector

	now, was := nodeAffinity(rest), nodeAffinity(old)
	if equality.Semantic.DeepEqual(now, was) {
		return errs
	}
	errs = append(errs, validateNarrower(now, was)...)
	switch {
	case rest.Affinity == nil:
		rest.Affinity = &corev1.Affinity{NodeAffinity: was}
	case old.Affinity == nil && rest.Affinity.PodAffinity == nil && rest.Affinity.PodAntiAffinity == nil:
		rest.Affinity = nil
	default:
		rest.Affinity.NodeAffinity = was
	}
	return errs
}

func nodeAffinity(spec *corev1.PodSpec) *corev1.NodeAffinity {
	if spec.Affinity == nil {
		return nil
	}
	return spec.Affinity.NodeAffinity
}

func validateNarrower(now, was *corev1.NodeAffinity) field.ErrorList {
	terms := func(a *corev1.NodeAffinity) []corev1.NodeSelectorTerm {
		if a == nil || a.RequiredDuringSchedulingIgnoredDuringExecution == nil {
			return nil
		}
		return a.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	before, after := terms(was), terms(now)
	if len(before) == 0 {
		return nil
	}
	at := atSpec.Child("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
	if len(before) != len(after) {
		return field.ErrorList{field.Invalid(at, len(after), "terms can be neither added nor removed")}
	}
	extends := func(now, was []corev1.NodeSelectorRequirement) bool {
		return len(now) >= len(was) && equality.Semantic.DeepEqual(now[:len(was)], was)
	}
	var errs field.ErrorList
	for i := range before {
		empty := len(before[i].MatchExpressions)+len(before[i].MatchFields) == 0
		filled := len(after[i].MatchExpressions)+len(after[i].MatchFields) > 0
		if empty && filled || !extends(after[i].MatchExpressions, before[i].MatchExpressions) || !extends(after[i].MatchFields, before[i].MatchFields) {
			errs = append(errs, field.Invalid(at.Index(i), i, "requirements can only be added, behind those that are there"))
		}
	}
	return errs
}

// appArmorPrefix is what annotations begin with that give a container its AppArmor profile.
const appArmorPrefix = corev1.DeprecatedAppArmorBetaContainerAnnotationKeyPrefix

// validateAnnotations validates those that mean something: most are older than the fields that replaced them.
func validateAnnotations(annotations map[string]string, spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	if value, mirror := annotations[corev1.MirrorPodAnnotationKey]; mirror && spec.NodeName == "" {
		errs = append(errs, field.Invalid(atAnnotations.Key(corev1.MirrorPodAnnotationKey), value, "needs spec.nodeName"))
	}
	if text := annotations[corev1.TolerationsAnnotationKey]; text != "" {
		var tolerations []corev1.Toleration
		if err := json.Unmarshal([]byte(text), &tolerations); err != nil {
			errs = append(errs, field.Invalid(atAnnotations, corev1.TolerationsAnnotationKey, "must be a list of tolerations in JSON"))
		} else {
			errs = append(errs, validateTolerations(atAnnotations.Child(corev1.TolerationsAnnotationKey), tolerations)...)
		}
	}
	if cost, set := annotations[corev1.PodDeletionCost]; set && !deletionCost(cost) {
		errs = append(errs, field.Invalid(atAnnotations.Key(corev1.PodDeletionCost), cost, "must be a number of 32 bits, without a + or zeros before it"))
	}
	if text, set := annotations[externalpod.AddressesAnnotation]; set && spec.RuntimeClassName != nil && *spec.RuntimeClassName == externalpod.RuntimeClass {
		if _, err := externalpod.ParseAddresses(text); err != nil {
			errs = append(errs, field.Invalid(atAnnotations.Key(externalpod.AddressesAnnotation), text, err.Error()))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		value := annotations[key]
		switch {
		case key == corev1.SeccompPodAnnotationKey || strings.HasPrefix(key, corev1.SeccompContainerAnnotationKeyPrefix):
			errs = append(errs, validateSeccompName(atAnnotations.Child(key), value)...)
		case strings.HasPrefix(key, appArmorPrefix):
			errs = append(errs, validateAppArmorName(atAnnotations.Key(key), strings.TrimPrefix(key, appArmorPrefix), value, spec)...)
		}
	}
	return errs
}

// deletionCost reads a number in the one way that everybody writes it.
func deletionCost(text string) bool {
	if text != "0" && (strings.HasPrefix(text, "+") || strings.HasPrefix(text, "0")) {
		return false
	}
	_, err := strconv.ParseInt(text, 10, 32)
	return err == nil
}

func validateSeccompName(at *field.Path, name string) field.ErrorList {
	if said, ok := readAnnotation(name, true); ok {
		return validateLocalPath(at, said.local)
	}
	return field.ErrorList{field.Invalid(at, name, "must be runtime/default, unconfined or localhost/<path>")}
}

func validateAppArmorName(at *field.Path, container, name string, spec *corev1.PodSpec) field.ErrorList {
	var errs field.ErrorList
	there := false
	for _, c := range containers(spec) {
		there = there || c.Name == container
	}
	if !there {
		errs = append(errs, field.Invalid(at, container, "must name a container of the Pod"))
	}
	if _, ok := readAnnotation(name, false); !ok && name != "" {
		errs = append(errs, field.Invalid(at, name, "must be runtime/default, unconfined or localhost/<profile>"))
	}
	return errs
}

// validateAnnotationUpdate keeps annotations that say what a Pod is.
func validateAnnotationUpdate(pod, old *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	judge := func(key string) {
		if key == corev1.MirrorPodAnnotationKey || strings.HasPrefix(key, appArmorPrefix) {
			errs = append(errs, field.Forbidden(atAnnotations.Key(key), "cannot be added, changed or removed"))
		}
	}
	for key, was := range old.Annotations {
		if now, there := pod.Annotations[key]; !there || now != was {
			judge(key)
		}
	}
	for key := range pod.Annotations {
		if _, there := old.Annotations[key]; !there {
			judge(key)
		}
	}
	return append(errs, validateAnnotations(pod.Annotations, &pod.Spec)...)
}
