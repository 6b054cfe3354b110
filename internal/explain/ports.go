package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// openness is where a Pod's processes listen at a port.
type openness int

const (
	nowhere  openness = iota
	loopback          // at a loopback address only
	reachable
)

// listens says whether somebody in the Pod listens at a port. known is false if the Pod's node does not say.
func (v *View) listens(p *corev1.Pod, protocol corev1.Protocol, port int32) (open openness, known bool) {
	r := v.Reports[p.Spec.NodeName]
	if r == nil || r.Report == nil || p.Spec.HostNetwork {
		return nowhere, false
	}
	sockets, known := r.Listening[string(p.UID)]
	if !known || protocol == corev1.ProtocolSCTP {
		return nowhere, false
	}
	for _, s := range sockets {
		if s.Protocol != string(protocol) || int32(s.Port) != port {
			continue
		}
		if !s.Address.Unmap().IsLoopback() {
			return reachable, true
		}
		open = loopback
	}
	return open, true
}

// openPorts are the ports at which a Pod's processes listen, loopback or not.
func (v *View) openPorts(p *corev1.Pod, protocol corev1.Protocol) (out []int32) {
	if r := v.Reports[p.Spec.NodeName]; r != nil && r.Report != nil {
		for _, s := range r.Listening[string(p.UID)] {
			if s.Protocol == string(protocol) && !slices.Contains(out, int32(s.Port)) {
				out = append(out, int32(s.Port))
			}
		}
	}
	slices.Sort(out)
	return out
}

func protocolOf(p *corev1.ServicePort) corev1.Protocol {
	if p.Protocol == "" {
		return corev1.ProtocolTCP
	}
	return p.Protocol
}

// target is the port of a Pod that a Service's port leads to; 0: it has none of that name.
func target(p *corev1.Pod, port *corev1.ServicePort) int32 {
	if port.TargetPort.Type == intstr.Int {
		if port.TargetPort.IntVal == 0 {
			return port.Port
		}
		return port.TargetPort.IntVal
	}
	containers := append(slices.Clone(p.Spec.Containers), sidecars(p)...)
	for i := range containers {
		for _, cp := range containers[i].Ports {
			if cp.Name == port.TargetPort.StrVal && containerProtocol(&cp) == protocolOf(port) {
				return cp.ContainerPort
			}
		}
	}
	return 0
}

func sidecars(p *corev1.Pod) (out []corev1.Container) {
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			out = append(out, c)
		}
	}
	return out
}

func containerProtocol(p *corev1.ContainerPort) corev1.Protocol {
	if p.Protocol == "" {
		return corev1.ProtocolTCP
	}
	return p.Protocol
}

// declared are the ports that a Pod's containers say they have.
func declared(p *corev1.Pod) (out []corev1.ContainerPort) {
	for i := range p.Spec.Containers {
		out = append(out, p.Spec.Containers[i].Ports...)
	}
	for _, c := range sidecars(p) {
		out = append(out, c.Ports...)
	}
	return out
}

// checkTargetPorts looks at targetPorts by name, and at protocols.
func checkTargetPorts(v *View) (out []Finding) {
	for _, s := range v.order {
		if !s.selects() {
			continue
		}
		for i := range s.Spec.Ports {
			port := &s.Spec.Ports[i]
			if port.TargetPort.Type == intstr.String {
				out = append(out, v.named(s, i)...)
			} else {
				out = append(out, v.otherProtocol(s, i)...)
			}
		}
	}
	return out
}

