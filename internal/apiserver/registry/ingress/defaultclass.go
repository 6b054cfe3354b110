package ingress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/client-go/informers"
	listers "k8s.io/client-go/listers/networking/v1"

	"portal/internal/apiserver/registry/ingressclass"
)

// DefaultClass is the admission plugin that gives a new Ingress without a class the IngressClass that is marked as
// the default, if there is one.
type DefaultClass struct {
	*admission.Handler
	classes listers.IngressClassLister
}

var (
	_ admission.MutationInterface                  = &DefaultClass{}
	_ admission.InitializationValidator            = &DefaultClass{}
	_ initializer.WantsExternalKubeInformerFactory = &DefaultClass{}
)

// NewDefaultClass makes the plugin; its informer factory comes through the admission initializers.
func NewDefaultClass() *DefaultClass {
	return &DefaultClass{Handler: admission.NewHandler(admission.Create)}
}

// SetExternalKubeInformerFactory takes the classes from the shared informers.
func (d *DefaultClass) SetExternalKubeInformerFactory(f informers.SharedInformerFactory) {
	informer := f.Networking().V1().IngressClasses()
	d.classes = informer.Lister()
	d.SetReadyFunc(informer.Informer().HasSynced)
}

// ValidateInitialization says whether the plugin got its informers.
func (d *DefaultClass) ValidateInitialization() error {
	if d.classes == nil {
		return errors.New("the default IngressClass cannot be looked up: no informers were given")
	}
	return nil
}

// Admit sets the class of an Ingress that names none, in the field or by annotation.
func (d *DefaultClass) Admit(_ context.Context, attr admission.Attributes, _ admission.ObjectInterfaces) error {
	if attr.GetResource().GroupResource() != networkingv1.Resource("ingresses") || attr.GetSubresource() != "" {
		return nil
	}
	ing, ok := attr.GetObject().(*networkingv1.Ingress)
	if !ok {
		return fmt.Errorf("a %T was sent as an Ingress", attr.GetObject())
	}
	if _, annotated := ing.Annotations[classAnnotation]; annotated || ing.Spec.IngressClassName != nil {
		return nil
	}
	if !d.WaitForReady() {
		return admission.NewForbidden(attr, errors.New("IngressClasses are not known yet; try again"))
	}
	classes, err := d.classes.List(labels.Everything())
	if err != nil {
		return admission.NewForbidden(attr, err)
	}
	if c := newestDefault(classes); c != nil {
		ing.Spec.IngressClassName = new(c.Name)
	}
	return nil
}

// newestDefault chooses the youngest of several defaults, so that a new one takes over at once.
func newestDefault(classes []*networkingv1.IngressClass) *networkingv1.IngressClass {
	defaults := slices.DeleteFunc(slices.Clone(classes), func(c *networkingv1.IngressClass) bool { return !ingressclass.IsDefault(c) })
	if len(defaults) == 0 {
		return nil
	}
	return slices.MinFunc(defaults, func(a, b *networkingv1.IngressClass) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}
