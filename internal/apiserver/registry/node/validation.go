package node

import (
	"context"
	"encoding/json"
	"maps"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"

	"portal/internal/apiserver/registry/rules"
)

var (
	atMeta   = field.NewPath("metadata")
	atSpec   = field.NewPath("spec")
	atStatus = field.NewPath("status")
)

func validateCreate(_ context.Context, node *corev1.Node) field.ErrorList {
	return append(rules.Finalizers(node), validateNode(node)...)
}

// validateNode validates a node by itself.
func validateNode(node *corev1.Node) field.ErrorList {
	errs := validateCommon(node)
	if swap := node.Status.NodeInfo.Swap; swap != nil && swap.Capacity != nil && *swap.Capacity <= 0 {
		errs = append(errs, field.Invalid(atMeta.Child("nodeSwapStatus", "capacity"), *swap.Capacity, "must be more than 0"))
	}
	at := atSpec.Child("podCIDRs")
	for i, cidr := range node.Spec.PodCIDRs {
		errs = append(errs, rules.CIDR(at.Index(i), cidr)...)
	}
	return append(errs, rules.OnePerFamily(at, node.Spec.PodCIDRs, utilnet.IPFamilyOfCIDRString)...)
}

// validateUpdate validates the node and then the change, and both look at some things: the API reports those twice.
func validateUpdate(_ context.Context, node, old *corev1.Node) field.ErrorList {
	errs := rules.Meta(node, false, apivalidation.NameIsDNSSubdomain)
	errs = append(errs, validateNode(node)...)
	errs = append(errs, rules.MetaUpdate(node, old)...)
	return append(errs, validateChange(node, old)...)
}

// validateStatus validates what a node reports.
func validateStatus(_ context.Context, node, old *corev1.Node) field.ErrorList {
	return append(rules.MetaUpdate(node, old), validateChange(node, old)...)
}

// validateCommon is what is looked at both in a node and in a change of one.
func validateCommon(node *corev1.Node) field.ErrorList {
	errs := validateAnnotations(node.Annotations)
	errs = append(errs, validateTaints(atMeta.Child("taints"), node.Spec.Taints)...)
	for where, list := range map[string]corev1.ResourceList{"capacity": node.Status.Capacity, "allocatable": node.Status.Allocatable} {
		for _, name := range slices.Sorted(maps.Keys(list)) {
			errs = append(errs, rules.Quantity(atStatus.Child(where, string(name)), name, list[name])...)
		}
	}
	return append(errs, validateFeatures(node.Status.DeclaredFeatures)...)
}

func validateChange(node, old *corev1.Node) field.ErrorList {
	errs := validateCommon(node)
	seen := map[corev1.NodeAddress]bool{}
	for i, address := range node.Status.Addresses {
		if seen[address] {
			errs = append(errs, field.Duplicate(atStatus.Child("addresses").Index(i), address))
		}
		seen[address] = true
	}
	errs = append(errs, validateSameCIDRs(node.Spec.PodCIDRs, old.Spec.PodCIDRs)...)
	if id := old.Spec.ProviderID; id != "" && node.Spec.ProviderID != id {
		errs = append(errs, field.Invalid(atSpec.Child("providerID"), node.Spec.ProviderID, "cannot be changed once it is set"))
	}
	if node.Spec.DoNotUseExternalID != old.Spec.DoNotUseExternalID {
		errs = append(errs, field.Forbidden(atSpec.Child("externalID"), "cannot be changed"))
	}
	return errs
}

// validateSameCIDRs lets addresses be given to a node once: its Pods have them.
func validateSameCIDRs(now, was []string) field.ErrorList {
	at := atSpec.Child("podCIDRs")
	const why = "cannot be changed once they are set: make the node again"
	if len(was) == 0 {
		return nil
	}
	if len(now) != len(was) {
		return field.ErrorList{field.Forbidden(at, why)}
	}
	var errs field.ErrorList
	for i := range was {
		if now[i] != was[i] {
			errs = append(errs, field.Forbidden(at, why))
		}
	}
	return errs
}

