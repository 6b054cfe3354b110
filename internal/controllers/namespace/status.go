package namespace

import (
	"errors"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// describe writes the progress into a namespace's status and reports whether that changed it. Every condition is
// always there: False is good news.
func (p *progress) describe(status *corev1.NamespaceStatus) bool {
	changed := status.Phase != corev1.NamespaceTerminating
	status.Phase = corev1.NamespaceTerminating
	for _, c := range p.conditions() {
		changed = setCondition(status, c) || changed
	}
	return changed
}

func (p *progress) conditions() []corev1.NamespaceCondition {
	one := func(kind corev1.NamespaceConditionType, bad bool, badReason, badMessage, goodReason, goodMessage string) corev1.NamespaceCondition {
		if bad {
			return corev1.NamespaceCondition{Type: kind, Status: corev1.ConditionTrue, Reason: badReason, Message: badMessage}
		}
		return corev1.NamespaceCondition{Type: kind, Status: corev1.ConditionFalse, Reason: goodReason, Message: goodMessage}
	}
	return []corev1.NamespaceCondition{
		one(corev1.NamespaceDeletionDiscoveryFailure, p.discovery != nil,
			"DiscoveryFailed", text(p.discovery),
			"ResourcesDiscovered", "every kind was discovered"),
		one(corev1.NamespaceDeletionGVParsingFailure, false, "", "",
			"ParsedGroupVersions", "every group and version could be read"),
		one(corev1.NamespaceDeletionContentFailure, len(p.failures) > 0,
			"ContentDeletionFailed", text(errors.Join(p.failures...)),
			"ContentDeleted", "all content was deleted, or is waiting for its finalizers"),
		one(corev1.NamespaceContentRemaining, len(p.remaining) > 0,
			"SomeResourcesRemain", "still there: "+counts(p.remaining, "%s (%d)"),
			"ContentRemoved", "nothing is left"),
		one(corev1.NamespaceFinalizersRemaining, len(p.finalizers) > 0,
			"SomeFinalizersRemain", "waiting for finalizers: "+counts(p.finalizers, "%s (on %d)"),
			"ContentHasNoFinalizers", "no finalizer holds anything back"),
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func setCondition(status *corev1.NamespaceStatus, want corev1.NamespaceCondition) bool {
	i := slices.IndexFunc(status.Conditions, func(c corev1.NamespaceCondition) bool { return c.Type == want.Type })
	want.LastTransitionTime = metav1.Now()
	if i < 0 {
		status.Conditions = append(status.Conditions, want)
		return true
	}
	have := &status.Conditions[i]
	if have.Status == want.Status {
		want.LastTransitionTime = have.LastTransitionTime
	}
	changed := have.Status != want.Status || have.Reason != want.Reason || have.Message != want.Message
	*have = want
	return changed
}
