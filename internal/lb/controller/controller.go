// Package controller gives Services of type LoadBalancer their addresses: it writes the claims, then status.loadBalancer, and says in
// Events what it does. Which address it is, portal/internal/lb/pool decides; how packets come to it, others see to.
//
// Claims are one ConfigMap, written with its resourceVersion: of two controllers that both believe they lead, one is refused. An address
// is claimed before it is published, and its claim lasts until it is not published any more.
package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"

	"portal/internal/lb/pool"
	"portal/internal/lb/spec"
)

const (
	// Finalizer keeps a Service until its address is free.
	Finalizer = "service.kubernetes.io/load-balancer-cleanup"
	// DefaultClass is the spec.loadBalancerClass of Services that are for Portal alone.
	DefaultClass = "portal.dev/lb"
	// ClaimsName is the ConfigMap of the claims, and ClaimsKey what it has them under.
	ClaimsName, ClaimsKey = "portal-lb-claims", "claims"
)

// Options are a controller's.
type Options struct {
	Client    kubernetes.Interface
	Namespace string // of the ConfigMap with the claims
	// Class is what spec.loadBalancerClass must be; Unclassed: Services without one are served too.
	Class     string
	Unclassed bool

	// Services and Namespaces must be synced before Run. Pools are those that hold now, or why they are not known: then Services keep
	// what they have, and nobody gets an address, until Changed says that they are.
	Services   corelisters.ServiceLister
	Namespaces corelisters.NamespaceLister
	Pools      func() (pool.Set, error)
	// Proxying: what only a balancer that ends connections can do, is done.
	Proxying bool
	// Reserved are addresses that are not given, and why; nil: none.
	Reserved func() map[netip.Addr]string
	// ReservedRanges are more of them; nil: none.
	ReservedRanges func() []pool.Reserved
	Events         record.EventRecorder
	Log            *slog.Logger
}

// Controller gives addresses while it runs.
type Controller struct {
	Options
	dirty chan struct{}

	// claims are what the API is known to have, as of revision; nil: not read yet.
	claims *pool.Table
	// recorded is what was said in Events about each Service, by its UID, and still holds.
	recorded map[string]map[string]bool

	mu       sync.Mutex
	revision string  // only the running controller changes it; empty: there are no claims
	seen     *string // the revision that was last seen and not yet looked at
	stats    Stats
}

// Stats is how things are.
type Stats struct {
	// Claimed are the addresses in use, by pool; Waiting are Services without an address.
	Claimed map[string]int
	Waiting int
	// Leading: this process decides. Failures counts passes that failed.
	Leading  bool
	Failures int
}

// New makes a controller.
func New(o Options) *Controller {
	return &Controller{Options: o, dirty: make(chan struct{}, 1)}
}

// Changed says that Services, namespaces or pools have changed. It never blocks.
func (c *Controller) Changed() {
	select {
	case c.dirty <- struct{}{}:
	default:
	}
}

// ClaimsSeen says which revision of the claims the API has; empty: they were deleted. If that is none that this controller wrote, it reads them
// again, or makes them again from the Services. It never blocks.
func (c *Controller) ClaimsSeen(revision string) {
	c.mu.Lock()
	c.seen = &revision
	known := revision != "" && revision == c.revision
	c.mu.Unlock()
	if !known {
		c.Changed()
	}
}

// changedByOthers says whether the claims that were last seen are others than this controller's.
func (c *Controller) changedByOthers() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := c.seen
	c.seen = nil
	return seen != nil && *seen != c.revision
}

func (c *Controller) setClaims(table *pool.Table, revision string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.claims, c.revision = table, revision
}

// Stats are those of the last pass.
func (c *Controller) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// Ours says whether a Service's balancer is this controller's business.
func (o *Options) Ours(svc *corev1.Service) bool {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return false
	}
	if svc.Spec.LoadBalancerClass == nil {
		return o.Unclassed
	}
	return *svc.Spec.LoadBalancerClass == o.Class
}

// claimClass is how the claims name the class.
func (o *Options) claimClass() string {
	if o.Class == DefaultClass {
		return ""
	}
	return o.Class
}

const (
	coalesceDelay = 5 * time.Millisecond // changes that come together are one pass, and one write of the claims
	firstBackoff  = 100 * time.Millisecond
	mostBackoff   = 30 * time.Second
)

