// Package statefulset describes apps/v1 StatefulSets: Pods from a template that keep their names. It makes none of them.
package statefulset

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

// New describes StatefulSets.
func New() registry.Resource {
	return workload.Describe(&registry.Kind[appsv1.StatefulSet, *appsv1.StatefulSet]{
		Served: appsv1.SchemeGroupVersion,
		Plural: "statefulsets", Singular: "statefulset", KindName: "StatefulSet",
		ShortNames: []string{"sts"},
		NewList:    func() runtime.Object { return &appsv1.StatefulSetList{} },
		ValidName:  apivalidation.NameIsDNSLabel,
		Default:    setDefaults,
		Warnings:   warnings,
		Columns:    columns(),
		Status:     &registry.Status[appsv1.StatefulSet, *appsv1.StatefulSet]{Validate: validateStatus},
	}, workload.Parts[appsv1.StatefulSet, *appsv1.StatefulSet, appsv1.StatefulSetSpec, appsv1.StatefulSetStatus]{
		Spec:           func(set *appsv1.StatefulSet) *appsv1.StatefulSetSpec { return &set.Spec },
		Status:         func(set *appsv1.StatefulSet) *appsv1.StatefulSetStatus { return &set.Status },
		Template:       func(spec *appsv1.StatefulSetSpec) *corev1.PodTemplateSpec { return &spec.Template },
		ValidateSpec:   validateSpec,
		ValidateChange: validateChange,
		Scaling: &workload.Scaling[*appsv1.StatefulSet]{
			Replicas: func(set *appsv1.StatefulSet) **int32 { return &set.Spec.Replicas },
			Status:   func(set *appsv1.StatefulSet) int32 { return set.Status.Replicas },
			Selector: func(set *appsv1.StatefulSet) *metav1.LabelSelector { return set.Spec.Selector },
		},
	})
}

