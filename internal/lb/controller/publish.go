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
	// Unsupported: annotations ask for what this version can't do.
	Unsupported = "LoadBalancerFeatureUnsupported"
)

// publish brings a Service's status to what it is to have, and says so.
func (c *Controller) publish(ctx context.Context, w *wish) error {
	svc := w.svc
	finalizer := slices.Contains(svc.Finalizers, Finalizer)
	if !finalizer {
		c.say(svc, corev1.EventTypeNormal, Ensuring, "choosing an address")
	}
	// Who has no address leaves nothing to clean up, and nobody would know whose finalizer it is.
	wanted := len(w.addresses) > 0
	for _, p := range w.problems {
		c.say(svc, corev1.EventTypeWarning, p.Reason, p.Message)
	}
	if why := w.balancer.Proxying(); len(why) > 0 {
		c.say(svc, corev1.EventTypeWarning, Unsupported, "packets are passed on unchanged: this version has no "+strings.Join(why, ", "))
	}
	if w.refusal == nil && len(w.notes) > 0 {
		c.say(svc, corev1.EventTypeWarning, AddressIgnored, strings.Join(w.notes, "; "))
	}
	if finalizer != wanted || !slices.Equal(published(svc), w.addresses) || !vip(svc) {
		if err := c.patch(ctx, svc, w.addresses, wanted); err != nil {
			return err
		}
		if w.refusal == nil {
			delete(c.said[string(svc.UID)], Ensured)
			c.say(svc, corev1.EventTypeNormal, Ensured, "the Service's address is "+addressText(w.addresses))
			c.Log.Info("address assigned", "service", svc.Namespace+"/"+svc.Name, "addresses", addressText(w.addresses))
		}
	}
	if w.refusal != nil {
		c.say(svc, corev1.EventTypeWarning, Failed, w.refusal.Message)
	} else {
		delete(c.said[string(svc.UID)], Failed)
	}
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
		return nil
	}
	c.say(svc, corev1.EventTypeNormal, Deleting, "releasing "+addressText(own))
	others := slices.DeleteFunc(published(svc), func(a netip.Addr) bool { return c.Ours(svc) || slices.Contains(own, a) })
	if err := c.patch(ctx, svc, others, false); err != nil {
		return err
	}
	c.say(svc, corev1.EventTypeNormal, Deleted, "released "+addressText(own))
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

// say records an Event, unless it was the last of its reason and subject for this Service.
func (c *Controller) say(svc *corev1.Service, kind, reason, message string) {
	uid := string(svc.UID)
	if c.said[uid] == nil {
		c.said[uid] = map[string]string{}
	}
	// Several problems of a Service may have one reason.
	key := reason
	if kind == corev1.EventTypeWarning && reason != Failed {
		key += message
	}
	if c.said[uid][key] == message {
		return
	}
	c.said[uid][key] = message
	c.Events.Event(svc, kind, reason, message)
}
