// Package volume describes v1 PersistentVolumes and PersistentVolumeClaims, for those who provision, bind and list them. It binds
// nothing: a claim waits until a controller of the cluster binds it.
package volume

import (
	"cmp"
	"context"
	"path"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

var at = workload.At

// New describes PersistentVolumes.
func New() registry.Resource {
	type volume = corev1.PersistentVolume
	spec, status := corev1.PersistentVolumeSpec{}.SwaggerDoc(), corev1.PersistentVolumeStatus{}.SwaggerDoc()
	k := &registry.Kind[volume, *volume]{
		Served: corev1.SchemeGroupVersion,
		Plural: "persistentvolumes", Singular: "persistentvolume", KindName: "PersistentVolume",
		ShortNames:    []string{"pv"},
		ClusterScoped: true,
		ReturnDeleted: true,
		NewList:       func() runtime.Object { return &corev1.PersistentVolumeList{} },
		Default: func(v *volume) {
			v.Status.Phase = cmp.Or(v.Status.Phase, corev1.VolumePending)
			v.Spec.PersistentVolumeReclaimPolicy = cmp.Or(v.Spec.PersistentVolumeReclaimPolicy, corev1.PersistentVolumeReclaimRetain)
			workload.OrPoint(&v.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		},
		Validate: func(_ context.Context, v *volume) field.ErrorList {
			return append(rules.Finalizers(v), validate(&v.Spec)...)
		},
		ValidateUpdate: validateUpdate,
		Columns: []registry.Column[volume]{
			{Name: "Capacity", Description: spec["capacity"], Cell: func(v *volume) any { return storageOf(v.Spec.Capacity) }},
			{Name: "Access Modes", Description: spec["accessModes"], Cell: func(v *volume) any { return modes(v.Spec.AccessModes) }},
			{Name: "Reclaim Policy", Description: spec["persistentVolumeReclaimPolicy"],
				Cell: func(v *volume) any { return string(v.Spec.PersistentVolumeReclaimPolicy) }},
			{Name: "Status", Description: status["phase"], Cell: func(v *volume) any { return ending(v.DeletionTimestamp != nil, string(v.Status.Phase)) }},
			{Name: "Claim", Description: spec["claimRef"], Cell: func(v *volume) any {
				if ref := v.Spec.ClaimRef; ref != nil {
					return ref.Namespace + "/" + ref.Name
				}
				return ""
			}},
			{Name: "StorageClass", Description: "StorageClass of the pv",
				Cell: func(v *volume) any {
					return cmp.Or(v.Annotations[corev1.BetaStorageClassAnnotation], v.Spec.StorageClassName)
				}},
			{Name: "VolumeAttributesClass", Description: "VolumeAttributesClass of the pv",
				Cell: func(v *volume) any { return or(v.Spec.VolumeAttributesClassName, "<unset>") }},
			{Name: "Reason", Description: status["reason"], Cell: func(v *volume) any { return v.Status.Reason }},
			registry.Age[volume](),
			{Name: "VolumeMode", Wide: true, Description: spec["volumeMode"], Cell: func(v *volume) any { return string(or(v.Spec.VolumeMode, "<unset>")) }},
		},
	}
	registry.SpecAndStatus(k, func(v *volume) *corev1.PersistentVolumeSpec { return &v.Spec },
		func(v *volume) *corev1.PersistentVolumeStatus { return &v.Status },
		func(_ context.Context, v, old *volume) field.ErrorList { return rules.MetaUpdate(v, old) })
	// Its changes are not counted.
	k.PrepareCreate = func(_ context.Context, v *volume) {
		v.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumePending}
	}
	k.PrepareUpdate = func(_ context.Context, v, old *volume) { v.Status = old.Status }
	return k
}

func validateUpdate(_ context.Context, v, old *corev1.PersistentVolume) field.ErrorList {
	errs := append(rules.MetaUpdate(v, old), validate(&v.Spec)...)
	if workload.Changed(v.Spec.PersistentVolumeSource, old.Spec.PersistentVolumeSource) {
		errs = append(errs, field.Forbidden(at.Child("persistentvolumesource"), "what a volume is cannot be changed"))
	}
	errs = append(errs, workload.Immutable(at.Child("volumeMode"), v.Spec.VolumeMode, old.Spec.VolumeMode)...)
	if old.Spec.NodeAffinity != nil {
		errs = append(errs, workload.Immutable(at.Child("nodeAffinity"), v.Spec.NodeAffinity, old.Spec.NodeAffinity)...)
	}
	return errs
}

func validate(spec *corev1.PersistentVolumeSpec) field.ErrorList {
	errs := validateModes(at.Child("accessModes"), spec.AccessModes)
	errs = append(errs, validateCapacity(at.Child("capacity"), spec.Capacity)...)
	errs = append(errs, rules.OneOf(at.Child("persistentVolumeReclaimPolicy"), spec.PersistentVolumeReclaimPolicy,
		corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle, corev1.PersistentVolumeReclaimRetain)...)
	errs = append(errs, validateClass(at.Child("storageClassName"), spec.StorageClassName)...)
	errs = append(errs, validateVolumeMode(spec.VolumeMode)...)
	if affinity := spec.NodeAffinity; affinity != nil {
		if affinity.Required == nil {
			errs = append(errs, field.Required(at.Child("nodeAffinity", "required"), ""))
		} else {
			errs = append(errs, pod.ValidateNodeSelector(at.Child("nodeAffinity", "required"), affinity.Required)...)
		}
	}
	return append(errs, validateSource(spec)...)
}

// validateCapacity wants the amount of storage, and no other.
func validateCapacity(at *field.Path, capacity corev1.ResourceList) field.ErrorList {
	if len(capacity) == 0 {
		return field.ErrorList{field.Required(at, "")}
	}
	size, found := capacity[corev1.ResourceStorage]
	if !found || len(capacity) > 1 {
		return field.ErrorList{field.NotSupported(at, names(capacity), []string{string(corev1.ResourceStorage)})}
	}
	if size.Sign() <= 0 {
		return field.ErrorList{field.Invalid(at.Key(string(corev1.ResourceStorage)), size.String(), "must be more than 0")}
	}
	return nil
}

func names(list corev1.ResourceList) string {
	var out []string
	for name := range list {
		out = append(out, string(name))
	}
	slices.Sort(out)
	return strings.Join(out, ",")
}

// validateSource wants exactly one kind of volume, and of those that most people write by hand what they can't do without.
func validateSource(spec *corev1.PersistentVolumeSpec) field.ErrorList {
	var errs field.ErrorList
	kinds := reflect.ValueOf(spec.PersistentVolumeSource)
	count := 0
	for i := range kinds.NumField() {
		if kinds.Field(i).IsNil() {
			continue
		}
		if count++; count > 1 {
			name, _, _ := strings.Cut(kinds.Type().Field(i).Tag.Get("json"), ",")
			errs = append(errs, field.Forbidden(at.Child(name), "may not specify more than 1 volume type"))
		}
	}
	if count == 0 {
		errs = append(errs, field.Required(at, "must have a kind of volume, such as csi, nfs, local or hostPath"))
	}
	need := func(at *field.Path, value string) {
		if value == "" {
			errs = append(errs, field.Required(at, ""))
		}
	}
	source := spec.PersistentVolumeSource
	if host := source.HostPath; host != nil {
		file := at.Child("hostPath", "path")
		need(file, host.Path)
		errs = append(errs, validatePath(file, host.Path)...)
		if path.Clean(host.Path) == "/" && spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRecycle {
			errs = append(errs, field.Forbidden(at.Child("persistentVolumeReclaimPolicy"), "the host's root can't be recycled"))
		}
	}
	if local := source.Local; local != nil {
		file := at.Child("local", "path")
		need(file, local.Path)
		errs = append(errs, validatePath(file, local.Path)...)
		if spec.NodeAffinity == nil {
			errs = append(errs, field.Required(at.Child("nodeAffinity"), "a local volume is on some node"))
		}
	}
	if nfs := source.NFS; nfs != nil {
		need(at.Child("nfs", "server"), nfs.Server)
		need(at.Child("nfs", "path"), nfs.Path)
		if nfs.Path != "" && !path.IsAbs(nfs.Path) {
			errs = append(errs, field.Invalid(at.Child("nfs", "path"), nfs.Path, "must be an absolute path"))
		}
	}
	if csi := source.CSI; csi != nil {
		need(at.Child("csi", "driver"), csi.Driver)
		need(at.Child("csi", "volumeHandle"), csi.VolumeHandle)
	}
	return errs
}

// validatePath wants a path that does not go up again.
func validatePath(at *field.Path, file string) field.ErrorList {
	if slices.Contains(strings.Split(file, "/"), "..") {
		return field.ErrorList{field.Invalid(at, file, "must not contain '..'")}
	}
	return nil
}

var accessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod}

