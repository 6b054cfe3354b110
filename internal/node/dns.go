package node

import (
	"context"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/clusterdns"
)

// dnsPatience is how long the first Pods wait for the cluster's DNS.
const dnsPatience = 10 * time.Second

// serveDNS starts the node's DNS server at its own addresses among the Pods'. When it answers, the Node says so, which makes it an
// endpoint of kube-dns. It returns when kube-dns has an address, so that Pods are not started without a resolver, or after a while.
func (a *Agent) serveDNS(ctx context.Context) {
	if a.DNS == nil {
		return
	}
	if a.connections.bridge == nil {
		a.Log.Warn("this node serves no DNS: CNI plugins connect its Pods, and don't report which address of the node they reach", "node", a.Name)
		return
	}
	addrs := a.connections.bridge.Gateways()
	a.running.Go(func() {
		a.DNS(ctx, addrs, func(serving bool) {
			var now []netip.Addr
			if serving {
				now = addrs
			}
			a.announced.Store(&now)
			select {
			case a.nodeChanged <- struct{}{}:
			default:
			}
		})
	})
	if len(a.ClusterDNS) > 0 {
		return
	}
	for end := time.Now().Add(dnsPatience); len(a.clusterDNS()) == 0; {
		if time.Now().After(end) {
			a.Log.Warn("there is no Service kube-dns yet: Pods start with this machine's resolver", "node", a.Name, "waited", dnsPatience)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// clusterDNS are the addresses of the cluster's DNS: those that were given, or kube-dns'.
func (a *Agent) clusterDNS() []string {
	if len(a.ClusterDNS) > 0 {
		return a.ClusterDNS
	}
	obj, ok, _ := a.services.GetStore().GetByKey(metav1.NamespaceSystem + "/" + clusterdns.ServiceName)
	if !ok {
		return nil
	}
	var out []string
	for _, addr := range clusterdns.Addresses(obj.(*corev1.Service)) {
		out = append(out, addr.String())
	}
	return out
}

// announce has the Node say where it serves DNS, and reports whether that changed it. A node that doesn't serve says nothing.
func (a *Agent) announce(node *corev1.Node) bool {
	var addrs []netip.Addr
	if p := a.announced.Load(); p != nil {
		addrs = *p
	}
	want, have := clusterdns.Announcement(addrs), node.Annotations[clusterdns.Annotation]
	if want == have {
		return false
	}
	if want == "" {
		delete(node.Annotations, clusterdns.Annotation)
		return true
	}
	if node.Annotations == nil {
		node.Annotations = map[string]string{}
	}
	node.Annotations[clusterdns.Annotation] = want
	return true
}
