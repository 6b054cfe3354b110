package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// checkExternalNames looks at what ExternalName Services point to.
func checkExternalNames(v *View) (out []Finding) {
	for _, s := range v.subjects {
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
			} else if found, ok := v.tried(f, s, name); ok {
				out = append(out, found)
			}
			continue
		}
		if right := v.shortened(name); right != nil && strings.Contains(name, ".") {
			f.Code, f.Sure = "externalname-unknown", Likely
			f.Verdict = fmt.Sprintf("%s points to %q, which is no full name: an alias is resolved without search domains; there is %s", s.ref(), name, right.ref())
			f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalName": v.fullName(right)}})}
			out = append(out, f)
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
		out = append(out, v.external(f, s, name)...)
	}
	return out
}

// shortened is the Service that SERVICE.NAMESPACE or SERVICE.NAMESPACE.svc means inside of a cluster.
func (v *View) shortened(name string) *Service {
	parts := strings.Split(strings.TrimSuffix(name, ".svc"), ".")
	if len(parts) != 2 {
		return nil
	}
	return v.Service(parts[1], parts[0])
}

func (v *View) fullName(s *Service) string {
	return fmt.Sprintf("%s.%s.svc.%s", s.Name, s.Namespace, v.Zone)
}

// tried is what is wrong with the target of an alias by what a node got there, if one was asked.
func (v *View) tried(f Finding, s *Service, name string) (Finding, bool) {
	for _, node := range slices.Sorted(maps.Keys(v.Reports)) {
		if r := v.Reports[node]; r.Report != nil && r.Alias != nil && r.Alias.Name == name {
			return v.aliased(f, s, r.Alias, node)
		}
	}
	return Finding{}, false
}

// external is about an alias of a name outside of the cluster: what nodes got there, or what may happen.
func (v *View) external(f Finding, s *Service, name string) []Finding {
	if found, ok := v.tried(f, s, name); ok {
		return []Finding{found}
	}
	f.Code, f.Severity, f.Sure = "externalname-host", Notice, Possible
	f.Verdict = fmt.Sprintf("%s is an alias of %s: clients send the name %s as Host header and TLS server name, which %s may reject", s.ref(), name, s.Name, name)
	f.Evidence = []string{"nothing is led or balanced: DNS answers with a CNAME, and ports of the Service mean nothing"}
	f.Fix = []string{fmt.Sprintf("curl --connect-to %s.%s::%s: https://%s/", s.Name, s.Namespace, name, name)}
	return []Finding{f}
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
	case v.circular(s):
		f.Code = "externalname-loop"
		f.Verdict = fmt.Sprintf("%s points to itself, by way of %s", s.ref(), other.ref())
		f.Fix = []string{kubectl(s.Namespace, "get service %s -o yaml", s.Name)}
		return f
	}
	return Finding{}
}

// circular: following aliases leads back to the Service.
func (v *View) circular(s *Service) bool {
	at := s
	for range 10 {
		k, ok := v.inCluster(strings.TrimSuffix(at.Spec.ExternalName, "."))
		if at = v.services[k]; !ok || at == nil || at.Spec.Type != corev1.ServiceTypeExternalName {
			return false
		}
		if at == s {
			return true
		}
	}
	return true
}
