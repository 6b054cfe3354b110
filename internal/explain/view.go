package explain

import (
	"net/netip"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Key is a namespace and a name.
type Key struct{ Namespace, Name string }

type pair struct{ key, value string }

// Service is a Service with what belongs to it.
type Service struct {
	*corev1.Service
	// Pods are those that its selector matches.
	Pods []*corev1.Pod
	// Slices are those with its label; Endpoints is the object of its name, nil if there is none.
	Slices    []*discoveryv1.EndpointSlice
	Endpoints *corev1.Endpoints
}

// View is evidence with indexes: checks look things up in it, and none walks through everything for each Service.
type View struct {
	*Evidence
	services map[Key]*Service
	order    []*Service
	// subjects are the Services that checks of single ones look at: all, or those that somebody asks about.
	subjects []*Service
	pods     map[Key]*corev1.Pod
	podIPs   map[netip.Addr]*corev1.Pod
	nodes    map[string]*corev1.Node
	events   map[Ref][]*corev1.Event
	labelled map[string]map[pair][]*corev1.Pod
	inSpace  map[string][]*corev1.Pod
	anywhere map[pair][]*corev1.Pod
	// workloads are what makes Pods, by namespace.
	workloads   map[string][]Workload
	replicas    map[Key]*appsv1.ReplicaSet
	inNamespace map[string][]*Service
	// strays are slices with endpoints that belong to no Service.
	strays map[string][]*discoveryv1.EndpointSlice
	// sets are filled as they are asked for.
	sets map[string]*spaceLabels
	// clusterIPs says which Service has an address.
	clusterIPs map[netip.Addr]*Service
}

// Workload makes Pods from a template.
type Workload struct {
	Ref
	Replicas int32
	Template *corev1.PodTemplateSpec
	// Message is why it can't make Pods.
	Message string
	// Paused: a change of it is not carried out.
	Paused bool
}

// Look makes a View.
func Look(e *Evidence) *View {
	v := newView(e)
	for i := range e.Nodes {
		v.nodes[e.Nodes[i].Name] = &e.Nodes[i]
	}
	v.indexPods()
	v.indexWorkloads()
	v.indexServices()
	for i := range e.Events {
		o := e.Events[i].InvolvedObject
		r := Ref{o.Kind, o.Namespace, o.Name}
		v.events[r] = append(v.events[r], &e.Events[i])
	}
	return v
}

// newView has no index filled yet.
func newView(e *Evidence) *View {
	v := &View{
		Evidence: e, services: map[Key]*Service{}, pods: map[Key]*corev1.Pod{}, podIPs: map[netip.Addr]*corev1.Pod{}, nodes: map[string]*corev1.Node{},
		events: map[Ref][]*corev1.Event{}, labelled: map[string]map[pair][]*corev1.Pod{}, inSpace: map[string][]*corev1.Pod{},
		anywhere: map[pair][]*corev1.Pod{}, workloads: map[string][]Workload{}, replicas: map[Key]*appsv1.ReplicaSet{}, clusterIPs: map[netip.Addr]*Service{},
		inNamespace: map[string][]*Service{}, strays: map[string][]*discoveryv1.EndpointSlice{}, sets: map[string]*spaceLabels{},
	}
	if e.Zone == "" {
		e.Zone = "cluster.local"
	}
	return v
}

func (v *View) indexPods() {
	for i := range v.Evidence.Pods {
		p := &v.Evidence.Pods[i]
		v.pods[Key{p.Namespace, p.Name}] = p
		v.inSpace[p.Namespace] = append(v.inSpace[p.Namespace], p)
		space := v.labelled[p.Namespace]
		if space == nil {
			space = map[pair][]*corev1.Pod{}
			v.labelled[p.Namespace] = space
		}
		for k, value := range p.Labels {
			space[pair{k, value}] = append(space[pair{k, value}], p)
			v.anywhere[pair{k, value}] = append(v.anywhere[pair{k, value}], p)
		}
		if ended(p) || p.Spec.HostNetwork {
			continue
		}
		for _, ip := range p.Status.PodIPs {
			if a, err := netip.ParseAddr(ip.IP); err == nil {
				v.podIPs[a.Unmap()] = p
			}
		}
	}
}

func (v *View) indexWorkloads() {
	add := func(w Workload) { v.workloads[w.Namespace] = append(v.workloads[w.Namespace], w) }
	e := v.Evidence
	for i := range e.Deployments {
		d := &e.Deployments[i]
		w := Workload{Ref{"Deployment", d.Namespace, d.Name}, wanted(d.Spec.Replicas), &d.Spec.Template, "", d.Spec.Paused}
		for _, c := range d.Status.Conditions {
			if c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue {
				w.Message = c.Message
			}
		}
		add(w)
	}
	for i := range e.StatefulSets {
		s := &e.StatefulSets[i]
		add(Workload{Ref{"StatefulSet", s.Namespace, s.Name}, wanted(s.Spec.Replicas), &s.Spec.Template, "", false})
	}
	for i := range e.DaemonSets {
		d := &e.DaemonSets[i]
		add(Workload{Ref{"DaemonSet", d.Namespace, d.Name}, d.Status.DesiredNumberScheduled, &d.Spec.Template, "", false})
	}
	for i := range e.ReplicaSets {
		r := &e.ReplicaSets[i]
		v.replicas[Key{r.Namespace, r.Name}] = r
		if metav1.GetControllerOf(r) == nil {
			add(Workload{Ref{"ReplicaSet", r.Namespace, r.Name}, wanted(r.Spec.Replicas), &r.Spec.Template, "", false})
		}
	}
}

func wanted(n *int32) int32 {
	if n == nil {
		return 1
	}
	return *n
}

func (v *View) indexServices() {
	for i := range v.Evidence.Services {
		s := &Service{Service: &v.Evidence.Services[i]}
		v.services[Key{s.Namespace, s.Name}] = s
		v.order = append(v.order, s)
		v.inNamespace[s.Namespace] = append(v.inNamespace[s.Namespace], s)
		if s.selects() {
			s.Pods = v.matching(s.Namespace, s.Spec.Selector)
		}
		for _, text := range s.Spec.ClusterIPs {
			if a, err := netip.ParseAddr(text); err == nil {
				v.clusterIPs[a] = s
			}
		}
	}
	for i := range v.Evidence.Slices {
		slice := &v.Evidence.Slices[i]
		if s := v.services[Key{slice.Namespace, slice.Labels[discoveryv1.LabelServiceName]}]; s != nil {
			s.Slices = append(s.Slices, slice)
		} else if len(slice.Endpoints) > 0 {
			v.strays[slice.Namespace] = append(v.strays[slice.Namespace], slice)
		}
	}
	for i := range v.Evidence.Endpoints {
		e := &v.Evidence.Endpoints[i]
		if s := v.services[Key{e.Namespace, e.Name}]; s != nil {
			s.Endpoints = e
		}
	}
	v.subjects = v.order
}

// matching are the Pods of a namespace with all of these labels: those with the rarest label are looked through.
func (v *View) matching(namespace string, selector map[string]string) (out []*corev1.Pod) {
	space := v.labelled[namespace]
	var fewest []*corev1.Pod
	first := true
	for k, value := range selector {
		if list := space[pair{k, value}]; first || len(list) < len(fewest) {
			fewest, first = list, false
		}
	}
	for _, p := range fewest {
		if matches(selector, p.Labels) {
			out = append(out, p)
		}
	}
	return out
}

func matches(selector, labels map[string]string) bool {
	for k, value := range selector {
		if got, ok := labels[k]; !ok || got != value {
			return false
		}
	}
	return true
}

// selects says whether controllers find the endpoints of the Service.
func (s *Service) selects() bool {
	return len(s.Spec.Selector) > 0 && s.Spec.Type != corev1.ServiceTypeExternalName
}

func (s *Service) headless() bool {
	return s.Spec.ClusterIP == corev1.ClusterIPNone
}

func (s *Service) ref() Ref { return Ref{"Service", s.Namespace, s.Name} }

// proxied says whether the proxy of each node serves it.
func (s *Service) proxied() bool {
	return s.Spec.Type != corev1.ServiceTypeExternalName && !s.headless()
}

// leftOut says whether a label has the nodes' own proxies leave it out.
func (s *Service) leftOut() bool {
	_, headless := s.Labels[corev1.IsHeadlessService]
	return headless || s.Labels["service.kubernetes.io/service-proxy-name"] != ""
}

// endpoints are the addresses in the Service's slices that get traffic.
func (s *Service) endpoints() (ready, all int) {
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			all++
			if isReady(&slice.Endpoints[i]) && len(slice.Endpoints[i].Addresses) > 0 {
				ready++
			}
		}
	}
	return ready, all
}

