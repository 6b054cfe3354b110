// Package publish writes the Service kube-dns: it creates one, and repairs one without addresses. When that is due is up to its callers.
package publish

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"portal/internal/clusterdns"
)

// Services is what Service needs of a client.
type Services interface {
	Create(context.Context, *corev1.Service, metav1.CreateOptions) (*corev1.Service, error)
	Update(context.Context, *corev1.Service, metav1.UpdateOptions) (*corev1.Service, error)
}

// Service creates kube-dns if current is nil, and repairs it if it lost its addresses. It gets the first of the choices of cluster IPs
// that no other Service has; an empty choice is for any.
func Service(ctx context.Context, services Services, current *corev1.Service, choices ...[]netip.Addr) (*corev1.Service, error) {
	log := klog.FromContext(ctx)
	if current == nil {
		svc, err := first(choices, func(addrs []netip.Addr) (*corev1.Service, error) {
			return services.Create(ctx, clusterdns.Service(addrs), metav1.CreateOptions{})
		})
		if err == nil {
			log.Info("kube-dns created", "clusterIPs", svc.Spec.ClusterIPs)
		}
		return svc, err
	}
	if !clusterdns.LostAddresses(current) {
		return current, nil
	}
	before := current
	if current.Spec.Type != corev1.ServiceTypeExternalName {
		// A headless Service gets no cluster IP by an update, but an ExternalName does.
		var err error
		if current, err = services.Update(ctx, clusterdns.ToExternalName(current), metav1.UpdateOptions{}); err != nil {
			return nil, err
		}
	}
	svc, err := first(choices, func(addrs []netip.Addr) (*corev1.Service, error) {
		return services.Update(ctx, clusterdns.Repaired(current, addrs), metav1.UpdateOptions{})
	})
	if err == nil {
		log.Info("kube-dns had no cluster IPs, repaired", "clusterIPs", svc.Spec.ClusterIPs,
			"type", before.Spec.Type, "clusterIP", before.Spec.ClusterIP, "externalName", before.Spec.ExternalName)
	}
	return svc, err
}

// first is the first choice that is not invalid, as one is if another Service has the address.
func first(choices [][]netip.Addr, write func([]netip.Addr) (*corev1.Service, error)) (svc *corev1.Service, err error) {
	for _, addrs := range choices {
		if svc, err = write(addrs); !apierrors.IsInvalid(err) {
			return svc, err
		}
	}
	return svc, err
}
