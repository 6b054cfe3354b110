package storage

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

const (
	maxAttachmentMetadata = 256 << 10
	maxErrorMessage       = 1024
)

// NewAttachment describes VolumeAttachments: that a volume shall be attached to a node, and whether it is.
func NewAttachment() registry.Resource {
	type attachment = storagev1.VolumeAttachment
	spec, source, status := storagev1.VolumeAttachmentSpec{}.SwaggerDoc(), storagev1.VolumeAttachmentSource{}.SwaggerDoc(), storagev1.VolumeAttachmentStatus{}.SwaggerDoc()
	k := &registry.Kind[attachment, *attachment]{
		Served: storagev1.SchemeGroupVersion,
		Plural: "volumeattachments", Singular: "volumeattachment", KindName: "VolumeAttachment",
		ClusterScoped: true,
		StrictUpdate:  true,
		NewList:       func() runtime.Object { return &storagev1.VolumeAttachmentList{} },
		Validate: func(_ context.Context, a *attachment) field.ErrorList {
			return append(rules.Finalizers(a), validateAttachment(a)...)
		},
		ValidateUpdate: validateAttachmentUpdate,
		Columns: []registry.Column[attachment]{
			{Name: "Attacher", Format: "name", Description: spec["attacher"], Cell: func(a *attachment) any { return a.Spec.Attacher }},
			{Name: "PV", Description: source["persistentVolumeName"], Cell: func(a *attachment) any { return or(a.Spec.Source.PersistentVolumeName, "") }},
			{Name: "Node", Description: spec["nodeName"], Cell: func(a *attachment) any { return a.Spec.NodeName }},
			{Name: "Attached", Type: "boolean", Description: status["attached"], Cell: func(a *attachment) any { return a.Status.Attached }},
			registry.Age[attachment](),
		},
	}
	registry.SpecAndStatus(k, func(a *attachment) *storagev1.VolumeAttachmentSpec { return &a.Spec },
		func(a *attachment) *storagev1.VolumeAttachmentStatus { return &a.Status }, validateAttachmentUpdate)
	// What is wanted never changes, so that nothing is counted.
	k.PrepareCreate = func(_ context.Context, a *attachment) { a.Status = storagev1.VolumeAttachmentStatus{} }
	k.PrepareUpdate = func(_ context.Context, a, old *attachment) { a.Status = old.Status }
	return k
}

func validateAttachmentUpdate(_ context.Context, a, old *storagev1.VolumeAttachment) field.ErrorList {
	errs := append(rules.MetaUpdate(a, old), validateAttachment(a)...)
	return append(errs, workload.Immutable(workload.At, a.Spec, old.Spec)...)
}

func validateAttachment(a *storagev1.VolumeAttachment) field.ErrorList {
	at := workload.At
	errs := validateDriverName(at.Child("attacher"), a.Spec.Attacher)
	errs = append(errs, rules.NodeName(at.Child("nodeName"), a.Spec.NodeName)...)
	errs = append(errs, validateSource(at.Child("source"), &a.Spec.Source)...)

	status, size := workload.AtStatus, 0
	for key, value := range a.Status.AttachmentMetadata {
		size += len(key) + len(value)
	}
	if size > maxAttachmentMetadata {
		errs = append(errs, field.TooLong(status.Child("attachmentMetadata"), "", maxAttachmentMetadata))
	}
	errs = append(errs, validateVolumeError(status.Child("attachError"), a.Status.AttachError)...)
	return append(errs, validateVolumeError(status.Child("detachError"), a.Status.DetachError)...)
}

func validateSource(at *field.Path, source *storagev1.VolumeAttachmentSource) field.ErrorList {
	name, inline := source.PersistentVolumeName, source.InlineVolumeSpec
	switch {
	case name == nil && inline == nil:
		return field.ErrorList{field.Required(at, "persistentVolumeName or inlineVolumeSpec")}
	case name != nil && inline != nil:
		return field.ErrorList{field.Forbidden(at, "only one of persistentVolumeName and inlineVolumeSpec")}
	case inline != nil:
		return validateInline(at.Child("inlineVolumeSpec"), inline)
	}
	at = at.Child("persistentVolumeName")
	errs := rules.DNSSubdomain(at, *name)
	if *name == "" {
		errs = append(errs, field.Required(at, ""))
	}
	return errs
}

var accessModes = []corev1.PersistentVolumeAccessMode{
	corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce, corev1.ReadWriteOncePod,
}