func validateTaints(list *field.Path, taints []corev1.Taint) field.ErrorList {
	type identity struct {
		key    string
		effect corev1.TaintEffect
	}
	seen := map[identity]bool{}
	var errs field.ErrorList
	for i, taint := range taints {
		at := list.Index(i)
		errs = append(errs, rules.LabelName(at.Child("key"), taint.Key)...)
		if complaints := validation.IsValidLabelValue(taint.Value); len(complaints) > 0 {
			errs = append(errs, field.Invalid(at.Child("value"), taint.Value, complaints[0]))
		}
		if taint.Effect == "" {
			errs = append(errs, field.Required(at.Child("effect"), ""))
		} else {
			errs = append(errs, rules.TaintEffect(at.Child("effect"), taint.Effect)...)
		}
		id := identity{taint.Key, taint.Effect}
		if seen[id] {
			errs = append(errs, field.Duplicate(at, taint.Key+":"+string(taint.Effect)))
		}
		seen[id] = true
	}
	return errs
}

// Annotations that once held what are fields now, or never became one.
const (
	taintsAnnotation = "scheduler.alpha.kubernetes.io/taints"
	avoidAnnotation  = corev1.PreferAvoidPodsAnnotationKey
)

func validateAnnotations(annotations map[string]string) field.ErrorList {
	at := atMeta.Child("annotations")
	var errs field.ErrorList
	if text := annotations[taintsAnnotation]; text != "" {
		var taints []corev1.Taint
		if err := json.Unmarshal([]byte(text), &taints); err != nil {
			errs = append(errs, field.Invalid(at, taintsAnnotation, "must be a list of taints in JSON"))
		}
		errs = append(errs, validateTaints(at.Child(taintsAnnotation), taints)...)
	}
	if text := annotations[avoidAnnotation]; text != "" {
		var avoid corev1.AvoidPods
		if err := json.Unmarshal([]byte(text), &avoid); err != nil {
			errs = append(errs, field.Invalid(at.Child("AvoidPods"), avoidAnnotation, "must be a list of Pods in JSON"))
		}
		for i, entry := range avoid.PreferAvoidPods {
			at := at.Child(avoidAnnotation).Index(i).Child("PodSignature")
			owner := entry.PodSignature.PodController
			switch {
			case owner == nil:
				errs = append(errs, field.Required(at, ""))
			case owner.Controller == nil || !*owner.Controller:
				errs = append(errs, field.Invalid(at.Child("PodController", "Controller"), false, "must be a controller"))
			}
		}
	}
	return errs
}

var featureName = regexp.MustCompile(`^[A-Z][a-zA-Z0-9]*(/[a-zA-Z][a-zA-Z0-9]*)*$`)

// validateFeatures wants a sorted list of names, each once.
func validateFeatures(features []string) field.ErrorList {
	var errs field.ErrorList
	list := atStatus.Child("declaredFeatures")
	for i, name := range features {
		if len(name) > validation.DNS1123SubdomainMaxLength || !featureName.MatchString(name) {
			errs = append(errs, field.Invalid(list.Index(i), name, "must be like MyFeature or MyFeature/part"))
		}
		if i == 0 {
			continue
		}
		switch before := features[i-1]; {
		case before == name:
			errs = append(errs, field.Duplicate(list.Index(i), name))
		case before > name:
			errs = append(errs, field.Invalid(list.Index(i), name, "must be in alphabetical order"))
		}
	}
	return errs
}

func warnings(_ context.Context, node, _ *corev1.Node) []string {
	var out []string
	if node.Spec.DoNotUseExternalID != "" {
		out = append(out, "spec.externalID: is deprecated and means nothing")
	}
	for i, cidr := range node.Spec.PodCIDRs {
		out = append(out, validation.GetWarningsForCIDR(atSpec.Child("podCIDRs").Index(i), cidr)...)
	}
	return out
}
