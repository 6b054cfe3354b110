package explain

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

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
	for _, s := range v.subjects {
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
		if wide, ok := v.strangers(s, port, with, without); ok {
			return []Finding{wide}
		}
		f.Severity = Degraded
		f.Verdict = fmt.Sprintf("%s leads to the port %q of its Pods, and %d of %d have no container port of that name: they get no traffic of port %d", s.ref(), name, len(without), len(with)+len(without), port.Port)
		f.Evidence = []string{fmt.Sprintf("without %q: %s", name, some(podNames(without))), fmt.Sprintf("with it: %s", some(podNames(with)))}
		f.Fix = v.portNameFix(s, index, with[0], without[0])
		return []Finding{f}
	}
	best, wrongProtocol := alternative(without[0], port)
	if best == nil && v.starts(without[0]) {
		return nil // in a moment it will be known which port is meant
	}
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
			f.Evidence = append(f.Evidence, fmt.Sprintf("its processes listen at %s", v.portList(without[0], protocolOf(port))))
			f.Fix = []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), open[0]})}
		} else {
			f.Fix = []string{kubectl(s.Namespace, "get pod %s -o jsonpath='{.spec.containers[*].ports}'", without[0].Name)}
		}
	}
	return []Finding{f}
}

// strangers: the Pods without the name don't serve at its number either.
func (v *View) strangers(s *Service, port *corev1.ServicePort, with, without []*corev1.Pod) (Finding, bool) {
	number := target(with[0], port)
	for _, p := range without {
		if open, known := v.listens(p, protocolOf(port), number); !known || open != nowhere {
			return Finding{}, false
		}
	}
	return v.tooWide(s, with, without, number)
}

// portNameFix names the port in the workload that lacks it; or, if the Pods agree about the number, has the Service go by that.
func (v *View) portNameFix(s *Service, index int, with, without *corev1.Pod) []string {
	number := target(with, &s.Spec.Ports[index])
	open, known := v.listens(without, protocolOf(&s.Spec.Ports[index]), number)
	has := known && open == reachable || slices.ContainsFunc(declared(without), func(cp corev1.ContainerPort) bool { return cp.ContainerPort == number })
	if has {
		return []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), number})}
	}
	name := s.Spec.Ports[index].TargetPort.StrVal
	if list := without.Spec.Containers[0].Ports; len(list) > 0 {
		return v.changePod(without, operation{"add", "/containers/0/ports/0/name", name})
	}
	if open := v.openPorts(without, protocolOf(&s.Spec.Ports[index])); len(open) > 0 {
		number = open[0]
	}
	return v.changePod(without, operation{"add", "/containers/0/ports", []map[string]any{{"name": name, "containerPort": number}}})
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
