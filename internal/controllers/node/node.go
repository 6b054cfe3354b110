// Package node looks after Nodes: it notices when one has stopped renewing its Lease, so that its Pods leave the
// endpoints and can be evicted, and hands each its part of the cluster's Pod addresses. It runs no Pods and evicts none itself.
package node

import (
	"context"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	coordinationlisters "k8s.io/client-go/listers/coordination/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
)

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	Nodes    cache.SharedIndexInformer
	Leases   cache.SharedIndexInformer // those in kube-node-lease
	Pods     cache.SharedIndexInformer // with the index membership.ByNode
	Clock    clock.WithTicker          // the wall clock if nil

	// GracePeriod is how long a Lease may go without being renewed, MonitorPeriod how often that is checked.
	GracePeriod, MonitorPeriod time.Duration
	// Ranges are cut up for the nodes; none: nodes get no addresses here.
	Ranges []Range
	// Reserved are parts of Ranges that nodes must not get: the Services' own, if they overlap.
	Reserved []netip.Prefix
}

// Controller checks the health of Nodes and assigns them Pod CIDRs.
type Controller struct {
	Deps
	nodes  corelisters.NodeLister
	leases coordinationlisters.LeaseNamespaceLister
	health map[string]pulse // only the monitor's goroutine uses it
	// suspended says that nodes could not renew their Leases when last checked.
	suspended bool
	// isolated says that no node was ready when last checked, evicted when a zone last had a node's Pods evicted. They are the monitor's too.
	isolated bool
	evicted  map[string]time.Time
	wake     chan struct{} // has the monitor look at once
	queue    *queue.Queue

	mu       sync.Mutex
	pools    []*pool
	reserved map[string][]netip.Prefix // parts on their way to a node
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	if deps.Clock == nil {
		deps.Clock = clock.RealClock{}
	}
	c := &Controller{
		Deps:     deps,
		nodes:    corelisters.NewNodeLister(deps.Nodes.GetIndexer()),
		leases:   coordinationlisters.NewLeaseLister(deps.Leases.GetIndexer()).Leases(corev1.NamespaceNodeLease),
		health:   map[string]pulse{},
		evicted:  map[string]time.Time{},
		wake:     make(chan struct{}, 1),
		reserved: map[string][]netip.Prefix{},
	}
	for _, r := range deps.Ranges {
		p := newPool(r)
		for _, reserved := range deps.Reserved {
			p.occupy(reserved, "Services")
		}
		c.pools = append(c.pools, p)
	}
	if _, err := deps.Nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { c.changed(obj.(*corev1.Node)) },
		UpdateFunc: func(_, obj any) { c.changed(obj.(*corev1.Node)) },
	}); err != nil {
		return nil, err
	}
	c.queue = queue.New(queue.Options{Name: "node_cidr"}, c.syncCIDR)
	if len(c.pools) == 0 {
		return c, nil
	}
	_, err := deps.Nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { c.seen(obj.(*corev1.Node)) },
		UpdateFunc: func(old, obj any) {
			// Deleted and made again while no watch could see it.
			if was := old.(*corev1.Node); was.UID != obj.(*corev1.Node).UID {
				c.gone(was)
			}
			c.seen(obj.(*corev1.Node))
		},
		DeleteFunc: func(obj any) {
			if gone := membership.Deleted[*corev1.Node](obj); gone != nil {
				c.gone(gone)
			}
		},
	})
	return c, err
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	// All that is in use must be known before the first part is handed out, events or not.
	for _, obj := range c.Nodes.GetStore().List() {
		c.seen(obj.(*corev1.Node))
	}
	var done sync.WaitGroup
	done.Go(func() { c.queue.Run(ctx, 1) })
	done.Go(func() { c.monitor(ctx) })
	done.Wait()
	return nil
}
