package pod

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// validateScheduling validates what says where a Pod may run and when it counts as ready.
func validateScheduling(spec *corev1.PodSpec) field.ErrorList {
	errs := validateLabels(atSpec.Child("nodeSelector"), spec.NodeSelector)
	errs = append(errs, validateAffinity(spec.Affinity)...)
	errs = append(errs, validateTolerations(atSpec.Child("tolerations"), spec.Tolerations)...)
	errs = append(errs, validateSpread(spec.TopologySpreadConstraints)...)
	for i, gate := range spec.ReadinessGates {
		errs = append(errs, rules.QualifiedName(atSpec.Child("readinessGates").Index(i).Child("conditionType"), string(gate.ConditionType))...)
	}
	gates := map[string]bool{}
	for i, gate := range spec.SchedulingGates {
		at := atSpec.Child("schedulingGates").Index(i)
		errs = append(errs, rules.QualifiedName(at, gate.Name)...)
		if gates[gate.Name] {
			errs = append(errs, field.Duplicate(at, gate.Name))
		}
		gates[gate.Name] = true
	}
	return errs
}

func validateTolerations(list *field.Path, tolerations []corev1.Toleration) field.ErrorList {
	var errs field.ErrorList
	for i, t := range tolerations {
		at := list.Index(i)
		operator := at.Child("operator")
		if t.Key != "" {
			errs = append(errs, rules.LabelName(at.Child("key"), t.Key)...)
		} else if t.Operator != corev1.TolerationOpExists {
			errs = append(errs, field.Invalid(operator, t.Operator, "must be Exists where there is no key: that tolerates everything"))
		}
		if t.TolerationSeconds != nil && t.Effect != corev1.TaintEffectNoExecute {
			errs = append(errs, field.Invalid(at.Child("effect"), t.Effect, "must be NoExecute where there are tolerationSeconds"))
		}
		switch t.Operator {
		case corev1.TolerationOpEqual, "":
			if len(validation.IsValidLabelValue(t.Value)) > 0 {
				errs = append(errs, field.Invalid(operator, t.Value, "compares with value, which must be one that a label may have"))
			}
		case corev1.TolerationOpExists:
			if t.Value != "" {
				errs = append(errs, field.Invalid(operator, t.Value, "Exists needs no value"))
			}
		default:
			errs = append(errs, field.NotSupported(operator, t.Operator, []corev1.TolerationOperator{corev1.TolerationOpEqual, corev1.TolerationOpExists}))
		}
		if t.Effect != "" {
			errs = append(errs, rules.TaintEffect(at.Child("effect"), t.Effect)...)
		}
	}
	return errs
}

// placedTerm is a term of Pod affinity and where it is.
type placedTerm struct {
	at     *field.Path
	term   *corev1.PodAffinityTerm
	weight *int32
}

// termList are the terms of one kind of affinity.
type termList struct{ all []placedTerm }

