package console

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
)

const (
	maxEndpoints = 1000
	maxPods      = 500
	// maxWatchedEvents is how many Events of a namespace are looked through for those of the Service's Pods.
	maxWatchedEvents = 2000
)

// Pod is one that a Service's selector matches.
type Pod struct {
	Name  string `json:"name"`
	Phase string `json:"phase"`
	Ready bool   `json:"ready"`
	// Reason is why it is not ready.
	Reason      string `json:"reason,omitempty"`
	Node        string `json:"node,omitempty"`
	IP          string `json:"ip,omitempty"`
	Terminating bool   `json:"terminating,omitempty"`
}

// Event is one about the Service.
type Event struct {
	Type    string    `json:"type"`
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Count   int32     `json:"count"`
	Last    time.Time `json:"last"`
	From    string    `json:"from,omitempty"`
}

// Detail is all that a Service's page shows, traffic excepted.
type Detail struct {
	Found     bool       `json:"found"`
	Row       Row        `json:"service"`
	Selector  string     `json:"selector,omitempty"`
	Headless  bool       `json:"headless,omitempty"`
	Policies  []Policy   `json:"policies,omitempty"`
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// More counts the endpoints that are left out.
	More  int    `json:"more,omitempty"`
	Nodes []Node `json:"nodes,omitempty"`
	Pods  []Pod  `json:"pods,omitempty"`
	// Timeline is what happened, the newest first; Since is when the console began to note changes of endpoints.
	Timeline []Moment  `json:"timeline,omitempty"`
	Since    time.Time `json:"since,omitzero"`
	Findings []Finding `json:"findings,omitempty"`
	// Unexplained is why there are no findings; empty: they are looked for.
	Unexplained string `json:"unexplained,omitempty"`
	Status      Status `json:"status"`
	// Hidden are what this user may not see of it.
	Hidden []string `json:"hidden,omitempty"`
}

// Policy is a setting that changes which endpoints get a packet.
type Policy struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	Means string `json:"means"`
}

// policies lists what differs from the default, in words.
func policies(svc *corev1.Service) (out []Policy) {
	add := func(name, value, means string) { out = append(out, Policy{name, value, means}) }
	spec := svc.Spec
	if deref(spec.InternalTrafficPolicy) == corev1.ServiceInternalTrafficPolicyLocal {
		add("internalTrafficPolicy", "Local", "from inside the cluster, only endpoints on the client's own node")
	}
	if spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		add("externalTrafficPolicy", "Local", "from outside, only endpoints on the node that the packet came to")
	}
	if spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		add("sessionAffinity", "ClientIP", "a client stays with the endpoint that it had")
	}
	if value := deref(spec.TrafficDistribution); value != "" {
		add("trafficDistribution", value, "endpoints nearby come first")
	}
	if len(spec.LoadBalancerSourceRanges) > 0 {
		add("loadBalancerSourceRanges", strings.Join(spec.LoadBalancerSourceRanges, ", "), "other clients are dropped")
	}
	if spec.PublishNotReadyAddresses {
		add("publishNotReadyAddresses", "true", "Pods that are not ready get traffic too")
	}
	return out
}

// page gathers what only one Service's page needs, beside its session's feed.
type page struct {
	mu       sync.Mutex
	changed  chan struct{} // closed at the next change
	revision uint64        // of the last change
	pods     map[string]*corev1.Pod
	events   map[string]*corev1.Event
	findings []Finding
	// unexplained is why nobody looks for findings.
	unexplained string
	hidden      map[string]bool
	// eventsRevision counts changes of Events about the Service and its Pods. eventsListed is closed when those of all kinds have come, or never will.
	eventsRevision uint64
	eventsListed   chan struct{}
	unlisted       int // kinds of Events that have not come
}

func newPage() *page {
	return &page{
		changed: make(chan struct{}), pods: map[string]*corev1.Pod{}, events: map[string]*corev1.Event{}, hidden: map[string]bool{},
		eventsListed: make(chan struct{}), unlisted: len(eventKinds),
	}
}

func (p *page) change(do func()) {
	p.changeIf(func() bool {
		do()
		return true
	})
}

