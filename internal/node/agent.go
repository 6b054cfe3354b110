// Package node runs the Pods that are bound to one node: it follows the API, has each Pod's life decided (package life), carries the
// decisions out (packages runtime, network, image, probe), and reports. It is where these packages, which know nothing of each other,
// come together.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/node/disk"
	"portal/internal/node/follow"
	"portal/internal/node/image"
	"portal/internal/node/network"
	"portal/internal/node/network/peers"
	"portal/internal/node/runtime"
	"portal/internal/rmtree"
)

// Options are an Agent's.
type Options struct {
	Client kubernetes.Interface
	// Name is the Node's.
	Name    string
	NodeIPs []netip.Addr // at most one of each family, the primary one first
	Zone    string       // of topology.kubernetes.io/zone; empty: none
	DataDir string
	// PodCIDRs are the prefixes of this node's Pods. None: those that the Node object has, once it has some.
	PodCIDRs []netip.Prefix
	Bridge   string
	// Images says where images come from; its Dir, Hidden and InUse are the agent's own.
	Images          image.Options
	ImageCollection image.Thresholds
	Eviction        Eviction
	// NodesClient may list all Nodes, which a node's own identity may not: routes to the Pods of other nodes are kept with it. nil: there
	// are no such routes.
	NodesClient kubernetes.Interface
	// ClusterCIDRs are the prefixes of all Pods of the cluster. None: those of the Nodes that are known.
	ClusterCIDRs []netip.Prefix
	Tunnels      peers.Tunnels
	PodMTU       int // 0: what fits the links and tunnels
	// Masquerade: what Pods send outside of the cluster gets the node's address.
	Masquerade bool
	// CNIConfDir has a CNI configuration, whose plugins, in CNIBinDirs, connect Pods instead of a bridge. Routes to other nodes and
	// masquerading are then up to them.
	CNIConfDir string
	CNIBinDirs []string
	// Hidden are paths that Pods with the node's own root don't see.
	Hidden        []string
	ClusterDNS    []string
	ClusterDomain string
	MaxPods       int
	PodProcesses  int64
	CgroupRoot    string
	Version       string
	Stream        StreamOptions
	// DNS, if not nil, serves the cluster's names at the node's own addresses among its Pods until ctx ends, and says when it
	// begins and ends to answer. ClusterDNS are the resolvers that Pods get; none: those of the Service kube-dns.
	DNS func(ctx context.Context, addrs []netip.Addr, serving func(bool))
	// Drained, if not nil, says whether this node has stopped sending new connections of a Service to endpoints at these addresses.
	Drained func(service intent.Key, addrs []netip.Addr) bool
	// Started, if not nil, is called when Pods can be started.
	Started func(podCIDRs []netip.Prefix)
	Log     *slog.Logger
}

// Agent looks after one node.
type Agent struct {
	Options
	runtime  *runtime.Runtime
	images   *image.Store
	recorder record.EventRecorder
	follower *follow.Follower
	bundles  *trustBundles
	network  network.Network // set before any Pod is started

	connections *connections
	claims      portClaims

	pods, services, nodes cache.SharedIndexInformer
	// found are the Pods that an earlier agent left running.
	found map[types.UID]*runtime.Pod
	host  hostFacts

	registered chan struct{} // closed when the Node is in the API
	up         chan struct{} // closed when Pods can be started
	announced  atomic.Pointer[[]netip.Addr]

	unguardedOnce sync.Once // it is said once

	panics atomic.Int64 // while something was done for a Pod

	nodeChanged chan struct{} // the Node should be written now

	pressureMu sync.Mutex // workers take it while they hold their own lock, which is taken under mu
	pressure   disk.Pressure

	mu      sync.Mutex
	workers map[types.UID]*worker
	running sync.WaitGroup
}

// DefaultCgroupRoot is where the control groups of a Node's Pods are unless its options say otherwise.
func DefaultCgroupRoot(name string) string { return "portal/" + name }

