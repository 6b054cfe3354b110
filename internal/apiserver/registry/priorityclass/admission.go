package priorityclass

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/informers"
	listers "k8s.io/client-go/listers/scheduling/v1"
)

// Admission gives new Pods the numbers behind their priority class, and refuses a second default class.
type Admission struct {
	*admission.Handler
	// Classes reads the class that a Pod names where the API keeps it, so that a class counts as soon as it is created.
	Classes rest.Getter

	lister listers.PriorityClassLister
}

var (
	_ admission.MutationInterface   = &Admission{}
	_ admission.ValidationInterface = &Admission{}
)

// NewAdmission makes the plugin. Classes must be set before it is used.
func NewAdmission(factory informers.SharedInformerFactory) *Admission {
	informer := factory.Scheduling().V1().PriorityClasses()
	p := &Admission{Handler: admission.NewHandler(admission.Create, admission.Update), lister: informer.Lister()}
	p.SetReadyFunc(informer.Informer().HasSynced)
	return p
}

// Admit fills in priority and preemption policy.
func (p *Admission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" || a.GetOperation() != admission.Create {
		return nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("a %T was sent as a Pod", a.GetObject()))
	}
	class, err := p.classOf(ctx, a, pod)
	if err != nil {
		return err
	}
	spec := &pod.Spec
	if spec.Priority != nil && *spec.Priority != class.Value {
		return admission.NewForbidden(a, fmt.Errorf("spec.priority is %d, but follows from spec.priorityClassName, which says %d: leave it out",
			*spec.Priority, class.Value))
	}
	spec.PriorityClassName, spec.Priority = class.Name, &class.Value
	if class.PreemptionPolicy == nil {
		return nil
	}
	if spec.PreemptionPolicy != nil && *spec.PreemptionPolicy != *class.PreemptionPolicy {
		return admission.NewForbidden(a, fmt.Errorf("spec.preemptionPolicy is %s, but follows from spec.priorityClassName, which says %s: leave it out",
			*spec.PreemptionPolicy, *class.PreemptionPolicy))
	}
	spec.PreemptionPolicy = class.PreemptionPolicy
	return nil
}

// classOf is the class that a Pod names, or the default one, as a copy. A Pod without a class where none is the default has
// priority 0.
func (p *Admission) classOf(ctx context.Context, a admission.Attributes, pod *corev1.Pod) (*schedulingv1.PriorityClass, error) {
	name := pod.Spec.PriorityClassName
	if name == "" {
		class, err := p.defaultClass(a)
		if class != nil || err != nil {
			return class.DeepCopy(), err
		}
		lower := corev1.PreemptLowerPriority
		return &schedulingv1.PriorityClass{PreemptionPolicy: &lower}, nil
	}
	if class := systemClass(name); class != nil {
		return class, nil // while a server starts, it may not be stored yet
	}
	obj, err := p.Classes.Get(ctx, name, &metav1.GetOptions{ResourceVersion: "0"})
	if apierrors.IsNotFound(err) { // the cache may be a moment behind
		obj, err = p.Classes.Get(ctx, name, &metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil, admission.NewForbidden(a, fmt.Errorf("spec.priorityClassName: there is no PriorityClass %q", name))
	}
	if err != nil {
		return nil, err
	}
	return obj.(*schedulingv1.PriorityClass).DeepCopy(), nil
}

// defaultClass is the one for Pods that name none: the lowest, if there came to be several.
func (p *Admission) defaultClass(a admission.Attributes) (*schedulingv1.PriorityClass, error) {
	if !p.WaitForReady() {
		return nil, admission.NewForbidden(a, errors.New("PriorityClasses are not known yet; try again"))
	}
	all, err := p.lister.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(c *schedulingv1.PriorityClass) bool { return !c.GlobalDefault })
	if len(all) == 0 {
		return nil, nil
	}
	return slices.MinFunc(all, func(a, b *schedulingv1.PriorityClass) int {
		return cmp.Or(cmp.Compare(a.Value, b.Value), cmp.Compare(a.Name, b.Name))
	}), nil
}

// Validate refuses a second default class.
func (p *Admission) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != schedulingv1.Resource("priorityclasses") || a.GetSubresource() != "" {
		return nil
	}
	class, ok := a.GetObject().(*schedulingv1.PriorityClass)
	if !ok || !class.GlobalDefault {
		return nil
	}
	known, err := p.defaultClass(a)
	if err != nil {
		return err
	}
	if known != nil && (a.GetOperation() == admission.Create || known.Name != class.Name) {
		return admission.NewForbidden(a, fmt.Errorf("globalDefault: PriorityClass %s is the default already, and there can be one", known.Name))
	}
	return nil
}
