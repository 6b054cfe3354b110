package explain

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// name says what a DNS name leads to, as seen by a Pod of the question's namespace.
func (a *asking) name(text string) error {
	text, a.port = cleanName(text)
	text, absolute := strings.CutSuffix(text, ".")
	labels := strings.Split(text, ".")
	if text == "" || slices.Contains(labels, "") || len(text) > 253 {
		return fmt.Errorf("name %q: must be a DNS name, such as web, web.shop or web.shop.svc.%s", text, a.Zone)
	}
	rest, full := strings.CutSuffix(text, "."+a.Zone)
	if !full && a.wrongZone(text) {
		return nil
	}
	if absolute && !full && a.dotted(text, labels) {
		return nil
	}
	labels = strings.Split(rest, ".")
	if n := len(labels); full && n > 1 && labels[n-1] == "pod" {
		a.podName(text, labels[:n-1])
		return nil
	}
	if n := len(labels); n > 1 && labels[n-1] == "svc" {
		labels = labels[:n-1]
		if len(labels) == 1 {
			a.noName(text, Key{labels[0], ""}, fmt.Sprintf("%s lacks the Service or the namespace: it must be SERVICE.NAMESPACE.svc", text))
			return nil
		}
		a.resolve(text, labels)
		return nil
	}
	if full && labels[len(labels)-1] != "pod" {
		right := Key{labels[len(labels)-1], labels[0]}
		a.noName(text, right, fmt.Sprintf("%s does not exist: names of Services end with .svc.%s", text, a.Zone))
		return nil
	}
	a.relative(text, labels)
	return nil
}

// schemePorts are those that a URL without a port means.
var schemePorts = map[string]uint16{"http": 80, "ws": 80, "https": 443, "wss": 443}

// cleanName takes from a text what is not part of a name: a scheme, a user, a port, a path. The port is 0 if the text says nothing about it.
func cleanName(text string) (name string, port uint16) {
	text = strings.ToLower(text)
	if scheme, rest, ok := strings.Cut(text, "://"); ok {
		text, port = rest, schemePorts[scheme]
	}
	text, _, _ = strings.Cut(text, "/")
	if _, host, ok := strings.Cut(text, "@"); ok {
		text = host
	}
	text, number, _ := strings.Cut(text, ":")
	if n, err := strconv.ParseUint(number, 10, 16); err == nil {
		port = uint16(n)
	}
	return text, port
}

// namedPort looks at the port that was asked for beside a Service's name.
func (a *asking) namedPort(s *Service) {
	switch {
	case a.port == 0 || s.Spec.Type == corev1.ServiceTypeExternalName || len(s.Spec.Ports) == 0:
	case s.headless():
		a.headlessPort(s)
	default:
		a.missingPort(s, "cluster IP "+s.Spec.ClusterIP, a.port, func(p *corev1.ServicePort) int32 { return p.Port })
	}
}

// headlessPort: the name of a headless Service leads to Pods, and the port has to be theirs.
func (a *asking) headlessPort(s *Service) {
	var have []string
	for i := range s.Spec.Ports {
		number := s.Spec.Ports[i].Port
		if len(s.Pods) > 0 {
			number = target(s.Pods[0], &s.Spec.Ports[i])
		}
		if number == int32(a.port) || number == 0 {
			return
		}
		have = append(have, fmt.Sprint(number))
	}
	if len(s.Pods) > 0 {
		if open, known := a.listens(s.Pods[0], corev1.ProtocolTCP, int32(a.port)); known && open == reachable {
			return
		}
	}
	f := Finding{Code: "address-port", Severity: Broken, Sure: Likely, Object: s.ref(), Field: "spec.ports"}
	f.Verdict = fmt.Sprintf("%s is headless: its name leads to the Pods themselves, which have no port %d, but %s", s.ref(), a.port, some(have))
	f.Fix = []string{kubectl(s.Namespace, "get service %s", s.Name)}
	a.found = append([]Finding{f}, slices.DeleteFunc(a.found, func(f Finding) bool { return f.Code == "headless-port" && f.Object == s.ref() })...)
}

