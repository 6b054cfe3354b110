// Package servicecidr manages the life cycle of ServiceCIDR objects: it marks them ready, and blocks their deletion while
// a Service has an address that no other range covers. It allocates nothing.
package servicecidr

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	applymetav1 "k8s.io/client-go/applyconfigurations/meta/v1"
	applynetworkingv1 "k8s.io/client-go/applyconfigurations/networking/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
	"portal/internal/servicerange"
)

// Name is what --controllers calls it.
const Name = "servicecidr"

const (
	// Finalizer blocks a ServiceCIDR's deletion until this controller removes it.
	Finalizer = "networking.k8s.io/service-cidr-finalizer"
	// manager is the field manager of the status.
	manager = "service-cidr-controller"
	// grace is how long a ServiceCIDR stays after its deletion was asked for, even if nobody uses it: every API server
	// must have heard by then, and have ended what it was about to allocate.
	grace = 10 * time.Second
)

// allocated selects the addresses that API servers claimed for Services, and not those that users made for other ends.
var allocated = labels.SelectorFromSet(labels.Set{networkingv1.LabelManagedBy: "ipallocator.k8s.io"})

// Controller manages ServiceCIDRs.
type Controller struct {
	client    kubernetes.Interface
	informers [2]cache.SharedIndexInformer // of ServiceCIDRs and IPAddresses
	ranges    listers.ServiceCIDRLister
	addresses listers.IPAddressLister
	queue     *queue.Queue
	clock     clock.WithTicker
}

// New makes the controller. The factory must be started before it runs, or while it does.
func New(client kubernetes.Interface, factory informers.SharedInformerFactory) *Controller {
	return newController(client, factory, clock.RealClock{})
}

func newController(client kubernetes.Interface, factory informers.SharedInformerFactory, clock clock.WithTicker) *Controller {
	ranges, addresses := factory.Networking().V1().ServiceCIDRs(), factory.Networking().V1().IPAddresses()
	c := &Controller{
		client:    client,
		informers: [2]cache.SharedIndexInformer{ranges.Informer(), addresses.Informer()},
		ranges:    ranges.Lister(),
		addresses: addresses.Lister(),
		clock:     clock,
	}
	c.queue = queue.New(queue.Options{Name: Name, Clock: clock}, c.sync)
	return c
}

// Run works until ctx ends, and returns when all it started has ended.
func (c *Controller) Run(ctx context.Context) error {
	for i, changed := range []func(any){c.rangeChanged, c.addressChanged} {
		handler, err := c.informers[i].AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: changed, UpdateFunc: func(_, obj any) { changed(obj) }, DeleteFunc: changed,
		})
		if err != nil {
			return fmt.Errorf("%s: %w", Name, err)
		}
		defer func() { _ = c.informers[i].RemoveEventHandler(handler) }()
		// With only some of the addresses known, a range that is in use would be released.
		if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
			return nil
		}
	}
	c.queue.Run(ctx, 1)
	return nil
}

// rangeChanged looks at a ServiceCIDR, and at those being deleted whose addresses it may cover or have covered.
func (c *Controller) rangeChanged(obj any) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	changed, ok := obj.(*networkingv1.ServiceCIDR)
	if !ok {
		return
	}
	c.queue.Add(queue.Key{Name: changed.Name})
	prefixes := servicerange.Prefixes(changed)
	c.addDeleting(func(p netip.Prefix) bool { return slices.ContainsFunc(prefixes, p.Overlaps) })
}

// addressChanged looks at the ServiceCIDRs whose deletion the address may hold back, or held back.
func (c *Controller) addressChanged(obj any) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	changed, ok := obj.(*networkingv1.IPAddress)
	if !ok || !allocated.Matches(labels.Set(changed.Labels)) {
		return
	}
	if addr, err := netip.ParseAddr(changed.Name); err == nil {
		c.addDeleting(func(p netip.Prefix) bool { return p.Contains(addr) })
	}
}