// Run gives addresses until the context ends. It must only run while this process leads.
func (c *Controller) Run(ctx context.Context) {
	c.claims, c.recorded = nil, map[string]map[string]bool{}
	defer c.update(func(s *Stats) { s.Leading = false })
	c.update(func(s *Stats) { s.Leading = true })
	c.Changed()
	backoff := firstBackoff
	var again <-chan time.Time
	blocked := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.dirty:
		case <-again:
		}
		if !sleep(ctx, coalesceDelay) {
			return
		}
		again = nil
		err := c.pass(ctx)
		if errors.Is(err, errNoPools) {
			// Trying again changes nothing before the pools do.
			if !blocked {
				c.Log.Error("not allocating or releasing addresses until the pools can be read", "err", err)
				c.update(func(s *Stats) { s.Failures++ })
			}
			blocked = true
			continue
		}
		blocked = false
		if err == nil {
			backoff = firstBackoff
			continue
		}
		if ctx.Err() != nil {
			return
		}
		// A conflict is somebody else's change, which the informers are about to show.
		if !onlyConflicts(err) {
			c.Log.Warn("pass over Services failed, retrying", "err", err, "backoff", backoff)
			c.update(func(s *Stats) { s.Failures++ })
		}
		again = time.After(backoff)
		backoff = min(2*backoff, mostBackoff)
	}
}

// onlyConflicts looks at each error of a pass: a conflict must not hide what else failed.
func onlyConflicts(err error) bool {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(joined.Unwrap(), func(e error) bool { return !onlyConflicts(e) })
	}
	return apierrors.IsConflict(err)
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

func (c *Controller) update(change func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats)
}

// desired is what one Service is to have.
type desired struct {
	svc       *corev1.Service
	balancer  *spec.Balancer
	problems  []spec.Problem
	addresses []netip.Addr
	notes     []string
	refusal   *pool.Refusal
}

// errNoPools: it is not known which addresses may be given, and so not which may be kept.
var errNoPools = errors.New("pools are not known")

// pass brings claims and Services to what they should be.
func (c *Controller) pass(ctx context.Context) error {
	pools, err := c.Pools()
	if err != nil {
		return fmt.Errorf("%w: %w", errNoPools, err)
	}
	if c.changedByOthers() || c.claims == nil {
		if err := c.readClaims(ctx); err != nil {
			return err
		}
	}
	all, err := c.Services.List(labels.Everything())
	if err != nil {
		return err
	}
	byUID := map[string]*corev1.Service{}
	owners := c.claims.Owners()
	// Controllers of other classes write the same claims. What one of them has given, it alone takes back.
	foreign := func(uid string) bool {
		owner, found := owners[uid]
		return found && owner.Class != c.claimClass()
	}
	var wanted []*desired
	for _, svc := range all {
		byUID[string(svc.UID)] = svc
		if c.Ours(svc) && svc.DeletionTimestamp == nil && !foreign(string(svc.UID)) {
			d := &desired{svc: svc}
			d.balancer, d.problems = spec.Read(svc)
			wanted = append(wanted, d)
		}
	}
	next := c.claims.Clone()
	if c.Reserved != nil {
		next.Reserved = c.Reserved()
	}
	if c.ReservedRanges != nil {
		next.ReservedRanges = c.ReservedRanges()
	}
	if err := c.releaseGone(ctx, next, byUID, foreign); err != nil {
		return err
	}
	c.assign(next, pools, wanted)
	if err := c.writeClaims(ctx, next); err != nil {
		return err
	}
	var errs []error
	waiting := 0
	for _, d := range wanted {
		if d.refusal != nil {
			waiting++
		}
		errs = append(errs, c.publish(ctx, d))
	}
	for _, svc := range all {
		if (!c.Ours(svc) || svc.DeletionTimestamp != nil) && !foreign(string(svc.UID)) {
			errs = append(errs, c.withdraw(ctx, svc))
		}
	}
	for uid := range c.recorded {
		if byUID[uid] == nil {
			delete(c.recorded, uid)
		}
	}
	c.update(func(s *Stats) {
		s.Waiting, s.Claimed = waiting, map[string]int{}
		for _, p := range pools {
			s.Claimed[p.Name] = next.Used(p)
		}
	})
	return errors.Join(errs...)
}

// releaseGone frees the addresses of Services that are gone, or have lost theirs and no longer show it. That an informer does not have
// a Service proves nothing: a leader before this one may have seen more.
func (c *Controller) releaseGone(ctx context.Context, next *pool.Table, byUID map[string]*corev1.Service, foreign func(uid string) bool) error {
	for uid, owner := range next.Owners() {
		svc := byUID[uid]
		if svc == nil {
			live, err := c.Client.CoreV1().Services(owner.Namespace).Get(ctx, owner.Name, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err) || err == nil && string(live.UID) != uid:
				next.Release(uid)
				continue
			case err != nil:
				return fmt.Errorf("see whether Service %s is gone: %w", &owner, err)
			}
			continue // it is there; the informer will show it
		}
		if !foreign(uid) && (!c.Ours(svc) || svc.DeletionTimestamp != nil) && !c.leftover(svc, next.Of(uid)) {
			next.Release(uid)
		}
	}
	return nil
}