// New makes an Agent; Run starts it.
func New(o Options) (*Agent, error) {
	if len(o.NodeIPs) == 0 {
		return nil, errors.New("a node has an address")
	}
	if o.MaxPods == 0 {
		o.MaxPods = 250
	}
	if o.PodProcesses == 0 {
		o.PodProcesses = 4096
	}
	if o.CgroupRoot == "" {
		o.CgroupRoot = DefaultCgroupRoot(o.Name)
	}
	if o.ImageCollection.High == 0 {
		o.ImageCollection = image.Thresholds{High: 85, Low: 80, MinAge: 2 * time.Minute}
	}
	if o.ClusterDomain == "" {
		o.ClusterDomain = "cluster.local"
	}
	a := &Agent{Options: o, registered: make(chan struct{}), up: make(chan struct{}), nodeChanged: make(chan struct{}, 1), workers: map[types.UID]*worker{}, found: map[types.UID]*runtime.Pod{}}
	images := o.Images
	own := ImageOptions(o.DataDir)
	images.Dir, images.InUse, images.Hidden = own.Dir, own.InUse, append(own.Hidden, o.Hidden...)
	a.images = image.NewStore(images)
	var err error
	if a.connections, err = newConnections(&o); err != nil {
		return nil, err
	}
	mine := informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithTweakListOptions(func(l *metav1.ListOptions) {
		l.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", o.Name).String()
	}))
	// A node reads its own Node, and no other.
	itself := informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithTweakListOptions(func(l *metav1.ListOptions) {
		l.FieldSelector = fields.OneTermEqualSelector("metadata.name", o.Name).String()
	}))
	all := informers.NewSharedInformerFactory(o.Client, 0)
	a.pods, a.services, a.nodes = mine.Core().V1().Pods().Informer(), all.Core().V1().Services().Informer(), itself.Core().V1().Nodes().Informer()
	for _, i := range []cache.SharedIndexInformer{a.pods, a.services, a.nodes} {
		if err := i.SetTransform(dropManagedFields); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// dropManagedFields keeps objects small.
func dropManagedFields(obj any) (any, error) {
	if m, ok := obj.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return obj, nil
}

// Run looks after the node until ctx ends. Pods run on.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer a.running.Wait()
	defer cancel()
	defer unix.Umask(unix.Umask(0o022)) // of what is made for Pods, which others than root use
	defer protect()()
	unlock, err := lock(a.DataDir)
	if err != nil {
		return err
	}
	defer unlock()
	if err := claim(a.DataDir, a.Name); err != nil {
		return err
	}
	if a.runtime, err = runtime.New(runtime.Options{
		Dir: filepath.Join(a.DataDir, "pods"), Logs: filepath.Join(a.DataDir, "logs"), CgroupRoot: a.CgroupRoot, PodProcesses: a.PodProcesses,
	}); err != nil {
		return err
	}
	if a.host, err = readHost(a.DataDir); err != nil {
		return err
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: a.Client.CoreV1().Events("")})
	defer broadcaster.Shutdown()
	a.recorder = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "portal-node", Host: a.Name})

	a.follower = follow.New(ctx, a.Client, a.Log)
	a.bundles = newTrustBundles(ctx, a.Client, a.running.Go)
	a.running.Go(func() {
		<-ctx.Done()
		a.follower.Wait()
	})
	a.running.Go(func() { a.keepNode(ctx) })
	a.running.Go(func() { a.keepLease(ctx) })
	a.running.Go(func() { a.collectImages(ctx) })
	for _, i := range []cache.SharedIndexInformer{a.pods, a.services, a.nodes} {
		a.running.Go(func() { i.RunWithContext(ctx) })
	}
	if !cache.WaitForCacheSync(ctx.Done(), a.pods.HasSynced, a.services.HasSynced, a.nodes.HasSynced) {
		return ctx.Err()
	}
	if err := a.followNodes(ctx); err != nil {
		return err
	}
	if err := a.setupNetwork(ctx); err != nil {
		return err
	}
	if err := a.adopt(ctx); err != nil {
		return err
	}
	if a.Stream.Port != 0 {
		if err := a.serveStreams(ctx); err != nil {
			return err
		}
	}
	a.connect() // with what the adopted Pods have
	a.running.Go(func() { a.keepConnected(ctx) })
	a.serveDNS(ctx)
	close(a.up)
	a.running.Go(func() { a.guardDisk(ctx) })
	a.running.Go(func() { a.watchProcesses(ctx) })
	if a.Started != nil {
		a.Started(a.connections.cidrs)
	}
	following, err := a.pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { a.seen(ctx, obj.(*corev1.Pod)) },
		UpdateFunc: func(_, obj any) { a.seen(ctx, obj.(*corev1.Pod)) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if pod, ok := obj.(*corev1.Pod); ok {
				a.gone(pod)
			}
		},
	})
	if err != nil {
		return err
	}
	a.running.Go(func() { a.dropLeft(ctx, following) })
	a.Log.Info("node is running Pods", "node", a.Name, "addresses", fmt.Sprint(a.NodeIPs), "podCIDRs", fmt.Sprint(a.connections.cidrs))
	<-ctx.Done()
	return nil
}