func setDefaults(set *appsv1.StatefulSet) {
	spec := &set.Spec
	if spec.PodManagementPolicy == "" {
		spec.PodManagementPolicy = appsv1.OrderedReadyPodManagement
	}
	strategy := &spec.UpdateStrategy
	if strategy.Type == "" {
		strategy.Type = appsv1.RollingUpdateStatefulSetStrategyType
		workload.OrPoint(&strategy.RollingUpdate, appsv1.RollingUpdateStatefulSetStrategy{})
	}
	if strategy.Type == appsv1.RollingUpdateStatefulSetStrategyType && strategy.RollingUpdate != nil {
		workload.OrPoint(&strategy.RollingUpdate.Partition, 0)
		workload.OrPoint(&strategy.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
	}
	workload.OrPoint(&spec.PersistentVolumeClaimRetentionPolicy, appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{})
	for _, policy := range []*appsv1.PersistentVolumeClaimRetentionPolicyType{
		&spec.PersistentVolumeClaimRetentionPolicy.WhenDeleted, &spec.PersistentVolumeClaimRetentionPolicy.WhenScaled,
	} {
		if *policy == "" {
			*policy = appsv1.RetainPersistentVolumeClaimRetentionPolicyType
		}
	}
	workload.OrPoint(&spec.Replicas, 1)
	workload.OrPoint(&spec.RevisionHistoryLimit, 10)
	pod.DefaultTemplate(&spec.Template)
	for i := range spec.VolumeClaimTemplates {
		claim := &spec.VolumeClaimTemplates[i]
		claim.APIVersion, claim.Kind = "v1", "PersistentVolumeClaim"
		workload.OrPoint(&claim.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		if claim.Status.Phase == "" {
			claim.Status.Phase = corev1.ClaimPending
		}
	}
}

func validateChange(now, before *appsv1.StatefulSetSpec) field.ErrorList {
	at := workload.At
	errs := workload.Immutable(at.Child("selector"), now.Selector, before.Selector)
	errs = append(errs, workload.Immutable(at.Child("volumeClaimTemplates"), now.VolumeClaimTemplates, before.VolumeClaimTemplates)...)
	errs = append(errs, workload.Immutable(at.Child("serviceName"), now.ServiceName, before.ServiceName)...)
	return append(errs, workload.Immutable(at.Child("podManagementPolicy"), now.PodManagementPolicy, before.PodManagementPolicy)...)
}

func validateSpec(spec *appsv1.StatefulSetSpec) field.ErrorList {
	at := workload.At
	var errs field.ErrorList
	switch spec.PodManagementPolicy {
	case appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement:
	case "":
		errs = append(errs, field.Required(at.Child("podManagementPolicy"), ""))
	default:
		errs = append(errs, field.Invalid(at.Child("podManagementPolicy"), spec.PodManagementPolicy, "must be OrderedReady or Parallel"))
	}
	errs = append(errs, validateStrategy(at.Child("updateStrategy"), &spec.UpdateStrategy)...)
	if policy := spec.PersistentVolumeClaimRetentionPolicy; policy != nil {
		kinds := []appsv1.PersistentVolumeClaimRetentionPolicyType{
			appsv1.DeletePersistentVolumeClaimRetentionPolicyType, appsv1.RetainPersistentVolumeClaimRetentionPolicyType,
		}
		at := at.Child("persistentVolumeClaimRetentionPolicy")
		errs = append(errs, rules.OneOf(at.Child("whenDeleted"), policy.WhenDeleted, kinds...)...)
		errs = append(errs, rules.OneOf(at.Child("whenScaled"), policy.WhenScaled, kinds...)...)
	}
	for i := range spec.VolumeClaimTemplates {
		errs = append(errs, validateClaim(at.Child("volumeClaimTemplates").Index(i).Child("spec"), &spec.VolumeClaimTemplates[i].Spec)...)
	}
	errs = append(errs, workload.NotNegative(at, workload.P("replicas", spec.Replicas), workload.N("minReadySeconds", spec.MinReadySeconds))...)
	if spec.Ordinals != nil {
		errs = append(errs, workload.NotNegative(at.Child("ordinals"), workload.N("start", spec.Ordinals.Start))...)
	}
	if spec.ServiceName != "" {
		errs = append(errs, rules.DNSLabel(at.Child("serviceName"), spec.ServiceName)...)
	}
	errs = append(errs, workload.ValidateSelector(at.Child("selector"), spec.Selector)...)
	errs = append(errs, workload.ValidateSelected(at.Child("template"), &spec.Template, spec.Selector)...)
	return append(errs, workload.ValidateEndless(at.Child("template"), asMade(spec))...)
}

// asMade is the template as Pods get it: each Pod has its own host name, and volumes for the claims.
func asMade(spec *appsv1.StatefulSetSpec) *corev1.PodTemplateSpec {
	out := spec.Template.DeepCopy()
	out.Spec.Hostname, out.Spec.Subdomain = "", ""
	var volumes []corev1.Volume
	claimed := map[string]bool{}
	for _, claim := range spec.VolumeClaimTemplates {
		claimed[claim.Name] = true
		volumes = append(volumes, corev1.Volume{Name: claim.Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim.Name},
		}})
	}
	out.Spec.Volumes = append(volumes, slices.DeleteFunc(out.Spec.Volumes, func(v corev1.Volume) bool { return claimed[v.Name] })...)
	return out
}

func validateStrategy(at *field.Path, strategy *appsv1.StatefulSetUpdateStrategy) field.ErrorList {
	rolling := at.Child("rollingUpdate")
	switch strategy.Type {
	case "":
		return field.ErrorList{field.Required(at, "")}
	case appsv1.OnDeleteStatefulSetStrategyType:
		if strategy.RollingUpdate != nil {
			return field.ErrorList{field.Invalid(rolling, strategy.RollingUpdate, "cannot be where type is OnDelete")}
		}
		return nil
	case appsv1.RollingUpdateStatefulSetStrategyType:
	default:
		return field.ErrorList{field.Invalid(at, *strategy, "type must be RollingUpdate or OnDelete")}
	}
	update := strategy.RollingUpdate
	if update == nil {
		return nil
	}
	errs := workload.NotNegative(rolling, workload.P("partition", update.Partition))
	if most := update.MaxUnavailable; most != nil {
		at := rolling.Child("maxUnavailable")
		errs = append(errs, workload.Share(at, most)...)
		if workload.IsNone(most) {
			errs = append(errs, field.Invalid(at, *most, "must not be 0: no Pod could be replaced"))
		}
		errs = append(errs, workload.AtMostAll(at, most)...)
	}
	return errs
}

