// Package configmap describes ConfigMaps: settings that others read. It validates how they are kept, never what they say.
package configmap

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// New describes core/v1 ConfigMaps.
func New() registry.Resource {
	return &registry.Kind[corev1.ConfigMap, *corev1.ConfigMap]{
		Served:     corev1.SchemeGroupVersion,
		Plural:     "configmaps",
		Singular:   "configmap",
		KindName:   "ConfigMap",
		ShortNames: []string{"cm"},
		NewList:    func() runtime.Object { return &corev1.ConfigMapList{} },
		Validate:   validate,
		Columns: []registry.Column[corev1.ConfigMap]{
			{
				Name: "Data", Description: corev1.ConfigMap{}.SwaggerDoc()["data"],
				Cell: func(c *corev1.ConfigMap) any { return int64(len(c.Data) + len(c.BinaryData)) },
			},
			registry.Age[corev1.ConfigMap](),
		},
		ValidateUpdate: validateUpdate,
	}
}

func validate(_ context.Context, c *corev1.ConfigMap) field.ErrorList {
	errs := rules.Finalizers(c)
	errs = append(errs, registry.CountKeys(field.NewPath("data"), c.Data)...)
	errs = append(errs, registry.CountKeys(field.NewPath("binaryData"), c.BinaryData)...)
	size := 0
	for key, value := range c.Data {
		path := field.NewPath("data").Key(key)
		errs = append(errs, rules.Each(path, key, utilvalidation.IsConfigMapKey(key))...)
		if _, twice := c.BinaryData[key]; twice {
			errs = append(errs, field.Invalid(path, key, "is a key of binaryData too; choose another for one of them"))
		}
		size += len(value)
	}
	for key, value := range c.BinaryData {
		errs = append(errs, rules.Each(field.NewPath("binaryData").Key(key), key, utilvalidation.IsConfigMapKey(key))...)
		size += len(value)
	}
	if size > corev1.MaxSecretSize {
		// No one field is too long, so the path is empty; it shows as "[]".
		errs = append(errs, field.TooLong(field.NewPath(""), "", corev1.MaxSecretSize))
	}
	return errs
}

func validateUpdate(ctx context.Context, c, old *corev1.ConfigMap) field.ErrorList {
	errs := validate(ctx, c)
	if old.Immutable == nil || !*old.Immutable {
		return errs
	}
	refuse := func(name string) {
		errs = append(errs, field.Forbidden(field.NewPath(name),
			fmt.Sprintf("ConfigMap %q was made immutable; delete it and create it anew to change it", old.Name)))
	}
	if c.Immutable == nil || !*c.Immutable {
		refuse("immutable")
	}
	if !equality.Semantic.DeepEqual(c.Data, old.Data) {
		refuse("data")
	}
	if !equality.Semantic.DeepEqual(c.BinaryData, old.BinaryData) {
		refuse("binaryData")
	}
	return errs
}