// affinityTerms are the terms about other Pods: near and far, required and preferred.
func affinityTerms(affinity *corev1.Affinity) []termList {
	if affinity == nil {
		return nil
	}
	var out []termList
	collect := func(at *field.Path, must []corev1.PodAffinityTerm, should []corev1.WeightedPodAffinityTerm) {
		var list termList
		for i := range must {
			list.all = append(list.all, placedTerm{at.Child("requiredDuringSchedulingIgnoredDuringExecution").Index(i), &must[i], nil})
		}
		for i := range should {
			list.all = append(list.all, placedTerm{at.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i),
				&should[i].PodAffinityTerm, &should[i].Weight})
		}
		out = append(out, list)
	}
	at := atSpec.Child("affinity")
	if near := affinity.PodAffinity; near != nil {
		collect(at.Child("podAffinity"), near.RequiredDuringSchedulingIgnoredDuringExecution, near.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	if far := affinity.PodAntiAffinity; far != nil {
		collect(at.Child("podAntiAffinity"), far.RequiredDuringSchedulingIgnoredDuringExecution, far.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	return out
}

func validateAffinity(affinity *corev1.Affinity) field.ErrorList {
	if affinity == nil {
		return nil
	}
	var errs field.ErrorList
	if affinity.NodeAffinity != nil {
		errs = validateNodeAffinity(affinity.NodeAffinity)
	}
	for _, list := range affinityTerms(affinity) {
		for _, placed := range list.all {
			at := placed.at
			if placed.weight != nil {
				errs = append(errs, validateWeight(at, *placed.weight)...)
				at = at.Child("podAffinityTerm")
			}
			errs = append(errs, validateTerm(at, placed.term)...)
		}
	}
	return errs
}

func validateWeight(at *field.Path, weight int32) field.ErrorList {
	if weight < 1 || weight > 100 {
		return field.ErrorList{field.Invalid(at.Child("weight"), weight, "must be from 1 to 100")}
	}
	return nil
}

func validateTerm(at *field.Path, term *corev1.PodAffinityTerm) field.ErrorList {
	errs := validateSelector(at.Child("labelSelector"), term.LabelSelector)
	errs = append(errs, validateSelector(at.Child("namespaceSelector"), term.NamespaceSelector)...)
	for _, name := range term.Namespaces {
		errs = append(errs, validateNamespaceName(at.Child("namespace"), name)...)
	}
	errs = append(errs, validateLabelKeys(at, term.MatchLabelKeys, term.MismatchLabelKeys, term.LabelSelector)...)
	errs = append(errs, required(at.Child("topologyKey"), term.TopologyKey)...)
	return append(errs, rules.LabelName(at.Child("topologyKey"), term.TopologyKey)...)
}

// validateLabelKeys validates keys whose values come from the Pod's own labels. By now they are in the selector too, so
// that a key which is there twice was written by hand.
func validateLabelKeys(at *field.Path, match, mismatch []string, selector *metav1.LabelSelector) field.ErrorList {
	var errs field.ErrorList
	for name, keys := range map[string][]string{"matchLabelKeys": match, "mismatchLabelKeys": mismatch} {
		if selector == nil && len(keys) > 0 {
			errs = append(errs, field.Forbidden(at.Child(name), "needs labelSelector"))
			continue
		}
		for i, key := range keys {
			errs = append(errs, rules.LabelName(at.Child(name).Index(i), key)...)
		}
	}
	if selector != nil {
		place := map[string]int{}
		for i, key := range match {
			place[key] = i
		}
		seen := map[string]bool{}
		for key := range selector.MatchLabels {
			seen[key] = true
		}
		for _, expression := range selector.MatchExpressions {
			if i, listed := place[expression.Key]; listed && seen[expression.Key] {
				errs = append(errs, field.Invalid(at.Index(i), expression.Key, "must not be in labelSelector and in matchLabelKeys"))
			}
			seen[expression.Key] = true
		}
	}
	not := map[string]bool{}
	for _, key := range mismatch {
		not[key] = true
	}
	for i, key := range match {
		if not[key] {
			errs = append(errs, field.Invalid(at.Child("matchLabelKeys").Index(i), key, "must not be in mismatchLabelKeys too"))
		}
	}
	return errs
}

func validateNodeAffinity(affinity *corev1.NodeAffinity) field.ErrorList {
	at := atSpec.Child("affinity", "nodeAffinity")
	var errs field.ErrorList
	if must := affinity.RequiredDuringSchedulingIgnoredDuringExecution; must != nil {
		errs = append(errs, ValidateNodeSelector(at.Child("requiredDuringSchedulingIgnoredDuringExecution"), must)...)
	}
	for i := range affinity.PreferredDuringSchedulingIgnoredDuringExecution {
		should := &affinity.PreferredDuringSchedulingIgnoredDuringExecution[i]
		at := at.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i)
		errs = append(errs, validateWeight(at, should.Weight)...)
		// A wish that can't come true does no harm, so its values may be anything.
		errs = append(errs, validateNodeTerm(at.Child("preference"), &should.Preference, false)...)
	}
	return errs
}

func validateNodeTerm(at *field.Path, term *corev1.NodeSelectorTerm, strict bool) field.ErrorList {
	var errs field.ErrorList
	for i, wanted := range term.MatchExpressions {
		at := at.Child("matchExpressions").Index(i)
		values := at.Child("values")
		switch wanted.Operator {
		case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
			if len(wanted.Values) == 0 {
				errs = append(errs, field.Required(values, "at least one for In and NotIn"))
			}
		case corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist:
			if len(wanted.Values) > 0 {
				errs = append(errs, field.Forbidden(values, "none for Exists and DoesNotExist"))
			}
		case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
			if len(wanted.Values) != 1 {
				errs = append(errs, field.Required(values, "exactly one for Gt and Lt"))
			}
		default:
			errs = append(errs, field.Invalid(at.Child("operator"), wanted.Operator, "must be In, NotIn, Exists, DoesNotExist, Gt or Lt"))
		}
		errs = append(errs, rules.LabelName(at.Child("key"), wanted.Key)...)
		for j, value := range wanted.Values {
			if strict {
				errs = append(errs, rules.LabelValue(values.Index(j), value)...)
			}
		}
	}
	for i, wanted := range term.MatchFields {
		at := at.Child("matchFields").Index(i)
		if wanted.Operator != corev1.NodeSelectorOpIn && wanted.Operator != corev1.NodeSelectorOpNotIn {
			errs = append(errs, field.Invalid(at.Child("operator"), wanted.Operator, "must be In or NotIn"))
		} else if len(wanted.Values) != 1 {
			errs = append(errs, field.Required(at.Child("values"), "exactly one"))
		}
		if wanted.Key != metav1.ObjectNameField {
			errs = append(errs, field.Invalid(at.Child("key"), wanted.Key, "must be metadata.name"))
			continue
		}
		for j, value := range wanted.Values {
			errs = append(errs, rules.NodeName(at.Child("values").Index(j), value)...)
		}
	}
	return errs
}

func validateSpread(constraints []corev1.TopologySpreadConstraint) field.ErrorList {
	var errs field.ErrorList
	for i := range constraints {
		c, at := &constraints[i], atSpec.Child("topologySpreadConstraints").Index(i)
		if c.MaxSkew <= 0 {
			errs = append(errs, field.Invalid(at.Child("maxSkew"), c.MaxSkew, "must be more than 0"))
		}
		errs = append(errs, required(at.Child("topologyKey"), c.TopologyKey)...)
		errs = append(errs, rules.OneOf(at.Child("whenUnsatisfiable"), c.WhenUnsatisfiable, corev1.DoNotSchedule, corev1.ScheduleAnyway)...)
		for j := i + 1; j < len(constraints); j++ {
			if constraints[j].TopologyKey == c.TopologyKey && constraints[j].WhenUnsatisfiable == c.WhenUnsatisfiable {
				errs = append(errs, field.Duplicate(at.Child("{topologyKey, whenUnsatisfiable}"), c.TopologyKey))
				break
			}
		}
		if c.MinDomains != nil {
			if *c.MinDomains <= 0 {
				errs = append(errs, field.Invalid(at.Child("minDomains"), *c.MinDomains, "must be more than 0"))
			}
			if c.WhenUnsatisfiable != corev1.DoNotSchedule {
				errs = append(errs, field.Invalid(at.Child("minDomains"), *c.MinDomains, "needs whenUnsatisfiable DoNotSchedule"))
			}
		}
		for name, policy := range map[string]*corev1.NodeInclusionPolicy{"nodeAffinityPolicy": c.NodeAffinityPolicy,
			"nodeTaintsPolicy": c.NodeTaintsPolicy} {
			if policy != nil {
				errs = append(errs, rules.OneOf(at.Child(name), *policy, corev1.NodeInclusionPolicyHonor, corev1.NodeInclusionPolicyIgnore)...)
			}
		}
		errs = append(errs, validateLabelKeys(at, c.MatchLabelKeys, nil, c.LabelSelector)...)
		errs = append(errs, validateSelector(at.Child("labelSelector"), c.LabelSelector)...)
	}
	return errs
}
