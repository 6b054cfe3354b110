package pod

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
)

// priorities are the priority classes that every cluster has; "" is the default one. No other classes, of priority or
// of runtimes, can be made here.
var priorities = map[string]int32{
	"":                        0,
	"system-cluster-critical": 2000000000,
	"system-node-critical":    2000001000,
}

// resolvePriority fills in the numbers behind a priority class.
func resolvePriority(spec *corev1.PodSpec) {
	if priority, known := priorities[spec.PriorityClassName]; known {
		orPoint(&spec.Priority, priority)
		orPoint(&spec.PreemptionPolicy, corev1.PreemptLowerPriority)
	}
}

// judgeClasses refuses classes that are not there, and numbers that differ from what the class says.
func judgeClasses(_ context.Context, obj runtime.Object, _ *metav1.CreateOptions) (genericregistry.FinishFunc, error) {
	pod := obj.(*corev1.Pod)
	spec := &pod.Spec
	resolvePriority(spec) // this hook comes before the object is prepared
	priority, known := priorities[spec.PriorityClassName]
	var wrong error
	switch {
	case !known:
		wrong = fmt.Errorf("there is no PriorityClass %q", spec.PriorityClassName)
	case *spec.Priority != priority:
		wrong = fmt.Errorf("spec.priority is %d, but follows from spec.priorityClassName, which says %d: leave it out", *spec.Priority, priority)
	case *spec.PreemptionPolicy != corev1.PreemptLowerPriority:
		wrong = fmt.Errorf("spec.preemptionPolicy is %s, but follows from spec.priorityClassName, which says %s: leave it out",
			*spec.PreemptionPolicy, corev1.PreemptLowerPriority)
	case spec.RuntimeClassName != nil:
		wrong = fmt.Errorf("there is no RuntimeClass %q", *spec.RuntimeClassName)
	case len(spec.Overhead) > 0:
		wrong = fmt.Errorf("spec.overhead follows from spec.runtimeClassName, and there is none: leave it out")
	default:
		return func(context.Context, bool) {}, nil
	}
	return nil, apierrors.NewForbidden(corev1.Resource("pods"), pod.Name, wrong)
}
