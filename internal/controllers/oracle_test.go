package controllers_test

import (
	"fmt"
	"slices"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"portal/internal/controllers/endpoints"
	"portal/internal/controllers/endpointslice"
	"portal/internal/controllers/mirror"
)

// facts are sets of sentences about endpoints, by the Service they are about.
type facts map[string]map[string]bool

func (f facts) add(service, sentence string) {
	if f[service] == nil {
		f[service] = map[string]bool{}
	}
	f[service][sentence] = true
}

// wrong compares what is in the namespace with what its Services, Pods and hand-made Endpoints say should be there,
// worked out in the plainest way. Empty: nothing is wrong.
func (w *world) wrong() string {
	services, err := w.client.CoreV1().Services(w.namespace).List(w.ctx(), metav1.ListOptions{})
	w.must(err)
	pods, err := w.client.CoreV1().Pods(w.namespace).List(w.ctx(), metav1.ListOptions{})
	w.must(err)
	objects, err := w.client.CoreV1().Endpoints(w.namespace).List(w.ctx(), metav1.ListOptions{})
	w.must(err)
	list, err := w.client.DiscoveryV1().EndpointSlices(w.namespace).List(w.ctx(), metav1.ListOptions{})
	w.must(err)
	nodes, err := w.client.CoreV1().Nodes().List(w.ctx(), metav1.ListOptions{})
	w.must(err)
	zones := map[string]string{}
	for _, n := range nodes.Items {
		zones[n.Name] = n.Labels[corev1.LabelTopologyZone]
	}
	wantSlices, wantEndpoints, byHand := facts{}, facts{}, map[string]bool{}
	for i := range services.Items {
		svc := &services.Items[i]
		if svc.Spec.Selector == nil {
			byHand[svc.Name] = true
			continue
		}
		wantEndpoints[svc.Name] = map[string]bool{}
		for j := range pods.Items {
			if pod := &pods.Items[j]; selects(svc, pod) {
				expectPod(svc, pod, zones, wantEndpoints, wantSlices)
			}
		}
	}
	gotEndpoints := facts{}
	for i := range objects.Items {
		e := &objects.Items[i]
		if byHand[e.Name] {
			mirrorFacts(e, wantSlices)
			continue
		}
		if _, has := wantEndpoints[e.Name]; !has && e.Labels[endpoints.LabelManagedBy] == "" {
			// Hand-made, without a Service: they may stay. They do if the Service came and went while no watch could
			// see it, and nobody can tell then that there ever was one.
			continue
		}
		gotEndpoints[e.Name] = map[string]bool{}
		endpointsFacts(e, gotEndpoints)
	}
	if diff := cmp.Diff(wantEndpoints, gotEndpoints); diff != "" {
		return "Endpoints (- wanted, + there):\n" + diff
	}
	got, problem := sliceFacts(list.Items, byHand)
	if problem != "" {
		return problem
	}
	if diff := cmp.Diff(wantSlices, got); diff != "" {
		return "EndpointSlices (- wanted, + there):\n" + diff
	}
	return ""
}

func selects(svc *corev1.Service, pod *corev1.Pod) bool {
	for k, v := range svc.Spec.Selector {
		if pod.Labels[k] != v {
			return false
		}
	}
	return true
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// expectPod says what a Pod should be in its Service's Endpoints and slices.
func expectPod(svc *corev1.Service, pod *corev1.Pod, zones map[string]string, wantEndpoints, wantSlices facts) {
	if pod.Status.PodIP == "" || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return
	}
	terminating, serving, all := pod.DeletionTimestamp != nil, isReady(pod), svc.Spec.PublishNotReadyAddresses
	var numbers []string
	for _, p := range svc.Spec.Ports {
		number := p.TargetPort.IntVal
		if p.TargetPort.Type == intstr.String {
			number = pod.Spec.Containers[0].Ports[0].ContainerPort
		}
		numbers = append(numbers, fmt.Sprintf("%s=%d", p.Name, number))
	}
	for i, family := range svc.Spec.IPFamilies {
		ip := pod.Status.PodIPs[0].IP
		if family == corev1.IPv6Protocol {
			ip = pod.Status.PodIPs[1].IP
		}
		if i == 0 && (all || !terminating) {
			for _, number := range numbers {
				wantEndpoints.add(svc.Name, fmt.Sprintf("%s %s %s ready=%t", pod.UID, ip, number, all || serving))
			}
		}
		wantSlices.add(svc.Name, fmt.Sprintf("%s %s %s ready=%t serving=%t terminating=%t node=%s zone=%s",
			pod.UID, ip, joinSorted(slices.Clone(numbers)), all || serving && !terminating, serving, terminating, pod.Spec.NodeName, zones[pod.Spec.NodeName]))
	}
}

