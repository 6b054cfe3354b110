package explain

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// checkExternalNames looks at what ExternalName Services point to.
func checkExternalNames(v *View) (out []Finding) {
	for _, s := range v.order {
		if s.Spec.Type != corev1.ServiceTypeExternalName {
			continue
		}
		name := strings.TrimSuffix(s.Spec.ExternalName, ".")
		f := Finding{Severity: Broken, Sure: Certain, Object: s.ref(), Field: "spec.externalName"}
		if a, err := netip.ParseAddr(name); err == nil {
			f.Code = "externalname-ip"
			f.Verdict = fmt.Sprintf("%s points to %q: externalName is a DNS name, and an address there is looked up as a name, which nobody has", s.ref(), name)
			f.Evidence = []string{"for an address, a Service without selector and an EndpointSlice are right"}
			f.Fix = addressInstead(s, a)
			out = append(out, f)
			continue
		}
		if target, ok := v.inCluster(name); ok {
			if fault := v.clusterName(f, s, name, target); fault.Code != "" {
				out = append(out, fault)
			}
			continue
		}
		if !strings.Contains(name, ".") {
			f.Code, f.Sure = "externalname-unknown", Likely
			f.Verdict = fmt.Sprintf("%s points to %q, which is no full name: an alias is resolved without search domains", s.ref(), name)
			if v.Service(s.Namespace, name) != nil {
				f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalName": fmt.Sprintf("%s.%s.svc.%s", name, s.Namespace, v.Zone)}})}
			}
			out = append(out, f)
			continue
		}
		out = append(out, externalNotice(f, s, name))
	}
	return out
}

func externalNotice(f Finding, s *Service, name string) Finding {
	f.Code, f.Severity, f.Sure = "externalname-host", Notice, Possible
	f.Verdict = fmt.Sprintf("%s is an alias of %s: clients send the name %s as Host header and TLS server name, which %s may reject", s.ref(), name, s.Name, name)
	f.Evidence = []string{"nothing is led or balanced: DNS answers with a CNAME, and ports of the Service mean nothing"}
	f.Fix = []string{fmt.Sprintf("curl --connect-to %s.%s::%s: https://%s/", s.Name, s.Namespace, name, name)}
	return f
}

// addressInstead makes the Service one with an endpoint at the address.
func addressInstead(s *Service, a netip.Addr) []string {
	if len(s.Spec.Ports) == 0 {
		return []string{
			mergePatch(s.ref(), map[string]any{"spec": map[string]any{"type": "ClusterIP", "externalName": nil, "ports": []map[string]any{{"port": 80}}}}),
			sliceCommand(s, a, 80, ""),
		}
	}
	p := s.Spec.Ports[0]
	number := p.Port
	if p.TargetPort.Type == intstr.Int && p.TargetPort.IntVal != 0 {
		number = p.TargetPort.IntVal
	}
	return []string{
		mergePatch(s.ref(), map[string]any{"spec": map[string]any{"type": "ClusterIP", "externalName": nil}}),
		sliceCommand(s, a, number, p.Name),
	}
}

// sliceCommand writes an EndpointSlice with one address.
func sliceCommand(s *Service, a netip.Addr, port int32, name string) string {
	kind := "IPv4"
	if a.Is6() {
		kind = "IPv6"
	}
	slice := map[string]any{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": kind,
		"metadata":  map[string]any{"name": s.Name + "-1", "namespace": s.Namespace, "labels": map[string]string{"kubernetes.io/service-name": s.Name}},
		"ports":     []map[string]any{{"port": port, "name": name}},
		"endpoints": []map[string]any{{"addresses": []string{a.String()}}},
	}
	return fmt.Sprintf("echo '%s' | kubectl apply -f -", compact(slice))
}

// inCluster reads a name of this cluster's zone.
func (v *View) inCluster(name string) (Key, bool) {
	rest, ok := strings.CutSuffix(name, ".svc."+v.Zone)
	if !ok {
		return Key{}, false
	}
	parts := strings.Split(rest, ".")
	if len(parts) < 2 {
		return Key{}, false
	}
	return Key{parts[len(parts)-1], parts[len(parts)-2]}, true
}

// clusterName: an alias of another Service of the cluster.
func (v *View) clusterName(f Finding, s *Service, name string, k Key) Finding {
	if !v.sees("services") || v.Limited != "" && v.Limited != k.Namespace {
		return Finding{}
	}
	other := v.services[k]
	switch {
	case other == nil:
		f.Code = "externalname-unknown"
		f.Verdict = fmt.Sprintf("%s points to %s, and there is no Service %s in the namespace %s", s.ref(), name, k.Name, k.Namespace)
		if right := v.similar(k); right != nil {
			f.Verdict += "; there is " + right.ref().String()
			f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalName": fmt.Sprintf("%s.%s.svc.%s", right.Name, right.Namespace, v.Zone)}})}
		}
		return f
	case other == s:
		f.Code = "externalname-loop"
		f.Verdict = fmt.Sprintf("%s points to itself", s.ref())
		return f
	}
	return Finding{}
}

