package main

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/bench/report"
	"portal/test/harness"
)

const (
	namespace = "default"
	nodeName  = "bench-node"
	// sliceSize is how many endpoints the EndpointSlice controller puts into one slice.
	sliceSize = 100
	// nodePorts leaves room for a large mix, and the ports of the bench's own connections alone.
	nodePorts = "2000-8999"
)

// cluster is an API server with Services in it.
type cluster struct {
	api    *harness.API
	client *clientset.Clientset
	load   workload
	specs  []serviceSpec
	// frontends are all addresses and ports that answer, by Service; the first of each is its IPv4 cluster IP.
	frontends [][]netip.AddrPort
	// replaceable are the Services whose endpoints can be replaced with one write.
	replaceable []int
	fresh       atomic.Int64 // how many Pods have replaced others
}

func newCluster(ctx context.Context, dir string, load workload, n int) (*cluster, error) {
	api, err := harness.StartPortal(dir, "--controllers", "none", "--service-node-port-range", nodePorts)
	if err != nil {
		return nil, err
	}
	c := &cluster{api: api, load: load, specs: make([]serviceSpec, n), frontends: make([][]netip.AddrPort, n)}
	for i := range n {
		c.specs[i] = load.service(i)
		if c.specs[i].endpoints <= sliceSize {
			c.replaceable = append(c.replaceable, i)
		}
	}
	if c.client, err = harness.Connect(api.Kubeconfig); err != nil {
		c.stop()
		return nil, err
	}
	if err := c.fill(ctx); err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *cluster) stop() { c.api.Kill() }

func (c *cluster) size() int { return len(c.specs) }

func (c *cluster) fill(ctx context.Context) error {
	nodes := c.client.CoreV1().Nodes()
	node, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	for _, addr := range []string{nodeAddr, nodeAddr6} {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: addr})
	}
	if _, err := nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return report.Each(ctx, 16, c.size(), func(i int) error { return c.create(ctx, i) })
}

func serviceName(i int) string { return fmt.Sprintf("svc-%05d", i) }

func (c *cluster) create(ctx context.Context, i int) error {
	services := c.client.CoreV1().Services(namespace)
	svc, err := services.Create(ctx, c.service(i), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("198.18.%d.%d", i>>8, i&255)}}
		if svc, err = services.UpdateStatus(ctx, svc, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	if c.frontends[i], err = frontends(svc); err != nil {
		return err
	}
	for _, s := range c.slices(i) {
		if _, err = c.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) service(i int) *corev1.Service {
	spec := c.specs[i]
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: serviceName(i)}}
	svc.Spec.Type = corev1.ServiceType(spec.kind)
	svc.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicySingleStack)
	if c.load.dualStack {
		svc.Spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
	}
	for k := range spec.ports {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: fmt.Sprintf("p%d", k), Port: int32(80 + k), TargetPort: intstr.FromInt(podPorts[k]),
		})
	}
	if spec.affinity {
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	switch {
	case spec.local && spec.kind != "ClusterIP":
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	case spec.local:
		svc.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}
	return svc
}

// frontends are where a Service answers: cluster IPs, node ports and load balancer addresses.
func frontends(svc *corev1.Service) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	add := func(text string, port int32) error {
		addr, err := netip.ParseAddr(text)
		out = append(out, netip.AddrPortFrom(addr, uint16(port)))
		return err
	}
	for _, port := range svc.Spec.Ports {
		for _, ip := range svc.Spec.ClusterIPs {
			if err := add(ip, port.Port); err != nil {
				return nil, fmt.Errorf("cluster IP of %s: %w", svc.Name, err)
			}
		}
		if port.NodePort != 0 {
			if err := add(nodeAddr, port.NodePort); err != nil {
				return nil, err
			}
		}
		for _, ingress := range svc.Status.LoadBalancer.Ingress {
			if err := add(ingress.IP, port.Port); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// slices are the EndpointSlices that a Service has at first: up to sliceSize endpoints in each, for each family.
func (c *cluster) slices(i int) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	families := []func(int) string{podAddr}
	if c.load.dualStack {
		families = append(families, podAddr6)
	}
	for _, address := range families {
		for first := 0; first < c.specs[i].endpoints; first += sliceSize {
			var addrs []string
			for k := first; k < min(first+sliceSize, c.specs[i].endpoints); k++ {
				addrs = append(addrs, address(i*maxEndpoints+k+1))
			}
			out = append(out, c.slice(i, first/sliceSize, addrs))
		}
	}
	return out
}

// slice is one EndpointSlice of a Service. One endpoint of a Service with a Local policy is on this node, or it would
// not answer here; all others are elsewhere.
func (c *cluster) slice(i, number int, addrs []string) *discoveryv1.EndpointSlice {
	family, suffix := discoveryv1.AddressTypeIPv4, "4"
	if netip.MustParseAddr(addrs[0]).Is6() {
		family, suffix = discoveryv1.AddressTypeIPv6, "6"
	}
	out := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:   fmt.Sprintf("%s-%s-%d", serviceName(i), suffix, number),
			Labels: map[string]string{discoveryv1.LabelServiceName: serviceName(i), discoveryv1.LabelManagedBy: "bench"},
		},
		AddressType: family,
	}
	for k := range c.specs[i].ports {
		out.Ports = append(out.Ports, discoveryv1.EndpointPort{
			Name: ptr.To(fmt.Sprintf("p%d", k)), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(int32(podPorts[k])),
		})
	}
	for k, a := range addrs {
		node := "elsewhere"
		if c.specs[i].local && number == 0 && k == 0 {
			node = nodeName
		}
		out.Endpoints = append(out.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}, NodeName: ptr.To(node),
		})
	}
	return out
}

// vip is a Service's IPv4 cluster IP with its first port.
func (c *cluster) vip(i int) netip.AddrPort { return c.frontends[i][0] }

// replace replaces the IPv4 endpoints of a Service by a new one and returns its address.
func (c *cluster) replace(ctx context.Context, i int) (string, error) {
	addr := podAddr(freshFrom + int(c.fresh.Add(1)))
	return addr, c.update(ctx, c.slice(i, 0, []string{addr}))
}

// restore gives a Service its original endpoints back.
func (c *cluster) restore(ctx context.Context, i int) error { return c.update(ctx, c.slices(i)[0]) }

func (c *cluster) update(ctx context.Context, s *discoveryv1.EndpointSlice) error {
	_, err := c.client.DiscoveryV1().EndpointSlices(namespace).Update(ctx, s, metav1.UpdateOptions{})
	return err
}
