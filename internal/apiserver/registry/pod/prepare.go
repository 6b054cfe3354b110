package pod

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func prepareCreate(_ context.Context, pod *corev1.Pod) {
	pod.Generation = 1
	pod.Status = corev1.PodStatus{Phase: corev1.PodPending}
	tolerateBriefly(&pod.Spec)
	if pod.Spec.PriorityClassName == "" { // admission has looked for a default class
		orPoint(&pod.Spec.Priority, 0)
		orPoint(&pod.Spec.PreemptionPolicy, corev1.PreemptLowerPriority)
	}
	dropUnserved(&pod.ObjectMeta, &pod.Spec)
	if len(pod.Spec.SchedulingGates) > 0 {
		setCondition(&pod.Status, corev1.PodCondition{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonSchedulingGated,
			Message: "Not scheduled while there are scheduling gates",
		})
	}
	resolveLabelKeys(pod)
	adoptAppArmor(pod)
	defaultPodResources(&pod.Spec)
	pod.Status.QOSClass = qosClass(&pod.Spec)
}

// prepareUpdate also carries over what a create added by itself, so that a person may write the same manifest again.
func prepareUpdate(_ context.Context, pod, old *corev1.Pod) {
	tolerateBriefly(&pod.Spec)
	if pod.Spec.Priority == nil {
		pod.Spec.Priority = old.Spec.Priority
	}
	if pod.Spec.PreemptionPolicy == nil {
		pod.Spec.PreemptionPolicy = old.Spec.PreemptionPolicy
	}
	pod.Status = old.Status
	if pod.Spec.Resources == nil && old.Spec.Resources != nil {
		pod.Spec.Resources = old.Spec.Resources.DeepCopy()
	}
	dropUnserved(&pod.ObjectMeta, &pod.Spec)
	if !equality.Semantic.DeepEqual(pod.Spec, old.Spec) {
		pod.Generation++
	}
}

// tolerateBriefly lets a Pod stay five minutes on a node that stopped being ready or reachable, unless it says itself
// what it wants.
func tolerateBriefly(spec *corev1.PodSpec) {
	for _, taint := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		if slices.ContainsFunc(spec.Tolerations, func(t corev1.Toleration) bool {
			return (t.Key == taint || t.Key == "") && (t.Effect == corev1.TaintEffectNoExecute || t.Effect == "")
		}) {
			continue
		}
		seconds := int64(300)
		spec.Tolerations = append(spec.Tolerations, corev1.Toleration{
			Key: taint, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &seconds,
		})
	}
}

// resolveLabelKeys turns "Pods with the same value of this label as mine" into selectors.
func resolveLabelKeys(pod *corev1.Pod) {
	add := func(selector *metav1.LabelSelector, keys []string, operator metav1.LabelSelectorOperator) {
		for _, key := range keys {
			if value, ok := pod.Labels[key]; ok && selector != nil {
				selector.MatchExpressions = append(selector.MatchExpressions,
					metav1.LabelSelectorRequirement{Key: key, Operator: operator, Values: []string{value}})
			}
		}
	}
	for _, terms := range affinityTerms(pod.Spec.Affinity) {
		for _, t := range terms.all {
			add(t.term.LabelSelector, t.term.MatchLabelKeys, metav1.LabelSelectorOpIn)
			add(t.term.LabelSelector, t.term.MismatchLabelKeys, metav1.LabelSelectorOpNotIn)
		}
	}
	for i := range pod.Spec.TopologySpreadConstraints {
		constraint := &pod.Spec.TopologySpreadConstraints[i]
		add(constraint.LabelSelector, constraint.MatchLabelKeys, metav1.LabelSelectorOpIn)
	}
}

// setCondition adds a condition or replaces the one of its type; the time of the last transition moves with the status.
func setCondition(status *corev1.PodStatus, condition corev1.PodCondition) {
	condition.LastTransitionTime = metav1.Now()
	for i := range status.Conditions {
		known := &status.Conditions[i]
		if known.Type != condition.Type {
			continue
		}
		if known.Status == condition.Status {
			condition.LastTransitionTime = known.LastTransitionTime
		}
		*known = condition
		return
	}
	status.Conditions = append(status.Conditions, condition)
}

// obsolete are annotations from before init containers were a field.
var obsolete = []string{
	"pod.beta.kubernetes.io/init-containers", "pod.alpha.kubernetes.io/init-containers",
	"pod.beta.kubernetes.io/init-container-statuses", "pod.alpha.kubernetes.io/init-container-statuses",
}

