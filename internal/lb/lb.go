// Package lb is `portal lb`: of all its processes one, the leader, gives Services of type LoadBalancer their addresses, and each
// announces some of these from its machine, and has a process balance what packets alone can't carry. It brings the parts together: the API's
// informers, the controller, the announcer, the balancing process.
package lb

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"portal/internal/lb/announce"
	"portal/internal/lb/bgp"
	"portal/internal/lb/controller"
	"portal/internal/lb/l2"
	"portal/internal/lb/pool"
)

const (
	// Namespace is where the objects of balancers are: the claims, the pools, and Leases unless options say otherwise.
	Namespace = metav1.NamespaceSystem
	// LeaderLease is held by the process that gives addresses. Leaders of other classes than the default have their own: see leaderLease.
	LeaderLease = "portal-lb"
	// PoolsName is a ConfigMap with further pools, and PoolsKey what it has them under.
	PoolsName, PoolsKey = pool.ConfigMap, pool.ConfigMapKey
	// GroupsName is a ConfigMap with security groups, CertificatesName one that leads from certificates' identifiers to Secrets.
	GroupsName, CertificatesName = "portal-lb-security-groups", "portal-lb-certificates"
	// PeersKey is what the same ConfigMap has BGP's configuration under, and PasswordsName a Secret with the passwords of sessions.
	PeersKey, PasswordsName = "bgp", "portal-lb-bgp"
)

// Options are those of a balancer process.
type Options struct {
	Config *rest.Config
	// Node is this machine's name, Identity this process': no other has it.
	Node, Identity string
	// Leases is the namespace of Leases; empty: Namespace. All processes of a cluster must have the same.
	Leases string
	// Pools are those of flags.
	Pools pool.Set
	// Class and Unclassed say whose balancers these are: see portal/internal/lb/controller.
	Class     string
	Unclassed bool
	// Layer2 announces addresses by ARP and neighbour discovery, on Interfaces or where addresses belong.
	Layer2     bool
	Interfaces []string
	Times      announce.Times
	// Stop is what becomes of addresses of layer 2 when this process ends.
	Stop Stop
	// BGP announces addresses to routers: Peers are those of flags. KeepOnStop leaves routes with them for a process that follows.
	BGP        bool
	Peers      []bgp.Peer
	KeepOnStop bool
	// Balancing is the proxying way; nil: this process has none.
	Balancing *Balancing
	Log       *slog.Logger
}

// Balancer is one process' part in all balancers.
type Balancer struct {
	Options
	client kubernetes.Interface

	services, slices, nodes, namespaces, claims, config, leases, passwords, ranges *replica
	groups, certificates, ingresses, classes                                       *replica

	controller *controller.Controller
	announcer  *announce.Announcer
	responder  *l2.Responder
	balancing  *balancing
	speaker    *bgp.Speaker
	peers      peering

	mu        sync.Mutex
	pools     pool.Set                // all that hold
	poolsErr  error                   // why the ConfigMap can't be used
	warned    map[netip.Addr]string   // addresses of pools that are machines', as they were logged
	overlaps  map[string]bool         // of pools with ranges of others, as they were logged
	poolsRead bool                    // the ConfigMap, or that there is none, was read once: pools are at worst outdated
	published map[netip.Addr][]string // from the claims: address → Services
}

