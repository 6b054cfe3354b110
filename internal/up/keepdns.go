package up

import (
	"context"
	"net/netip"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"portal/internal/clusterdns"
	"portal/internal/ensure"
)

// KeepDNS creates kube-dns again, with the cluster IPs at which the DNS server listens, when somebody deletes it or takes its addresses
// away, and its endpoints if there are any. It returns when ctx ends.
func KeepDNS(ctx context.Context, client kubernetes.Interface, virtual, endpoints []netip.Addr) {
	failing := map[string]bool{}
	report := func(name string, err error) {
		if err != nil && !failing[name] {
			klog.ErrorS(err, "system object could not be reconciled, retrying", "object", name)
		}
		failing[name] = err != nil
	}
	services := client.CoreV1().Services(metav1.NamespaceSystem)
	objects := []ensure.Object{{
		Name: "service kube-system/" + clusterdns.ServiceName,
		Ensure: func(ctx context.Context) error {
			_, err := ensureService(ctx, client, virtual)
			return ignoreExists(err)
		},
		Watch: func(ctx context.Context) (watch.Interface, error) {
			return services.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + clusterdns.ServiceName})
		},
	}}
	if len(endpoints) > 0 {
		objects = append(objects, ensure.Object{
			Name:   "endpointslices of kube-system/" + clusterdns.ServiceName,
			Ensure: func(ctx context.Context) error { return ignoreExists(DNSEndpoints(ctx, client, endpoints)) },
			Watch: func(ctx context.Context) (watch.Interface, error) {
				return client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem).Watch(ctx, metav1.ListOptions{
					LabelSelector: discoveryv1.LabelServiceName + "=" + clusterdns.ServiceName,
				})
			},
		})
	}
	ensure.New(report, objects...).Run(ctx)
}

func ignoreExists(err error) error {
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
