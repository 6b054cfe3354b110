package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/servicerange"
)

// address says whose an address is, and what is wrong there.
func (a *asking) address(text string) error {
	addr, port, err := splitAddress(text)
	if err != nil {
		return err
	}
	if s := a.clusterIPs[addr]; s != nil {
		a.fact("the cluster IP of %s", s.ref())
		a.at(s, "cluster IP", addr, port, func(p *corev1.ServicePort) int32 { return p.Port })
		return nil
	}
	for _, s := range a.order {
		kind := ""
		if slices.Contains(s.Spec.ExternalIPs, addr.String()) {
			kind = "external IP"
		}
		for _, in := range s.Status.LoadBalancer.Ingress {
			if in.IP == addr.String() {
				kind = "load balancer's address"
			}
		}
		if kind != "" {
			a.fact("the %s of %s", kind, s.ref())
			a.at(s, kind, addr, port, func(p *corev1.ServicePort) int32 { return p.Port })
			return nil
		}
	}
	if p := a.podIPs[addr]; p != nil {
		a.podAddress(p, port)
		return nil
	}
	for name, n := range a.nodes {
		if slices.ContainsFunc(n.Status.Addresses, func(x corev1.NodeAddress) bool { return x.Address == addr.String() }) {
			a.nodeAddress(name, addr, port)
			return nil
		}
	}
	a.nobody(addr)
	return nil
}

// at looks at one of the Service's addresses, and a port if one is asked for.
func (a *asking) at(s *Service, kind string, addr netip.Addr, port uint16, number func(*corev1.ServicePort) int32) {
	a.serviceFacts(s)
	a.take(s.ref())
	a.takeShared()
	if port == 0 {
		return
	}
	var have []string
	for i := range s.Spec.Ports {
		n := number(&s.Spec.Ports[i])
		if n == int32(port) {
			return
		}
		have = append(have, fmt.Sprint(n))
	}
	f := Finding{
		Code: "address-port", Severity: Broken, Sure: Certain, Object: s.ref(), Field: "spec.ports",
		Verdict: fmt.Sprintf("%s has no port %d at its %s %s: it has %s", s.ref(), port, kind, addr, some(have)),
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if p.NodePort == int32(port) {
			f.Verdict += fmt.Sprintf("; %d is its node port, which is open at the nodes' own addresses", port)
		} else if len(s.Pods) > 0 && target(s.Pods[0], p) == int32(port) {
			f.Verdict += fmt.Sprintf("; %d is the port of its Pods", port)
		}
	}
	f.Fix = []string{kubectl(s.Namespace, "get service %s", s.Name)}
	a.found = append([]Finding{f}, a.found...)
}

func (a *asking) podAddress(p *corev1.Pod, port uint16) {
	a.fact("the address of %s", podRef(p))
	a.pod(Key{p.Namespace, p.Name})
	a.found = slices.DeleteFunc(a.found, func(f Finding) bool { return f.Code == "pod-unselected" })
	if port == 0 {
		return
	}
	open, known := a.listens(p, corev1.ProtocolTCP, int32(port))
	if udp, _ := a.listens(p, corev1.ProtocolUDP, int32(port)); !known || open == reachable || udp == reachable {
		return
	}
	f := Finding{Code: "port-not-listening", Severity: Broken, Sure: Certain, Object: podRef(p), Verdict: fmt.Sprintf("nothing listens at port %d of %s; open are: %s", port, podRef(p), a.portList(p))}
	if open == loopback {
		f.Code = "listens-on-loopback"
		f.Verdict = fmt.Sprintf("port %d of %s is open at a loopback address only, where nobody else reaches it", port, podRef(p))
		f.Fix = a.loopbackFix(p, int32(port))
	}
	a.found = append(a.found, f)
}

// nodeAddress is about a node, or one of its node ports.
func (a *asking) nodeAddress(name string, addr netip.Addr, port uint16) {
	r := Ref{"Node", "", name}
	a.fact("an address of node %s", name)
	a.take(r)
	if port == 0 {
		return
	}
	for _, s := range a.order {
		for i := range s.Spec.Ports {
			if s.Spec.Ports[i].NodePort != int32(port) {
				continue
			}
			a.fact("port %d is a node port of %s", port, s.ref())
			a.at(s, "node port of", addr, port, func(p *corev1.ServicePort) int32 { return p.NodePort })
			a.localHere(s, name)
			return
		}
	}
	if port >= 30000 && port <= 32767 {
		a.found = append(a.found, Finding{
			Code: "no-node-port", Severity: Broken, Sure: Certain, Object: r, Node: name,
			Verdict: fmt.Sprintf("no Service has the node port %d", port), Fix: []string{kubectl("", "get services --all-namespaces --field-selector=spec.type=NodePort")},
		})
	}
}

// localHere: what is a notice about the Service is the reason at a node without endpoints.
func (a *asking) localHere(s *Service, node string) {
	here := false
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			here = here || isReady(e) && e.NodeName != nil && *e.NodeName == node
		}
	}
	for i := range a.found {
		if f := &a.found[i]; f.Code == "policy-local" && f.Field == "spec.externalTrafficPolicy" && f.Object == s.ref() && !here {
			f.Severity, f.Node = Broken, node
		}
	}
}

// nobody: an address that no object has.
func (a *asking) nobody(addr netip.Addr) {
	f := Finding{Severity: Broken, Sure: Certain, Object: Ref{"Address", "", addr.String()}}
	switch {
	case servicerange.Covered(a.ranges(), addr):
		f.Code = "address-free"
		f.Verdict = fmt.Sprintf("no Service has the cluster IP %s: it was deleted or made again with another address, and whoever uses it has an old answer", addr)
		f.Evidence = []string{"environment variables of Pods and caches of resolvers keep the address that a Service had"}
		f.Fix = []string{kubectl("", "get services --all-namespaces -o wide")}
	case a.noPod(addr):
		f.Code = "address-no-pod"
		f.Verdict = fmt.Sprintf("no Pod has the address %s, which is among the Pods' addresses", addr)
		f.Fix = []string{kubectl("", "get pods --all-namespaces -o wide")}
	default:
		f.Code, f.Severity, f.Sure = "address-unknown", Notice, Possible
		f.Verdict = fmt.Sprintf("%s is the address of no Service, Pod or node of this cluster", addr)
	}
	a.found = append(a.found, f)
}

// name says what a DNS name leads to, as seen by a Pod of the question's namespace.
func (a *asking) name(text string) error {
	text = strings.TrimSuffix(text, ".")
	labels := strings.Split(text, ".")
	if text == "" || slices.Contains(labels, "") || len(text) > 253 {
		return fmt.Errorf("name %q: must be a DNS name, such as web, web.shop or web.shop.svc.%s", text, a.Zone)
	}
	rest, full := strings.CutSuffix(text, "."+a.Zone)
	if !full && a.wrongZone(text) {
		return nil
	}
	labels = strings.Split(rest, ".")
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
	case len(before) == 1:
		a.hostName(text, s, before[0])
	case len(before) > 0:
		a.noName(text, k, fmt.Sprintf("%s has too many parts: below a Service there are only names of endpoints and _PORT._PROTOCOL", text))
	}
	a.serviceFacts(s)
	a.take(s.ref())
	a.takeShared()
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
	if !s.headless() {
		why = fmt.Sprintf("%s does not exist: %s is not headless, and only headless Services have names for their Pods", text, s.ref())
	} else if len(have) > 0 {
		why += "; there are " + some(have)
	}
	a.noName(text, Key{s.Namespace, s.Name}, why)
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
