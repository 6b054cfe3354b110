package endpointslice

import (
	"context"
	"sync"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/sliceview"
)

// countingClient notes the slices that the reconciler writes, and counts them for each Service: it doesn't tell itself.
type countingClient struct {
	kubernetes.Interface
	wrote  func(*discovery.EndpointSlice)
	mu     sync.Mutex
	writes map[queue.Key]int
}

func newCountingClient(client kubernetes.Interface, wrote func(*discovery.EndpointSlice)) *countingClient {
	return &countingClient{Interface: client, wrote: wrote, writes: map[queue.Key]int{}}
}

func (c *countingClient) count(asked, made *discovery.EndpointSlice, err error) (*discovery.EndpointSlice, error) {
	if err == nil {
		c.wrote(made)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writes[sliceview.ServiceOf(asked)]++
	return made, err
}

// take is how many slices were written for a Service since it was last asked.
func (c *countingClient) take(key queue.Key) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.writes[key]
	delete(c.writes, key)
	return n
}

func (c *countingClient) DiscoveryV1() discoveryclient.DiscoveryV1Interface {
	return countingGroup{c.Interface.DiscoveryV1(), c}
}

type countingGroup struct {
	discoveryclient.DiscoveryV1Interface
	counter *countingClient
}

func (g countingGroup) EndpointSlices(namespace string) discoveryclient.EndpointSliceInterface {
	return countingSlices{g.DiscoveryV1Interface.EndpointSlices(namespace), g.counter}
}

type countingSlices struct {
	discoveryclient.EndpointSliceInterface
	counter *countingClient
}

func (s countingSlices) Create(ctx context.Context, slice *discovery.EndpointSlice, opts metav1.CreateOptions) (*discovery.EndpointSlice, error) {
	made, err := s.EndpointSliceInterface.Create(ctx, slice, opts)
	return s.counter.count(slice, made, err)
}

func (s countingSlices) Update(ctx context.Context, slice *discovery.EndpointSlice, opts metav1.UpdateOptions) (*discovery.EndpointSlice, error) {
	made, err := s.EndpointSliceInterface.Update(ctx, slice, opts)
	return s.counter.count(slice, made, err)
}
