package trace

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/plan"
	"portal/internal/proxy"
)

// Objects are what a trace is made from, as the API has it. What is missing is not known: without Pods, for example, addresses have no
// names.
type Objects struct {
	Services   []corev1.Service
	Slices     []discoveryv1.EndpointSlice
	Nodes      []corev1.Node
	Pods       []corev1.Pod
	Namespaces []corev1.Namespace
	Ranges     []networkingv1.ServiceCIDR
	// Announced are the nodes that announce addresses of load balancers, by name.
	Announced map[netip.Addr]string
}

// Settings are what a node's proxy is configured with, which the API does not know.
type Settings struct {
	// Mode is the proxy's.
	Mode string
	// ClusterCIDRs are the Pods' prefixes by which a proxy recognises them. Empty: a node of Portal's own knows its Pods by their
	// bridge, and others are taken to know the prefixes of all nodes.
	ClusterCIDRs  []netip.Prefix
	NodePorts     plan.NodePortAddresses
	MasqueradeAll bool
	// Zone is the cluster's domain.
	Zone string
}

// World is a cluster at one moment. It is not changed by traces, but they must not run at the same time.
type World struct {
	Settings
	mode      *Mode
	cluster   *intent.Cluster
	nodes     []*node
	pods      []*pod
	podAt     map[netip.Addr]*pod
	nodeAt    map[netip.Addr]*node
	announced map[netip.Addr]string
	snapshots map[string]*plan.Snapshot
}

// node is a machine of the cluster.
type node struct {
	*intent.Node
	// ours: it is run by Portal.
	ours bool
	// addrs are its own, the primary one of each family first; gateways those that its Pods know it by.
	addrs, gateways []netip.Addr
}

// pod is a Pod that has addresses.
type pod struct {
	intent.Key
	node        string
	addrs       []netip.Addr
	hostNetwork bool
	ports       []hostPort
}

// hostPort is a port of the node that leads to the Pod.
type hostPort struct {
	host     netip.Addr // the zero Addr: all of the node's
	protocol intent.Protocol
	from, to uint16
}

// bridge is how the interface of a node's Pods is called here; its name makes no difference.
const bridge = "pods"

// NewWorld returns the cluster that the objects describe.
func NewWorld(o *Objects, s Settings) (*World, error) {
	mode, err := modeNamed(s.Mode)
	if err != nil {
		return nil, err
	}
	s.Mode, s.Zone = mode.Name, cmp.Or(s.Zone, "cluster.local")
	w := &World{
		Settings: s, mode: mode, cluster: intent.NewCluster(), podAt: map[netip.Addr]*pod{}, nodeAt: map[netip.Addr]*node{},
		announced: o.Announced, snapshots: map[string]*plan.Snapshot{},
	}
	for i := range o.Services {
		w.cluster.SetService(watch.Service(&o.Services[i]))
	}
	for i := range o.Slices {
		w.cluster.SetSlice(watch.Slice(&o.Slices[i]))
	}
	for i := range o.Namespaces {
		w.cluster.SetNamespace(watch.Namespace(&o.Namespaces[i]))
	}
	for i := range o.Services { // whoever may not list namespaces knows those of Services
		w.cluster.SetNamespace(&intent.Namespace{Name: o.Services[i].Namespace})
	}
	for i := range o.Ranges {
		w.cluster.SetServiceCIDR(watch.ServiceCIDR(&o.Ranges[i]))
	}
	for i := range o.Nodes {
		w.addNode(&o.Nodes[i])
	}
	slices.SortFunc(w.nodes, func(a, b *node) int { return strings.Compare(a.Name, b.Name) })
	for i := range o.Pods {
		w.addPod(&o.Pods[i])
	}
	return w, nil
}

