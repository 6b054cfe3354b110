package lb

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"portal/internal/identity"
	"portal/internal/lb/capture"
	"portal/internal/lb/compile"
	"portal/internal/lb/config"
	following "portal/internal/node/follow"
)

// Balancing is the proxying way: a process of this machine ends connections and makes others to endpoints.
type Balancing struct {
	// Engine carries out configurations.
	Engine Engine
	// Buckets leads from a bucket's name to its URL, for access logs.
	Buckets map[string]string
	// Entry is the Service whose addresses Ingresses share, NAMESPACE/NAME.
	Entry string
	// Policy is a TLS policy by its name.
	Policy func(name string) (compile.TLSPolicy, bool)
}

// Engine is the balancing process as this one sees it.
type Engine interface {
	// Apply has it carry out a configuration, and starts it if need be. It is called again with the same configuration every now and then.
	Apply(ctx context.Context, c config.Config) error
	// Gone is closed when the process that the last configuration went to has ended; nil if there is none.
	Gone() <-chan struct{}
}

// DefaultEntry is the Service whose addresses Ingresses share.
const DefaultEntry = Namespace + "/portal-ingress"

const (
	balancingDelay = 20 * time.Millisecond // changes that come together are one pass
	checkInterval  = 5 * time.Second       // how often it is looked whether all is still as it should be
	syncPatience   = 30 * time.Second      // in a foreign cluster roles may be those of an older version
	// settlePatience is how long the first pass waits for Secrets and names.
	settlePatience = 10 * time.Second
)

// errUnsettled: the first pass waits.
var errUnsettled = errors.New("not all Secrets and names are known yet")

// balancing keeps the balancing process and the way to it right.
type balancing struct {
	*Balancer
	dirty   chan struct{}
	capture *capture.Capture
	secrets *following.Follower
	held    map[compile.SecretRef]func()
	names   *names
	applied []byte // the digest of what the process carries out
	retries retryPace
	events  problemEvents
	leads   atomic.Pointer[context.Context] // ends with the time that this process leads
	began   time.Time                       // when the API was known
	ready   bool                            // and all else that was needed at the beginning

	mu    sync.Mutex
	stats balancingStats
}

type balancingStats struct {
	listeners, captured, filters, ingresses, problems int
	failures                                          uint64
	failing                                           bool
}

func newBalancing(b *Balancer) *balancing {
	return &balancing{Balancer: b, dirty: make(chan struct{}, 1), capture: capture.New(), held: map[compile.SecretRef]func(){}, events: problemEvents{}}
}

// changed says that something of the API is another. It never blocks.
func (p *balancing) changed() {
	if p == nil {
		return
	}
	select {
	case p.dirty <- struct{}{}:
	default:
	}
}

// lead says that this process leads until the context ends.
func (p *balancing) lead(ctx context.Context) {
	p.leads.Store(&ctx)
	p.changed()
}

func (p *balancing) leading() bool {
	ctx := p.leads.Load()
	return ctx != nil && (*ctx).Err() == nil
}

// run balances until the context ends. What it follows ends with informing.
func (p *balancing) run(ctx, informing context.Context, watching *sync.WaitGroup) {
	defer p.capture.Close()
	p.secrets = following.New(informing, p.client, p.Log)
	watching.Go(func() {
		<-informing.Done()
		p.secrets.Wait()
	})
	var synced []cache.InformerSynced
	for _, r := range []*replica{p.groups, p.certificates, p.ingresses, p.classes} {
		watching.Go(func() { r.run(informing) })
		synced = append(synced, r.hasSynced)
	}
	p.names = &names{found: map[string][]netip.Addr{}, changed: p.changed}
	watching.Go(func() { p.names.run(informing) })
	late := time.AfterFunc(syncPatience, func() {
		p.Log.Warn("balancing waits: ConfigMaps of kube-system, Ingresses or IngressClasses can't be listed; see the roles system:portal:lb")
	})
	defer late.Stop()
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return
	}
	late.Stop()
	p.changed()
	p.began = time.Now()
	p.keep(ctx, p.pass)
}

// failed counts a pass that failed, and logs the first of a row.
func (p *balancing) failed(err error, wait time.Duration) {
	p.mu.Lock()
	first := !p.stats.failing
	p.stats.failures++
	p.stats.failing = true
	p.mu.Unlock()
	if first {
		p.Log.Error("balancing not in sync, retrying", "err", err, "in", wait)
	}
}

