// Package storage describes the resources of storage.k8s.io/v1: how volumes are provisioned (StorageClass,
// VolumeAttributesClass) and what CSI drivers say of themselves and of what they can do (CSIDriver, CSINode, VolumeAttachment,
// CSIStorageCapacity). It provisions and attaches nothing.
package storage

import (
	"context"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

const (
	maxParameters     = 512
	maxParametersSize = 256 << 10
	// defaultClass is the annotation of the class that claims get which name none; the other one is its first name.
	defaultClass     = "storageclass.kubernetes.io/is-default-class"
	defaultClassBeta = "storageclass.beta.kubernetes.io/is-default-class"
)

// NewClass describes StorageClasses.
func NewClass() registry.Resource {
	docs := storagev1.StorageClass{}.SwaggerDoc()
	return &registry.Kind[storagev1.StorageClass, *storagev1.StorageClass]{
		Served: storagev1.SchemeGroupVersion,
		Plural: "storageclasses", Singular: "storageclass", KindName: "StorageClass",
		ShortNames:    []string{"sc"},
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &storagev1.StorageClassList{} },
		Default: func(class *storagev1.StorageClass) {
			workload.OrPoint(&class.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
			workload.OrPoint(&class.VolumeBindingMode, storagev1.VolumeBindingImmediate)
		},
		Validate:       validateClass,
		ValidateUpdate: validateClassUpdate,
		Columns: []registry.Column[storagev1.StorageClass]{
			{Name: "Provisioner", Description: docs["provisioner"], Cell: func(class *storagev1.StorageClass) any { return class.Provisioner }},
			{Name: "ReclaimPolicy", Description: docs["reclaimPolicy"],
				Cell: func(class *storagev1.StorageClass) any {
					return string(or(class.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete))
				}},
			{Name: "VolumeBindingMode", Description: docs["volumeBindingMode"],
				Cell: func(class *storagev1.StorageClass) any {
					return string(or(class.VolumeBindingMode, storagev1.VolumeBindingImmediate))
				}},
			{Name: "AllowVolumeExpansion", Description: docs["allowVolumeExpansion"],
				Cell: func(class *storagev1.StorageClass) any { return or(class.AllowVolumeExpansion, false) }},
			registry.Age[storagev1.StorageClass](),
		},
		Customize: func(store *genericregistry.Store, _ map[string]rest.Storage) error {
			store.TableConvertor = defaultMarked{store.TableConvertor}
			return nil
		},
	}
}

// or is what a pointer points to, or something else.
func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// defaultMarked marks the default class in a table of several.
type defaultMarked struct{ rest.TableConvertor }

func (m defaultMarked) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	table, err := m.TableConvertor.ConvertToTable(ctx, object, options)
	list, ok := object.(*storagev1.StorageClassList)
	if err != nil || !ok {
		return table, err
	}
	name := Default(list.Items)
	for i := range table.Rows {
		if name != "" && table.Rows[i].Cells[0] == name {
			table.Rows[i].Cells[0] = name + " (default)"
		}
	}
	return table, nil
}

// Default is the name of the class that claims get which name none: of those that are marked the newest, and of those of one
// age the first by name. It is "" if none is marked.
func Default(classes []storagev1.StorageClass) string {
	var best *storagev1.StorageClass
	for i := range classes {
		class := &classes[i]
		if class.Annotations[defaultClass] != "true" && class.Annotations[defaultClassBeta] != "true" {
			continue
		}
		newer := best == nil || class.CreationTimestamp.After(best.CreationTimestamp.Time)
		if newer || class.CreationTimestamp.Equal(&best.CreationTimestamp) && class.Name < best.Name {
			best = class
		}
	}
	if best == nil {
		return ""
	}
	return best.Name
}