// changeIf notes a change only if do says that it shows.
func (p *page) changeIf(do func() bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !do() {
		return
	}
	p.revision++
	close(p.changed)
	p.changed = make(chan struct{})
}

func newPod(from *corev1.Pod) Pod {
	pod := Pod{Name: from.Name, Phase: string(from.Status.Phase), Node: from.Spec.NodeName, IP: from.Status.PodIP, Terminating: from.DeletionTimestamp != nil}
	for _, condition := range from.Status.Conditions {
		switch {
		case condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue:
			pod.Ready = true
		case condition.Type == corev1.PodReady:
			pod.Reason = cmp.Or(pod.Reason, condition.Message, condition.Reason)
		case condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse:
			pod.Reason = condition.Message
		}
	}
	for _, container := range from.Status.ContainerStatuses {
		if waiting := container.State.Waiting; waiting != nil && waiting.Reason != "" {
			pod.Reason = container.Name + ": " + strings.TrimSuffix(waiting.Reason+": "+waiting.Message, ": ")
		}
	}
	if pod.Ready {
		pod.Reason = ""
	}
	return pod
}

func newEvent(from *corev1.Event) Event {
	e := Event{
		Type: from.Type, Reason: from.Reason, Message: from.Message, Count: max(from.Count, 1), Last: from.LastTimestamp.Time,
		From: cmp.Or(from.ReportingController, from.Source.Component),
	}
	if from.Series != nil {
		e.Count, e.Last = from.Series.Count, from.Series.LastObservedTime.Time
	}
	for _, other := range []time.Time{from.EventTime.Time, from.CreationTimestamp.Time} {
		if e.Last.IsZero() {
			e.Last = other
		}
	}
	return e
}

// eventKinds are of what objects a page has Events.
var eventKinds = []string{"Service", "Pod"}

// followEvents watches the Events about a Service, or about all objects of another kind in its namespace: which of these belong to
// it is decided later.
func (p *page) followEvents(ctx context.Context, client kubernetes.Interface, k key, about fields.Set) {
	follow(ctx, client.CoreV1().RESTClient(), "events", k.namespace, &corev1.Event{}, sink[*corev1.Event]{
		put: p.putEvent, drop: p.dropEvent,
		replace: func(_ string, list []*corev1.Event) {
			p.change(func() {
				maps.DeleteFunc(p.events, func(_ string, e *corev1.Event) bool { return e.InvolvedObject.Kind == about["involvedObject.kind"] })
				for _, e := range list[max(0, len(list)-maxWatchedEvents):] {
					p.events[e.Name] = e
				}
				p.eventsRevision++
				p.listedEvents(1)
			})
		},
	}, func(o *metav1.ListOptions) { o.FieldSelector = about.String() })
}

// putEvent keeps an Event. Most of a busy namespace are about others' Pods: they show only when such a Pod comes to the Service, which is a
// change of its own.
func (p *page) putEvent(e *corev1.Event) {
	p.changeIf(func() bool {
		if _, known := p.events[e.Name]; !known && len(p.events) >= maxWatchedEvents {
			return false
		}
		p.events[e.Name] = e
		return p.tell(e)
	})
}

func (p *page) dropEvent(e *corev1.Event) {
	p.changeIf(func() bool {
		delete(p.events, e.Name)
		return p.tell(e)
	})
}

// tell notes a change of an Event, and says whether it is the page's.
func (p *page) tell(e *corev1.Event) bool {
	mine := p.mine(e)
	if mine {
		p.eventsRevision++
	}
	return mine
}

func (p *page) eventsAt() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.eventsRevision
}

// listedEvents notes that so many kinds of Events have come.
func (p *page) listedEvents(kinds int) {
	if p.unlisted <= 0 {
		return
	}
	if p.unlisted -= kinds; p.unlisted <= 0 {
		close(p.eventsListed)
	}
}