// New makes a balancer. It opens sockets, and starts nothing.
func New(o Options) (*Balancer, error) {
	if o.Leases == "" {
		o.Leases = Namespace
	}
	config := rest.CopyConfig(o.Config)
	config.QPS = -1 // the server's own limits hold
	config.WarningHandler = rest.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	b := &Balancer{Options: o, client: client, pools: o.Pools, published: map[netip.Addr][]string{}}
	b.makeReplicas()
	b.balancing = newBalancing(b)
	b.controller = controller.New(controller.Options{
		Client: client, Namespace: Namespace, Class: o.Class, Unclassed: o.Unclassed,
		Services: corelisters.NewServiceLister(b.services), Namespaces: corelisters.NewNamespaceLister(b.namespaces),
		Pools: b.allPools, Reserved: b.reserved, ReservedRanges: b.reservedRanges, Proxying: o.Balancing != nil, Log: o.Log,
	})
	if o.BGP {
		b.speaker = bgp.New(bgp.Options{Node: o.Node, KeepOnStop: o.KeepOnStop, Log: o.Log})
		b.peers = peering{dirty: make(chan struct{}, 1), passwords: map[string]bgp.Password{}}
	}
	if !o.Layer2 {
		return b, nil
	}
	var contested func(netip.Addr) bool
	b.responder, err = l2.New(l2.Options{Interfaces: o.Interfaces, Log: o.Log, Contested: func(a netip.Addr) bool { return contested(a) }})
	if err != nil {
		return nil, fmt.Errorf("announce addresses: %w", err)
	}
	b.announcer = announce.New(announce.Options{
		Node: o.Node, Identity: o.Identity, Client: client, Namespace: o.Leases, Times: o.Times, Leases: b.memberLeases, Addresses: b.addresses,
		Owners: b.ownerOfLease, Out: b.responder, Grace: b.grace, StandIn: o.Stop.StandIn, Settled: o.Stop.Settled, Log: o.Log,
	})
	contested = b.announcer.Insist
	return b, nil
}

// The times of the leader's Lease: another process takes over within ten seconds, or at once if it is released.
const (
	leaseDuration = 6 * time.Second
	renewDeadline = 4 * time.Second
	retryPeriod   = time.Second
)

// Run balances until the context ends.
func (b *Balancer) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg, watching sync.WaitGroup
	defer watching.Wait()
	// What is known of the API stays current until all who read them have ended.
	informing, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	all := []*replica{b.services, b.namespaces, b.claims, b.config, b.nodes}
	if b.announcer != nil {
		all = append(all, b.leases)
	}
	if b.announcer != nil || b.speaker != nil || b.Balancing != nil {
		all = append(all, b.slices)
	}
	if b.speaker != nil {
		// Nobody waits for it: peers without a password have sessions whether or not it may be read.
		watching.Go(func() { b.passwords.run(informing) })
	}
	var unreadable atomic.Bool
	watching.Go(func() { b.followRanges(informing, &unreadable) })
	synced := []cache.InformerSynced{func() bool { return b.ranges.hasSynced() || unreadable.Load() }}
	for _, i := range all {
		watching.Go(func() { i.run(informing) })
		synced = append(synced, i.hasSynced)
	}
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return nil
	}
	b.Log.Info("watching the API")
	broadcaster := record.NewBroadcaster(record.WithContext(informing))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: b.client.CoreV1().Events("")})
	b.controller.Events = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "portal-lb"})
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { b.leading(ctx) })
	if b.Balancing != nil {
		wg.Go(func() { b.balancing.run(ctx, informing, &watching) })
	}
	if b.speaker != nil {
		wg.Go(func() { b.speaking(ctx) })
	}
	if b.announcer == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	// The responder answers until the announcer has handed over.
	answering, stopAnswering := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() {
		defer stopAnswering()
		b.announcer.Run(ctx)
	})
	wg.Go(func() {
		if err := b.responder.Run(answering); err != nil {
			cancel(err)
		}
	})
	<-ctx.Done()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// leaderLease is the Lease of a class' leader. A class is no name of an object, and may be as long as one: hence a hash.
func leaderLease(class string) string {
	if class == controller.DefaultClass {
		return LeaderLease
	}
	hash := sha256.Sum256([]byte(class))
	return fmt.Sprintf("%s.%x", LeaderLease, hash[:8]) // with a hyphen it could be a machine's
}