// adopt finds the Pods that an earlier agent started. Those that the API no longer has are removed.
func (a *Agent) adopt(ctx context.Context) error {
	pods, err := a.runtime.Pods()
	if err != nil {
		return err
	}
	known, objects := map[string]bool{}, map[string]*corev1.Pod{}
	for _, obj := range a.pods.GetStore().List() {
		pod := obj.(*corev1.Pod)
		known[string(pod.UID)], objects[string(pod.UID)] = true, pod
	}
	for _, p := range pods {
		_ = a.attempt("adopt", func() error {
			if known[p.UID] {
				a.found[types.UID(p.UID)] = p
				a.undo(ctx, p)
				a.reclaim(objects[p.UID], p)
				return nil
			}
			a.Log.Info("removing a Pod that the API no longer has", "uid", p.UID)
			if err := p.Remove(ctx); err != nil {
				a.Log.Error("a Pod could not be removed", "uid", p.UID, "err", err)
			}
			return rmtree.Remove(a.volumesDir(types.UID(p.UID)))
		}, "uid", p.UID)
	}
	if err := a.network.Sweep(ctx, known); err != nil {
		a.Log.Warn("the network of Pods that are gone could not be removed", "node", a.Name, "err", err)
	}
	return nil
}

// undo ends a sandbox that an earlier agent began and did not finish: it has no containers yet, and may have no network. Its worker makes
// another.
func (a *Agent) undo(ctx context.Context, p *runtime.Pod) {
	if !p.Unfinished {
		return
	}
	if err := p.Stop(ctx); err != nil {
		a.Log.Warn("a Pod's unfinished sandbox could not be stopped", "uid", p.UID, "err", err)
	}
	p.PID = 0
}

// reclaim gives a Pod that is found its ports of the node again, before others ask for them.
func (a *Agent) reclaim(pod *corev1.Pod, found *runtime.Pod) {
	if terminal(pod.Status.Phase) || found.PID == 0 {
		return
	}
	_ = a.claims.take(pod)
	if addrs, err := a.network.Addresses(found.UID); err == nil {
		if ports := a.portsTo(pod, addrs); len(ports) > 0 {
			a.connections.state.Ports[found.UID] = ports
		}
	}
}

func terminal(phase corev1.PodPhase) bool {
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed
}

// dropLeft removes Pods that went from the API after they were found and before they were followed.
func (a *Agent) dropLeft(ctx context.Context, following cache.ResourceEventHandlerRegistration) {
	if !cache.WaitForCacheSync(ctx.Done(), following.HasSynced) {
		return
	}
	a.mu.Lock()
	left := a.found
	a.found = map[types.UID]*runtime.Pod{}
	a.mu.Unlock()
	for uid, p := range left {
		a.Log.Info("removing a Pod that the API no longer has", "uid", uid)
		if err := a.attempt("remove", func() error {
			return errors.Join(a.detach(ctx, string(uid)), p.Remove(ctx), rmtree.Remove(a.volumesDir(uid)))
		}, "uid", uid); err != nil {
			a.Log.Error("a Pod could not be removed", "uid", uid, "err", err)
		}
	}
}

// seen hands a Pod to its worker.
func (a *Agent) seen(ctx context.Context, pod *corev1.Pod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.workers[pod.UID]
	if w == nil {
		if ctx.Err() != nil {
			return
		}
		w = newWorker(a, pod, a.found[pod.UID])
		delete(a.found, pod.UID)
		a.workers[pod.UID] = w
		a.running.Go(func() {
			w.run(ctx)
			a.claims.release(pod.UID)
			a.mu.Lock()
			delete(a.workers, pod.UID)
			a.mu.Unlock()
		})
		return
	}
	w.update(pod)
}

func (a *Agent) gone(pod *corev1.Pod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w := a.workers[pod.UID]; w != nil {
		w.removed()
	}
}

// intentServices are the Services as serviceenv wants them.
func (a *Agent) intentServices() []*intent.Service {
	var out []*intent.Service
	for _, obj := range a.services.GetStore().List() {
		out = append(out, watch.Service(obj.(*corev1.Service)))
	}
	return out
}