// dotted: a name that ends with a dot is looked up as it is, without search domains; and this one would need them.
func (a *asking) dotted(text string, labels []string) bool {
	var s *Service
	if len(labels) > 0 && labels[len(labels)-1] == "svc" {
		labels = labels[:len(labels)-1]
	}
	if n := len(labels); n > 1 {
		s = a.Service(labels[n-1], labels[n-2])
	}
	if s == nil {
		s = a.Service(a.question.Namespace, labels[len(labels)-1])
	}
	if s == nil {
		return false
	}
	f := Finding{Code: "name-unknown", Severity: Broken, Sure: Certain, Object: Ref{"Name", "", text + "."}}
	f.Verdict = fmt.Sprintf("%s. does not exist: with the dot at its end it is looked up as it is, without the search domains that would make it %s", text, a.fullName(s))
	f.Evidence = []string{"in full: " + a.fullName(s)}
	f.Fix = []string{"portal explain name " + a.fullName(s)}
	a.found = append(a.found, f)
	return true
}

// podName is a name of an address: 10-244-1-3.NAMESPACE.pod.ZONE.
func (a *asking) podName(text string, labels []string) {
	if len(labels) != 2 {
		a.noName(text, Key{}, fmt.Sprintf("%s does not exist: names of Pods are IP-WITH-DASHES.NAMESPACE.pod.%s", text, a.Zone))
		return
	}
	for _, p := range a.inSpace[labels[1]] {
		for _, ip := range p.Status.PodIPs {
			if strings.NewReplacer(".", "-", ":", "-").Replace(ip.IP) == labels[0] && !ended(p) {
				a.fact("the address %s of %s", ip.IP, podRef(p))
				a.take(podRef(p))
				return
			}
		}
		if p.Name == labels[0] {
			a.noName(text, Key{}, fmt.Sprintf("%s does not exist: a Pod has no name by its own name there, only by its address (%s.%s.pod.%s), or below a headless Service", text, strings.ReplaceAll(p.Status.PodIP, ".", "-"), p.Namespace, a.Zone))
			return
		}
	}
	f := Finding{Code: "name-unknown", Severity: Degraded, Sure: Likely, Object: Ref{"Name", "", text}}
	f.Verdict = fmt.Sprintf("%s: no Pod in the namespace %s has that address", text, labels[1])
	f.Fix = []string{kubectl(labels[1], "get pods -o wide")}
	a.found = append(a.found, f)
}

// relative is a name that is looked up below the search domains: NAMESPACE.svc.ZONE, svc.ZONE and ZONE.
func (a *asking) relative(text string, labels []string) {
	if len(labels) == 1 || a.Service(a.question.Namespace, labels[len(labels)-1]) != nil && a.Service(labels[len(labels)-1], labels[len(labels)-2]) == nil {
		a.resolve(text, append(slices.Clone(labels), a.question.Namespace))
		return
	}
	space := labels[len(labels)-1]
	if slices.ContainsFunc(a.Namespaces, func(n corev1.Namespace) bool { return n.Name == space }) || a.Service(space, labels[len(labels)-2]) != nil {
		a.resolve(text, labels)
		return
	}
	for i := range a.Namespaces {
		if near(a.Namespaces[i].Name, space) && a.Service(a.Namespaces[i].Name, labels[len(labels)-2]) != nil {
			a.resolve(text, labels)
			return
		}
	}
	a.fact("no name of this cluster: the cluster's DNS asks others for it")
	a.takeShared()
}

// wrongZone: a name that ends almost as the cluster's do.
func (a *asking) wrongZone(text string) bool {
	_, after, found := strings.Cut(text, ".svc.")
	if !found {
		return false
	}
	a.noName(text, Key{}, fmt.Sprintf("%s is in no zone of this cluster: its names end with .svc.%s, not .svc.%s", text, a.Zone, after))
	return true
}

// resolve looks a name up: [[HOST or _PORT._PROTOCOL].]SERVICE.NAMESPACE.
func (a *asking) resolve(text string, labels []string) {
	k := Key{labels[len(labels)-1], labels[len(labels)-2]}
	s := a.services[k]
	if s == nil {
		a.noName(text, k, fmt.Sprintf("%s does not exist: there is no Service %s in the namespace %s", text, k.Name, k.Namespace))
		return
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		a.fact("an alias of %s, by %s", s.Spec.ExternalName, s.ref())
	} else if s.headless() {
		ready, _ := s.endpoints()
		a.fact("leads to %s of %s, which is headless", count(ready, "endpoint", "endpoints"), s.ref())
	} else {
		a.fact("leads to %s, the cluster IP of %s", strings.Join(s.Spec.ClusterIPs, " and "), s.ref())
	}
	before := labels[:len(labels)-2]
	switch {
	case len(before) == 2 && strings.HasPrefix(before[0], "_"):
		a.portName(text, s, strings.TrimPrefix(before[0], "_"), strings.TrimPrefix(before[1], "_"))
	case len(before) == 1 && (!a.broken(s) || len(s.Pods) > 0):
		a.hostName(text, s, before[0])
	case len(before) == 1: // what is wrong with the Service is why it has no names of Pods
	case len(before) > 0:
		a.noName(text, k, fmt.Sprintf("%s has too many parts: below a Service there are only names of endpoints and _PORT._PROTOCOL", text))
	}
	a.serviceFacts(s)
	a.take(s.ref())
	a.behindAlias(s)
	a.takeShared()
	a.namedPort(s)
}

