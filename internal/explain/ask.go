package explain

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// Question is what somebody wants to know. The zero value asks about everything.
type Question struct {
	// Kind is one of Kinds, or empty.
	Kind      string `json:"kind,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}

// Kinds are what one can ask about.
var Kinds = []string{"service", "pod", "name", "address", "ingress"}

// Answer is what was found about a question.
type Answer struct {
	Question Question `json:"question"`
	// Healthy: nothing that was found is wrong.
	Healthy bool `json:"healthy"`
	// Verdict is one sentence.
	Verdict  string    `json:"verdict"`
	Findings []Finding `json:"findings"`
	// Facts are what is as it should be, along the chain from the name to the endpoints.
	Facts []string `json:"facts,omitempty"`
	// Unseen is what could not be read, and why.
	Unseen []string `json:"unseen,omitempty"`
}

// Ask answers a question.
func Ask(v *View, q Question) (Answer, error) {
	a := &asking{View: v, question: q, all: All(v), taken: map[int]bool{}}
	switch q.Kind {
	case "":
		for _, f := range a.all {
			if f.Severity > Notice {
				a.found = append(a.found, f)
			}
		}
		a.fact("%s, %s, %s looked at", count(len(v.order), "Service", "Services"), count(len(v.pods), "Pod", "Pods"), count(len(v.nodes), "node", "nodes"))
	case "service":
		a.service(Key{q.Namespace, q.Name})
	case "pod":
		a.pod(Key{q.Namespace, q.Name})
	case "ingress":
		a.ingress(Key{q.Namespace, q.Name})
	case "address":
		if err := a.address(q.Name); err != nil {
			return Answer{}, err
		}
	case "name":
		if err := a.name(strings.ToLower(q.Name)); err != nil {
			return Answer{}, err
		}
	default:
		return Answer{}, fmt.Errorf("%q: must be one of %s", q.Kind, strings.Join(Kinds, ", "))
	}
	return a.answer(), nil
}

// asking collects an answer.
type asking struct {
	*View
	question Question
	all      []Finding
	taken    map[int]bool
	found    []Finding
	facts    []string
	// port is the one that was asked for beside a name, or 0.
	port uint16
}

func (a *asking) fact(format string, args ...any) {
	a.facts = append(a.facts, fmt.Sprintf(format, args...))
}

// take adds the findings that are about an object.
func (a *asking) take(r Ref) {
	for i := range a.all {
		if !a.taken[i] && a.all[i].About(r) {
			a.taken[i] = true
			a.found = append(a.found, a.all[i])
		}
	}
}

// everywhereCodes are findings about nodes and parts that all Services depend on.
var everywhereCodes = []string{
	"proxy-unreachable", "proxy-unhealthy", "proxy-not-synced", "proxy-failing", "proxy-foreign", "proxy-drift", "conntrack-full", "host-setting",
	"proxy-degraded", "proxy-behind", "dns-failing", "dns-behind", "agent-failing",
	"dns-no-service", "dns-no-endpoints", "dns-unreachable", "clock-skew", "node-network", "mtu", "node-address-conflict", "range-overlap", "address-taken",
}

// takeShared adds what everybody suffers from: as long as nothing is wrong with the object itself, that may be it.
func (a *asking) takeShared() {
	for i := range a.all {
		f := &a.all[i]
		if !a.taken[i] && f.Severity > Notice && (slices.Contains(everywhereCodes, f.Code) || f.Code == "controllers-stopped") {
			a.taken[i] = true
			a.found = append(a.found, *f)
		}
	}
}

func (a *asking) answer() Answer {
	out := Answer{Question: a.question, Findings: a.found, Facts: a.facts, Healthy: true}
	for i := range out.Findings {
		if f := &out.Findings[i]; f.Severity > Notice || f.Sure != Possible {
			out.Healthy = false
		}
	}
	slices.SortStableFunc(out.Findings, func(x, y Finding) int { return cmp.Compare(y.Severity, x.Severity) })
	for _, r := range slices.Sorted(maps.Keys(a.Unseen)) {
		out.Unseen = append(out.Unseen, fmt.Sprintf("%s: %s", r, a.Unseen[r]))
	}
	if a.Limited != "" {
		out.Unseen = append(out.Unseen, "other namespaces than "+a.Limited)
	}
	if out.Findings == nil {
		out.Findings = []Finding{}
	}
	out.Verdict = a.verdict(&out)
	return out
}

func (a *asking) verdict(out *Answer) string {
	if len(out.Findings) > 0 {
		return out.Findings[0].Verdict
	}
	if a.question.Kind == "" {
		return fmt.Sprintf("nothing is wrong with %s and %s", count(len(a.order), "Service", "Services"), count(len(a.nodes), "node", "nodes"))
	}
	what := a.question.Name
	if a.question.Kind != "name" && a.question.Kind != "address" {
		what = a.question.Kind + " " + a.question.Namespace + "/" + a.question.Name
	}
	if len(a.facts) > 0 && (a.question.Kind == "name" || a.question.Kind == "address") {
		return what + ": " + a.facts[0]
	}
	return what + ": nothing is wrong"
}

// service collects what there is about a Service.
func (a *asking) service(k Key) {
	s := a.services[k]
	if s == nil {
		a.missing("Service", k)
		return
	}
	a.serviceFacts(s)
	a.take(s.ref())
	a.behindAlias(s)
	a.takeShared()
}

// behindAlias adds what is wrong with the Services that an alias leads to. If one of them does not answer, that is why the alias does not.
func (a *asking) behindAlias(s *Service) {
	alias := s.ref()
	for range 5 {
		k, ok := a.inCluster(strings.TrimSuffix(s.Spec.ExternalName, "."))
		if s.Spec.Type != corev1.ServiceTypeExternalName || !ok || a.services[k] == nil {
			return
		}
		s = a.services[k]
		a.take(s.ref())
		if slices.ContainsFunc(a.found, func(f Finding) bool { return f.Object == s.ref() && f.Severity == Broken }) {
			a.found = slices.DeleteFunc(a.found, func(f Finding) bool {
				return f.Object == alias && (f.Code == "externalname-unreachable" || f.Code == "externalname-unknown")
			})
		}
	}
}

// missing: there is no such object.
func (a *asking) missing(kind string, k Key) {
	r := Ref{kind, k.Namespace, k.Name}
	f := Finding{Code: "not-found", Severity: Broken, Sure: Certain, Object: r, Verdict: fmt.Sprintf("there is no %s %s in the namespace %s", kind, k.Name, k.Namespace)}
	resource := strings.ToLower(kind) + "s"
	if kind == "Ingress" {
		resource = "ingresses"
	}
	if why, blind := a.Unseen[resource]; blind {
		f.Code, f.Sure = "not-seen", Possible
		f.Verdict = fmt.Sprintf("%s can't be looked at: %s", r, why)
		a.found = append(a.found, f)
		return
	}
	if a.Namespaces != nil && !slices.ContainsFunc(a.Namespaces, func(n corev1.Namespace) bool { return n.Name == k.Namespace }) {
		f.Verdict = fmt.Sprintf("there is no namespace %s", k.Namespace)
	}
	f.Fix = []string{kubectl("", "get %s --all-namespaces", resource)}
	if kind == "Service" {
		if other := a.similar(k); other != nil {
			f.Verdict += "; there is " + other.ref().String()
			f.Fix = []string{fmt.Sprintf("portal explain service %s -n %s", other.Name, other.Namespace)}
			if other.Namespace != k.Namespace {
				f.Evidence = []string{fmt.Sprintf("from other namespaces its name is %s.%s", other.Name, other.Namespace)}
			}
		}
	}
	a.found = append(a.found, f)
}

// serviceFacts are the chain's parts that are as they should be.
func (a *asking) serviceFacts(s *Service) {
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		a.fact("%s is an alias of %s", s.ref(), s.Spec.ExternalName)
		return
	}
	var ports []string
	for i := range s.Spec.Ports {
		ports = append(ports, fmt.Sprintf("%d/%s", s.Spec.Ports[i].Port, protocolOf(&s.Spec.Ports[i])))
	}
	at := strings.Join(s.Spec.ClusterIPs, ", ")
	if s.headless() {
		at = "no address of its own (headless)"
	}
	a.fact("%s (%s) has %s, ports %s", s.ref(), cmp.Or(string(s.Spec.Type), "ClusterIP"), at, strings.Join(ports, ", "))
	if s.selects() {
		a.fact("its selector %s matches %s", pairs(s.Spec.Selector), count(len(s.Pods), "Pod", "Pods"))
	}
	ready, all := s.endpoints()
	a.fact("%d of %s ready, in %s", ready, count(all, "endpoint is", "endpoints are"), count(len(s.Slices), "EndpointSlice", "EndpointSlices"))
	synced, asked := 0, 0
	for _, r := range a.Reports {
		if r.Report != nil && r.Proxy != nil {
			asked++
			if a.frontends(r.Proxy)[Key{s.Namespace, s.Name}].frontends > 0 {
				synced++
			}
		}
	}
	if asked > 0 && s.proxied() {
		a.fact("%d of the proxies of %s serve it", synced, count(asked, "node", "nodes"))
	}
}

// pod collects what there is about a Pod.
func (a *asking) pod(k Key) {
	p := a.pods[k]
	if p == nil {
		a.missing("Pod", k)
		return
	}
	r := podRef(p)
	a.fact("%s is %s on node %s, at %s", r, p.Status.Phase, cmp.Or(p.Spec.NodeName, "-"), p.Status.PodIP)
	a.take(r)
	services := a.selecting(p)
	for _, s := range services {
		a.fact("%s selects it", s.ref())
	}
	if t, ok := a.trouble(p); ok && !a.blamed(r) {
		f := Finding{Code: t.code, Severity: Broken, Sure: Certain, Object: r, Since: since(t.since), Fix: a.podFix(t, p)}
		f.Verdict = fmt.Sprintf("%s gets no traffic: %s", r, t.reason)
		if t.detail != "" {
			f.Verdict += ": " + firstLine(t.detail)
		}
		if !t.since.IsZero() {
			f.Evidence = append(f.Evidence, "for "+ago(a.Now.Sub(t.since)))
		}
		a.found = append(a.found, f)
	}
	if len(services) == 0 && !ended(p) {
		a.found = append(a.found, a.unselected(p))
	}
	for _, s := range services {
		for i := range a.all {
			if f := &a.all[i]; !a.taken[i] && f.Object == s.ref() && f.Severity == Broken && len(s.Pods) == 1 {
				a.taken[i] = true
				a.found = append(a.found, *f)
			}
		}
	}
	for i := range a.all {
		if f := &a.all[i]; !a.taken[i] && f.Node == p.Spec.NodeName && f.Node != "" && f.Severity > Notice {
			a.taken[i] = true
			a.found = append(a.found, *f)
		}
	}
}

// blamed says whether a finding about the Pod's readiness was taken already.
func (a *asking) blamed(r Ref) bool {
	return slices.ContainsFunc(a.found, func(f Finding) bool { return f.Severity == Broken || f.Object == r && f.Severity > Notice })
}

func (a *asking) selecting(p *corev1.Pod) (out []*Service) {
	for _, s := range a.inNamespace[p.Namespace] {
		if s.selects() && matches(s.Spec.Selector, p.Labels) {
			out = append(out, s)
		}
	}
	return out
}

// unselected: no Service leads to the Pod. That is a fault only if a Service nearly does.
func (a *asking) unselected(p *corev1.Pod) Finding {
	f := Finding{Code: "pod-unselected", Severity: Notice, Sure: Possible, Object: podRef(p), Field: "metadata.labels"}
	f.Verdict = fmt.Sprintf("%s is behind no Service: no selector in its namespace matches its labels %s", podRef(p), pairs(p.Labels))
	for _, s := range a.inNamespace[p.Namespace] {
		if !s.selects() {
			continue
		}
		if c := judge(s, p.Labels); c.likely && c.score >= 40 {
			c.who = "the Pod has"
			f.Sure, f.Severity = Likely, Degraded
			f.Verdict = fmt.Sprintf("%s is behind no Service: %s asks for %s, and %s %s", podRef(p), s.ref(), c.asked(), c.who, c.has())
			f.Affects = []Ref{s.ref()}
			f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": c.patch()}})}
			if len(s.Pods) > 0 {
				f.Fix = a.labelFix(p, s)
			}
			return f
		}
	}
	return f
}

// labelFix gives a Pod the labels that a Service with other Pods asks for.
func (a *asking) labelFix(p *corev1.Pod, s *Service) []string {
	var set []string
	for _, k := range slices.Sorted(maps.Keys(s.Spec.Selector)) {
		if p.Labels[k] != s.Spec.Selector[k] {
			set = append(set, k+"="+s.Spec.Selector[k])
		}
	}
	return []string{kubectl(p.Namespace, "label pod %s %s --overwrite", p.Name, strings.Join(set, " "))}
}

// ingress collects what there is about an Ingress and the Services behind it.
func (a *asking) ingress(k Key) {
	for i := range a.Ingresses {
		in := &a.Ingresses[i]
		if in.Namespace != k.Namespace || in.Name != k.Name {
			continue
		}
		a.fact("%s has %s", ingressRef(in), count(len(in.Spec.Rules), "rule", "rules"))
		a.take(ingressRef(in))
		for _, b := range backends(in) {
			if s := a.Service(in.Namespace, b.Name); s != nil {
				a.serviceFacts(s)
				a.take(s.ref())
			}
		}
		if entry := a.entry(in); entry != nil {
			a.take(entry.ref())
		}
		if len(a.found) == 0 && len(in.Status.LoadBalancer.Ingress) == 0 && a.Now.Sub(in.CreationTimestamp.Time) > 2*settle {
			a.found = append(a.found, Finding{
				Code: "ingress-pending", Severity: Degraded, Sure: Likely, Object: ingressRef(in), Field: "status.loadBalancer", Since: since(in.CreationTimestamp.Time),
				Verdict: fmt.Sprintf("%s has no address: no controller serves its IngressClass%s", ingressRef(in), a.classText(in)), Fix: []string{kubectl("", "get ingressclasses")},
			})
		}
		a.takeShared()
		return
	}
	a.missing("Ingress", k)
}

// classText names the class of an Ingress and its controller.
func (a *asking) classText(in *networkingv1.Ingress) string {
	if c := a.classOf(in); c != nil {
		return fmt.Sprintf(" %s (spec.controller %s)", c.Name, c.Spec.Controller)
	}
	return ""
}

// entry is the Service through which Portal's load balancers serve an Ingress, nil if others do.
func (a *asking) entry(in *networkingv1.Ingress) *Service {
	if !a.servedHere(in) {
		return nil
	}
	namespace, name, _ := strings.Cut(BalancerEntry, "/")
	return a.Service(namespace, name)
}

// splitAddress reads IP or IP:PORT; the port is 0 if there is none.
func splitAddress(text string) (netip.Addr, uint16, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return a.Unmap(), 0, nil
	}
	if ap, err := netip.ParseAddrPort(text); err == nil {
		return ap.Addr().Unmap(), ap.Port(), nil
	}
	return netip.Addr{}, 0, fmt.Errorf("address %q: must be IP or IP:PORT, such as 10.96.0.10:53 or [fd00:96::a]:53", text)
}
