// Package priorityclass describes scheduling.k8s.io/v1 PriorityClasses, and gives Pods the priority of their class. It
// schedules and preempts nothing.
package priorityclass

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

const (
	systemPrefix = "system-"
	// highestOfUsers is the highest value that a class may have which is not the system's.
	highestOfUsers = 1_000_000_000
)

// System are the classes that every cluster has.
func System() []*schedulingv1.PriorityClass {
	class := func(name string, value int32, description string) *schedulingv1.PriorityClass {
		lower := corev1.PreemptLowerPriority
		return &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, PreemptionPolicy: &lower, Description: description}
	}
	return []*schedulingv1.PriorityClass{
		class("system-node-critical", 2*highestOfUsers+1000, "For Pods that the system needs on the node that they are on."),
		class("system-cluster-critical", 2*highestOfUsers, "For Pods that the system needs, on any node."),
	}
}

func systemClass(name string) *schedulingv1.PriorityClass {
	for _, class := range System() {
		if class.Name == name {
			return class
		}
	}
	return nil
}

// New describes PriorityClasses.
func New() registry.Resource {
	return &registry.Kind[schedulingv1.PriorityClass, *schedulingv1.PriorityClass]{
		Served: schedulingv1.SchemeGroupVersion,
		Plural: "priorityclasses", Singular: "priorityclass", KindName: "PriorityClass",
		ShortNames:    []string{"pc"},
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &schedulingv1.PriorityClassList{} },
		Default: func(class *schedulingv1.PriorityClass) {
			workload.OrPoint(&class.PreemptionPolicy, corev1.PreemptLowerPriority)
		},
		PrepareCreate:  func(_ context.Context, class *schedulingv1.PriorityClass) { class.Generation = 1 },
		Validate:       validateCreate,
		ValidateUpdate: validateUpdate,
		Columns: []registry.Column[schedulingv1.PriorityClass]{
			{Name: "Value", Type: "integer", Description: schedulingv1.PriorityClass{}.SwaggerDoc()["value"],
				Cell: func(class *schedulingv1.PriorityClass) any { return int64(class.Value) }},
			{Name: "Global-Default", Type: "boolean", Description: schedulingv1.PriorityClass{}.SwaggerDoc()["globalDefault"],
				Cell: func(class *schedulingv1.PriorityClass) any { return class.GlobalDefault }},
			registry.Age[schedulingv1.PriorityClass](),
			{Name: "PreemptionPolicy", Description: schedulingv1.PriorityClass{}.SwaggerDoc()["preemptionPolicy"],
				Cell: func(class *schedulingv1.PriorityClass) any {
					if class.PreemptionPolicy == nil {
						return ""
					}
					return string(*class.PreemptionPolicy)
				}},
		},
	}
}

func validateCreate(_ context.Context, class *schedulingv1.PriorityClass) field.ErrorList {
	errs := rules.Finalizers(class)
	switch {
	case strings.HasPrefix(class.Name, systemPrefix):
		known := systemClass(class.Name)
		if known == nil || known.Value != class.Value || known.GlobalDefault != class.GlobalDefault {
			errs = append(errs, field.Forbidden(field.NewPath("metadata", "name"), "names that begin with "+systemPrefix+" are the system's"))
		}
	case class.Value > highestOfUsers:
		errs = append(errs, field.Forbidden(field.NewPath("value"), fmt.Sprintf("must not be more than %d", highestOfUsers)))
	}
	if policy := class.PreemptionPolicy; policy != nil {
		errs = append(errs, rules.RequiredOneOf(field.NewPath("preemptionPolicy"), *policy, corev1.PreemptLowerPriority, corev1.PreemptNever)...)
	}
	return errs
}

func validateUpdate(_ context.Context, class, old *schedulingv1.PriorityClass) field.ErrorList {
	errs := rules.MetaUpdate(class, old)
	if class.Value != old.Value {
		errs = append(errs, field.Forbidden(field.NewPath("value"), "cannot be changed: make another class"))
	}
	return append(errs, workload.Immutable(field.NewPath("preemptionPolicy"), class.PreemptionPolicy, old.PreemptionPolicy)...)
}
