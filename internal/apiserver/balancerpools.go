package apiserver

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/lb/pool"
)

// poolGuard refuses pools of load balancers with addresses of the ranges of Services or of Nodes' Pods. Pools are the balancers' own matter otherwise:
// other mistakes are for them to report.
type poolGuard struct {
	*admission.Handler
	ranges func() []netip.Prefix // of Services
	nodes  rest.Lister
}

var _ admission.ValidationInterface = &poolGuard{}

// Validate looks at the one ConfigMap that has pools, if they have changed.
func (g *poolGuard) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("configmaps") || a.GetNamespace() != metav1.NamespaceSystem {
		return nil
	}
	object, ok := a.GetObject().(*corev1.ConfigMap)
	if !ok || object.Name != pool.ConfigMap {
		return nil
	}
	text := object.Data[pool.ConfigMapKey]
	if old, ok := a.GetOldObject().(*corev1.ConfigMap); ok && old.Data[pool.ConfigMapKey] == text {
		return nil
	}
	pools, err := pool.ParseYAML("", []byte(text))
	if err != nil {
		return nil
	}
	reserved, err := g.reserved(ctx)
	if err != nil {
		return err
	}
	if err := pool.Apart(pools, reserved); err != nil {
		return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("ConfigMap").GroupKind(), object.Name, field.ErrorList{
			field.Forbidden(field.NewPath("data").Key(pool.ConfigMapKey), err.Error()),
		})
	}
	return nil
}

// reserved are the ranges of Services and of Nodes' Pods.
func (g *poolGuard) reserved(ctx context.Context) (out []pool.Reserved, err error) {
	for _, p := range g.ranges() {
		out = append(out, pool.Reserved{Prefix: p, What: "the Service range"})
	}
	nodes, err := g.nodes.List(genericrequest.WithNamespace(ctx, metav1.NamespaceNone), &metainternalversion.ListOptions{})
	if err != nil {
		return nil, err
	}
	err = meta.EachListItem(nodes, func(object runtime.Object) error {
		if node, ok := object.(*corev1.Node); ok {
			for _, text := range node.Spec.PodCIDRs {
				if p, err := netip.ParsePrefix(text); err == nil {
					out = append(out, pool.Reserved{Prefix: p.Masked(), What: "the Pod range of Node " + node.Name})
				}
			}
		}
		return nil
	})
	return out, err
}