func endpointsFacts(e *corev1.Endpoints, out facts) {
	if e.Labels[endpoints.LabelManagedBy] != endpoints.Name {
		out.add(e.Name, fmt.Sprintf("labels %v", e.Labels))
	}
	for _, s := range e.Subsets {
		for _, p := range s.Ports {
			for _, a := range s.Addresses {
				out.add(e.Name, fmt.Sprintf("%s %s %s=%d ready=true", uidOf(a.TargetRef), a.IP, p.Name, p.Port))
			}
			for _, a := range s.NotReadyAddresses {
				out.add(e.Name, fmt.Sprintf("%s %s %s=%d ready=false", uidOf(a.TargetRef), a.IP, p.Name, p.Port))
			}
		}
	}
}

func mirrorFacts(e *corev1.Endpoints, out facts) {
	for _, s := range e.Subsets {
		for _, p := range s.Ports {
			for _, a := range s.Addresses {
				out.add(e.Name, mirrored(a.IP, p.Name, p.Port, true, e.UID))
			}
			for _, a := range s.NotReadyAddresses {
				out.add(e.Name, mirrored(a.IP, p.Name, p.Port, false, e.UID))
			}
		}
	}
}

func mirrored(ip, port string, number int32, ready bool, of types.UID) string {
	return fmt.Sprintf("mirrored %s %s=%d ready=%t of %s", ip, port, number, ready, of)
}

func uidOf(ref *corev1.ObjectReference) types.UID {
	if ref == nil {
		return "nobody"
	}
	return ref.UID
}

// sliceFacts are what slices say; a problem is what slices must never be.
func sliceFacts(list []discoveryv1.EndpointSlice, byHand map[string]bool) (facts, string) {
	out := facts{}
	for i := range list {
		s := &list[i]
		service := s.Labels[discoveryv1.LabelServiceName]
		managed := s.Labels[discoveryv1.LabelManagedBy]
		if (managed == mirror.Name) != byHand[service] && !(managed == endpointslice.Name && byHand[service]) {
			return nil, fmt.Sprintf("slice %s of %s is %s's", s.Name, service, managed)
		}
		if managed == endpointslice.Name && byHand[service] {
			continue // from when the Service had a selector: nobody's any more, as in Kubernetes
		}
		if len(s.Endpoints) > 100 {
			return nil, fmt.Sprintf("slice %s has %d endpoints", s.Name, len(s.Endpoints))
		}
		for _, e := range s.Endpoints {
			for _, sentence := range sentences(s, &e) {
				if out[service][sentence] {
					return nil, fmt.Sprintf("two slices of %s say %q", service, sentence)
				}
				out.add(service, sentence)
			}
		}
	}
	return out, ""
}

func sentences(s *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) []string {
	var each, numbers []string
	for _, p := range s.Ports {
		each = append(each, mirrored(e.Addresses[0], *p.Name, *p.Port, *e.Conditions.Ready, s.OwnerReferences[0].UID))
		numbers = append(numbers, fmt.Sprintf("%s=%d", *p.Name, *p.Port))
	}
	if s.Labels[discoveryv1.LabelManagedBy] == mirror.Name {
		return each
	}
	return []string{fmt.Sprintf("%s %s %s ready=%t serving=%t terminating=%t node=%s zone=%s", e.TargetRef.UID, e.Addresses[0], joinSorted(numbers),
		*e.Conditions.Ready, *e.Conditions.Serving, *e.Conditions.Terminating, deref(e.NodeName), deref(e.Zone))}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
