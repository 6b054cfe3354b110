package lb

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"portal/internal/lb/compile"
)

// publishIngresses has the entry made if there is an Ingress to serve, and writes its addresses into their status.
func (p *balancing) publishIngresses(ctx context.Context, served []*networkingv1.Ingress) error {
	entry, err := p.entry(ctx, len(served) > 0)
	if err != nil {
		return err
	}
	status := []networkingv1.IngressLoadBalancerIngress{}
	if entry != nil {
		for _, in := range entry.Status.LoadBalancer.Ingress {
			status = append(status, networkingv1.IngressLoadBalancerIngress{IP: in.IP, Hostname: in.Hostname})
		}
	}
	var errs []error
	for _, in := range objects[*networkingv1.Ingress](p.ingresses) {
		has := in.Status.LoadBalancer.Ingress
		switch {
		case slices.Contains(served, in):
			if !sameStatus(has, status) {
				errs = append(errs, p.patchIngress(ctx, in, status))
			}
		case len(has) > 0 && len(status) > 0 && sameStatus(has, status):
			errs = append(errs, p.patchIngress(ctx, in, []networkingv1.IngressLoadBalancerIngress{})) // it was ours, and has another class now
		}
	}
	return errors.Join(errs...)
}

func sameStatus(a, b []networkingv1.IngressLoadBalancerIngress) bool {
	return slices.EqualFunc(a, b, func(x, y networkingv1.IngressLoadBalancerIngress) bool {
		return x.IP == y.IP && x.Hostname == y.Hostname
	})
}

// entry is the Service whose addresses Ingresses share. It is made when there is something to serve, and stays: its address is in people's DNS.
func (p *balancing) entry(ctx context.Context, needed bool) (*corev1.Service, error) {
	object, found, err := p.services.GetByKey(p.Balancing.Entry)
	if err != nil {
		return nil, err
	}
	if svc, ok := object.(*corev1.Service); ok && found {
		return svc, nil
	}
	if !needed {
		return nil, nil
	}
	namespace, name, _ := strings.Cut(p.Balancing.Entry, "/")
	policy := corev1.IPFamilyPolicyPreferDualStack
	nodePorts := false
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilyPolicy: &policy, AllocateLoadBalancerNodePorts: &nodePorts,
			Ports: []corev1.ServicePort{{Name: "http", Port: compile.HTTPPort}, {Name: "https", Port: compile.HTTPSPort}},
		},
	}
	if p.Class != "" && !p.Unclassed {
		svc.Spec.LoadBalancerClass = &p.Class
	}
	_, err = p.client.CoreV1().Services(namespace).Create(ctx, svc, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create the Service %s, whose address Ingresses share: %w", p.Balancing.Entry, err)
	}
	return nil, nil // the informer will show it
}

func (p *balancing) patchIngress(ctx context.Context, in *networkingv1.Ingress, status []networkingv1.IngressLoadBalancerIngress) error {
	data, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": in.UID, "resourceVersion": in.ResourceVersion},
		"status":   map[string]any{"loadBalancer": map[string]any{"ingress": status}},
	})
	if err != nil {
		return err
	}
	_, err = p.client.NetworkingV1().Ingresses(in.Namespace).Patch(ctx, in.Name, types.MergePatchType, data, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // the informer will show it
	}
	if err != nil {
		return fmt.Errorf("write the status of Ingress %s/%s: %w", in.Namespace, in.Name, err)
	}
	return nil
}

// problemEvents are the problems that were recorded as Events, by object. What is said once is not said again while it lasts.
type problemEvents map[types.UID]map[string]bool

func (e problemEvents) record(to record.EventRecorder, problems []compile.Problem) {
	now := problemEvents{}
	for _, p := range problems {
		var object runtime.Object
		var uid types.UID
		if p.Service != nil {
			object, uid = p.Service, p.Service.UID
		} else {
			object, uid = p.Ingress, p.Ingress.UID
		}
		if now[uid] == nil {
			now[uid] = map[string]bool{}
		}
		key := p.Reason + ": " + p.Message
		if !e[uid][key] && !now[uid][key] {
			to.Event(object, corev1.EventTypeWarning, p.Reason, p.Message)
		}
		now[uid][key] = true
	}
	clear(e)
	for uid, said := range now {
		e[uid] = said
	}
}

// forget: somebody else leads, and says what there is to say.
func (e problemEvents) forget() { clear(e) }