func validateClass(_ context.Context, class *storagev1.StorageClass) field.ErrorList {
	errs := rules.Finalizers(class)
	errs = append(errs, validateProvisioner(field.NewPath("provisioner"), class.Provisioner)...)
	errs = append(errs, validateParameters(field.NewPath("parameters"), class.Parameters)...)
	if policy := class.ReclaimPolicy; policy != nil && *policy != "" {
		errs = append(errs, rules.OneOf(field.NewPath("reclaimPolicy"), *policy,
			corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
	}
	mode := field.NewPath("volumeBindingMode")
	if class.VolumeBindingMode == nil {
		errs = append(errs, field.Required(mode, ""))
	} else {
		errs = append(errs, rules.OneOf(mode, *class.VolumeBindingMode, storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
	}
	return append(errs, validateTopologies(field.NewPath("allowedTopologies"), class.AllowedTopologies)...)
}

func validateClassUpdate(_ context.Context, class, old *storagev1.StorageClass) field.ErrorList {
	errs := rules.MetaUpdate(class, old)
	errs = append(errs, workload.Immutable(field.NewPath("parameters"), class.Parameters, old.Parameters)...)
	errs = append(errs, workload.Immutable(field.NewPath("provisioner"), class.Provisioner, old.Provisioner)...)
	errs = append(errs, workload.Immutable(field.NewPath("reclaimPolicy"), class.ReclaimPolicy, old.ReclaimPolicy)...)
	return append(errs, workload.Immutable(field.NewPath("volumeBindingMode"), class.VolumeBindingMode, old.VolumeBindingMode)...)
}

func validateProvisioner(at *field.Path, name string) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return rules.QualifiedName(at, strings.ToLower(name))
}

func validateParameters(at *field.Path, parameters map[string]string) field.ErrorList {
	if len(parameters) > maxParameters {
		return field.ErrorList{field.TooLong(at, "", maxParameters)}
	}
	var errs field.ErrorList
	size := 0
	for key, value := range parameters {
		if key == "" {
			errs = append(errs, field.Invalid(at, key, "must not have a parameter without a name"))
		}
		size += len(key) + len(value)
	}
	if size > maxParametersSize {
		errs = append(errs, field.TooLong(at, "", maxParametersSize))
	}
	return errs
}

// validateTopologies wants terms that differ. One without expressions is not told apart from none at all.
func validateTopologies(at *field.Path, terms []corev1.TopologySelectorTerm) field.ErrorList {
	var errs field.ErrorList
	seen := []map[string][]string{{}}
	for i := range terms {
		expressions := at.Index(i).Child("matchLabelExpressions")
		values, wrong := validateTerm(expressions, terms[i].MatchLabelExpressions)
		errs = append(errs, wrong...)
		if slices.ContainsFunc(seen, func(other map[string][]string) bool { return maps.EqualFunc(values, other, slices.Equal) }) {
			errs = append(errs, field.Duplicate(expressions, ""))
		}
		seen = append(seen, values)
	}
	return errs
}

func validateTerm(at *field.Path, expressions []corev1.TopologySelectorLabelRequirement) (map[string][]string, field.ErrorList) {
	var errs field.ErrorList
	out := map[string][]string{}
	for i, expression := range expressions {
		values, own := at.Index(i).Child("values"), map[string]bool{}
		if len(expression.Values) == 0 {
			errs = append(errs, field.Required(values, "at least one"))
		}
		for j, value := range expression.Values {
			if own[value] {
				errs = append(errs, field.Duplicate(values.Index(j), value))
			}
			own[value] = true
		}
		errs = append(errs, rules.LabelName(at.Index(i).Child("key"), expression.Key)...)
		if _, twice := out[expression.Key]; twice {
			errs = append(errs, field.Duplicate(at.Index(i).Child("key"), expression.Key))
		}
		out[expression.Key] = slices.Sorted(maps.Keys(own))
	}
	return out, errs
}

// NewAttributes describes VolumeAttributesClasses.
func NewAttributes() registry.Resource {
	return &registry.Kind[storagev1.VolumeAttributesClass, *storagev1.VolumeAttributesClass]{
		Served: storagev1.SchemeGroupVersion,
		Plural: "volumeattributesclasses", Singular: "volumeattributesclass", KindName: "VolumeAttributesClass",
		ShortNames:    []string{"vac"},
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &storagev1.VolumeAttributesClassList{} },
		Validate:      validateAttributes,
		ValidateUpdate: func(ctx context.Context, class, old *storagev1.VolumeAttributesClass) field.ErrorList {
			errs := append(rules.MetaUpdate(class, old), validateAttributes(ctx, class)...)
			if class.DriverName != old.DriverName {
				errs = append(errs, field.Forbidden(field.NewPath("driverName"), "cannot be changed: make another class"))
			}
			if workload.Changed(class.Parameters, old.Parameters) {
				errs = append(errs, field.Forbidden(field.NewPath("parameters"), "cannot be changed: make another class"))
			}
			return errs
		},
		Columns: []registry.Column[storagev1.VolumeAttributesClass]{
			{Name: "DriverName", Description: storagev1.VolumeAttributesClass{}.SwaggerDoc()["driverName"],
				Cell: func(class *storagev1.VolumeAttributesClass) any { return class.DriverName }},
			registry.Age[storagev1.VolumeAttributesClass](),
		},
	}
}

func validateAttributes(_ context.Context, class *storagev1.VolumeAttributesClass) field.ErrorList {
	errs := append(rules.Finalizers(class), validateProvisioner(field.NewPath("driverName"), class.DriverName)...)
	parameters := field.NewPath("parameters")
	if len(class.Parameters) == 0 {
		errs = append(errs, field.Required(parameters, "at least one"))
	}
	return append(errs, validateParameters(parameters, class.Parameters)...)
}
