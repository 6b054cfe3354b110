package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Reasons of Events, beside those of the package spec. They are stable: docs/loadbalancer.md explains each.
const (
	Ensuring = "EnsuringLoadBalancer"
	Ensured  = "EnsuredLoadBalancer"
	Failed   = "CreatingLoadBalancerFailed"
	Deleting = "DeletingLoadBalancer"
	Deleted  = "DeletedLoadBalancer"
	// AddressIgnored: an address was asked for that can't be given; the Service has another.
	AddressIgnored = "LoadBalancerAddressIgnored"
	// Unsupported: annotations ask for what this process does not do.
	Unsupported = "LoadBalancerFeatureUnsupported"
)

// publish brings a Service's status to what it is to have, and says so.
func (c *Controller) publish(ctx context.Context, d *desired) error {
	svc := d.svc
	now := map[string]bool{}
	event := func(kind, reason, message string) {
		c.event(svc, kind, reason, message)
		now[reason+message] = true
	}
	finalizer := slices.Contains(svc.Finalizers, Finalizer)
	if !finalizer {
		event(corev1.EventTypeNormal, Ensuring, "choosing an address")
	}
	// Who has no address leaves nothing to clean up, and nobody would know whose finalizer it is.
	wanted := len(d.addresses) > 0
	for _, p := range d.problems {
		event(corev1.EventTypeWarning, p.Reason, p.Message)
	}
	if why := d.balancer.Proxying(); len(why) > 0 && !c.Proxying {
		event(corev1.EventTypeWarning, Unsupported, "packets are passed on unchanged: portal lb runs with --balancing off, without "+strings.Join(why, ", "))
	}
	if d.refusal == nil && len(d.notes) > 0 {
		event(corev1.EventTypeWarning, AddressIgnored, strings.Join(d.notes, "; "))
	}
	if finalizer != wanted || !slices.Equal(published(svc), d.addresses) || !vip(svc) {
		if err := c.patch(ctx, svc, d.addresses, wanted); err != nil {
			return err
		}
		if d.refusal == nil {
			c.Events.Event(svc, corev1.EventTypeNormal, Ensured, "the Service's address is "+addressText(d.addresses))
			c.Log.Info("address assigned", "service", svc.Namespace+"/"+svc.Name, "addresses", addressText(d.addresses))
		}
	}
	if d.refusal != nil {
		event(corev1.EventTypeWarning, Failed, d.refusal.Message)
	}
	c.recorded[string(svc.UID)] = now
	return nil
}

// vip says whether the status says of every address that packets come to nodes unchanged.
func vip(svc *corev1.Service) bool {
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IPMode == nil || *in.IPMode != corev1.LoadBalancerIPModeVIP || in.Hostname != "" {
			return false
		}
	}
	return true
}

// withdraw takes the address from a Service that is being deleted, or is no balancer's any more. It touches only what the claims, or the
// class, show to be this controller's.
func (c *Controller) withdraw(ctx context.Context, svc *corev1.Service) error {
	own := c.claims.Of(string(svc.UID))
	if len(own) == 0 && !c.Ours(svc) || !c.leftover(svc, own) {
		delete(c.recorded, string(svc.UID))
		return nil
	}
	c.event(svc, corev1.EventTypeNormal, Deleting, "releasing "+addressText(own))
	others := slices.DeleteFunc(published(svc), func(a netip.Addr) bool { return c.Ours(svc) || slices.Contains(own, a) })
	if err := c.patch(ctx, svc, others, false); err != nil {
		return err
	}
	c.event(svc, corev1.EventTypeNormal, Deleted, "released "+addressText(own))
	c.Log.Info("address released", "service", svc.Namespace+"/"+svc.Name, "addresses", addressText(own))
	return nil
}

// patch sets status and finalizer in one write, of this very state of the Service: who decided about another state decides again.
func (c *Controller) patch(ctx context.Context, svc *corev1.Service, addrs []netip.Addr, finalizer bool) error {
	meta := map[string]any{"uid": svc.UID, "resourceVersion": svc.ResourceVersion}
	if finalizer {
		meta["finalizers"] = []string{Finalizer}
	} else {
		meta["$deleteFromPrimitiveList/finalizers"] = []string{Finalizer}
	}
	ingress := []corev1.LoadBalancerIngress{}
	mode := corev1.LoadBalancerIPModeVIP
	for _, a := range addrs {
		ingress = append(ingress, corev1.LoadBalancerIngress{IP: a.String(), IPMode: &mode})
	}
	data, err := json.Marshal(map[string]any{"metadata": meta, "status": map[string]any{"loadBalancer": map[string]any{"ingress": ingress}}})
	if err != nil {
		return err
	}
	_, err = c.Client.CoreV1().Services(svc.Namespace).Patch(ctx, svc.Name, types.StrategicMergePatchType, data, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) {
		return nil // gone, as the informer will show
	}
	if err != nil {
		return fmt.Errorf("write the status of Service %s/%s: %w", svc.Namespace, svc.Name, err)
	}
	return nil
}

// event records an Event, unless the same was said about the Service and has held since.
func (c *Controller) event(svc *corev1.Service, kind, reason, message string) {
	said := c.recorded[string(svc.UID)]
	if said == nil {
		said = map[string]bool{}
		c.recorded[string(svc.UID)] = said
	}
	if !said[reason+message] {
		said[reason+message] = true
		c.Events.Event(svc, kind, reason, message)
	}
}