// broken says whether the Service itself is why nobody gets an answer.
func (a *asking) broken(s *Service) bool {
	return slices.ContainsFunc(a.all, func(f Finding) bool { return f.Object == s.ref() && f.Severity == Broken })
}

func (a *asking) portName(text string, s *Service, name, protocol string) {
	var have []string
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if p.Name == name && strings.EqualFold(string(protocolOf(p)), protocol) {
			return
		}
		have = append(have, fmt.Sprintf("_%s._%s", p.Name, strings.ToLower(string(protocolOf(p)))))
	}
	a.noName(text, Key{s.Namespace, s.Name}, fmt.Sprintf("%s does not exist: %s has no %s port named %q, only %s", text, s.ref(), strings.ToUpper(protocol), name, some(have)))
}

func (a *asking) hostName(text string, s *Service, host string) {
	var have []string
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if e.Hostname != nil {
				if *e.Hostname == host {
					a.facts = append([]string{fmt.Sprintf("leads to %s, an endpoint of %s", strings.Join(e.Addresses, " and "), s.ref())}, a.facts...)
					a.hiddenName(text, s, e)
					return
				}
				have = append(have, *e.Hostname)
			}
			for _, addr := range e.Addresses {
				if strings.NewReplacer(".", "-", ":", "-").Replace(addr) == host {
					return
				}
			}
		}
	}
	why := fmt.Sprintf("%s does not exist: no endpoint of %s has the host name %s", text, s.ref(), host)
	switch p := a.pods[Key{s.Namespace, host}]; {
	case p != nil && p.Spec.Hostname == "":
		why += fmt.Sprintf("; Pod %s has no spec.hostname (a StatefulSet gives its Pods one, a Deployment does not)", host)
	case p != nil && p.Spec.Subdomain != s.Name:
		why += fmt.Sprintf("; Pod %s has its name below the Service %q (spec.subdomain, of a StatefulSet spec.serviceName)", host, p.Spec.Subdomain)
	case len(have) > 0:
		why += "; there are " + some(have)
	}
	a.noName(text, Key{s.Namespace, s.Name}, why)
}

// hiddenName: the endpoint with the name is not ready, and DNS has only those that are.
func (a *asking) hiddenName(text string, s *Service, e *discoveryv1.Endpoint) {
	if isReady(e) || s.Spec.PublishNotReadyAddresses {
		return
	}
	f := Finding{Code: "name-not-ready", Severity: Broken, Sure: Certain, Object: Ref{"Name", "", text}, Affects: []Ref{s.ref()}}
	f.Verdict = fmt.Sprintf("%s does not resolve: its endpoint is not ready, and DNS has names of ready endpoints only", text)
	if e.TargetRef != nil {
		if p := a.pods[Key{e.TargetRef.Namespace, e.TargetRef.Name}]; p != nil {
			if t, ok := a.trouble(p); ok {
				f.Verdict = fmt.Sprintf("%s does not resolve: Pod %s is not ready (%s), and DNS has names of ready endpoints only", text, p.Name, t.reason)
				f.Fix = a.podFix(t, p)
			}
		}
	}
	f.Fix = append(f.Fix, mergePatch(s.ref(), map[string]any{"spec": map[string]any{"publishNotReadyAddresses": true}}))
	a.found = append(a.found, f)
}

// noName: a name that DNS answers with NXDOMAIN.
func (a *asking) noName(text string, k Key, why string) {
	f := Finding{Code: "name-unknown", Severity: Broken, Sure: Certain, Object: Ref{"Name", "", text}, Verdict: why}
	if other := a.similar(k); other != nil && k.Name != "" && a.services[k] == nil {
		f.Verdict += fmt.Sprintf("; there is %s", other.ref())
		short := other.Name + "." + other.Namespace
		f.Evidence = []string{fmt.Sprintf("its name is %s, in full %s.svc.%s", short, short, a.Zone)}
		f.Fix = []string{fmt.Sprintf("portal explain name %s.svc.%s", short, a.Zone)}
	}
	a.found = append(a.found, f)
}
