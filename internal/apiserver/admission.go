package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/registry/rest"
)

// immortalNamespaces can't be deleted: parts of the system live in them.
var immortalNamespaces = []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic}

// newAdmission is what every write passes before it reaches its resource.
func newAdmission(namespaces *namespaceGuard, denyExternalIPs bool) admission.Interface {
	chain := []admission.Interface{namespaces}
	if denyExternalIPs {
		chain = append(chain, externalIPs{admission.NewHandler(admission.Create, admission.Update)})
	}
	return admission.NewChainHandler(chain...)
}

// namespaceGuard lets objects be written only into a namespace that exists, and created only in one that is not on its
// way out. It reads the namespace where the API itself keeps it, so that a namespace is there for the next request as
// soon as its creation was answered.
type namespaceGuard struct {
	*admission.Handler
	namespaces rest.Getter
}

func newNamespaceGuard() *namespaceGuard {
	return &namespaceGuard{Handler: admission.NewHandler(admission.Create, admission.Update, admission.Delete)}
}

var _ admission.MutationInterface = &namespaceGuard{}

// Admit runs before the object is looked at: a missing namespace is the better answer than a mistake in the object.
func (g *namespaceGuard) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	isNamespace := a.GetKind().GroupKind() == corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind()
	switch {
	case a.GetOperation() == admission.Delete:
		if isNamespace && slices.Contains(immortalNamespaces, a.GetName()) {
			return apierrors.NewForbidden(a.GetResource().GroupResource(), a.GetName(), errors.New("the system lives in it"))
		}
		return nil
	case isNamespace || a.GetNamespace() == "" || isReview(a):
		return nil
	}
	namespace, err := g.lookUp(ctx, a.GetNamespace())
	if err != nil {
		return err
	}
	if a.GetOperation() != admission.Create || namespace.Status.Phase != corev1.NamespaceTerminating {
		return nil
	}
	refusal := admission.NewForbidden(a, fmt.Errorf("namespace %s is being terminated", a.GetNamespace()))
	if status, ok := refusal.(*apierrors.StatusError); ok && status.ErrStatus.Details != nil {
		status.ErrStatus.Details.Causes = append(status.ErrStatus.Details.Causes, metav1.StatusCause{
			Type: corev1.NamespaceTerminatingCause, Message: status.ErrStatus.Message, Field: "metadata.namespace",
		})
	}
	return refusal
}

// lookUp reads a namespace from the cache, and from etcd if it is not there: the cache may be a moment behind.
func (g *namespaceGuard) lookUp(ctx context.Context, name string) (*corev1.Namespace, error) {
	obj, err := g.namespaces.Get(ctx, name, &metav1.GetOptions{ResourceVersion: "0"})
	if apierrors.IsNotFound(err) {
		obj, err = g.namespaces.Get(ctx, name, &metav1.GetOptions{})
	}
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Namespace), nil
}

// isReview says that a request asks a question, which may be about a namespace that does not exist.
func isReview(a admission.Attributes) bool {
	group := a.GetResource().Group
	return group == authorizationv1.GroupName || group == authenticationv1.GroupName
}

// externalIPs forbids addresses in spec.externalIPs that were not there before: whoever may set them can draw any
// address' traffic to himself (CVE-2020-8554).
type externalIPs struct{ *admission.Handler }

var _ admission.ValidationInterface = externalIPs{}

func (externalIPs) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("services") || a.GetSubresource() != "" {
		return nil
	}
	svc, ok := a.GetObject().(*corev1.Service)
	if !ok {
		return nil
	}
	var before []string
	if old, ok := a.GetOldObject().(*corev1.Service); ok {
		before = old.Spec.ExternalIPs
	}
	for _, ip := range svc.Spec.ExternalIPs {
		if !slices.Contains(before, ip) {
			return admission.NewForbidden(a, fmt.Errorf("spec.externalIPs: %s is new, and this server is set to allow no new ones", ip))
		}
	}
	return nil
}