func (w *World) addNode(o *corev1.Node) {
	n := &node{Node: watch.Node(o), ours: strings.HasPrefix(o.Status.NodeInfo.ContainerRuntimeVersion, "portal://")}
	w.cluster.SetNode(n.Node)
	for _, kind := range []string{"InternalIP", "ExternalIP"} {
		for _, a := range n.Addresses {
			if a.Type == kind && !slices.Contains(n.addrs, a.Addr.Unmap()) {
				n.addrs = append(n.addrs, a.Addr.Unmap())
			}
		}
	}
	if n.ours {
		for _, p := range n.PodCIDRs {
			n.gateways = append(n.gateways, p.Masked().Addr().Next())
		}
	}
	w.nodes = append(w.nodes, n)
	for _, a := range slices.Concat(n.addrs, n.gateways) {
		if w.nodeAt[a] == nil {
			w.nodeAt[a] = n
		}
	}
}

func (w *World) addPod(o *corev1.Pod) {
	if o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed {
		return
	}
	p := &pod{Key: intent.Key{Namespace: o.Namespace, Name: o.Name}, node: o.Spec.NodeName, hostNetwork: o.Spec.HostNetwork}
	for _, ip := range o.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			p.addrs = append(p.addrs, a.Unmap())
		}
	}
	w.pods = append(w.pods, p)
	if p.hostNetwork {
		return
	}
	for _, a := range p.addrs {
		w.podAt[a] = p
	}
	for _, c := range o.Spec.Containers {
		for _, port := range c.Ports {
			if port.HostPort == 0 {
				continue
			}
			h := hostPort{protocol: protocolNamed(string(port.Protocol)), from: uint16(port.HostPort), to: uint16(port.ContainerPort)}
			if a, err := netip.ParseAddr(port.HostIP); err == nil && !a.IsUnspecified() {
				h.host = a.Unmap()
			}
			p.ports = append(p.ports, h)
		}
	}
}

func protocolNamed(name string) intent.Protocol {
	switch strings.ToUpper(name) {
	case "TCP", "":
		return intent.TCP
	case "UDP":
		return intent.UDP
	case "SCTP":
		return intent.SCTP
	}
	return 0
}

func (w *World) node(name string) *node {
	for _, n := range w.nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// pod finds a Pod by NAMESPACE/NAME, or by NAME in a namespace.
func (w *World) pod(name, namespace string) *pod {
	if before, after, found := strings.Cut(name, "/"); found {
		namespace, name = before, after
	}
	for _, p := range w.pods {
		if p.Key == (intent.Key{Namespace: namespace, Name: name}) {
			return p
		}
	}
	return nil
}

// snapshot is what a node does for Services.
func (w *World) snapshot(n *node) *plan.Snapshot {
	if s := w.snapshots[n.Name]; s != nil {
		return s
	}
	facts := w.facts(n)
	s := plan.NewSnapshot(facts)
	for _, k := range w.cluster.Keys(intent.Services) {
		s.Set(k, plan.For(w.cluster.Entry(k), facts))
	}
	w.snapshots[n.Name] = s
	return s
}

// facts are those that the node's proxy finds.
func (w *World) facts(n *node) *plan.Facts {
	c := proxy.Config{
		Node: n.Name, Families: []intent.Family{intent.IPv4, intent.IPv6}, ClusterCIDRs: w.ClusterCIDRs,
		MasqueradeAll: w.MasqueradeAll, NodePorts: w.NodePorts, LocalhostNodePorts: true,
	}
	if len(w.ClusterCIDRs) == 0 && n.ours {
		c.DetectLocal, c.Bridge = proxy.DetectBridgeInterface, bridge
	}
	local := slices.Concat(n.addrs, n.gateways)
	facts := c.Facts(n.Node, hostnet.Addresses{Node: n.addrs, Local: local}, w.cluster.ServicePrefixes(), w.mode.Traits)
	if len(w.ClusterCIDRs) == 0 && !n.ours {
		for _, other := range w.nodes {
			facts.Pods.Prefixes = append(facts.Pods.Prefixes, other.PodCIDRs...)
		}
	}
	return facts
}
