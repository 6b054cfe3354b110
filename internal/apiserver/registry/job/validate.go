package job

import (
	"context"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
	"portal/internal/jobs"
)

const (
	// maxIndexed bounds parallelism and failed indexes of Jobs with indexes: their sets are in the status.
	maxIndexed = 100_000
	// manyCompletions is from where on limits for each index need stricter bounds, which are fewerAtOnce.
	manyCompletions = 100_000
	fewerAtOnce     = 10_000

	maxRules      = 20
	maxConditions = 20
	maxExitCodes  = 255
	maxManagedBy  = 63
	maxIndexText  = 64 << 10
)

func validateCreate(_ context.Context, job *batchv1.Job) field.ErrorList {
	errs := rules.Finalizers(job)
	errs = append(errs, validateGenerated(job)...)
	errs = append(errs, validateWhole(&job.Spec, nil)...)
	return append(errs, validateHostNames(job)...)
}

func validateUpdate(_ context.Context, job, old *batchv1.Job) field.ErrorList {
	at, now, before := workload.At, &job.Spec, &old.Spec
	errs := rules.MetaUpdate(job, old)
	errs = append(errs, validateWhole(now, before)...)
	errs = append(errs, validateCompletions(now, before)...)
	errs = append(errs, workload.Immutable(at.Child("selector"), now.Selector, before.Selector)...)
	errs = append(errs, validateTemplateUpdate(now, old)...)
	errs = append(errs, workload.Immutable(at.Child("completionMode"), now.CompletionMode, before.CompletionMode)...)
	errs = append(errs, workload.Immutable(at.Child("podFailurePolicy"), now.PodFailurePolicy, before.PodFailurePolicy)...)
	errs = append(errs, workload.Immutable(at.Child("backoffLimitPerIndex"), now.BackoffLimitPerIndex, before.BackoffLimitPerIndex)...)
	errs = append(errs, workload.Immutable(at.Child("managedBy"), now.ManagedBy, before.ManagedBy)...)
	errs = append(errs, workload.Immutable(at.Child("successPolicy"), now.SuccessPolicy, before.SuccessPolicy)...)
	return append(errs, validateHostNames(job)...)
}

// validateGenerated wants labels and selector as they are generated, unless the user makes their own.
func validateGenerated(job *batchv1.Job) field.ErrorList {
	if or(job.Spec.ManualSelector, false) || job.Spec.Selector == nil {
		return nil
	}
	var errs field.ErrorList
	at := workload.At.Child("template", "metadata", "labels")
	own := ownLabels(job)
	for _, key := range []string{legacyControllerUID, legacyJobName, batchv1.ControllerUidLabel, batchv1.JobNameLabel} {
		if value, set := job.Spec.Template.Labels[key]; !set {
			errs = append(errs, field.Required(at.Key(key), "must be "+own[key]))
		} else if value != own[key] {
			errs = append(errs, field.Invalid(at.Key(key), job.Spec.Template.Labels, "must be "+own[key]))
		}
	}
	if selector, err := metav1.LabelSelectorAsSelector(job.Spec.Selector); err == nil && !selector.Matches(labels.Set(own)) {
		errs = append(errs, field.Invalid(workload.At.Child("selector"), job.Spec.Selector, "must be left out, or manualSelector be true"))
	}
	return errs
}

