package runtimeclass

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Admission gives new Pods what their runtime class asks for.
type Admission struct {
	*admission.Handler
	// Classes reads classes where the API keeps them.
	Classes rest.Getter
}

var (
	_ admission.MutationInterface   = &Admission{}
	_ admission.ValidationInterface = &Admission{}
)

// NewAdmission makes the plugin. Classes must be set before it is used.
func NewAdmission() *Admission { return &Admission{Handler: admission.NewHandler(admission.Create)} }

// Admit adds overhead, node selector and tolerations.
func (p *Admission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, class, err := p.look(ctx, a)
	if err != nil || class == nil {
		return err
	}
	if class.Overhead != nil {
		if len(pod.Spec.Overhead) > 0 && !equality.Semantic.DeepEqual(pod.Spec.Overhead, class.Overhead.PodFixed) {
			return differs(a, class)
		}
		pod.Spec.Overhead = class.Overhead.PodFixed.DeepCopy()
	}
	if class.Scheduling == nil {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(class.Scheduling.NodeSelector)) {
		value := class.Scheduling.NodeSelector[key]
		if own, set := pod.Spec.NodeSelector[key]; set && own != value {
			return admission.NewForbidden(a, fmt.Errorf("spec.nodeSelector[%s] is %s, but RuntimeClass %s wants %s", key, own, class.Name, value))
		}
		if pod.Spec.NodeSelector == nil {
			pod.Spec.NodeSelector = map[string]string{}
		}
		pod.Spec.NodeSelector[key] = value
	}
	pod.Spec.Tolerations = merge(pod.Spec.Tolerations, class.Scheduling.Tolerations)
	return nil
}

// Validate judges what other plugins may have changed since.
func (p *Admission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, class, err := p.look(ctx, a)
	switch {
	case err != nil || pod == nil:
		return err
	case class == nil || class.Overhead == nil:
		if len(pod.Spec.Overhead) > 0 {
			return admission.NewForbidden(a, errors.New("spec.overhead follows from the RuntimeClass, which says none: leave it out"))
		}
	case !equality.Semantic.DeepEqual(pod.Spec.Overhead, class.Overhead.PodFixed):
		return differs(a, class)
	}
	return nil
}

func differs(a admission.Attributes, class *nodev1.RuntimeClass) error {
	return admission.NewForbidden(a, fmt.Errorf("spec.overhead is not that of RuntimeClass %s: leave it out", class.Name))
}

// look finds the Pod of a request and its class; without a class nil.
func (p *Admission) look(ctx context.Context, a admission.Attributes) (*corev1.Pod, *nodev1.RuntimeClass, error) {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" {
		return nil, nil, nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("a %T was sent as a Pod", a.GetObject()))
	}
	if pod.Spec.RuntimeClassName == nil {
		return pod, nil, nil
	}
	name := *pod.Spec.RuntimeClassName
	obj, err := p.Classes.Get(ctx, name, &metav1.GetOptions{ResourceVersion: "0"})
	if apierrors.IsNotFound(err) { // the cache may be a moment behind
		obj, err = p.Classes.Get(ctx, name, &metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil, nil, admission.NewForbidden(a, fmt.Errorf("spec.runtimeClassName: there is no RuntimeClass %q", name))
	}
	if err != nil {
		return nil, nil, err
	}
	return pod, obj.(*nodev1.RuntimeClass), nil
}

// merge puts two lists together without what another toleration already covers.
func merge(first, second []corev1.Toleration) []corev1.Toleration {
	all := slices.Concat(first, second)
	var out []corev1.Toleration
	for i, t := range all {
		covered := func(other corev1.Toleration) bool { return covers(other, t) }
		// Of two equal ones the first stays.
		later := func(other corev1.Toleration) bool { return covers(other, t) && !equality.Semantic.DeepEqual(other, t) }
		if !slices.ContainsFunc(out, covered) && !slices.ContainsFunc(all[i+1:], later) {
			out = append(out, t)
		}
	}
	return out
}

// covers says whether whatever b tolerates, a does, and as long.
func covers(a, b corev1.Toleration) bool {
	if equality.Semantic.DeepEqual(a, b) {
		return true
	}
	exists := a.Operator == corev1.TolerationOpExists
	switch {
	case a.Key != b.Key && (a.Key != "" || !exists),
		a.Effect != "" && a.Effect != b.Effect,
		a.TolerationSeconds != nil && (b.TolerationSeconds == nil || *a.TolerationSeconds < *b.TolerationSeconds):
		return false
	}
	return exists || b.Operator != corev1.TolerationOpExists && a.Value == b.Value
}
