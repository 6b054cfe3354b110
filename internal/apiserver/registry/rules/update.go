package rules

import (
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Meta validates the metadata of an object by itself.
func Meta(obj metav1.Object, namespaced bool, name validation.ValidateNameFunc) field.ErrorList {
	return append(validation.ValidateObjectMetaAccessor(obj, namespaced, name, field.NewPath("metadata")), Finalizers(obj)...)
}

// MetaUpdate validates what an update does to an object's metadata.
func MetaUpdate(obj, old metav1.Object) field.ErrorList {
	return append(validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")), Finalizers(obj)...)
}