func validateModes(at *field.Path, given []corev1.PersistentVolumeAccessMode) field.ErrorList {
	if len(given) == 0 {
		return field.ErrorList{field.Required(at, "at least one")}
	}
	var errs field.ErrorList
	for i, mode := range given {
		errs = append(errs, rules.OneOf(at.Index(i), mode, accessModes...)...)
	}
	if len(given) > 1 && slices.Contains(given, corev1.ReadWriteOncePod) {
		errs = append(errs, field.Forbidden(at, "ReadWriteOncePod can't be together with another"))
	}
	return errs
}

func validateClass(at *field.Path, class string) field.ErrorList {
	if class == "" {
		return nil
	}
	return rules.DNSSubdomain(at, class)
}

func validateVolumeMode(mode *corev1.PersistentVolumeMode) field.ErrorList {
	if mode == nil {
		return nil
	}
	return rules.OneOf(at.Child("volumeMode"), *mode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)
}

// modes are access modes in kubectl's short form, each once.
func modes(given []corev1.PersistentVolumeAccessMode) string {
	short := map[corev1.PersistentVolumeAccessMode]string{
		corev1.ReadWriteOnce: "RWO", corev1.ReadOnlyMany: "ROX", corev1.ReadWriteMany: "RWX", corev1.ReadWriteOncePod: "RWOP",
	}
	var out []string
	for _, mode := range accessModes {
		if slices.Contains(given, mode) {
			out = append(out, short[mode])
		}
	}
	return strings.Join(out, ",")
}

func storageOf(list corev1.ResourceList) string {
	size := list[corev1.ResourceStorage]
	return size.String()
}

func ending(deleted bool, phase string) string {
	if deleted {
		return "Terminating"
	}
	return phase
}

func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}