// similar is a Service that a wrong name could mean: of that name in another namespace, or a typo.
func (v *View) similar(k Key) *Service {
	var best *Service
	for _, s := range v.order {
		switch {
		case s.Namespace == k.Namespace && near(s.Name, k.Name):
			return s
		case s.Name == k.Name && (best == nil || near(s.Namespace, k.Namespace)):
			best = s
		}
	}
	return best
}

// checkHeadless looks at headless Services that are used as if they had an address.
func checkHeadless(v *View) (out []Finding) {
	for _, s := range v.order {
		if !s.headless() || s.Spec.Type == corev1.ServiceTypeExternalName {
			continue
		}
		for i := range s.Spec.Ports {
			port := &s.Spec.Ports[i]
			number := port.Port
			if len(s.Pods) > 0 {
				number = target(s.Pods[0], port)
			}
			if number == 0 || number == port.Port {
				continue
			}
			out = append(out, Finding{
				Code: "headless-port", Severity: Notice, Sure: Likely, Object: s.ref(), Field: "spec.clusterIP",
				Verdict:  fmt.Sprintf("%s is headless: its name leads to the Pods themselves, where port %d is not open; they listen at port %d", s.ref(), port.Port, number),
				Evidence: []string{"without a cluster IP nothing leads spec.ports.port to targetPort; clients connect to the Pods directly"},
				Fix:      []string{recreate(s)},
			})
			break
		}
	}
	return out
}

// recreate makes a Service again, with a cluster IP: that field can't be changed.
func recreate(s *Service) string {
	ports := []map[string]any{}
	for _, p := range s.Spec.Ports {
		one := map[string]any{"port": p.Port, "targetPort": p.TargetPort}
		if p.Name != "" {
			one["name"] = p.Name
		}
		if p.Protocol != "" && p.Protocol != corev1.ProtocolTCP {
			one["protocol"] = p.Protocol
		}
		ports = append(ports, one)
	}
	metadata := map[string]any{"name": s.Name, "namespace": s.Namespace}
	if len(s.Labels) > 0 {
		metadata["labels"] = s.Labels
	}
	spec := map[string]any{"ports": ports}
	if len(s.Spec.Selector) > 0 {
		spec["selector"] = s.Spec.Selector
	}
	object := map[string]any{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
	return fmt.Sprintf("echo '%s' | kubectl replace --force -f -", compact(object))
}

// checkStatefulSets looks at the Services that StatefulSets name.
func checkStatefulSets(v *View) (out []Finding) {
	if !v.sees("services") {
		return nil
	}
	for i := range v.StatefulSets {
		set := &v.StatefulSets[i]
		if set.Spec.ServiceName == "" {
			continue
		}
		r := Ref{"StatefulSet", set.Namespace, set.Name}
		f := Finding{Severity: Degraded, Sure: Certain, Object: r, Field: "spec.serviceName"}
		s := v.Service(set.Namespace, set.Spec.ServiceName)
		switch {
		case s == nil:
			f.Code = "statefulset-service"
			f.Verdict = fmt.Sprintf("%s names the Service %s, which does not exist: its Pods have no names of their own", r, set.Spec.ServiceName)
			port := int32(80)
			for _, c := range set.Spec.Template.Spec.Containers {
				if len(c.Ports) > 0 {
					port = c.Ports[0].ContainerPort
				}
			}
			f.Fix = []string{
				kubectl(set.Namespace, "create service clusterip %s --clusterip=None --tcp=%d", set.Spec.ServiceName, port),
			}
			if labels := set.Spec.Selector; labels != nil {
				f.Fix = append(f.Fix, kubectl(set.Namespace, "set selector service %s '%s'", set.Spec.ServiceName, pairs(labels.MatchLabels)))
			}
		case s.selects() && !matches(s.Spec.Selector, set.Spec.Template.Labels):
			f.Code = "statefulset-service"
			f.Affects = []Ref{s.ref()}
			f.Verdict = fmt.Sprintf("%s names %s, whose selector %s does not match its Pods: they have no names of their own", r, s.ref(), pairs(s.Spec.Selector))
			f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": set.Spec.Template.Labels}})}
		default:
			continue
		}
		out = append(out, f)
	}
	return out
}