// served says whether any endpoint would get traffic: while none is ready, those that are terminating and still serve do.
func (s *Service) served() bool {
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if isReady(e) || e.Conditions.Serving != nil && *e.Conditions.Serving && e.Conditions.Terminating != nil && *e.Conditions.Terminating {
				return true
			}
		}
	}
	return false
}

func isReady(e *discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready }

// Service finds one.
func (v *View) Service(namespace, name string) *Service { return v.services[Key{namespace, name}] }

// sees says whether a resource could be read, so that what is not there does not exist.
func (v *View) sees(resources ...string) bool {
	return !slices.ContainsFunc(resources, func(r string) bool { _, blind := v.Unseen[r]; return blind })
}

func podRef(p *corev1.Pod) Ref { return Ref{"Pod", p.Namespace, p.Name} }

func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

func podReady(p *corev1.Pod) (bool, time.Time, string) {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue, c.LastTransitionTime.Time, c.Message
		}
	}
	return false, p.CreationTimestamp.Time, ""
}

// workload is what a Pod was made by: the object whose template must change for the Pod to change.
func (v *View) workload(p *corev1.Pod) (Ref, bool) {
	owner := metav1.GetControllerOf(p)
	if owner == nil {
		return Ref{}, false
	}
	if owner.Kind == "ReplicaSet" {
		if set := v.replicas[Key{p.Namespace, owner.Name}]; set != nil {
			if above := metav1.GetControllerOf(set); above != nil {
				return Ref{above.Kind, p.Namespace, above.Name}, true
			}
		}
	}
	return Ref{owner.Kind, p.Namespace, owner.Name}, true
}

// eventMessage is the newest message of an object with one of the reasons.
func (v *View) eventMessage(r Ref, reasons ...string) string {
	var newest *corev1.Event
	for _, e := range v.events[r] {
		if slices.Contains(reasons, e.Reason) && (newest == nil || lastSeen(e).After(lastSeen(newest))) {
			newest = e
		}
	}
	if newest == nil {
		return ""
	}
	return newest.Message
}

func lastSeen(e *corev1.Event) time.Time {
	if e.Series != nil {
		return e.Series.LastObservedTime.Time
	}
	if !e.LastTimestamp.IsZero() {
		return e.LastTimestamp.Time
	}
	return e.EventTime.Time
}
