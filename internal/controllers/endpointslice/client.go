package endpointslice

import (
	"context"
	"sync"

	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/sliceview"
	"portal/internal/controllers/writes"
)

// countingClient tracks the slices that the reconciler writes and deletes, and counts them for each Service, because the
// reconciler reports neither.
type countingClient struct {
	kubernetes.Interface
	tracker *writes.Tracker
	slices  cache.Store
	mu      sync.Mutex
	writes  map[queue.Key]int
}

func newCountingClient(client kubernetes.Interface, tracker *writes.Tracker, slices cache.Store) *countingClient {
	return &countingClient{Interface: client, tracker: tracker, slices: slices, writes: map[queue.Key]int{}}
}

func (c *countingClient) count(asked, made *discovery.EndpointSlice, err error) (*discovery.EndpointSlice, error) {
	key := sliceview.ServiceOf(asked)
	if err == nil {
		c.tracker.Wrote(key, made)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writes[key]++
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
	return countingSlices{g.DiscoveryV1Interface.EndpointSlices(namespace), namespace, g.counter}
}

type countingSlices struct {
	discoveryclient.EndpointSliceInterface
	namespace string
	counter   *countingClient
}

func (s countingSlices) Create(ctx context.Context, slice *discovery.EndpointSlice, opts metav1.CreateOptions) (*discovery.EndpointSlice, error) {
	made, err := s.EndpointSliceInterface.Create(ctx, slice, opts)
	return s.counter.count(slice, made, err)
}

func (s countingSlices) Update(ctx context.Context, slice *discovery.EndpointSlice, opts metav1.UpdateOptions) (*discovery.EndpointSlice, error) {
	made, err := s.EndpointSliceInterface.Update(ctx, slice, opts)
	return s.counter.count(slice, made, err)
}

func (s countingSlices) Delete(ctx context.Context, name string, opts metav1.DeleteOptions) error {
	err := s.EndpointSliceInterface.Delete(ctx, name, opts)
	if apierrors.IsNotFound(err) {
		err = nil // somebody was faster
	}
	if obj, there, _ := s.counter.slices.GetByKey(s.namespace + "/" + name); err == nil && there {
		slice := obj.(*discovery.EndpointSlice)
		s.counter.tracker.Deleted(sliceview.ServiceOf(slice), slice)
	}
	return err
}