// named: a port by name that some or all Pods don't have.
func (v *View) named(s *Service, index int) []Finding {
	port := &s.Spec.Ports[index]
	var with, without []*corev1.Pod
	for _, p := range s.Pods {
		if ended(p) {
			continue
		}
		if target(p, port) == 0 {
			without = append(without, p)
		} else {
			with = append(with, p)
		}
	}
	if len(without) == 0 {
		return nil
	}
	field := fmt.Sprintf("spec.ports[%d].targetPort", index)
	f := Finding{Code: "target-port-name", Severity: Broken, Sure: Certain, Object: s.ref(), Field: field}
	name := port.TargetPort.StrVal
	for _, p := range without {
		f.Affects = append(f.Affects, podRef(p))
	}
	if len(with) > 0 {
		f.Severity = Degraded
		f.Verdict = fmt.Sprintf("%s leads to the port %q of its Pods, and %d of %d have no container port of that name: they get no traffic of port %d", s.ref(), name, len(without), len(with)+len(without), port.Port)
		f.Evidence = []string{fmt.Sprintf("without %q: %s", name, some(podNames(without))), fmt.Sprintf("with it: %s", some(podNames(with)))}
		f.Fix = v.portNameFix(s, index, with[0], without[0])
		return []Finding{f}
	}
	best, wrongProtocol := alternative(without[0], port)
	f.Verdict = fmt.Sprintf("%s leads to the port %q of its Pods, and no container has a port of that name", s.ref(), name)
	f.Evidence = []string{fmt.Sprintf("%s is %q", field, name), fmt.Sprintf("Pod %s declares %s", without[0].Name, describePorts(without[0]))}
	switch {
	case wrongProtocol:
		f.Verdict = fmt.Sprintf("%s leads to the %s port %q of its Pods, and their port %q is of protocol %s", s.ref(), protocolOf(port), name, name, containerProtocol(best))
		f.Fix = []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/protocol", index), containerProtocol(best)})}
	case best != nil && best.Name != "":
		f.Verdict += fmt.Sprintf("; there is %q", best.Name)
		f.Fix = []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), best.Name})}
	case best != nil:
		f.Fix = []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), best.ContainerPort})}
	default:
		if open := v.openPorts(without[0], protocolOf(port)); len(open) > 0 {
			f.Evidence = append(f.Evidence, fmt.Sprintf("its processes listen at %s", v.portList(without[0])))
			f.Fix = []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), open[0]})}
		} else {
			f.Fix = []string{kubectl(s.Namespace, "get pod %s -o jsonpath='{.spec.containers[*].ports}'", without[0].Name)}
		}
	}
	return []Finding{f}
}

// portNameFix names the port in the workload that lacks it; or, if the Pods agree about the number, has the Service go by that.
func (v *View) portNameFix(s *Service, index int, with, without *corev1.Pod) []string {
	number := target(with, &s.Spec.Ports[index])
	open, known := v.listens(without, protocolOf(&s.Spec.Ports[index]), number)
	has := known && open == reachable || slices.ContainsFunc(declared(without), func(cp corev1.ContainerPort) bool { return cp.ContainerPort == number })
	if has {
		return []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), number})}
	}
	w, made := v.workload(without)
	if !made {
		return []string{kubectl(without.Namespace, "get pod %s -o yaml", without.Name)}
	}
	name := s.Spec.Ports[index].TargetPort.StrVal
	if list := without.Spec.Containers[0].Ports; len(list) > 0 {
		return []string{jsonPatch(w, operation{"add", "/spec/template/spec/containers/0/ports/0/name", name})}
	}
	if open := v.openPorts(without, protocolOf(&s.Spec.Ports[index])); len(open) > 0 {
		number = open[0]
	}
	return []string{jsonPatch(w, operation{"add", "/spec/template/spec/containers/0/ports", []map[string]any{{"name": name, "containerPort": number}}})}
}

// alternative is the declared port that a name most probably means.
func alternative(p *corev1.Pod, port *corev1.ServicePort) (best *corev1.ContainerPort, wrongProtocol bool) {
	all := declared(p)
	for i := range all {
		if all[i].Name == port.TargetPort.StrVal {
			return &all[i], true
		}
	}
	var same []*corev1.ContainerPort
	for i := range all {
		if containerProtocol(&all[i]) != protocolOf(port) {
			continue
		}
		if near(all[i].Name, port.TargetPort.StrVal) || all[i].ContainerPort == port.Port {
			return &all[i], false
		}
		same = append(same, &all[i])
	}
	if len(same) == 1 {
		return same[0], false
	}
	return nil, false
}

func describePorts(p *corev1.Pod) string {
	var out []string
	for _, cp := range declared(p) {
		text := strconv.Itoa(int(cp.ContainerPort)) + "/" + string(containerProtocol(&cp))
		if cp.Name != "" {
			text = strconv.Quote(cp.Name) + " " + text
		}
		out = append(out, text)
	}
	if len(out) == 0 {
		return "no ports"
	}
	return strings.Join(out, ", ")
}

func podNames(pods []*corev1.Pod) (out []string) {
	for _, p := range pods {
		out = append(out, p.Name)
	}
	slices.Sort(out)
	return out
}