// validateHostNames wants a name of which the host name of every index can be made.
func validateHostNames(job *batchv1.Job) field.ErrorList {
	if !jobs.Indexed(&job.Spec) || or(job.Spec.Completions, 0) <= 0 {
		return nil
	}
	longest := fmt.Sprintf("%s-%d", job.Name, *job.Spec.Completions-1)
	if len(validation.IsDNS1123Label(longest)) == 0 {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata", "name"), job.Name, "Pods need host names such as "+longest+", which is no DNS label")}
}

func validateWhole(spec, old *batchv1.JobSpec) field.ErrorList {
	at := workload.At
	errs := ValidateSpec(at, spec)
	switch {
	case spec.Selector == nil:
		errs = append(errs, field.Required(at.Child("selector"), ""))
	case old == nil || workload.Changed(spec.Selector, old.Selector):
		errs = append(errs, metavalidation.ValidateLabelSelector(spec.Selector, metavalidation.LabelSelectorValidationOptions{}, at.Child("selector"))...)
	}
	if selector, err := metav1.LabelSelectorAsSelector(spec.Selector); err == nil && !selector.Matches(labels.Set(spec.Template.Labels)) {
		errs = append(errs, field.Invalid(at.Child("template", "metadata", "labels"), spec.Template.Labels, "must be selected by spec.selector"))
	}
	return errs
}

// ValidateSpec judges a specification but for its selector, which a CronJob's has none of.
func ValidateSpec(at *field.Path, spec *batchv1.JobSpec) field.ErrorList {
	errs := workload.NotNegative(at, workload.P("parallelism", spec.Parallelism), workload.P("completions", spec.Completions),
		workload.P("activeDeadlineSeconds", spec.ActiveDeadlineSeconds), workload.P("backoffLimit", spec.BackoffLimit),
		workload.P("ttlSecondsAfterFinished", spec.TTLSecondsAfterFinished), workload.P("backoffLimitPerIndex", spec.BackoffLimitPerIndex),
		workload.P("maxFailedIndexes", spec.MaxFailedIndexes))
	if spec.MaxFailedIndexes != nil && spec.BackoffLimitPerIndex == nil {
		errs = append(errs, field.Required(at.Child("backoffLimitPerIndex"), "where maxFailedIndexes is set"))
	}
	if name := spec.ManagedBy; name != nil {
		errs = append(errs, validation.IsDomainPrefixedPath(at.Child("managedBy"), *name)...)
		if len(*name) > maxManagedBy {
			errs = append(errs, field.TooLong(at.Child("managedBy"), "", maxManagedBy))
		}
	}
	if spec.CompletionMode != nil {
		errs = append(errs, rules.OneOf(at.Child("completionMode"), *spec.CompletionMode, batchv1.NonIndexedCompletion, batchv1.IndexedCompletion)...)
	}
	errs = append(errs, validateIndexed(at, spec)...)
	if spec.PodFailurePolicy != nil {
		errs = append(errs, validateFailurePolicy(at.Child("podFailurePolicy", "rules"), spec)...)
	}
	if policy := spec.PodReplacementPolicy; policy != nil {
		allowed := []batchv1.PodReplacementPolicy{batchv1.Failed}
		if spec.PodFailurePolicy == nil {
			allowed = append(allowed, batchv1.TerminatingOrFailed)
		}
		errs = append(errs, rules.OneOf(at.Child("podReplacementPolicy"), *policy, allowed...)...)
	}
	return append(errs, validateTemplate(at.Child("template"), spec)...)
}

// validateIndexed judges what has to do with indexes.
func validateIndexed(at *field.Path, spec *batchv1.JobSpec) field.ErrorList {
	var errs field.ErrorList
	atMost := func(name string, value *int32, limit int32, when string) {
		if value != nil && *value > limit {
			errs = append(errs, field.Invalid(at.Child(name), *value, fmt.Sprintf("must not be more than %d%s", limit, when)))
		}
	}
	if !jobs.Indexed(spec) {
		const why = "needs the completionMode Indexed"
		if spec.CompletionMode == nil || *spec.CompletionMode == batchv1.NonIndexedCompletion {
			if spec.BackoffLimitPerIndex != nil {
				errs = append(errs, field.Invalid(at.Child("backoffLimitPerIndex"), *spec.BackoffLimitPerIndex, why))
			}
			if spec.MaxFailedIndexes != nil {
				errs = append(errs, field.Invalid(at.Child("maxFailedIndexes"), *spec.MaxFailedIndexes, why))
			}
		}
		if spec.SuccessPolicy != nil {
			errs = append(errs, field.Invalid(at.Child("successPolicy"), *spec.SuccessPolicy, why))
		}
		return errs
	}
	if spec.Completions == nil {
		errs = append(errs, field.Required(at.Child("completions"), "where completionMode is Indexed"))
	} else {
		atMost("maxFailedIndexes", spec.MaxFailedIndexes, *spec.Completions, ", the completions")
	}
	atMost("parallelism", spec.Parallelism, maxIndexed, " where completionMode is Indexed")
	atMost("maxFailedIndexes", spec.MaxFailedIndexes, maxIndexed, "")
	if or(spec.Completions, 0) > manyCompletions && spec.BackoffLimitPerIndex != nil {
		const when = " with that many completions and backoffLimitPerIndex"
		if spec.MaxFailedIndexes == nil {
			errs = append(errs, field.Required(at.Child("maxFailedIndexes"), "with that many completions"))
		}
		atMost("parallelism", spec.Parallelism, fewerAtOnce, when)
		atMost("maxFailedIndexes", spec.MaxFailedIndexes, fewerAtOnce, when)
	}
	if spec.SuccessPolicy != nil {
		errs = append(errs, validateSuccessPolicy(at.Child("successPolicy", "rules"), spec)...)
	}
	return errs
}

func validateTemplate(at *field.Path, spec *batchv1.JobSpec) field.ErrorList {
	errs := pod.ValidateTemplate(at, &spec.Template)
	policy := at.Child("spec", "restartPolicy")
	switch set := spec.Template.Spec.RestartPolicy; set {
	case corev1.RestartPolicyAlways, "": // what is left out becomes Always
		errs = append(errs, field.Required(policy, "OnFailure or Never"))
	case corev1.RestartPolicyOnFailure:
		if spec.PodFailurePolicy != nil {
			errs = append(errs, field.Invalid(policy, set, "must be Never where podFailurePolicy is set"))
		}
	case corev1.RestartPolicyNever:
	default:
		errs = append(errs, field.NotSupported(policy, set, []corev1.RestartPolicy{corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}))
	}
	return errs
}

var actions = []batchv1.PodFailurePolicyAction{
	batchv1.PodFailurePolicyActionCount, batchv1.PodFailurePolicyActionFailIndex, batchv1.PodFailurePolicyActionFailJob,
	batchv1.PodFailurePolicyActionIgnore,
}

func validateFailurePolicy(at *field.Path, spec *batchv1.JobSpec) field.ErrorList {
	var errs field.ErrorList
	policy := spec.PodFailurePolicy.Rules
	if len(policy) > maxRules {
		errs = append(errs, field.TooMany(at, len(policy), maxRules))
	}
	var containers []string
	for _, list := range [][]corev1.Container{spec.Template.Spec.InitContainers, spec.Template.Spec.Containers} {
		for i := range list {
			containers = append(containers, list[i].Name)
		}
	}
	for i := range policy {
		rule, at := &policy[i], at.Index(i)
		if rule.Action == batchv1.PodFailurePolicyActionFailIndex && spec.BackoffLimitPerIndex == nil {
			errs = append(errs, field.Invalid(at.Child("action"), rule.Action, "needs spec.backoffLimitPerIndex"))
		}
		errs = append(errs, rules.RequiredOneOf(at.Child("action"), rule.Action, actions...)...)
		if rule.OnExitCodes != nil {
			errs = append(errs, validateExitCodes(at.Child("onExitCodes"), rule.OnExitCodes, containers)...)
		}
		errs = append(errs, validatePatterns(at.Child("onPodConditions"), rule.OnPodConditions)...)
		if (rule.OnExitCodes != nil) == (len(rule.OnPodConditions) > 0) {
			errs = append(errs, field.Invalid(at, field.OmitValueType{}, "must have onExitCodes or onPodConditions, and not both"))
		}
	}
	return errs
}

func validatePatterns(at *field.Path, patterns []batchv1.PodFailurePolicyOnPodConditionsPattern) field.ErrorList {
	var errs field.ErrorList
	if len(patterns) > maxConditions {
		errs = append(errs, field.TooMany(at, len(patterns), maxConditions))
	}
	for i, pattern := range patterns {
		errs = append(errs, rules.QualifiedName(at.Index(i).Child("type"), string(pattern.Type))...)
		errs = append(errs, rules.RequiredOneOf(at.Index(i).Child("status"), pattern.Status, corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown)...)
	}
	return errs
}

func validateExitCodes(at *field.Path, codes *batchv1.PodFailurePolicyOnExitCodesRequirement, containers []string) field.ErrorList {
	errs := rules.RequiredOneOf(at.Child("operator"), codes.Operator, batchv1.PodFailurePolicyOnExitCodesOpIn, batchv1.PodFailurePolicyOnExitCodesOpNotIn)
	if name := codes.ContainerName; name != nil && !slices.Contains(containers, *name) {
		errs = append(errs, field.Invalid(at.Child("containerName"), *name, "must be a container of the template"))
	}
	values := at.Child("values")
	switch {
	case len(codes.Values) == 0:
		errs = append(errs, field.Invalid(values, codes.Values, "must have at least one"))
	case len(codes.Values) > maxExitCodes:
		errs = append(errs, field.TooMany(values, len(codes.Values), maxExitCodes))
	}
	seen := map[int32]bool{}
	for i, value := range codes.Values {
		if value == 0 && codes.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn {
			errs = append(errs, field.Invalid(values.Index(i), value, "must not be 0 with the operator In: that is no failure"))
		}
		if seen[value] {
			errs = append(errs, field.Duplicate(values.Index(i), value))
		}
		seen[value] = true
	}
	if !slices.IsSorted(codes.Values) {
		errs = append(errs, field.Invalid(values, codes.Values, "must be in order"))
	}
	return errs
}

func validateSuccessPolicy(at *field.Path, spec *batchv1.JobSpec) field.ErrorList {
	policy := spec.SuccessPolicy.Rules
	switch {
	case len(policy) == 0:
		return field.ErrorList{field.Required(at, "at least one")}
	case spec.Completions == nil:
		return nil // told elsewhere
	}
	var errs field.ErrorList
	if len(policy) > maxRules {
		errs = append(errs, field.TooMany(at, len(policy), maxRules))
	}
	for i, rule := range policy {
		at := at.Index(i)
		if rule.SucceededCount == nil && rule.SucceededIndexes == nil {
			errs = append(errs, field.Required(at, "succeededCount or succeededIndexes"))
		}
		limit := int(*spec.Completions)
		if text := rule.SucceededIndexes; text != nil {
			if len(*text) > maxIndexText {
				errs = append(errs, field.TooLong(at.Child("succeededIndexes"), "", maxIndexText))
			}
			set, err := jobs.ParseIndexes(*text, limit)
			if err != nil {
				errs = append(errs, field.Invalid(at.Child("succeededIndexes"), *text, err.Error()))
			}
			limit = min(limit, set.Len())
		}
		if count := rule.SucceededCount; count != nil {
			errs = append(errs, rules.NotNegative(at.Child("succeededCount"), int64(*count))...)
			if int(*count) > limit {
				errs = append(errs, field.Invalid(at.Child("succeededCount"), *count, fmt.Sprintf("must not be more than %d, which is all there are", limit)))
			}
		}
	}
	return errs
}

// validateCompletions lets the number of indexes change, with the parallelism.
func validateCompletions(now, before *batchv1.JobSpec) field.ErrorList {
	at := workload.At.Child("completions")
	if !jobs.Indexed(now) {
		return workload.Immutable(at, now.Completions, before.Completions)
	}
	if !workload.Changed(now.Completions, before.Completions) || now.Completions == nil || *now.Completions == or(now.Parallelism, 0) {
		return nil
	}
	return field.ErrorList{field.Invalid(at, *now.Completions, "can only be changed together with spec.parallelism, to the same number")}
}

// validateTemplateUpdate lets the template of a Job change as long as nothing was made from it: where its Pods may run, and what
// they take.
func validateTemplateUpdate(now *batchv1.JobSpec, old *batchv1.Job) field.ErrorList {
	at := workload.At.Child("template")
	waits := old.Status.StartTime == nil || jobs.Condition(&old.Status, batchv1.JobSuspended) != nil
	if !or(old.Spec.Suspend, false) || !waits || old.Status.Active > 0 {
		return workload.Immutable(at, now.Template, old.Spec.Template)
	}
	before := old.Spec.Template.DeepCopy()
	from, to := &now.Template.Spec, &before.Spec
	switch {
	case from.Affinity == nil && to.Affinity != nil:
		if to.Affinity.NodeAffinity = nil; *to.Affinity == (corev1.Affinity{}) {
			to.Affinity = nil
		}
	case from.Affinity != nil && to.Affinity == nil:
		to.Affinity = &corev1.Affinity{NodeAffinity: from.Affinity.NodeAffinity}
	case from.Affinity != nil:
		to.Affinity.NodeAffinity = from.Affinity.NodeAffinity
	}
	to.NodeSelector, to.Tolerations, to.SchedulingGates = from.NodeSelector, from.Tolerations, from.SchedulingGates
	takeResources(from.Containers, to.Containers)
	takeResources(from.InitContainers, to.InitContainers)
	return workload.Immutable(at.Child("spec"), *from, *to)
}

func takeResources(from, to []corev1.Container) {
	if len(from) != len(to) {
		return
	}
	for i := range from {
		if from[i].Name == to[i].Name {
			to[i].Resources = from[i].Resources
		}
	}
}