// leading runs the controller whenever this process leads.
func (b *Balancer) leading(ctx context.Context) {
	config := rest.CopyConfig(b.Config)
	config.Timeout = renewDeadline / 2
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		b.Log.Error("leader election failed, this process allocates no addresses", "err", err)
		return
	}
	lock := &resourcelock.LeaseLock{
		LeaseMeta: metav1.ObjectMeta{Namespace: b.Leases, Name: leaderLease(b.Class)}, Client: client.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: b.Identity},
	}
	// What a leader that was deposed still writes is refused by its resourceVersion; this process starts no second pass beside it.
	var work sync.Mutex
	for ctx.Err() == nil {
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: lock, Name: lock.LeaseMeta.Name, ReleaseOnCancel: true, LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: retryPeriod,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(leased context.Context) {
					work.Lock()
					defer work.Unlock()
					if leased.Err() == nil {
						b.Log.Info("became leader, allocating addresses", "lease", lock.LeaseMeta.Name)
						b.balancing.lead(leased)
						b.controller.Run(leased)
						b.Log.Info("stopped leading", "lease", lock.LeaseMeta.Name)
					}
				},
				OnStoppedLeading: func() {},
			},
		})
		func() { // wait until the work has ended
			work.Lock()
			defer work.Unlock()
		}()
	}
}

// allPools are those of flags and of the ConfigMap. A process that started with a ConfigMap that can't be used has an error: it does not
// know which addresses Services may keep.
func (b *Balancer) allPools() (pool.Set, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.poolsErr != nil && !b.poolsRead {
		return nil, b.poolsErr
	}
	return b.pools, nil
}

// readConfig takes in the ConfigMap. What can't be used changes nothing: no Service loses its address, and no session ends, for a typing error.
func (b *Balancer) readConfig(object *corev1.ConfigMap) {
	source := "ConfigMap " + Namespace + "/" + PoolsName
	data := map[string]string{}
	var unknown error
	if object != nil {
		data = object.Data
		keys := slices.Sorted(maps.Keys(data))
		if len(keys) == 0 || slices.ContainsFunc(keys, func(k string) bool { return k != PoolsKey && k != PeersKey }) {
			unknown = fmt.Errorf("%s: the keys of data are %q, want %q, %q or both and no other", source, keys, PoolsKey, PeersKey)
		}
	}
	all := slices.Clone(b.Pools)
	more, err := pool.ParseYAML(source, []byte(data[PoolsKey]))
	all = append(all, more...)
	if err == nil {
		if err = all.Validate(); err != nil {
			err = fmt.Errorf("%s: %w", source, err)
		}
	}
	if unknown != nil {
		err = unknown
	}
	b.mu.Lock()
	b.poolsErr = err
	if err == nil {
		b.pools, b.poolsRead = all, true
	}
	b.mu.Unlock()
	if err != nil {
		b.Log.Error("pools not changed: the ConfigMap can't be used", "err", err)
	} else {
		b.Log.Info("pools read", "pools", len(all))
		b.controller.Changed()
	}
	if b.speaker != nil {
		b.readPeers(source, data[PeersKey], unknown)
		b.peersChanged()
	}
}

// readClaims takes in which addresses are whose. If the claims were deleted, addresses are announced as before until the leader has made
// them again.
func (b *Balancer) readClaims(object *corev1.ConfigMap) {
	if object == nil {
		b.Log.Warn("claims deleted, announcing as before until the leader has recreated them")
		b.controller.ClaimsSeen("")
		return
	}
	b.controller.ClaimsSeen(object.ResourceVersion)
	table, err := pool.Read([]byte(object.Data[controller.ClaimsKey]))
	if err != nil {
		b.Log.Error("claims not read, announcing as before", "err", err)
		return
	}
	published := map[netip.Addr][]string{}
	for _, c := range table.Claims() {
		for _, o := range c.Owners {
			published[c.Address] = append(published[c.Address], o.Namespace+"/"+o.Name)
		}
	}
	b.mu.Lock()
	b.published = published
	b.mu.Unlock()
	b.announced()
}

