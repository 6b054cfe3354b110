package explain

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// handMadePorts compares the names of ports in slices that people wrote with those of their Services.
func (v *View) handMadePorts() (out []Finding) {
	for _, s := range v.subjects {
		if s.selects() || s.headless() || len(s.Slices) == 0 {
			continue
		}
		for i := range s.Spec.Ports {
			if f, ok := v.slicePort(s, i); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

func (v *View) slicePort(s *Service, index int) (Finding, bool) {
	port := &s.Spec.Ports[index]
	var have []string
	var in *discoveryv1.EndpointSlice
	at, best := 0, 0
	for _, slice := range s.Slices {
		if len(slice.Endpoints) == 0 {
			continue
		}
		if in == nil {
			in = slice
		}
		for j := range slice.Ports {
			p := &slice.Ports[j]
			if sliceName(p) == port.Name && sliceProtocol(p) == protocolOf(port) && p.Port != nil {
				return Finding{}, false
			}
			if likeness := v.likeness(s, p, port); likeness > best {
				in, at, best = slice, j, likeness
			}
			have = append(have, endpointPortText(p))
		}
	}
	if in == nil {
		return Finding{}, false
	}
	r := Ref{"EndpointSlice", in.Namespace, in.Name}
	f := Finding{Code: "slice-port", Severity: Broken, Sure: Certain, Object: s.ref(), Field: fmt.Sprintf("spec.ports[%d].name", index), Affects: []Ref{r}}
	if len(have) == 0 {
		f.Verdict = fmt.Sprintf("%s gets no traffic through: %s has no ports, and endpoints belong to a Service's port by its name", s.ref(), r)
		f.Fix = []string{portPatch(s, in, 0, 0, port)}
		return f, true
	}
	f.Verdict = fmt.Sprintf("%s: its port %s has no endpoints: the ports of %s are %s, and endpoints belong to a Service's port by name and protocol", s.ref(), portText(port.Port, port.Name, protocolOf(port)), r, some(have))
	f.Fix = []string{portPatch(s, in, at, best, port)}
	return f, true
}

// likeness says how probable it is that a slice's port is meant for a Service's; 0: it is another one's.
func (v *View) likeness(s *Service, p *discoveryv1.EndpointPort, port *corev1.ServicePort) (out int) {
	for i := range s.Spec.Ports {
		if other := &s.Spec.Ports[i]; other != port && sliceName(p) == other.Name && sliceProtocol(p) == protocolOf(other) {
			return 0
		}
	}
	if sliceName(p) == port.Name {
		out += 4
	}
	if p.Port != nil && *p.Port == numberOf(port) {
		out += 3
	}
	if near(sliceName(p), port.Name) {
		out += 2
	}
	if sliceProtocol(p) == protocolOf(port) {
		out++
	}
	return out
}

// portPatch makes a slice's port, at an index, one of the Service's; or adds it, if none is like it. What is mirrored is changed where it comes from.
func portPatch(s *Service, in *discoveryv1.EndpointSlice, at, likeness int, port *corev1.ServicePort) string {
	r, ports := Ref{"EndpointSlice", in.Namespace, in.Name}, "/ports"
	if in.Labels[discoveryv1.LabelManagedBy] == mirror {
		r, ports = Ref{"Endpoints", s.Namespace, s.Name}, "/subsets/0/ports"
	}
	whole := map[string]any{"name": port.Name, "port": numberOf(port), "protocol": protocolOf(port)}
	switch {
	case len(in.Ports) == 0:
		return jsonPatch(r, operation{"add", ports, []map[string]any{whole}})
	case likeness == 0:
		return jsonPatch(r, operation{"add", ports + "/-", whole})
	}
	return jsonPatch(r, samePort(&in.Ports[at], fmt.Sprintf("%s/%d", ports, at), port)...)
}

// samePort are the changes that make a slice's port one of the Service's.
func samePort(p *discoveryv1.EndpointPort, at string, port *corev1.ServicePort) (out []operation) {
	if sliceName(p) != port.Name {
		out = append(out, operation{"add", at + "/name", quoted(port.Name)})
	}
	if sliceProtocol(p) != protocolOf(port) {
		out = append(out, operation{"add", at + "/protocol", protocolOf(port)})
	}
	if p.Port == nil {
		out = append(out, operation{"add", at + "/port", numberOf(port)})
	}
	return out
}

// numberOf is the port of endpoints that a Service's port asks for; a name says nothing without Pods.
func numberOf(port *corev1.ServicePort) int32 {
	if n := target(&corev1.Pod{}, port); n != 0 {
		return n
	}
	return port.Port
}

// portText is a port with its name and protocol.
func portText(number int32, name string, protocol corev1.Protocol) string {
	if name == "" {
		return fmt.Sprintf("%d/%s (without a name)", number, protocol)
	}
	return fmt.Sprintf("%d/%s (named %q)", number, protocol, name)
}

// endpointPortText is a port of a slice.
func endpointPortText(p *discoveryv1.EndpointPort) string {
	if p.Port == nil {
		return fmt.Sprintf("one without a number, of %s", sliceProtocol(p))
	}
	return portText(*p.Port, sliceName(p), sliceProtocol(p))
}

// quoted keeps an empty text in a patch.
func quoted(text string) any {
	if text == "" {
		return &text
	}
	return text
}

func sliceName(p *discoveryv1.EndpointPort) string {
	if p.Name == nil {
		return ""
	}
	return *p.Name
}

func sliceProtocol(p *discoveryv1.EndpointPort) corev1.Protocol {
	if p.Protocol == nil {
		return corev1.ProtocolTCP
	}
	return *p.Protocol
}