// otherProtocol: all Pods declare the number for another protocol only.
func (v *View) otherProtocol(s *Service, index int) []Finding {
	port := &s.Spec.Ports[index]
	var other corev1.Protocol
	for _, p := range s.Pods {
		number := target(p, port)
		if open, known := v.listens(p, protocolOf(port), number); known && open != nowhere {
			return nil
		}
		found := corev1.Protocol("")
		for _, another := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
			if open, _ := v.listens(p, another, number); open == reachable {
				found = another
			}
		}
		for _, cp := range declared(p) {
			if cp.ContainerPort != number {
				continue
			}
			if found = containerProtocol(&cp); found == protocolOf(port) {
				return nil
			}
		}
		if found == "" {
			return nil
		}
		other = found
	}
	if other == "" {
		return nil
	}
	return []Finding{{
		Code: "port-protocol", Severity: Broken, Sure: Likely, Object: s.ref(), Field: fmt.Sprintf("spec.ports[%d].protocol", index),
		Verdict:  fmt.Sprintf("%s has port %d for %s, and its Pods have port %d for %s only", s.ref(), port.Port, protocolOf(port), target(s.Pods[0], port), other),
		Evidence: []string{fmt.Sprintf("Pod %s declares %s", s.Pods[0].Name, describePorts(s.Pods[0]))},
		Fix:      []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/protocol", index), other})},
	}}
}

// checkListeners looks at whether somebody in the Pods listens where the Service leads, as far as nodes say.
func checkListeners(v *View) (out []Finding) {
	for _, s := range v.order {
		if !s.selects() {
			continue
		}
		for i := range s.Spec.Ports {
			out = append(out, v.closed(s, i)...)
		}
	}
	return out
}

func (v *View) closed(s *Service, index int) []Finding {
	port := &s.Spec.Ports[index]
	var fine int
	found := map[openness][]*corev1.Pod{}
	for _, p := range s.Pods {
		number := target(p, port)
		started := p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil
		if !started || number == 0 {
			continue
		}
		if _, waits := waiting(p); waits {
			continue
		}
		open, known := v.listens(p, protocolOf(port), number)
		if !known || open == reachable {
			fine++
			continue
		}
		if _, at, _ := podReady(p); v.Now.Sub(at) < settle {
			fine++ // it may be about to listen
			continue
		}
		found[open] = append(found[open], p)
	}
	for _, open := range []openness{loopback, nowhere} {
		if pods := found[open]; len(pods) > 0 {
			return []Finding{v.closedFinding(s, index, open, pods, fine)}
		}
	}
	return v.undeclared(s, index)
}

func (v *View) closedFinding(s *Service, index int, open openness, pods []*corev1.Pod, fine int) Finding {
	port := &s.Spec.Ports[index]
	number := target(pods[0], port)
	f := Finding{Severity: Broken, Sure: Certain, Object: s.ref(), Field: fmt.Sprintf("spec.ports[%d].targetPort", index)}
	for _, p := range pods {
		f.Affects = append(f.Affects, podRef(p))
	}
	who := "Pod " + pods[0].Name
	if len(pods) > 1 {
		who = fmt.Sprintf("%d Pods (such as %s)", len(pods), pods[0].Name)
	}
	if fine > 0 {
		f.Severity = Degraded
	}
	if open == loopback {
		f.Code = "listens-on-loopback"
		f.Verdict = fmt.Sprintf("%s gets no answer at port %d: in %s the process listens at a loopback address only, port %d, where nobody else reaches it", s.ref(), port.Port, who, number)
		f.Evidence = []string{fmt.Sprintf("in Pod %s port %d is open at %s", pods[0].Name, number, v.addressesOf(pods[0], number))}
		f.Fix = v.loopbackFix(pods[0], number)
		return f
	}
	f.Code = "port-not-listening"
	f.Verdict = fmt.Sprintf("%s leads to port %d, at which nothing listens in %s", s.ref(), number, who)
	others := v.reachablePorts(pods[0], protocolOf(port))
	if len(others) == 0 {
		f.Evidence = []string{fmt.Sprintf("no process of Pod %s listens for %s", pods[0].Name, protocolOf(port))}
		f.Fix = []string{kubectl(s.Namespace, "logs %s", pods[0].Name)}
		return f
	}
	if len(others) == 1 {
		f.Verdict += fmt.Sprintf("; port %d is open", others[0])
	} else {
		f.Verdict += fmt.Sprintf("; ports %s are open", v.portList(pods[0]))
	}
	f.Evidence = []string{fmt.Sprintf("in Pod %s these ports are open: %s", pods[0].Name, v.portList(pods[0]))}
	f.Fix = []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), v.probable(pods[0], others)})}
	return f
}

