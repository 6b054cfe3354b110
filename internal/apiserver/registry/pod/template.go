package pod

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// DefaultTemplate fills what a template leaves out. What depends on the cluster, or on other fields, is filled in when a
// Pod is made from it.
func DefaultTemplate(t *corev1.PodTemplateSpec) { defaultAll(&t.Spec) }

// PrepareTemplate drops what is not served.
func PrepareTemplate(t *corev1.PodTemplateSpec) { dropUnserved(&t.ObjectMeta, &t.Spec) }

// ValidateTemplate judges the template of Pods that is at a path.
func ValidateTemplate(at *field.Path, t *corev1.PodTemplateSpec) field.ErrorList {
	errs := metavalidation.ValidateLabels(t.Labels, at.Child("labels"))
	errs = append(errs, apivalidation.ValidateAnnotations(t.Annotations, at.Child("annotations"))...)

	pod := &corev1.Pod{ObjectMeta: t.ObjectMeta, Spec: t.Spec}
	if pod.Spec.HostNetwork {
		// A template may leave host ports out; its Pods get them.
		pod.Spec = *t.Spec.DeepCopy()
		for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range list {
				openHostPorts(list[i].Ports)
			}
		}
	}
	// What only a Pod is judged by: it has an account by then, and no negative period.
	orElse(&pod.Spec.ServiceAccountName, "default")
	if period := pod.Spec.TerminationGracePeriodSeconds; period != nil && *period < 0 {
		pod.Spec.TerminationGracePeriodSeconds = nil
	}
	inside := validateAnnotations(pod.Annotations, &pod.Spec)
	inside = append(inside, validateSpec(&pod.Spec, &metav1.ObjectMeta{})...)
	inside = append(inside, validateClasses(&pod.Spec)...)
	inside = append(inside, validateProfilesMatch(pod)...)
	if len(pod.Spec.EphemeralContainers) > 0 {
		inside = append(inside, field.Forbidden(atSpec.Child("ephemeralContainers"), "are added to a Pod that is there"))
	}
	return append(errs, within(at, inside)...)
}

// within moves errors of a Pod to where its template is.
func within(at *field.Path, errs field.ErrorList) field.ErrorList {
	for _, err := range errs {
		// The API has always left out "metadata" here.
		err.Field = at.String() + "." + strings.TrimPrefix(err.Field, "metadata.")
	}
	return errs
}

// TemplateWarnings are what a person should know about the Pods that a template will make.
func TemplateWarnings(ctx context.Context, at *field.Path, t *corev1.PodTemplateSpec) []string {
	pod := &corev1.Pod{ObjectMeta: t.ObjectMeta, Spec: t.Spec}
	pod.Name = "x" // the names come later
	if pod.Spec.SecurityContext == nil {
		pod.Spec.SecurityContext = &corev1.PodSecurityContext{}
	}
	out := warnings(ctx, pod, nil)
	for i := range out {
		out[i] = at.String() + "." + out[i]
	}
	return out
}

// ValidateTolerations judges the tolerations of something else than a Pod.
func ValidateTolerations(at *field.Path, tolerations []corev1.Toleration) field.ErrorList {
	return validateTolerations(at, tolerations)
}

// ValidateOverhead judges what Pods of a kind need beside their containers.
func ValidateOverhead(at *field.Path, overhead corev1.ResourceList) field.ErrorList {
	return validateResources(at, &corev1.ResourceRequirements{Limits: overhead}, validateContainerResourceName, nil)
}

// ValidateNodeSelector validates which nodes something can be used on.
func ValidateNodeSelector(at *field.Path, selector *corev1.NodeSelector) field.ErrorList {
	terms := at.Child("nodeSelectorTerms")
	if len(selector.NodeSelectorTerms) == 0 {
		return field.ErrorList{field.Required(terms, "at least one")}
	}
	var errs field.ErrorList
	for i := range selector.NodeSelectorTerms {
		errs = append(errs, validateNodeTerm(terms.Index(i), &selector.NodeSelectorTerms[i], true)...)
	}
	return errs
}
