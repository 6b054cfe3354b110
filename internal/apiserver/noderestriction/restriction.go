// Package noderestriction narrows what nodes may write to what is theirs, by looking at the objects: their Node without the labels
// and taints that attract workloads, their Lease, mirror Pods and status of their Pods, tokens of these, certificates in their
// own name, what their parts report. It does the same for the balancers, proxies and DNS servers of machines. Whether a node may send such a request at all is decided in portal/internal/apiserver/authz/nodes.
package noderestriction

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/authz/nodes"
	"portal/internal/csr"
	"portal/internal/identity"
)

// Restriction is the admission plugin. Pods, Nodes and ServiceAccounts are read where the API itself keeps them.
type Restriction struct {
	*admission.Handler
	Pods       Pods
	Nodes      Nodes
	Accounts   rest.Getter
	Authorizer authorizer.UnconditionalAuthorizer
}

// Pods is where Pods are read.
type Pods interface {
	rest.Getter
	nodes.Source
}

// Nodes is where Nodes are read.
type Nodes interface {
	rest.Getter
	rest.Lister
}

var _ admission.MutationInterface = &Restriction{}

// New makes the plugin. The getters are set when their storage is there.
func New(z authorizer.UnconditionalAuthorizer) *Restriction {
	return &Restriction{Handler: admission.NewHandler(admission.Create, admission.Update, admission.Delete), Authorizer: z}
}

// judge says why a node may not write something.
type judge func(*Restriction, context.Context, string, admission.Attributes) error

var judges = map[schema.GroupResource]judge{
	corev1.Resource("nodes"):                                                  (*Restriction).node,
	corev1.Resource("pods"):                                                   (*Restriction).pod,
	corev1.Resource("serviceaccounts"):                                        (*Restriction).token,
	{Group: coordinationv1.GroupName, Resource: "leases"}:                     (*Restriction).lease,
	{Group: storagev1.GroupName, Resource: "csinodes"}:                        (*Restriction).csiNode,
	{Group: certificatesv1.GroupName, Resource: "certificatesigningrequests"}: (*Restriction).certificate,
	{Group: certificatesv1.GroupName, Resource: "podcertificaterequests"}:     (*Restriction).podCertificate,
	nodeReports: (*Restriction).report,
}

// Admit changes nothing: it runs among those that do so that a node learns first that an object is none of its business.
func (r *Restriction) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if err := balancer(a); err != nil {
		return err
	}
	if err := part(a); err != nil {
		return err
	}
	node, ok := nodes.Identify(a.GetUserInfo())
	if !ok {
		return nil
	}
	if node == "" {
		return forbid(a, "the user name %q does not say which node this is", a.GetUserInfo().GetName())
	}
	if f := judges[a.GetResource().GroupResource()]; f != nil {
		return f(r, ctx, node, a)
	}
	return nil
}

func forbid(a admission.Attributes, format string, args ...any) error {
	return admission.NewForbidden(a, fmt.Errorf(format, args...))
}

// nameOf is the name of the object that is written, also if it has none yet.
func nameOf(a admission.Attributes) string {
	if a.GetOperation() == admission.Create && a.GetSubresource() == "" {
		if object, err := meta.Accessor(a.GetObject()); err == nil {
			return object.GetName()
		}
	}
	return a.GetName()
}

func (r *Restriction) node(ctx context.Context, name string, a admission.Attributes) error {
	if nameOf(a) != name {
		return forbid(a, "a node writes its own Node only")
	}
	if a.GetOperation() == admission.Delete {
		return nil
	}
	node, ok := a.GetObject().(*corev1.Node)
	if !ok {
		return forbid(a, "a Node is expected, not %T", a.GetObject())
	}
	old := &corev1.Node{}
	if a.GetOperation() == admission.Update {
		if old, ok = a.GetOldObject().(*corev1.Node); !ok {
			return forbid(a, "a Node is expected, not %T", a.GetOldObject())
		}
		if v := node.ResourceVersion; v != "" && old.ResourceVersion != "" && v != old.ResourceVersion {
			// What differs may be somebody else's change. The node has to look again.
			return apierrors.NewConflict(a.GetResource().GroupResource(), node.Name, errors.New("the Node has changed: read it again"))
		}
		if !equality.Semantic.DeepEqual(node.Spec.Taints, old.Spec.Taints) {
			return forbid(a, "spec.taints: a node does not change its taints")
		}
		if !equality.Semantic.DeepEqual(node.OwnerReferences, old.OwnerReferences) {
			return forbid(a, "metadata.ownerReferences: a node does not change its owners")
		}
	}
	if node.Spec.ConfigSource != nil && !equality.Semantic.DeepEqual(node.Spec.ConfigSource, old.Spec.ConfigSource) {
		return forbid(a, "spec.configSource: a node does not say where its configuration comes from")
	}
	if refused := refusedLabels(node.Labels, old.Labels); len(refused) > 0 {
		return forbid(a, "metadata.labels: a node does not change %q", refused)
	}
	if a.GetSubresource() != "" || equality.Semantic.DeepEqual(node.Spec.PodCIDRs, old.Spec.PodCIDRs) {
		return nil
	}
	return r.podCIDRs(ctx, node, a)
}

