package explain

import (
	"fmt"
	"net/netip"
	"slices"

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
	if port != 0 {
		a.missingPort(s, fmt.Sprintf("%s %s", kind, addr), port, number)
	}
}

// missingPort: what is asked for at a place of a Service is none of its ports there.
func (a *asking) missingPort(s *Service, where string, port uint16, number func(*corev1.ServicePort) int32) {
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
		Verdict: fmt.Sprintf("%s has no port %d at its %s: it has %s", s.ref(), port, where, some(have)),
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
	f := Finding{Code: "port-not-listening", Severity: Broken, Sure: Certain, Object: podRef(p), Verdict: fmt.Sprintf("nothing listens at port %d of %s; open are: %s", port, podRef(p), a.portList(p, corev1.ProtocolTCP))}
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
	if a.noSuchPort(r, name, addr, port) {
		return
	}
	if port >= 30000 && port <= 32767 {
		a.found = append(a.found, Finding{
			Code: "no-node-port", Severity: Broken, Sure: Certain, Object: r, Node: name,
			Verdict: fmt.Sprintf("no Service has the node port %d", port), Fix: []string{kubectl("", "get services --all-namespaces --field-selector=spec.type=NodePort")},
		})
	}
}

// noSuchPort: a Service's own port, asked for at a node's address, where it has another.
func (a *asking) noSuchPort(r Ref, name string, addr netip.Addr, port uint16) bool {
	tried := false
	for _, report := range a.Reports {
		if report.Report == nil {
			continue
		}
		for _, d := range report.Tries {
			if d.To == netip.AddrPortFrom(addr, port) {
				if d.Error == "" {
					return false // somebody listens there
				}
				tried = true
			}
		}
	}
	f := Finding{Code: "no-node-port", Severity: Broken, Sure: Certain, Object: r, Node: name, Verdict: fmt.Sprintf("nothing listens at port %d of node %s (%s)", port, name, addr)}
	for _, s := range a.order {
		for i := range s.Spec.Ports {
			if p := &s.Spec.Ports[i]; p.NodePort != 0 && (p.Port == int32(port) || len(s.Pods) > 0 && target(s.Pods[0], p) == int32(port)) {
				f.Affects = append(f.Affects, s.ref())
				f.Evidence = append(f.Evidence, fmt.Sprintf("the node port of %s for its port %d is %d", s.ref(), p.Port, p.NodePort))
				if len(f.Affects) == 1 {
					f.Verdict += fmt.Sprintf("; %s has port %d at its cluster IP, and at nodes' addresses %d", s.ref(), p.Port, p.NodePort)
					f.Fix = []string{fmt.Sprintf("portal explain address %s", netip.AddrPortFrom(addr, uint16(p.NodePort)))}
				}
			}
		}
	}
	f.Evidence = limit(f.Evidence)
	if !tried && len(f.Affects) == 0 || port >= 30000 && port <= 32767 && len(f.Affects) == 0 {
		return false
	}
	a.found = append(a.found, f)
	return true
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