// validateInline judges the volume of a Pod, which a CSI driver attaches in place of what Kubernetes once did itself.
func validateInline(at *field.Path, volume *corev1.PersistentVolumeSpec) field.ErrorList {
	var errs field.ErrorList
	const why = "cannot be of a volume that is in a Pod"
	for _, not := range []struct {
		name string
		set  bool
	}{
		{"claimRef", volume.ClaimRef != nil}, {"capacity", len(volume.Capacity) > 0}, {"nodeAffinity", volume.NodeAffinity != nil},
		{"persistentVolumeReclaimPolicy", volume.PersistentVolumeReclaimPolicy != "" && volume.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain},
		{"storageClassName", volume.StorageClassName != ""}, {"volumeMode", or(volume.VolumeMode, corev1.PersistentVolumeFilesystem) != corev1.PersistentVolumeFilesystem},
	} {
		if not.set {
			errs = append(errs, field.Forbidden(at.Child(not.name), why))
		}
	}
	modes := at.Child("accessModes")
	if len(volume.AccessModes) == 0 {
		errs = append(errs, field.Required(modes, "at least one"))
	}
	for _, mode := range volume.AccessModes {
		errs = append(errs, rules.OneOf(modes, mode, accessModes...)...)
	}
	if slices.Contains(volume.AccessModes, corev1.ReadWriteOncePod) && len(volume.AccessModes) > 1 {
		errs = append(errs, field.Forbidden(modes, "ReadWriteOncePod must be the only one"))
	}
	csi := at.Child("csi")
	if volume.CSI == nil {
		return append(errs, field.Required(csi, ""))
	}
	errs = append(errs, validateDriverName(csi.Child("driver"), volume.CSI.Driver)...)
	if volume.CSI.VolumeHandle == "" {
		errs = append(errs, field.Required(csi.Child("volumeHandle"), ""))
	}
	return errs
}

func validateVolumeError(at *field.Path, e *storagev1.VolumeError) field.ErrorList {
	if e == nil {
		return nil
	}
	var errs field.ErrorList
	if len(e.Message) > maxErrorMessage {
		errs = append(errs, field.TooLong(at.Child("message"), "", maxErrorMessage))
	}
	return append(errs, workload.NotNegative(at, workload.P("errorCode", e.ErrorCode))...)
}

// NewCapacity describes CSIStorageCapacities: how much a driver can still provision for nodes of a topology.
func NewCapacity() registry.Resource {
	type capacity = storagev1.CSIStorageCapacity
	docs := storagev1.CSIStorageCapacity{}.SwaggerDoc()
	return &registry.Kind[capacity, *capacity]{
		Served: storagev1.SchemeGroupVersion,
		Plural: "csistoragecapacities", Singular: "csistoragecapacity", KindName: "CSIStorageCapacity",
		StrictUpdate: true,
		NewList:      func() runtime.Object { return &storagev1.CSIStorageCapacityList{} },
		Validate: func(_ context.Context, c *capacity) field.ErrorList {
			errs := rules.Finalizers(c)
			errs = append(errs, metavalidation.ValidateLabelSelector(c.NodeTopology, metavalidation.LabelSelectorValidationOptions{}, field.NewPath("nodeTopology"))...)
			errs = append(errs, rules.DNSSubdomain(field.NewPath("storageClassName"), c.StorageClassName)...)
			if c.Capacity != nil && c.Capacity.Sign() < 0 {
				errs = append(errs, field.Invalid(field.NewPath("capacity"), c.Capacity.String(), "must not be negative"))
			}
			return errs
		},
		ValidateUpdate: func(_ context.Context, c, old *capacity) field.ErrorList {
			errs := append(rules.MetaUpdate(c, old), workload.Immutable(field.NewPath("nodeTopology"), c.NodeTopology, old.NodeTopology)...)
			return append(errs, workload.Immutable(field.NewPath("storageClassName"), c.StorageClassName, old.StorageClassName)...)
		},
		Columns: []registry.Column[capacity]{
			{Name: "StorageClassName", Description: docs["storageClassName"], Cell: func(c *capacity) any { return c.StorageClassName }},
			{Name: "Capacity", Description: docs["capacity"], Cell: func(c *capacity) any {
				if c.Capacity == nil {
					return "<unset>"
				}
				return c.Capacity.String()
			}},
		},
	}
}