// dropUnserved forgets fields whose features are still alpha in Kubernetes, and so off: a cluster without them answers
// as if they had not been sent.
func dropUnserved(meta *metav1.ObjectMeta, spec *corev1.PodSpec) {
	for _, key := range obsolete {
		delete(meta.Annotations, key)
	}
	spec.SchedulingGroup = nil
	spec.EvictionResponders = nil
	for _, c := range containers(spec) {
		for i := range c.VolumeMounts {
			c.VolumeMounts[i].BindMountOptions = nil
		}
		for _, probe := range probes(c) {
			dropProtocol(probe.HTTPGet)
			if probe.GRPC != nil {
				probe.GRPC.Mode = nil
			}
		}
		for _, hook := range hooks(c) {
			dropProtocol(hook.HTTPGet)
		}
		if c.Lifecycle != nil && c.Lifecycle.StopSignal != nil {
			c.Lifecycle.StopSignal = nil
			if *c.Lifecycle == (corev1.Lifecycle{}) {
				c.Lifecycle = nil
			}
		}
	}
	for i := range spec.Volumes {
		dropOwners(&spec.Volumes[i])
	}
}

func dropProtocol(get *corev1.HTTPGetAction) {
	if get != nil {
		get.Protocol = nil
	}
}

// dropOwners forgets whom the files of a volume should belong to, and an empty directory's mode.
func dropOwners(v *corev1.Volume) {
	keys := func(items []corev1.KeyToPath) {
		for i := range items {
			items[i].User = nil
		}
	}
	files := func(items []corev1.DownwardAPIVolumeFile) {
		for i := range items {
			items[i].User = nil
		}
	}
	if v.EmptyDir != nil {
		v.EmptyDir.Mode = nil
	}
	switch {
	case v.Secret != nil:
		v.Secret.DefaultUser = nil
		keys(v.Secret.Items)
	case v.ConfigMap != nil:
		v.ConfigMap.DefaultUser = nil
		keys(v.ConfigMap.Items)
	case v.DownwardAPI != nil:
		v.DownwardAPI.DefaultUser = nil
		files(v.DownwardAPI.Items)
	case v.Projected != nil:
		v.Projected.DefaultUser = nil
		for _, source := range v.Projected.Sources {
			switch {
			case source.Secret != nil:
				keys(source.Secret.Items)
			case source.ConfigMap != nil:
				keys(source.ConfigMap.Items)
			case source.DownwardAPI != nil:
				files(source.DownwardAPI.Items)
			case source.ServiceAccountToken != nil:
				source.ServiceAccountToken.User = nil
			case source.ClusterTrustBundle != nil:
				source.ClusterTrustBundle.User = nil
			case source.PodCertificate != nil:
				source.PodCertificate.User = nil
			}
		}
	}
}

// prepareStatus leaves spec and owners alone, and keeps what a writer that doesn't know a field left out.
func prepareStatus(_ context.Context, pod, old *corev1.Pod) {
	pod.Spec = old.Spec
	pod.DeletionTimestamp = nil
	pod.OwnerReferences = old.OwnerReferences
	status, before := &pod.Status, &old.Status
	orElse(&status.QOSClass, before.QOSClass)
	if status.ResourceClaimStatuses == nil {
		status.ResourceClaimStatuses = before.ResourceClaimStatuses
	}
	if status.ExtendedResourceClaimStatus == nil {
		status.ExtendedResourceClaimStatus = before.ExtendedResourceClaimStatus
	}
	orElse(&status.ObservedGeneration, before.ObservedGeneration)
	seen := map[corev1.PodConditionType][]int64{}
	for _, condition := range before.Conditions {
		seen[condition.Type] = append(seen[condition.Type], condition.ObservedGeneration)
	}
	for i := range status.Conditions {
		condition := &status.Conditions[i]
		if known := seen[condition.Type]; len(known) > 0 {
			orElse(&condition.ObservedGeneration, known[0])
			seen[condition.Type] = known[1:]
		}
	}
	status.NodeAllocatableResourceClaimStatuses = nil
	status.VolumeHealth = nil
	for _, list := range [][]corev1.ContainerStatus{status.InitContainerStatuses, status.ContainerStatuses, status.EphemeralContainerStatuses} {
		for i := range list {
			for j := range list[i].VolumeMounts {
				list[i].VolumeMounts[j].VolumeStatus = nil
			}
		}
	}
}

// graceful decides how long a deleted Pod may take to end.
type graceful struct{}

// CheckGracefulDelete gives a Pod the time that the request says, or that its spec does. One that no node runs, or
// that has ended, goes at once.
func (graceful) CheckGracefulDelete(_ context.Context, obj runtime.Object, options *metav1.DeleteOptions) bool {
	if options == nil {
		return false
	}
	pod := obj.(*corev1.Pod)
	period := int64(0)
	switch {
	case pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded:
	case options.GracePeriodSeconds != nil:
		period = *options.GracePeriodSeconds
	case pod.Spec.TerminationGracePeriodSeconds != nil:
		period = *pod.Spec.TerminationGracePeriodSeconds
	}
	if period < 0 {
		period = 1
	}
	options.GracePeriodSeconds = &period
	return true
}
