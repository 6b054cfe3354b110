package csr

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"portal/internal/controllers/queue"
	"portal/internal/csr"
)

// approveServing approves a certificate that a node serves with, if the node itself asks and all names and addresses in it are its own. One
// that had an API server's address could pass for it. What is not approved here waits for a person.
func (c *Controller) approveServing(ctx context.Context, r *signingRequest) (queue.Result, error) {
	request, err := csr.Parse(r.Spec.Request)
	if err != nil || csr.NodeServing(request, r.Spec.Usages) != nil || c.Nodes == nil {
		return queue.Result{}, nil
	}
	name, isNode := strings.CutPrefix(r.Spec.Username, csr.NodeUserPrefix)
	if !isNode || !slices.Contains(r.Spec.Groups, csr.NodeGroup) {
		return queue.Result{}, nil
	}
	var own []string
	others := map[string]bool{}
	for _, obj := range c.Nodes.GetStore().List() {
		node := obj.(*corev1.Node)
		for _, a := range node.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil {
				a.Address = ip.Unmap().String() // however it is written
			}
			if node.Name == name {
				own = append(own, a.Address)
			} else {
				others[a.Address] = true
			}
		}
	}
	for _, host := range c.servers() {
		others[host] = true
	}
	why := csr.ServingFor(request, name, own, func(host string) bool { return others[host] })
	if why == nil {
		klog.FromContext(ctx).Info("certificate request approved", "request", r.Name, "subject", request.Subject.CommonName, "requestor", r.Spec.Username)
		return c.decide(ctx, r, certificatesv1.CertificateApproved, "AutoApproved", fmt.Sprintf("%s asks for itself, with its own names and addresses", r.Spec.Username))
	}
	// The Node's addresses may be written a little later than it asks.
	age := c.age(r.CreationTimestamp.Time)
	if age < time.Minute {
		return queue.Result{Again: time.Second}, nil
	}
	klog.FromContext(ctx).Info("certificate request waits for a person", "request", r.Name, "requestor", r.Spec.Username, "why", why.Error())
	return queue.Result{Again: min(max(age/2, time.Minute), 10*time.Minute)}, nil
}

// servers are the names and addresses of API servers.
func (c *Controller) servers() (out []string) {
	if c.ServerHosts != nil {
		out = c.ServerHosts()
	}
	if c.Endpoints == nil {
		return out
	}
	obj, ok, _ := c.Endpoints.GetStore().GetByKey(metav1.NamespaceDefault + "/kubernetes")
	if !ok {
		return out
	}
	for _, subset := range obj.(*corev1.Endpoints).Subsets {
		for _, a := range slices.Concat(subset.Addresses, subset.NotReadyAddresses) {
			out = append(out, a.IP)
		}
	}
	return out
}