// podCIDRs keeps a node from taking addresses that are another's: its Pods' packets would come here.
func (r *Restriction) podCIDRs(ctx context.Context, node *corev1.Node, a admission.Attributes) error {
	var own []netip.Prefix
	for _, text := range node.Spec.PodCIDRs {
		if prefix, err := netip.ParsePrefix(text); err == nil { // validation tells of those that are none
			own = append(own, prefix)
		}
	}
	if len(own) == 0 {
		return nil
	}
	list, err := r.Nodes.List(ctx, &metainternalversion.ListOptions{})
	if err != nil {
		return err
	}
	all, ok := list.(*corev1.NodeList)
	if !ok {
		return forbid(a, "Nodes are expected, not %T", list)
	}
	for i := range all.Items {
		other := &all.Items[i]
		if other.Name == node.Name {
			continue
		}
		for _, text := range other.Spec.PodCIDRs {
			theirs, err := netip.ParsePrefix(text)
			if err == nil && slices.ContainsFunc(own, theirs.Overlaps) {
				return forbid(a, "spec.podCIDRs: %s is another node's", text)
			}
		}
	}
	return nil
}

func (r *Restriction) lease(_ context.Context, node string, a admission.Attributes) error {
	if a.GetNamespace() != corev1.NamespaceNodeLease || nameOf(a) != node {
		return forbid(a, "a node writes the Lease of its own name in %s only", corev1.NamespaceNodeLease)
	}
	return nil
}

// csiNode lets a node say which drivers it has.
func (r *Restriction) csiNode(_ context.Context, node string, a admission.Attributes) error {
	if nameOf(a) != node || a.GetSubresource() != "" {
		return forbid(a, "a node writes the CSINode of its own name only, and not its status")
	}
	return nil
}

// certificate lets a node ask for a node's certificates in its own name, and for those of its machine's other parts. What else a
// request may hold, its signer decides.
func (r *Restriction) certificate(_ context.Context, node string, a admission.Attributes) error {
	asked, ok := a.GetObject().(*certificatesv1.CertificateSigningRequest)
	if a.GetOperation() != admission.Create || !ok {
		return nil
	}
	signer := asked.Spec.SignerName
	switch signer {
	case certificatesv1.KubeletServingSignerName, certificatesv1.KubeAPIServerClientKubeletSignerName, identity.Signer:
	default:
		return nil
	}
	parsed, err := csr.Parse(asked.Spec.Request)
	if parsed == nil {
		return forbid(a, "spec.request: %w", err)
	}
	if signer == identity.Signer {
		if _, machine, err := identity.Parse(parsed.Subject.CommonName, parsed.Subject.Organization); err != nil || machine != node {
			return forbid(a, "spec.request: the common name must be %s, %s or %s", identity.Proxy.User(node), identity.DNS.User(node), identity.LB.User(node))
		}
		return nil
	}
	if own := csr.NodeUserPrefix + node; parsed.Subject.CommonName != own {
		return forbid(a, "spec.request: the common name must be %s", own)
	}
	return nil
}

// token lets a node have tokens that are bound to its Pods, for the audiences that these ask for.
func (r *Restriction) token(ctx context.Context, node string, a admission.Attributes) error {
	if a.GetOperation() != admission.Create || a.GetSubresource() != "token" {
		return nil
	}
	asked, ok := a.GetObject().(*authenticationv1.TokenRequest)
	if !ok {
		return forbid(a, "a TokenRequest is expected, not %T", a.GetObject())
	}
	bound := asked.Spec.BoundObjectRef
	if bound == nil || bound.APIVersion != "v1" || bound.Kind != "Pod" || bound.Name == "" || bound.UID == "" {
		return forbid(a, "spec.boundObjectRef: must name a Pod with its uid")
	}
	pod, err := r.podOf(ctx, a, bound.Name)
	if err != nil {
		return err
	}
	if pod.UID != bound.UID {
		return forbid(a, "spec.boundObjectRef.uid: the Pod of this name has another uid")
	}
	if pod.Spec.NodeName != node {
		return forbid(a, "spec.boundObjectRef: the Pod is not on this node")
	}
	return r.audience(ctx, pod, asked.Spec.Audiences, a)
}

// audience allows what a volume of the Pod asks for, and else what the node has a permission for.
func (r *Restriction) audience(ctx context.Context, pod *corev1.Pod, audiences []string, a admission.Attributes) error {
	audience := ""
	switch len(audiences) {
	case 0:
	case 1:
		audience = audiences[0]
	default:
		return forbid(a, "spec.audiences: a node asks for one at a time")
	}
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, source := range v.Projected.Sources {
			if source.ServiceAccountToken != nil && source.ServiceAccountToken.Audience == audience {
				return nil
			}
		}
	}
	const verb = "request-serviceaccounts-token-audience"
	decision, _, _ := r.Authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: a.GetUserInfo(), Verb: verb, APIGroup: a.GetResource().Group, APIVersion: a.GetResource().Version, Resource: audience,
		Namespace: a.GetNamespace(), Name: a.GetName(), ResourceRequest: true,
	})
	if decision != authorizer.DecisionAllow {
		return forbid(a, "spec.audiences: no volume of the Pod asks for a token for %q, and the node lacks the verb %s on it", audience, verb)
	}
	return nil
}

// podOf reads a Pod of the request's namespace.
func (r *Restriction) podOf(ctx context.Context, a admission.Attributes, name string) (*corev1.Pod, error) {
	obj, err := r.Pods.Get(request.WithNamespace(ctx, a.GetNamespace()), name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, forbid(a, "a Pod is expected, not %T", obj)
	}
	return pod, nil
}
