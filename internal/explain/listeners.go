package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"portal/internal/nodereport"
)

// openness is where a Pod's processes listen at a port.
type openness int

const (
	nowhere     openness = iota
	loopback             // at a loopback address only
	otherFamily          // for the other IP family only, or at an address that is not the Pod's
	reachable
)

// sockets are where a Pod's processes listen. known is false if the Pod's node does not say. Those of a Pod in its node's network are
// all of the node's.
func (v *View) sockets(p *corev1.Pod) (out []nodereport.Socket, known bool) {
	r := v.Reports[p.Spec.NodeName]
	if r == nil || r.Report == nil {
		return nil, false
	}
	out, known = r.Listening[string(p.UID)]
	return out, known
}

// recent says whether a Pod has become ready just now.
func (v *View) recent(p *corev1.Pod) bool {
	_, at, _ := podReady(p)
	return v.Now.Sub(at) < settle
}

// starts says whether a Pod has become ready just now and listens nowhere yet: without a readiness probe it is ready before its program is.
func (v *View) starts(p *corev1.Pod) bool {
	sockets, known := v.sockets(p)
	return known && len(sockets) == 0 && v.recent(p)
}

// listens says whether somebody in the Pod listens at a port, for either family. known is false if the Pod's node does not say.
func (v *View) listens(p *corev1.Pod, protocol corev1.Protocol, port int32) (open openness, known bool) {
	sockets, known := v.sockets(p)
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

// listensFor is listens for the families of a Service: the worst of them.
func (v *View) listensFor(s *Service, p *corev1.Pod, protocol corev1.Protocol, port int32) (open openness, known bool) {
	open, known = v.listens(p, protocol, port)
	if open == reachable && known && len(v.missedFamilies(s, p, protocol, port)) > 0 {
		return otherFamily, true
	}
	return open, known
}

// missedFamilies are the families of a Service for which nobody in a Pod listens at a port.
func (v *View) missedFamilies(s *Service, p *corev1.Pod, protocol corev1.Protocol, port int32) (out []string) {
	sockets, _ := v.sockets(p)
	for _, ip := range p.Status.PodIPs {
		a, err := netip.ParseAddr(ip.IP)
		if err != nil || !wantsFamily(s, a) {
			continue
		}
		if !slices.ContainsFunc(sockets, func(at nodereport.Socket) bool {
			return at.Protocol == string(protocol) && int32(at.Port) == port && accepts(at.Address, a)
		}) {
			out = append(out, string(familyOf(a)))
		}
	}
	return out
}

// accepts says whether a socket at one address gets what is sent to another. One at :: gets IPv4 as well, unless its program says
// otherwise, which is not to be seen.
func accepts(at, to netip.Addr) bool {
	if at.IsUnspecified() {
		return at.Is6() || to.Unmap().Is4()
	}
	return at.Unmap() == to.Unmap()
}

// openPorts are the ports at which a Pod's processes listen, loopback or not.
func (v *View) openPorts(p *corev1.Pod, protocol corev1.Protocol) (out []int32) {
	sockets, _ := v.sockets(p)
	for _, s := range sockets {
		if s.Protocol == string(protocol) && !slices.Contains(out, int32(s.Port)) {
			out = append(out, int32(s.Port))
		}
	}
	slices.Sort(out)
	return out
}

// checkListeners looks at whether somebody in the Pods listens where the Service leads, as far as nodes say.
func checkListeners(v *View) (out []Finding) {
	for _, s := range v.subjects {
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
	var fine []*corev1.Pod
	found := map[openness][]*corev1.Pod{}
	for _, p := range s.Pods {
		number := target(p, port)
		started := p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil
		if !started || number == 0 {
			continue
		}
		if _, waits := v.waiting(p); waits {
			continue
		}
		open, known := v.listensFor(s, p, protocolOf(port), number)
		if !known || open == reachable {
			fine = append(fine, p)
			continue
		}
		if v.starts(p) || v.recent(p) && !v.refused(p, number) {
			fine = append(fine, p) // it may be about to listen
			continue
		}
		found[open] = append(found[open], p)
	}
	for _, open := range []openness{loopback, otherFamily, nowhere} {
		if pods := found[open]; len(pods) > 0 {
			if f, ok := v.tooWide(s, fine, pods, target(pods[0], port)); ok {
				return []Finding{f}
			}
			return []Finding{v.closedFinding(s, index, open, pods, len(fine))}
		}
	}
	return v.undeclared(s, index)
}

// refused says whether a node that tried was refused a connection to a port of a Pod.
func (v *View) refused(p *corev1.Pod, port int32) bool {
	for _, r := range v.Reports {
		if r.Report == nil {
			continue
		}
		for _, d := range r.Dials {
			if d.Error == nodereport.Refused && int32(d.To.Port()) == port && v.podIPs[d.To.Addr()] == p {
				return true
			}
		}
	}
	return false
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
	if open == otherFamily {
		f.Code = "listens-other-family"
		missed := v.missedFamilies(s, pods[0], protocolOf(port), number)
		if len(missed) < len(s.Spec.IPFamilies) {
			f.Severity = Degraded
		}
		f.Verdict = fmt.Sprintf("%s (%s) gets no answer at port %d by %s: in %s the process listens at %s only, which is not for %s", s.ref(), families(s), port.Port, strings.Join(missed, " and "), who, v.addressesOf(pods[0], number), strings.Join(missed, " and "))
		f.Fix = v.loopbackFix(pods[0], number)
		return f
	}
	f.Code = "port-not-listening"
	f.Verdict = fmt.Sprintf("%s leads to port %d, at which nothing listens in %s", s.ref(), number, who)
	v.otherPorts(&f, s, index, pods[0])
	return f
}

// otherPorts says where a Pod listens instead, and leads the Service there.
func (v *View) otherPorts(f *Finding, s *Service, index int, p *corev1.Pod) {
	port := &s.Spec.Ports[index]
	protocol := protocolOf(port)
	open := v.reachablePorts(p, protocol)
	for _, another := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		if len(open) == 0 {
			protocol, open = another, v.reachablePorts(p, another)
		}
	}
	right := operation{"replace", fmt.Sprintf("/spec/ports/%d/targetPort", index), v.probable(p, open)}
	what := ""
	switch {
	case len(open) == 0:
		f.Evidence = []string{fmt.Sprintf("no process of Pod %s listens for %s", p.Name, protocolOf(port))}
		f.Fix = []string{kubectl(s.Namespace, "logs %s", p.Name)}
		return
	case protocol != protocolOf(port):
		what = string(protocol) + " "
		f.Fix = []string{jsonPatch(s.ref(), operation{"replace", fmt.Sprintf("/spec/ports/%d/protocol", index), protocol}, right)}
	default:
		f.Fix = []string{jsonPatch(s.ref(), right)}
	}
	if len(open) == 1 {
		f.Verdict += fmt.Sprintf("; %sport %d is open", what, open[0])
	} else {
		f.Verdict += fmt.Sprintf("; %sports %s are open", what, numbers(open))
	}
	f.Evidence = []string{fmt.Sprintf("in Pod %s these ports are open: %s", p.Name, numbers(open))}
}

// probable is, of open ports, the one that a container declares or probes; else the lowest.
func (v *View) probable(p *corev1.Pod, open []int32) int32 {
	for i := range p.Spec.Containers {
		if port, _ := probePort(&p.Spec.Containers[i], "readiness"); slices.Contains(open, port) {
			return port
		}
	}
	for _, cp := range declared(p) {
		if slices.Contains(open, cp.ContainerPort) {
			return cp.ContainerPort
		}
	}
	if len(open) == 0 {
		return 0
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
	sockets, _ := v.sockets(p)
	for _, s := range sockets {
		if int32(s.Port) == port {
			out = append(out, netip.AddrPortFrom(s.Address, s.Port).String())
		}
	}
	return strings.Join(out, ", ")
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

func families(s *Service) string {
	var out []string
	for _, f := range s.Spec.IPFamilies {
		out = append(out, string(f))
	}
	return strings.Join(out, " and ")
}

// tooWide: the selector also matches Pods of another application, which don't serve at the port.
func (v *View) tooWide(s *Service, fine, others []*corev1.Pod, port int32) (Finding, bool) {
	if len(fine) == 0 {
		return Finding{}, false
	}
	makers := map[Ref]bool{}
	for _, p := range fine {
		w, _ := v.workload(p)
		makers[w] = true
	}
	for _, p := range others {
		if w, _ := v.workload(p); makers[w] {
			return Finding{}, false
		}
	}
	key := ""
	for k, value := range fine[0].Labels {
		has := func(p *corev1.Pod) bool { return p.Labels[k] == value }
		if slices.Contains(generated, k) || slices.ContainsFunc(others, has) || slices.ContainsFunc(fine, func(p *corev1.Pod) bool { return !has(p) }) {
			continue
		}
		if key == "" || k == "app" || key != "app" && k < key {
			key = k
		}
	}
	if key == "" {
		return Finding{}, false
	}
	ours, _ := v.workload(fine[0])
	theirs, _ := v.workload(others[0])
	f := Finding{
		Code: "selector-too-wide", Severity: Degraded, Sure: Likely, Object: s.ref(), Field: "spec.selector",
		Verdict:  fmt.Sprintf("%s selects Pods of two applications: spec.selector %s matches those of %s and of %s, and in the latter nothing listens at port %d", s.ref(), pairs(s.Spec.Selector), orPod(ours, fine[0]), orPod(theirs, others[0]), port),
		Evidence: []string{fmt.Sprintf("%s serves there, %s does not", some(podNames(fine)), some(podNames(others)))},
		Fix:      []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": map[string]string{key: fine[0].Labels[key]}}})},
	}
	for _, p := range others {
		f.Affects = append(f.Affects, podRef(p))
	}
	return f, true
}

func orPod(w Ref, p *corev1.Pod) string {
	if w.Name == "" {
		return podRef(p).String()
	}
	return w.String()
}