// pass brings the process and the way to it to what they should be. First the process listens, then packets are led to it.
func (p *balancing) pass(ctx context.Context) error {
	out := compile.Compile(p.input())
	p.follow(out.Secrets)
	p.names.want(out.Names)
	if !p.ready {
		if !p.settled(out.Secrets, out.Names) {
			return errUnsettled
		}
		p.ready = true
		out = compile.Compile(p.input()) // with what has come to be known since
	}
	var problem error
	if digest := out.Config.Digest(); len(out.Config.Listeners) > 0 || p.applied != nil || p.Balancing.Engine.Gone() != nil {
		if problem = p.Balancing.Engine.Apply(ctx, out.Config); problem == nil && !bytes.Equal(digest, p.applied) {
			p.Log.Info("balancing configured", "listeners", len(out.Config.Listeners), "pools", len(out.Config.Pools))
			p.applied = digest
		}
	}
	if err := p.capture.Sync(out.Capture); err != nil {
		problem = err
	}
	if p.leading() {
		out.Problems = append(out.Problems, p.bypassed(out.Config.Listeners)...)
		p.events.record(p.controller.Events, out.Problems)
		if err := p.publishIngresses(ctx, out.Ingresses); err != nil {
			problem = err
		}
	} else {
		p.events.forget()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s := &p.stats
	s.listeners, s.captured, s.filters, s.ingresses, s.problems = len(out.Config.Listeners), len(out.Capture.Ports), len(out.Capture.Filters), len(out.Ingresses), len(out.Problems)
	if problem == nil {
		if s.failing {
			p.Log.Info("balancing in sync again")
		}
		s.failing = false
	}
	return problem
}

// settled says whether all is known that the first pass needs: a process that serves already must not close ports because this one has just
// started, and knows no certificates yet.
func (p *balancing) settled(secrets []compile.SecretRef, names []string) bool {
	if time.Since(p.began) >= settlePatience {
		return true
	}
	for _, ref := range secrets {
		key := following.Key{Kind: following.Secret, Namespace: ref.Namespace, Name: ref.Name}
		if _, known := p.secrets.Get(key); !known && !apierrors.IsForbidden(p.secrets.Err(key)) {
			return false
		}
	}
	for _, name := range names {
		if _, known := p.names.get(name); !known {
			return false
		}
	}
	return true
}

// input is what is known now.
func (p *balancing) input() compile.Input {
	in := compile.Input{
		Node: p.Node, Services: objects[*corev1.Service](p.services), Ours: p.controller.Ours, Ingresses: objects[*networkingv1.Ingress](p.ingresses),
		Classes: objects[*networkingv1.IngressClass](p.classes), Entry: p.Balancing.Entry, Buckets: p.Balancing.Buckets, Policy: p.Balancing.Policy, Resolve: p.names.get,
		Groups: data(p.groups, GroupsName), Certificates: data(p.certificates, CertificatesName),
	}
	for _, n := range objects[*corev1.Node](p.nodes) {
		if n.Name == p.Node {
			in.Zone = n.Labels[corev1.LabelTopologyZone]
		}
		for _, a := range n.Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				in.Balancers = append(in.Balancers, addr.Unmap())
			}
		}
	}
	slices.SortFunc(in.Balancers, netip.Addr.Compare)
	in.Slices = func(namespace, name string) (out []*discoveryv1.EndpointSlice) {
		list, err := p.slices.ByIndex(byService, namespace+"/"+name)
		if err != nil {
			p.Log.Error("endpoints not read", "err", err)
		}
		for _, object := range list {
			if s, ok := object.(*discoveryv1.EndpointSlice); ok {
				out = append(out, s)
			}
		}
		return out
	}
	in.Secret = func(namespace, name string) compile.Secret {
		key := following.Key{Kind: following.Secret, Namespace: namespace, Name: name}
		object, known := p.secrets.Get(key)
		out := compile.Secret{Known: known}
		if s, ok := object.(*corev1.Secret); ok {
			out.Data = s.Data
		}
		if !known { // what was read before is used while the API is away
			if out.Err = p.secrets.Err(key); apierrors.IsForbidden(out.Err) {
				out.Err = fmt.Errorf("%w; the ClusterRole %s allows it where it is bound", out.Err, identity.LBCertificates)
			}
		}
		return out
	}
	return in
}

// objects are all that a replica has.
func objects[T any](r *replica) (out []T) {
	for _, object := range r.List() {
		if o, ok := object.(T); ok {
			out = append(out, o)
		}
	}
	return out
}

// data is that of a ConfigMap.
func data(r *replica, name string) map[string]string {
	object, found, err := r.GetByKey(Namespace + "/" + name)
	if m, ok := object.(*corev1.ConfigMap); ok && found && err == nil {
		return m.Data
	}
	return nil
}

// follow watches these Secrets and no others.
func (p *balancing) follow(wanted []compile.SecretRef) {
	for ref, release := range p.held {
		if !slices.Contains(wanted, ref) {
			release()
			delete(p.held, ref)
		}
	}
	for _, ref := range wanted {
		if p.held[ref] == nil {
			p.held[ref] = p.secrets.Hold(following.Key{Kind: following.Secret, Namespace: ref.Namespace, Name: ref.Name}, p.changed)
		}
	}
}