// probable is, of open ports, the one that a container declares or probes; else the lowest.
func (v *View) probable(p *corev1.Pod, open []int32) int32 {
	for i := range p.Spec.Containers {
		if port, _ := probePort(&p.Spec.Containers[i]); slices.Contains(open, port) {
			return port
		}
	}
	for _, cp := range declared(p) {
		if slices.Contains(open, cp.ContainerPort) {
			return cp.ContainerPort
		}
	}
	return open[0]
}

func (v *View) reachablePorts(p *corev1.Pod, protocol corev1.Protocol) (out []int32) {
	for _, n := range v.openPorts(p, protocol) {
		if open, _ := v.listens(p, protocol, n); open == reachable {
			out = append(out, n)
		}
	}
	return out
}

func (v *View) addressesOf(p *corev1.Pod, port int32) string {
	var out []string
	for _, s := range v.Reports[p.Spec.NodeName].Listening[string(p.UID)] {
		if int32(s.Port) == port {
			out = append(out, netip.AddrPortFrom(s.Address, s.Port).String())
		}
	}
	return strings.Join(out, ", ")
}

// loopbackFix changes an argument that says where to listen, if there is one; else it shows the container's command.
func (v *View) loopbackFix(p *corev1.Pod, number int32) []string {
	if w, made := v.workload(p); made {
		for i := range p.Spec.Containers {
			for field, list := range map[string][]string{"args": p.Spec.Containers[i].Args, "command": p.Spec.Containers[i].Command} {
				for j, text := range list {
					if to, ok := everywhere(text, number); ok {
						return []string{jsonPatch(w, operation{"replace", fmt.Sprintf("/spec/template/spec/containers/%d/%s/%d", i, field, j), to})}
					}
				}
			}
			for j, env := range p.Spec.Containers[i].Env {
				if to, ok := everywhere(env.Value, number); ok {
					return []string{jsonPatch(w, operation{"replace", fmt.Sprintf("/spec/template/spec/containers/%d/env/%d/value", i, j), to})}
				}
			}
		}
	}
	return []string{kubectl(p.Namespace, "get pod %s -o jsonpath='{.spec.containers[*].command} {.spec.containers[*].args}'", p.Name)}
}

// everywhere is an argument with a loopback address in it, changed to all addresses.
func everywhere(text string, port int32) (string, bool) {
	for from, to := range map[string]string{"127.0.0.1": "0.0.0.0", "localhost": "0.0.0.0", "[::1]": "[::]"} {
		if text == from || strings.HasSuffix(text, "="+from) || strings.Contains(text, from+":"+strconv.Itoa(int(port))) {
			return strings.ReplaceAll(text, from, to), true
		}
	}
	return "", false
}

// undeclared: where nobody looked into the Pods, what they declare is all there is to go by, and it is no proof.
func (v *View) undeclared(s *Service, index int) []Finding {
	port := &s.Spec.Ports[index]
	if port.TargetPort.Type == intstr.String || len(s.Pods) == 0 {
		return nil
	}
	for _, p := range s.Pods {
		_, known := v.listens(p, protocolOf(port), 1)
		all := declared(p)
		if known || len(all) == 0 || slices.ContainsFunc(all, func(cp corev1.ContainerPort) bool { return cp.ContainerPort == target(p, port) }) {
			return nil
		}
	}
	p := s.Pods[0]
	return []Finding{{
		Code: "target-port-undeclared", Severity: Notice, Sure: Possible, Object: s.ref(), Field: fmt.Sprintf("spec.ports[%d].targetPort", index),
		Verdict:  fmt.Sprintf("%s leads to port %d, and its Pods declare %s: if nothing listens at %d, connections are refused", s.ref(), target(p, port), describePorts(p), target(p, port)),
		Evidence: []string{"declared ports are no proof: a process may listen at others"},
		Fix:      []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), declared(p)[0].ContainerPort})},
	}}
}