// leftover says whether a Service still shows that it had some addresses.
func (c *Controller) leftover(svc *corev1.Service, own []netip.Addr) bool {
	return slices.Contains(svc.Finalizers, Finalizer) || slices.ContainsFunc(published(svc), func(a netip.Addr) bool { return slices.Contains(own, a) })
}

// assign chooses addresses, first for those that have one: nobody who asks for an address gets that of another. Of the others, who has
// waited longest comes first.
func (c *Controller) assign(next *pool.Table, pools pool.Set, wanted []*desired) {
	has := next.Owners()
	rank := func(d *desired) int {
		if _, found := has[string(d.svc.UID)]; found || len(published(d.svc)) > 0 {
			return 0
		}
		return 1
	}
	slices.SortFunc(wanted, func(a, b *desired) int {
		return cmp.Or(rank(a)-rank(b), a.svc.CreationTimestamp.Compare(b.svc.CreationTimestamp.Time), cmp.Compare(a.svc.Namespace, b.svc.Namespace), cmp.Compare(a.svc.Name, b.svc.Name))
	})
	for _, d := range wanted {
		r := c.request(d)
		had := next.Entries(r.UID)
		var result pool.Result
		result, d.refusal = next.Assign(pools, r)
		d.addresses, d.notes = result.Addresses, result.Notes
		// What is still published must not become another's.
		for _, a := range published(d.svc) {
			if before, found := had[a]; found && !slices.Contains(d.addresses, a) {
				next.Hold(a, before)
			}
		}
	}
}

func (c *Controller) request(d *desired) *pool.Request {
	b := d.balancer
	r := &pool.Request{
		Owner:  pool.Owner{Namespace: d.svc.Namespace, Name: d.svc.Name, UID: string(d.svc.UID), Class: c.claimClass(), Share: b.Share},
		Labels: d.svc.Labels, All: b.RequireAll, Internal: b.Internal, Pool: b.Pool, PoolFrom: b.PoolFrom,
		Addresses: b.Addresses, AddressesFrom: b.AddressesFrom, Current: published(d.svc),
	}
	if ns, err := c.Namespaces.Get(d.svc.Namespace); err == nil {
		r.NamespaceLabels = ns.Labels
	}
	for i, f := range b.Families {
		r.IPv4 = r.IPv4 || f == corev1.IPv4Protocol
		r.IPv6 = r.IPv6 || f == corev1.IPv6Protocol
		r.IPv6First = r.IPv6First || i == 0 && f == corev1.IPv6Protocol
	}
	for _, l := range b.Listeners {
		r.Ports = append(r.Ports, pool.Port{Protocol: string(l.Protocol), Port: l.Port})
	}
	if b.Local && b.Share != "" {
		r.Backends = d.svc.Namespace + ": " + labels.Set(d.svc.Spec.Selector).String()
	}
	return r
}

// published are the addresses of a Service's status.
func published(svc *corev1.Service) (out []netip.Addr) {
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// readClaims reads the claims from the API.
func (c *Controller) readClaims(ctx context.Context) error {
	c.claims = nil
	object, err := c.Client.CoreV1().ConfigMaps(c.Namespace).Get(ctx, ClaimsName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		c.setClaims(pool.NewTable(), "")
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the claims: %w", err)
	}
	table, err := pool.Read([]byte(object.Data[ClaimsKey]))
	if err != nil {
		return fmt.Errorf("ConfigMap %s/%s: %w; delete it, and the claims are made again from the Services", c.Namespace, ClaimsName, err)
	}
	c.setClaims(table, object.ResourceVersion)
	return nil
}

// writeClaims writes the claims if they have changed. Who is not the only one to write them reads them again.
func (c *Controller) writeClaims(ctx context.Context, next *pool.Table) error {
	text := string(next.Write())
	if c.revision != "" && text == string(c.claims.Write()) {
		return nil
	}
	object := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: ClaimsName, ResourceVersion: c.revision},
		Data:       map[string]string{ClaimsKey: text},
	}
	api := c.Client.CoreV1().ConfigMaps(c.Namespace)
	var written *corev1.ConfigMap
	var err error
	if c.revision == "" {
		written, err = api.Create(ctx, object, metav1.CreateOptions{})
	} else {
		written, err = api.Update(ctx, object, metav1.UpdateOptions{})
	}
	if err != nil {
		c.claims = nil // also if the answer was lost: they may have been written
		return fmt.Errorf("write the claims: %w", err)
	}
	c.setClaims(next, written.ResourceVersion)
	return nil
}

// addressText is how addresses are written in Events.
func addressText(addrs []netip.Addr) string {
	var out []string
	for _, a := range addrs {
		out = append(out, a.String())
	}
	return strings.Join(out, ", ")
}
