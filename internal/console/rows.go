package console

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/explain"
)

// What a Service's health can be, the worst last.
const (
	unknown = "unknown"
	healthy = "ok"
	warning = "warning"
	broken  = "broken"
)

// Where on the way from the name to the node something is wrong.
const (
	atName      = "name"
	atAddress   = "address"
	atEndpoints = "endpoints"
	atNodes     = "nodes"
)

// Port is one of a Service's.
type Port struct {
	Name     string `json:"name,omitempty"`
	Protocol string `json:"protocol"`
	Port     int32  `json:"port"`
	Target   string `json:"target,omitempty"`
	NodePort int32  `json:"nodePort,omitempty"`
}

// Row is a Service in the overview.
type Row struct {
	Namespace    string    `json:"ns"`
	Name         string    `json:"name"`
	Type         string    `json:"type"`
	ClusterIPs   []string  `json:"ips,omitempty"`
	ExternalIPs  []string  `json:"external,omitempty"`
	Balancer     []string  `json:"lb,omitempty"`
	ExternalName string    `json:"cname,omitempty"`
	Ports        []Port    `json:"ports,omitempty"`
	HealthPort   int32     `json:"healthPort,omitempty"`
	Created      time.Time `json:"created"`
	// Ready and Total count endpoints, by address; those that are terminating only if nothing else is there.
	Ready int      `json:"ready"`
	Total int      `json:"total"`
	Zones []string `json:"zones,omitempty"`

	Health  string `json:"health"`
	Stage   string `json:"stage,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// Node is a machine in the overview.
type Node struct {
	Name          string   `json:"name"`
	Ready         bool     `json:"ready"`
	Reason        string   `json:"reason,omitempty"`
	Zone          string   `json:"zone,omitempty"`
	Addresses     []string `json:"addresses,omitempty"`
	Unschedulable bool     `json:"cordoned,omitempty"`
	// Endpoints counts the ready ones on it, of all Services that can be seen.
	Endpoints int `json:"endpoints"`
}

// Endpoint is one address behind a Service.
type Endpoint struct {
	Address     string   `json:"address"`
	Ports       []string `json:"ports,omitempty"`
	Node        string   `json:"node,omitempty"`
	Zone        string   `json:"zone,omitempty"`
	Pod         string   `json:"pod,omitempty"`
	Ready       bool     `json:"ready"`
	Serving     bool     `json:"serving"`
	Terminating bool     `json:"terminating,omitempty"`
}

// slice is what the console keeps of an EndpointSlice.
type slice struct {
	name      string
	endpoints []Endpoint
	portNames []string
}

func orTrue(p *bool) bool { return p == nil || *p }
func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func newSlice(from *discoveryv1.EndpointSlice) *slice {
	s := &slice{name: from.Name}
	var ports []string
	for _, p := range from.Ports {
		s.portNames = append(s.portNames, deref(p.Name))
		if p.Port != nil {
			ports = append(ports, fmt.Sprintf("%d/%s", *p.Port, deref(p.Protocol)))
		}
	}
	for _, e := range from.Endpoints {
		one := Endpoint{
			Node: deref(e.NodeName), Zone: deref(e.Zone), Ports: ports,
			Ready: orTrue(e.Conditions.Ready), Serving: orTrue(e.Conditions.Serving), Terminating: deref(e.Conditions.Terminating),
		}
		if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
			one.Pod = e.TargetRef.Name
		}
		for _, address := range e.Addresses {
			one.Address = address
			s.endpoints = append(s.endpoints, one)
		}
	}
	return s
}

// merge has each address once, with the ports of all slices: a Service whose Pods differ in ports has several slices.
func merge(parts map[string]*slice) []Endpoint {
	names := make([]string, 0, len(parts))
	for name := range parts {
		names = append(names, name)
	}
	slices.Sort(names)
	at := map[string]int{}
	var out []Endpoint
	for _, name := range names {
		for _, e := range parts[name].endpoints {
			i, seen := at[e.Address]
			if !seen {
				at[e.Address] = len(out)
				e.Ports = slices.Clone(e.Ports)
				out = append(out, e)
				continue
			}
			for _, port := range e.Ports {
				if !slices.Contains(out[i].Ports, port) {
					out[i].Ports = append(out[i].Ports, port)
				}
			}
			out[i].Ready = out[i].Ready || e.Ready
		}
	}
	slices.SortFunc(out, func(a, b Endpoint) int { return compareAddresses(a.Address, b.Address) })
	return out
}

func compareAddresses(a, b string) int {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX != nil || errY != nil {
		return strings.Compare(a, b)
	}
	return x.Compare(y)
}

// newRow has all of a Service but its endpoints and health.
func newRow(svc *corev1.Service) Row {
	row := Row{
		Namespace: svc.Namespace, Name: svc.Name, Type: string(svc.Spec.Type), ExternalIPs: svc.Spec.ExternalIPs,
		Created: svc.CreationTimestamp.Time, HealthPort: svc.Spec.HealthCheckNodePort,
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		row.ExternalName = svc.Spec.ExternalName
	} else {
		row.ClusterIPs = svc.Spec.ClusterIPs
	}
	for _, p := range svc.Spec.Ports {
		row.Ports = append(row.Ports, Port{Name: p.Name, Protocol: string(p.Protocol), Port: p.Port, Target: p.TargetPort.String(), NodePort: p.NodePort})
	}
	for _, ingress := range svc.Status.LoadBalancer.Ingress {
		if ingress.IP != "" {
			row.Balancer = append(row.Balancer, ingress.IP)
		} else if ingress.Hostname != "" {
			row.Balancer = append(row.Balancer, ingress.Hostname)
		}
	}
	return row
}

// judge says how a Service is, from what all who may read it can see. listed is whether all endpoints are known;
// nodes has those that are, and whether they are ready.
func judge(row *Row, svc *corev1.Service, parts map[string]*slice, endpoints []Endpoint, listed bool, nodes map[string]*Node) {
	row.Health = healthy
	worse := func(health, stage, format string, args ...any) {
		if row.Health == broken || row.Health == health {
			return
		}
		row.Health, row.Stage, row.Problem = health, stage, fmt.Sprintf(format, args...)
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		if _, err := netip.ParseAddr(svc.Spec.ExternalName); err == nil {
			worse(broken, atName, "spec.externalName is an IP address: DNS answers with a name that does not exist")
		}
		return
	}
	if !listed {
		row.Health = unknown
		return
	}
	judgeEndpoints(row, svc, endpoints, worse)
	judgePorts(svc, parts, endpoints, worse)
	judgeNodes(endpoints, nodes, worse)
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer && len(row.Balancer) == 0 {
		worse(warning, atAddress, "waits for a load balancer to give it an address")
	}
}

func judgeEndpoints(row *Row, svc *corev1.Service, endpoints []Endpoint, worse func(health, stage, format string, args ...any)) {
	var lasting, terminating, serving int
	for _, e := range endpoints {
		switch {
		case e.Terminating:
			terminating++
			if e.Serving {
				serving++
			}
		default:
			lasting++
		}
		if e.Ready {
			row.Ready++
		}
		if e.Ready && e.Zone != "" && !slices.Contains(row.Zones, e.Zone) {
			row.Zones = append(row.Zones, e.Zone)
		}
	}
	slices.Sort(row.Zones)
	row.Total = lasting
	switch {
	case len(endpoints) == 0 && svc.Namespace == metav1.NamespaceDefault && svc.Name == "kubernetes":
		// Servers at loopback have none to offer, and nobody misses them.
		worse(warning, atEndpoints, "has no endpoints: no API server has said where others reach it (--advertise-address)")
	case len(endpoints) == 0 && svc.Namespace+"/"+svc.Name == explain.BalancerEntry:
		// The balancing process has the endpoints of Ingresses.
	case len(endpoints) == 0 && len(svc.Spec.Selector) == 0:
		worse(broken, atEndpoints, "has no endpoints: it has no selector, and nobody made EndpointSlices for it")
	case len(endpoints) == 0:
		worse(broken, atEndpoints, "has no endpoints: no Pod with an address matches %s", selectorText(svc.Spec.Selector))
	case row.Ready > 0 && row.Ready < lasting:
		worse(warning, atEndpoints, "%d of %d endpoints are not ready", lasting-row.Ready, lasting)
	case row.Ready == 0 && lasting == 0 && serving > 0:
		row.Total = terminating
		worse(warning, atEndpoints, "all its endpoints are terminating; those that still serve get the traffic")
	case row.Ready == 0 && lasting == 0:
		row.Total = terminating
		worse(broken, atEndpoints, "all its endpoints are terminating")
	case row.Ready == 0 && lasting == 1:
		worse(broken, atEndpoints, "its only endpoint is not ready")
	case row.Ready == 0:
		worse(broken, atEndpoints, "none of its %d endpoints is ready", lasting)
	}
}

// judgePorts finds ports that lead nowhere: their target is a name that no Pod has.
func judgePorts(svc *corev1.Service, parts map[string]*slice, endpoints []Endpoint, worse func(health, stage, format string, args ...any)) {
	if len(endpoints) == 0 {
		return
	}
	have := map[string]bool{}
	for _, part := range parts {
		for _, name := range part.portNames {
			have[name] = true
		}
	}
	for _, p := range svc.Spec.Ports {
		if have[p.Name] {
			continue
		}
		label := fmt.Sprint(p.Port)
		if p.Name != "" {
			label = fmt.Sprintf("%s (%d)", p.Name, p.Port)
		}
		health := warning
		if len(svc.Spec.Ports) == 1 {
			health = broken
		}
		worse(health, atEndpoints, "port %s has no endpoints: none has its target %s", label, p.TargetPort.String())
	}
}

func judgeNodes(endpoints []Endpoint, nodes map[string]*Node, worse func(health, stage, format string, args ...any)) {
	var ready, lost int
	names := map[string]bool{}
	for _, e := range endpoints {
		if !e.Ready {
			continue
		}
		ready++
		if node := nodes[e.Node]; node != nil && !node.Ready {
			lost++
			names[e.Node] = true
		}
	}
	switch {
	case lost == 0:
	case lost == ready:
		worse(broken, atNodes, "all its ready endpoints are on nodes that are not ready: %s", nameList(names))
	default:
		worse(warning, atNodes, "%d of %d ready endpoints are on nodes that are not ready: %s", lost, ready, nameList(names))
	}
}

func nameList(set map[string]bool) string {
	var names []string
	for name := range set {
		names = append(names, name)
	}
	slices.Sort(names)
	if len(names) > 3 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), len(names)-3)
	}
	return strings.Join(names, ", ")
}

func selectorText(selector map[string]string) string {
	var pairs []string
	for key, value := range selector {
		pairs = append(pairs, key+"="+value)
	}
	slices.Sort(pairs)
	return strings.Join(pairs, ",")
}

func newNode(from *corev1.Node) *Node {
	n := &Node{Name: from.Name, Zone: from.Labels[corev1.LabelTopologyZone], Unschedulable: from.Spec.Unschedulable}
	for _, a := range from.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			n.Addresses = append(n.Addresses, a.Address)
		}
	}
	n.Reason = "it has not reported its condition"
	for _, condition := range from.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			n.Ready, n.Reason = condition.Status == corev1.ConditionTrue, ""
			if !n.Ready {
				n.Reason = condition.Message
			}
		}
	}
	return n
}
