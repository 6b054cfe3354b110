package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/informers"

	"portal/internal/apiserver/noderestriction"
	"portal/internal/apiserver/registry/certificatesigningrequest"
	"portal/internal/apiserver/registry/clustertrustbundle"
	"portal/internal/apiserver/registry/ingress"
	"portal/internal/apiserver/registry/priorityclass"
	"portal/internal/apiserver/registry/runtimeclass"
	"portal/internal/apiserver/registry/service"
	"portal/internal/apiserver/registry/serviceaccount"
)

// immortalNamespaces can't be deleted: parts of the system live in them.
var immortalNamespaces = []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic}

// guards are what every write passes before it reaches its resource. Those that read get their readers when the
// resources are built.
type guards struct {
	namespaces *namespaceGuard
	nodes      *noderestriction.Restriction
	addresses  *addressGuard
	pools      *poolGuard
	priorities *priorityclass.Admission
	runtimes   *runtimeclass.Admission
}

func newGuards() *guards {
	return &guards{
		namespaces: &namespaceGuard{Handler: admission.NewHandler(admission.Create, admission.Update, admission.Delete)},
		addresses:  &addressGuard{Handler: admission.NewHandler(admission.Delete)},
		pools:      &poolGuard{Handler: admission.NewHandler(admission.Create, admission.Update)},
	}
}

// chain puts the guards in order.
func (g *guards) chain(factory informers.SharedInformerFactory, z authorizer.UnconditionalAuthorizer, opts *completed, read objects) (admission.Interface, error) {
	classes := ingress.NewDefaultClass()
	classes.SetExternalKubeInformerFactory(factory)
	if err := classes.ValidateInitialization(); err != nil {
		return nil, err
	}
	g.nodes = noderestriction.New(z)
	chain := []admission.Interface{g.namespaces}
	if opts.admission(serviceaccount.AdmissionName, opts.DefaultAccounts) {
		accounts := serviceaccount.NewAdmission()
		accounts.Get = read.get
		chain = append(chain, accounts)
	}
	g.priorities, g.runtimes = priorityclass.NewAdmission(factory), runtimeclass.NewAdmission()
	chain = append(chain, g.priorities, g.runtimes)
	// After what Pods get by default: a node is judged by what is stored.
	chain = append(chain, g.nodes, certificatesigningrequest.NewGuard(z), clustertrustbundle.NewGuard(z), classes, g.addresses, g.pools)
	if opts.DenyExternalIPs {
		chain = append(chain, externalIPs{admission.NewHandler(admission.Create, admission.Update)})
	}
	return admission.NewChainHandler(chain...), nil
}

// connect gives the guards that read a resource its storage.
func (g *guards) connect(version schema.GroupVersion, path string, storage rest.Storage) {
	switch {
	case version == schedulingv1.SchemeGroupVersion && path == "priorityclasses":
		g.priorities.Classes = storage.(rest.Getter)
	case version == nodev1.SchemeGroupVersion && path == "runtimeclasses":
		g.runtimes.Classes = storage.(rest.Getter)
	case version != corev1.SchemeGroupVersion:
		return
	}
	switch path {
	case "namespaces":
		g.namespaces.namespaces = storage.(rest.Getter)
	case "pods":
		g.nodes.Pods = storage.(noderestriction.Pods)
	case "nodes":
		g.nodes.Nodes, g.pools.nodes = storage.(noderestriction.Nodes), storage.(rest.Lister)
	case "serviceaccounts":
		g.nodes.Accounts = storage.(rest.Getter)
	case "services":
		g.addresses.services = storage.(rest.Getter)
	}
}

// namespaceGuard lets objects be written only into a namespace that exists, and created only in one that is not on its
// way out. It reads the namespace where the API itself keeps it, so that a namespace is there for the next request as
// soon as its creation was answered.
type namespaceGuard struct {
	*admission.Handler
	namespaces rest.Getter
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
	if apierrors.IsNotFound(err) { // the store names the resource of the request
		return nil, apierrors.NewNotFound(corev1.Resource("namespaces"), name)
	}
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Namespace), nil
}

// addressGuard keeps the claim on an address as long as a Service holds the address: without the claim another Service
// could get it too.
type addressGuard struct {
	*admission.Handler
	services rest.Getter
}

var _ admission.ValidationInterface = &addressGuard{}

// Validate runs with the object that is about to be deleted, of a collection too.
func (g *addressGuard) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	address, ok := a.GetOldObject().(*networkingv1.IPAddress)
	if !ok || address.Spec.ParentRef == nil || address.Spec.ParentRef.Group != "" || address.Spec.ParentRef.Resource != "services" {
		return nil
	}
	owner := address.Spec.ParentRef
	if owner.Namespace == "" {
		return nil // no Service is without a namespace
	}
	obj, err := g.services.Get(genericrequest.WithNamespace(ctx, owner.Namespace), owner.Name, &metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ip, err := netip.ParseAddr(address.Name)
	if err != nil || !slices.Contains(service.Claims(obj.(*corev1.Service)).Addresses, ip) {
		return nil
	}
	return apierrors.NewConflict(a.GetResource().GroupResource(), address.Name,
		fmt.Errorf("it is the claim of Service %s/%s on its cluster IP, and goes with it", owner.Namespace, owner.Name))
}

// isReview says that a request asks a question, which may be about a namespace that does not exist.
func isReview(a admission.Attributes) bool {
	group := a.GetResource().Group
	return group == authorizationv1.GroupName || group == authenticationv1.GroupName
}

// externalIPs forbids addresses in spec.externalIPs that were not there before: whoever may set them can draw any
// address' traffic to themselves (CVE-2020-8554).
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