// followPods watches the Pods that a selector matches.
func (p *page) followPods(ctx context.Context, client kubernetes.Interface, namespace, selector string) {
	put := func(pod *corev1.Pod) {
		p.change(func() {
			if _, known := p.pods[pod.Name]; known || len(p.pods) < maxPods {
				p.pods[pod.Name] = pod
			}
		})
	}
	follow(ctx, client.CoreV1().RESTClient(), "pods", namespace, &corev1.Pod{}, sink[*corev1.Pod]{
		put: put, drop: func(pod *corev1.Pod) { p.change(func() { delete(p.pods, pod.Name) }) },
		replace: func(_ string, list []*corev1.Pod) {
			p.change(func() { clear(p.pods) })
			for _, pod := range list {
				put(pod)
			}
		},
	}, func(o *metav1.ListOptions) { o.LabelSelector = selector })
}

// detail is what is known of a Service.
func (f *feed) detail(k key) Detail {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.details++
	out := Detail{Status: f.status, Timeline: slices.Clone(f.history.of[k]), Since: f.history.since}
	e := f.services[k]
	if e == nil || e.svc == nil {
		return out
	}
	out.Found, out.Row, out.Selector, out.Policies = true, e.row, selectorText(e.svc.Spec.Selector), policies(e.svc)
	out.Headless = e.svc.Spec.ClusterIP == corev1.ClusterIPNone
	out.Endpoints = e.endpoints
	if len(out.Endpoints) > maxEndpoints {
		out.More, out.Endpoints = len(out.Endpoints)-maxEndpoints, out.Endpoints[:maxEndpoints]
	}
	seen := map[string]bool{}
	for _, one := range out.Endpoints {
		if node := f.nodes[one.Node]; node != nil && !seen[one.Node] {
			seen[one.Node] = true
			copied := *node
			copied.Endpoints = 0 // those of other Services change all the time
			out.Nodes = append(out.Nodes, copied)
		}
	}
	slices.SortFunc(out.Nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// add puts what the page gathered into a Detail.
func (p *page) add(to *Detail) {
	p.mu.Lock()
	defer p.mu.Unlock()
	to.Pods = nil
	moments := to.Timeline
	for _, name := range slices.Sorted(maps.Keys(p.pods)) {
		to.Pods = append(to.Pods, newPod(p.pods[name]))
		moments = append(moments, podMoments(p.pods[name])...)
	}
	for _, e := range p.events {
		if p.mine(e) {
			moments = append(moments, eventMoment(e))
		}
	}
	to.Timeline = newestFirst(moments)
	to.Findings, to.Unexplained = p.findings, p.unexplained
	to.Hidden = slices.Sorted(maps.Keys(p.hidden))
}

// mine says whether an Event is about the Service, or one of its Pods.
func (p *page) mine(e *corev1.Event) bool {
	return e.InvolvedObject.Kind == "Service" || e.InvolvedObject.Kind == "Pod" && p.pods[e.InvolvedObject.Name] != nil
}

// evidence are the Events that findings get.
func (p *page) evidence() (out []corev1.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(p.events)) {
		if p.mine(p.events[name]) {
			out = append(out, *p.events[name])
		}
	}
	return out
}

// look watches Events and Pods as far as the user may, the Pods anew when the selector changes.
func (p *page) look(ctx context.Context, f *feed, client kubernetes.Interface, k key, group *sync.WaitGroup) {
	may := func(resource, called string) bool {
		allowed, err := mayWatch(ctx, client, "", resource, k.namespace)
		if err == nil && !allowed {
			p.change(func() { p.hidden[called] = true })
		}
		return allowed
	}
	if may("events", "Events") {
		for _, kind := range eventKinds {
			about := fields.Set{"involvedObject.kind": kind}
			if kind == "Service" {
				about["involvedObject.name"] = k.name
			}
			group.Go(func() { p.followEvents(ctx, client, k, about) })
		}
	} else {
		p.change(func() { p.listedEvents(len(eventKinds)) })
	}
	if !may("pods", "Pods") {
		return
	}
	stop := func() {}
	f.followSelector(ctx, k, func(selector string) {
		stop()
		p.change(func() { clear(p.pods) })
		if _, err := labels.Parse(selector); selector != "" && err == nil {
			var inner context.Context
			inner, stop = context.WithCancel(ctx)
			group.Go(func() { p.followPods(inner, client, k.namespace, selector) })
		}
	})
	stop()
}
