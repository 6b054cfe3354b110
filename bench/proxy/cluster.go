package main

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"portal/test/harness"
)

const (
	namespace = "default"
	nodeName  = "bench-node"
)

// cluster is an API server with Services in it.
type cluster struct {
	api      *harness.API
	client   *clientset.Clientset
	services int
	addrs    []netip.Addr // cluster IPs, by number
	fresh    atomic.Int64 // addresses given out for changed endpoints
}

func newCluster(ctx context.Context, dir string, n, endpoints int) (*cluster, error) {
	api, err := harness.StartPortal(dir, "--controllers", "none")
	if err != nil {
		return nil, err
	}
	c := &cluster{api: api, services: n, addrs: make([]netip.Addr, n)}
	config, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		c.stop()
		return nil, err
	}
	config.QPS = -1
	config.ContentType = "application/vnd.kubernetes.protobuf"
	if c.client, err = clientset.NewForConfig(config); err != nil {
		c.stop()
		return nil, err
	}
	if err := c.fill(ctx, endpoints); err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *cluster) stop() { c.api.Kill() }

func (c *cluster) fill(ctx context.Context, endpoints int) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}
	if _, err := c.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	node, err := c.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeAddr}}
	if _, err := c.client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return parallel(16, c.services, func(i int) error { return c.create(ctx, i, endpoints) })
}

func serviceName(i int) string { return fmt.Sprintf("svc-%05d", i) }

// podAddr numbers the addresses of Pods.
func podAddr(i int) string { return fmt.Sprintf("10.%d.%d.%d", 128+i>>16&127, i>>8&255, i&255) }

func (c *cluster) create(ctx context.Context, i, endpoints int) error {
	svc, err := c.client.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: serviceName(i)},
		Spec: corev1.ServiceSpec{
			IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicySingleStack),
			Ports:          []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromInt32(podPort)}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if c.addrs[i], err = netip.ParseAddr(svc.Spec.ClusterIP); err != nil {
		return err
	}
	var addrs []string
	for k := range endpoints {
		addrs = append(addrs, podAddr(i*endpoints+k+1))
	}
	_, err = c.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, slice(i, podPort, addrs), metav1.CreateOptions{})
	return err
}

func slice(i, port int, addrs []string) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: serviceName(i), Labels: map[string]string{discoveryv1.LabelServiceName: serviceName(i), discoveryv1.LabelManagedBy: "bench"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(int32(port))}},
	}
	for _, a := range addrs {
		out.Endpoints = append(out.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}, NodeName: ptr.To("elsewhere"),
		})
	}
	return out
}

func (c *cluster) vip(i int) netip.AddrPort { return netip.AddrPortFrom(c.addrs[i], 80) }

// move gives a Service one new endpoint in place of those that it has, and returns its address.
func (c *cluster) move(ctx context.Context, i int) (string, error) {
	addr := podAddr(6<<20 + int(c.fresh.Add(1)))
	_, err := c.client.DiscoveryV1().EndpointSlices(namespace).Update(ctx, slice(i, podPort, []string{addr}), metav1.UpdateOptions{})
	return addr, err
}

// parallel calls do for 0 to n-1 from several goroutines and returns the first error.
func parallel(workers, n int, do func(int) error) error {
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	next := make(chan int)
	for range workers {
		wg.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					once.Do(func() { first = err })
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return first
}