func (c *Controller) addDeleting(concerned func(netip.Prefix) bool) {
	all, err := c.ranges.List(labels.Everything())
	if err != nil {
		return
	}
	for _, cidr := range all {
		if cidr.DeletionTimestamp != nil && slices.ContainsFunc(servicerange.Prefixes(cidr), concerned) {
			c.queue.Add(queue.Key{Name: cidr.Name})
		}
	}
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	cidr, err := c.ranges.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if cidr.DeletionTimestamp != nil {
		return c.release(ctx, cidr)
	}
	if !slices.Contains(cidr.Finalizers, Finalizer) {
		if err := c.patchFinalizers(ctx, cidr, "finalizers"); err != nil {
			return queue.Result{}, err
		}
	}
	return queue.Result{}, c.setReady(ctx, cidr, metav1.ConditionTrue, "", "Services can have addresses of this range")
}

// release removes the finalizer of a ServiceCIDR that is being deleted, once no Service needs it.
func (c *Controller) release(ctx context.Context, cidr *networkingv1.ServiceCIDR) (queue.Result, error) {
	if !slices.Contains(cidr.Finalizers, Finalizer) {
		return queue.Result{}, nil // others hold it back
	}
	needed, err := c.needed(cidr)
	if err != nil {
		return queue.Result{}, err
	}
	if needed {
		// The last one's end, or a new ServiceCIDR, brings us here again. The message names no address, because it
		// would change with each that is freed.
		return queue.Result{}, c.setReady(ctx, cidr, metav1.ConditionFalse, networkingv1.ServiceCIDRReasonTerminating,
			"Services still have addresses that only this range covers: delete them, or create a ServiceCIDR that covers them")
	}
	if left := grace - c.clock.Since(cidr.DeletionTimestamp.Time); left > 0 {
		return queue.Result{Again: left}, nil
	}
	klog.FromContext(ctx).Info("releasing a ServiceCIDR that no Service needs any more", "serviceCIDR", cidr.Name, "cidrs", cidr.Spec.CIDRs)
	return queue.Result{}, c.patchFinalizers(ctx, cidr, "$deleteFromPrimitiveList/finalizers")
}

// needed says that a Service has an address that would belong to no range without this one. Another one that is being
// deleted covers nothing: else two could go, each relying on the other.
func (c *Controller) needed(cidr *networkingv1.ServiceCIDR) (bool, error) {
	all, err := c.ranges.List(labels.Everything())
	if err != nil {
		return false, err
	}
	var others []netip.Prefix
	for _, other := range all {
		if other.Name != cidr.Name && other.DeletionTimestamp == nil {
			others = append(others, servicerange.Prefixes(other)...)
		}
	}
	used, err := c.addresses.List(allocated)
	if err != nil {
		return false, err
	}
	mine := servicerange.Prefixes(cidr)
	return slices.ContainsFunc(used, func(object *networkingv1.IPAddress) bool {
		addr, err := netip.ParseAddr(object.Name)
		return err == nil && servicerange.Covered(mine, addr) && !servicerange.Covered(others, addr)
	}), nil
}

// patchFinalizers adds or removes the finalizer, as the field says, and touches nobody else's.
func (c *Controller) patchFinalizers(ctx context.Context, cidr *networkingv1.ServiceCIDR, field string) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": cidr.UID, field: []string{Finalizer}},
	})
	if err != nil {
		return err
	}
	_, err = c.client.NetworkingV1().ServiceCIDRs().Patch(ctx, cidr.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	return ignoreGone(err)
}

func (c *Controller) setReady(ctx context.Context, cidr *networkingv1.ServiceCIDR, status metav1.ConditionStatus, reason, message string) error {
	have := meta.FindStatusCondition(cidr.Status.Conditions, networkingv1.ServiceCIDRConditionReady)
	if have != nil && have.Status == status && have.Reason == reason && have.Message == message {
		return nil
	}
	since := metav1.NewTime(c.clock.Now())
	if have != nil && have.Status == status {
		since = have.LastTransitionTime
	}
	ready := applymetav1.Condition().WithType(networkingv1.ServiceCIDRConditionReady).WithStatus(status).
		WithReason(reason).WithMessage(message).WithLastTransitionTime(since)
	apply := applynetworkingv1.ServiceCIDR(cidr.Name).WithUID(cidr.UID).
		WithStatus(applynetworkingv1.ServiceCIDRStatus().WithConditions(ready))
	_, err := c.client.NetworkingV1().ServiceCIDRs().ApplyStatus(ctx, apply, metav1.ApplyOptions{FieldManager: manager, Force: true})
	return ignoreGone(err)
}

// ignoreGone takes it as done when the object is gone; one of the same name will bring an event of its own.
func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