// accessModes are how a volume can be mounted.
var accessModes = []corev1.PersistentVolumeAccessMode{
	corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce, corev1.ReadWriteOncePod,
}

func validateClaim(at *field.Path, claim *corev1.PersistentVolumeClaimSpec) field.ErrorList {
	var errs field.ErrorList
	modes := at.Child("accessModes")
	if len(claim.AccessModes) == 0 {
		errs = append(errs, field.Required(modes, "at least one"))
	}
	for _, mode := range claim.AccessModes {
		errs = append(errs, rules.OneOf(modes, mode, accessModes...)...)
	}
	if slices.Contains(claim.AccessModes, corev1.ReadWriteOncePod) && len(claim.AccessModes) > 1 {
		errs = append(errs, field.Forbidden(modes, "ReadWriteOncePod must be the only one"))
	}
	amount := at.Child("resources").Key(string(corev1.ResourceStorage))
	size, asked := claim.Resources.Requests[corev1.ResourceStorage]
	switch {
	case !asked:
		errs = append(errs, field.Required(amount, ""))
	case size.Sign() <= 0:
		errs = append(errs, field.Invalid(amount, size.String(), "must be more than 0"))
	}
	if claim.StorageClassName != nil && *claim.StorageClassName != "" {
		errs = append(errs, rules.DNSSubdomain(at.Child("storageClassName"), *claim.StorageClassName)...)
	}
	if claim.VolumeMode != nil {
		errs = append(errs, rules.OneOf(at.Child("volumeMode"), *claim.VolumeMode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)...)
	}
	return errs
}

func validateStatus(_ context.Context, set, old *appsv1.StatefulSet) field.ErrorList {
	at, status := workload.AtStatus, &set.Status
	replicas := workload.N("replicas", status.Replicas)
	current, updated := workload.N("currentReplicas", status.CurrentReplicas), workload.N("updatedReplicas", status.UpdatedReplicas)
	ready, available := workload.N("readyReplicas", status.ReadyReplicas), workload.N("availableReplicas", status.AvailableReplicas)
	errs := workload.NotNegative(at, replicas, ready, current, updated, available,
		workload.N("observedGeneration", status.ObservedGeneration), workload.P("collisionCount", status.CollisionCount))
	errs = append(errs, workload.AtMost(at, replicas, ready, current, updated, available)...)
	errs = append(errs, workload.AtMost(at, ready, available)...)
	errs = append(errs, rules.MetaUpdate(set, old)...)
	return append(errs, workload.NotFewer(at.Child("collisionCount"), status.CollisionCount, old.Status.CollisionCount)...)
}

func warnings(ctx context.Context, set, old *appsv1.StatefulSet) []string {
	var before *corev1.PodTemplateSpec
	if old != nil {
		before = &old.Spec.Template
	}
	out := workload.Warnings(ctx, &set.Spec.Template, before)
	if set.Spec.RevisionHistoryLimit != nil && *set.Spec.RevisionHistoryLimit < 0 {
		out = append(out, "spec.revisionHistoryLimit: a negative value keeps every revision; 0 or more is recommended")
	}
	return out
}

func columns() []registry.Column[appsv1.StatefulSet] {
	out := []registry.Column[appsv1.StatefulSet]{
		{Name: "Ready", Description: "Number of the pod with ready state", Cell: func(set *appsv1.StatefulSet) any {
			return fmt.Sprintf("%d/%d", set.Status.ReadyReplicas, ptr.Deref(set.Spec.Replicas, 0))
		}},
		registry.Age[appsv1.StatefulSet](),
	}
	return append(out, workload.ContainerColumns(func(set *appsv1.StatefulSet) *corev1.PodTemplateSpec { return &set.Spec.Template }, true)...)
}
