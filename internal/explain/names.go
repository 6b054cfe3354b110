package explain

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// similar is a Service that a wrong name could mean: with both parts the other way round, of that name in another namespace, or a typo.
func (v *View) similar(k Key) *Service {
	if swapped := v.Service(k.Name, k.Namespace); swapped != nil {
		return swapped
	}
	var best *Service
	distance := func(s *Service) int {
		return min(edits(s.Name, k.Name), edits(k.Name, s.Name)) + min(edits(s.Namespace, k.Namespace), edits(k.Namespace, s.Namespace))
	}
	for _, s := range v.order {
		switch {
		case s.Namespace == k.Namespace && near(s.Name, k.Name):
			return s
		case s.Name == k.Name, near(s.Namespace, k.Namespace) && near(s.Name, k.Name):
			if best == nil || distance(s) < distance(best) {
				best = s
			}
		}
	}
	return best
}

// checkHeadless looks at headless Services that are used as if they had an address.
func checkHeadless(v *View) (out []Finding) {
	for _, s := range v.subjects {
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
	return fmt.Sprintf("echo '%s' | kubectl replace --force -f -", compact(plainService(s, s.Namespace)))
}

// plainService is a Service with the ports and the selector of another one, and a cluster IP.
func plainService(s *Service, namespace string) map[string]any {
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
	metadata := map[string]any{"name": s.Name, "namespace": namespace}
	if len(s.Labels) > 0 {
		metadata["labels"] = s.Labels
	}
	spec := map[string]any{"ports": ports}
	if len(s.Spec.Selector) > 0 {
		spec["selector"] = s.Spec.Selector
	}
	return map[string]any{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
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