func (b *Balancer) announced() {
	if b.announcer != nil {
		b.announcer.Changed()
	}
	b.peersChanged()
}

// addresses are those to announce: claimed, and in the status of a Service.
func (b *Balancer) addresses() (out []announce.Address) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for a, owners := range b.published {
		var rules []func(string) bool
		for _, key := range owners {
			object, found, err := b.services.GetByKey(key)
			svc, ok := object.(*corev1.Service)
			if err != nil || !found || !ok || !shows(svc, a) {
				continue
			}
			rules = append(rules, b.servedBy(svc))
		}
		if len(rules) == 0 {
			continue
		}
		out = append(out, announce.Address{Addr: a, Eligible: func(node string) bool {
			return !b.excluded(node) && !slices.ContainsFunc(rules, func(may func(string) bool) bool { return !may(node) })
		}})
	}
	slices.SortFunc(out, func(x, y announce.Address) int { return x.Addr.Compare(y.Addr) })
	return out
}

func shows(svc *corev1.Service, a netip.Addr) bool {
	return slices.ContainsFunc(svc.Status.LoadBalancer.Ingress, func(in corev1.LoadBalancerIngress) bool {
		shown, err := netip.ParseAddr(in.IP)
		return err == nil && shown.Unmap() == a
	})
}

// servedBy says which nodes route packets to a Service's endpoints: with externalTrafficPolicy Local those that have a ready one; if no
// node has, those with one that still serves while it terminates, as proxies do.
func (b *Balancer) servedBy(svc *corev1.Service) func(node string) bool {
	if svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return func(string) bool { return true }
	}
	objects, err := b.slices.ByIndex(byService, svc.Namespace+"/"+svc.Name)
	if err != nil {
		b.Log.Error("endpoints not read", "err", err)
	}
	var endpoints []discoveryv1.Endpoint
	for _, object := range objects {
		if slice, ok := object.(*discoveryv1.EndpointSlice); ok {
			endpoints = append(endpoints, slice.Endpoints...)
		}
	}
	has := nodesWithEndpoints(endpoints)
	return func(node string) bool { return has[node] }
}

// nodesWithEndpoints are those with ready endpoints, or, if there are none at all, with serving ones that terminate.
func nodesWithEndpoints(endpoints []discoveryv1.Endpoint) map[string]bool {
	ready, terminating := map[string]bool{}, map[string]bool{}
	for _, e := range endpoints {
		switch {
		case e.NodeName == nil:
		case ptr.Deref(e.Conditions.Ready, true):
			ready[*e.NodeName] = true
		case ptr.Deref(e.Conditions.Serving, false) && ptr.Deref(e.Conditions.Terminating, false):
			terminating[*e.NodeName] = true
		}
	}
	if len(ready) == 0 {
		return terminating
	}
	return ready
}

// excluded says whether an administrator keeps balancers off a node.
func (b *Balancer) excluded(name string) bool {
	object, found, err := b.nodes.GetByKey(name)
	node, ok := object.(*corev1.Node)
	if err != nil || !found || !ok {
		return false // a machine that is no Node has only what it says itself
	}
	_, excluded := node.Labels[corev1.LabelNodeExcludeBalancers]
	return excluded
}

func (b *Balancer) memberLeases() (out []*coordinationv1.Lease) {
	for _, object := range b.leases.List() {
		if l, ok := object.(*coordinationv1.Lease); ok {
			out = append(out, l)
		}
	}
	return out
}

// ownerOfLease has the Lease of a Node that is deleted deleted too.
func (b *Balancer) ownerOfLease() []metav1.OwnerReference {
	object, found, err := b.nodes.GetByKey(b.Node)
	node, ok := object.(*corev1.Node)
	if err != nil || !found || !ok {
		return nil
	}
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
}
