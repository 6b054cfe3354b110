package explain

import (
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"portal/internal/nodereport"
	"portal/internal/proxy"
)

// unready makes a Pod not ready for five minutes.
func unready(w *world, p *corev1.Pod) {
	p.Status.Conditions[0].Status = corev1.ConditionFalse
	p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-5 * time.Minute))
	for i := range w.Slices {
		for j := range w.Slices[i].Endpoints {
			if e := &w.Slices[i].Endpoints[j]; e.TargetRef != nil && e.TargetRef.Name == p.Name {
				e.Conditions.Ready = ptr.To(false)
			}
		}
	}
}

func bothUnready(w *world) (*corev1.Pod, *corev1.Pod) {
	_, a, b := w.web()
	unready(w, a)
	unready(w, b)
	return a, b
}

func probe(p *corev1.Pod, port int32) {
	p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(port)}}}
}

func (w *world) listening(p *corev1.Pod, sockets ...nodereport.Socket) {
	w.Reports[p.Spec.NodeName].Listening[string(p.UID)] = sockets
}

func (w *world) deployment(name string, labels map[string]string, replicas int32) *appsv1.Deployment {
	w.Deployments = append(w.Deployments, appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec:       appsv1.DeploymentSpec{Replicas: &replicas, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}}},
	})
	return &w.Deployments[len(w.Deployments)-1]
}

// owned makes the Pods those of the Deployment web.
func (w *world) owned(pods ...*corev1.Pod) {
	w.deployment("web", map[string]string{"app": "web"}, 2)
	w.ReplicaSets = append(w.ReplicaSets, appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: "web-5f", OwnerReferences: []metav1.OwnerReference{{Kind: "Deployment", Name: "web", Controller: ptr.To(true)}},
	}})
	for _, p := range pods {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web-5f", Controller: ptr.To(true)}}
	}
}

func (w *world) event(kind, name, reason, message string) {
	w.Events = append(w.Events, corev1.Event{
		InvolvedObject: corev1.ObjectReference{Kind: kind, Namespace: "shop", Name: name}, Reason: reason, Message: message, Type: corev1.EventTypeWarning, LastTimestamp: metav1.NewTime(now),
	})
}

func (w *world) noEndpoints(s *corev1.Service) {
	for i := range w.Slices {
		if w.Slices[i].Labels[discoveryv1.LabelServiceName] == s.Name {
			w.Slices[i].Endpoints = nil
		}
	}
}

// select gives web another selector, with the empty slice that the controller writes.
func (w *world) selecting(selector map[string]string) {
	s, _, _ := w.web()
	s.Spec.Selector = selector
	w.noEndpoints(s)
}

// ingress adds the Service web and an Ingress.
func (w *world) ingress(service string, port int32) *networkingv1.Ingress {
	w.web()
	w.IngressClasses = []networkingv1.IngressClass{{ObjectMeta: metav1.ObjectMeta{Name: "portal"}}}
	w.Ingresses = append(w.Ingresses, networkingv1.Ingress{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "in", CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))},
		Spec: networkingv1.IngressSpec{IngressClassName: ptr.To("portal"), DefaultBackend: &networkingv1.IngressBackend{
			Service: &networkingv1.IngressServiceBackend{Name: service, Port: networkingv1.ServiceBackendPort{Number: port}},
		}},
	})
	return &w.Ingresses[len(w.Ingresses)-1]
}

// dials are what every node got when it connected to the Service that was made last, whose endpoints the first node's proxy knows.
func (w *world) dials(all ...nodereport.Dial) {
	for _, r := range w.Reports {
		r.Dials = slices.Clone(all)
		f := &r.Proxy.Frontends[len(r.Proxy.Frontends)-1]
		f.Routes = []proxy.RouteState{{From: []string{"node"}, Pool: ptr.To(len(r.Proxy.Pools))}}
		var pool proxy.PoolState
		for _, d := range all {
			if !d.Frontend {
				pool.Endpoints = append(pool.Endpoints, d.To)
			}
		}
		r.Proxy.Pools = append(r.Proxy.Pools, pool)
	}
}
