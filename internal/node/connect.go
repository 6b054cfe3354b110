package node

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"portal/internal/node/network"
	"portal/internal/node/network/cni"
	"portal/internal/node/network/nat"
	"portal/internal/node/network/peers"
)

const (
	// networkInterval is how often the network is compared with what it should be, even if nothing is known to have changed.
	networkInterval = 30 * time.Second
	networkRetry    = 5 * time.Second // while something fails
	// networkPause lets changes that come together be looked at together.
	networkPause = 100 * time.Millisecond
)

// connections are what connects this node's Pods to others: routes, tunnels and rewritten addresses.
type connections struct {
	// all are the cluster's Nodes; nil if they are not known.
	all     cache.SharedIndexInformer
	changed chan struct{}
	cidrs   []netip.Prefix
	bridge  *network.Bridge // nil: others connect Pods

	nat   *nat.NAT
	mu    sync.Mutex
	state nat.State
	// broken is why no Pods can be connected.
	broken string
	told   map[string]bool // problems that are in the log
}

func newConnections(o *Options) (*connections, error) {
	c := &connections{changed: make(chan struct{}, 1), nat: nat.New(), state: nat.State{Ports: map[string][]nat.Port{}}, told: map[string]bool{}}
	if o.NodesClient == nil {
		return c, nil
	}
	c.all = informers.NewSharedInformerFactory(o.NodesClient, 0).Core().V1().Nodes().Informer()
	// There may be thousands.
	return c, c.all.SetTransform(func(obj any) (any, error) {
		if n, ok := obj.(*corev1.Node); ok {
			return &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion},
				Spec:       corev1.NodeSpec{PodCIDRs: n.Spec.PodCIDRs}, Status: corev1.NodeStatus{Addresses: n.Status.Addresses},
			}, nil
		}
		return obj, nil
	})
}

// change has the network looked at soon.
func (c *connections) change() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// followNodes lists the cluster's Nodes and has routes follow them. Nothing is removed before all are known.
func (a *Agent) followNodes(ctx context.Context) error {
	if a.connections.all == nil {
		a.Log.Info("routes to the Pods of other nodes are not kept: this node can't list Nodes", "node", a.Name)
		return nil
	}
	if _, err := a.connections.all.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { a.connections.change() },
		DeleteFunc: func(any) { a.connections.change() },
		UpdateFunc: func(old, now any) {
			before, after := peerOf(old.(*corev1.Node)), peerOf(now.(*corev1.Node))
			if !slices.Equal(before.Addresses, after.Addresses) || !slices.Equal(before.PodCIDRs, after.PodCIDRs) {
				a.connections.change()
			}
		},
	}); err != nil {
		return err
	}
	a.running.Go(func() { a.connections.all.RunWithContext(ctx) })
	late := time.AfterFunc(10*time.Second, func() {
		a.Log.Warn("waiting for the list of Nodes, for routes to their Pods", "node", a.Name)
	})
	defer late.Stop()
	if !cache.WaitForCacheSync(ctx.Done(), a.connections.all.HasSynced) {
		return ctx.Err()
	}
	return nil
}

// peerOf is a Node as far as its Pods are to be reached. What can't be read is left out.
func peerOf(n *corev1.Node) peers.Node {
	out := peers.Node{Name: n.Name}
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			out.Addresses = append(out.Addresses, ip.Unmap())
		}
	}
	for _, text := range n.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out.PodCIDRs = append(out.PodCIDRs, p)
		}
	}
	return out
}

// setupNetwork waits for the node's Pod CIDRs and makes the bridge, unless CNI plugins connect Pods.
func (a *Agent) setupNetwork(ctx context.Context) error {
	if a.CNIConfDir != "" {
		// Its plugins may come later: a Pod in the node's own network installs them, for example.
		a.network = cni.New(cni.Options{ConfDir: a.CNIConfDir, BinDirs: a.CNIBinDirs, Dir: filepath.Join(a.DataDir, "cni")})
		return nil
	}
	cidrs, err := a.waitForCIDRs(ctx)
	if err != nil {
		return err
	}
	b, err := network.NewBridge(network.BridgeOptions{Dir: filepath.Join(a.DataDir, "addresses"), Bridge: a.Bridge, CIDRs: cidrs, Unguarded: a.unguarded})
	if err != nil {
		return err
	}
	if err := b.Setup(); err != nil {
		return err
	}
	a.network, a.connections.bridge, a.connections.cidrs = b, b, cidrs
	return nil
}

// unguarded says once that Pods are not kept to their addresses.
func (a *Agent) unguarded(err error) {
	a.unguardedOnce.Do(func() { a.Log.Warn("Pods can use addresses of others", "err", err) })
}

func (a *Agent) waitForCIDRs(ctx context.Context) ([]netip.Prefix, error) {
	cidrs := a.PodCIDRs
	for told := false; len(cidrs) == 0; {
		if obj, ok, _ := a.nodes.GetStore().GetByKey(a.Name); ok {
			cidrs = peerOf(obj.(*corev1.Node)).PodCIDRs
		}
		if len(cidrs) > 0 {
			break
		}
		if !told {
			a.Log.Info("waiting for Pod CIDRs", "node", a.Name, "hint", "start the server with --cluster-cidr, or this node with --pod-cidr")
			told = true
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return cidrs, nil
}

// keepConnected keeps routes, tunnels and rewritten addresses right as nodes and links come and go.
func (a *Agent) keepConnected(ctx context.Context) {
	links := peers.Changes(ctx)
	for {
		interval := networkInterval
		switch {
		case a.connections.problem() != "":
			interval = retryDelay
		case len(a.connections.told) > 0:
			interval = networkRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-links:
		case <-a.connections.changed:
		case <-time.After(interval):
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(networkPause):
		}
		_ = a.attempt("keep Pods connected", func() error { a.connect(); return nil })
	}
}

// problem is why no Pods can be connected, empty if they can.
func (c *connections) problem() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.broken
}

// connect does that once. What fails is logged when it begins to fail, and tried again with the next change, or a little later.
func (a *Agent) connect() {
	c := a.connections
	problems := map[string]bool{}
	note := func(what string, err error) {
		if err != nil {
			problems[what+": "+err.Error()] = true
		}
	}
	err := a.network.Setup()
	note("the Pods' network is not set up", err)
	c.mu.Lock()
	c.broken = ""
	if err != nil {
		c.broken = err.Error()
	}
	c.mu.Unlock()
	if c.bridge != nil {
		note("routes to the Pods of other nodes are not programmed", a.connectPeers(problems))
	}
	note("Pods' addresses are not rewritten (masquerade, hostPort)", c.rewrite())
	for p := range problems {
		if !c.told[p] {
			a.Log.Warn(p, "node", a.Name)
		}
	}
	if len(c.told) > 0 && len(problems) == 0 {
		a.Log.Info("the Pods' network is as it should be again", "node", a.Name)
	}
	c.told = problems
}

// rewrite has Pods' addresses rewritten.
func (c *connections) rewrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nat.Sync(c.state)
}

// connectPeers programs the ways to other nodes' Pods, and notes which addresses Pods are known to by their own.
func (a *Agent) connectPeers(problems map[string]bool) error {
	c := a.connections
	plan, err := a.planPeers()
	if err != nil {
		return err
	}
	for _, p := range plan.Problems {
		problems[p] = true
	}
	mtu := plan.MTU
	if a.PodMTU != 0 {
		mtu = a.PodMTU
	}
	c.bridge.SetMTU(mtu)
	inside := slices.Concat(a.ClusterCIDRs, c.cidrs)
	for to := range plan.Ways {
		inside = append(inside, to)
	}
	// They see Pods' own addresses. Others might not know the way back.
	for _, addr := range plan.Neighbours() {
		inside = append(inside, netip.PrefixFrom(addr, addr.BitLen()))
	}
	slices.SortFunc(inside, func(a, b netip.Prefix) int { return strings.Compare(a.String(), b.String()) })
	c.mu.Lock()
	c.state.Masquerade, c.state.Pods, c.state.Inside, c.state.Bridge = a.Masquerade, c.cidrs, inside, c.bridge.Bridge
	c.mu.Unlock()
	return peers.Apply(plan)
}

// planPeers plans the ways to other nodes' Pods.
func (a *Agent) planPeers() (*peers.Plan, error) {
	links, err := peers.Links(a.connections.bridge.Bridge)
	if err != nil {
		return nil, err
	}
	in := peers.Input{
		Self: peers.Node{Name: a.Name, Addresses: a.NodeIPs, PodCIDRs: a.connections.cidrs}, Links: links, Cluster: a.ClusterCIDRs, Tunnels: a.Tunnels,
	}
	if a.connections.all != nil {
		for _, obj := range a.connections.all.GetStore().List() {
			in.Peers = append(in.Peers, peerOf(obj.(*corev1.Node)))
		}
	}
	return peers.Make(in), nil
}

// attach connects a Pod, and has its ports of the node lead to it.
func (a *Agent) attach(ctx context.Context, pod *corev1.Pod, namespace string) ([]netip.Addr, error) {
	addrs, err := a.network.Attach(ctx, network.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name, Ports: hostPorts(pod)}, namespace)
	if err != nil {
		return nil, err
	}
	return addrs, a.serve(string(pod.UID), a.portsTo(pod, addrs))
}

// portsTo are the ports of the node that have to lead to a Pod.
func (a *Agent) portsTo(pod *corev1.Pod, addrs []netip.Addr) []nat.Port {
	if m, ok := a.network.(interface{ MapsPorts() bool }); ok && m.MapsPorts() || pod.Spec.HostNetwork {
		return nil // a plugin does it; or the Pod does it itself
	}
	link := ""
	if a.connections.bridge != nil {
		link = network.HostInterface(string(pod.UID))
	}
	return natPorts(hostPorts(pod), addrs, link)
}

// detach disconnects a Pod again.
func (a *Agent) detach(ctx context.Context, uid string) error {
	if err := a.serve(uid, nil); err != nil {
		return err
	}
	return a.network.Detach(ctx, uid)
}

// serve has ports of the node lead to a Pod, and no others.
func (a *Agent) serve(uid string, ports []nat.Port) error {
	c := a.connections
	c.mu.Lock()
	defer c.mu.Unlock()
	if slices.Equal(c.state.Ports[uid], ports) {
		return nil
	}
	before, had := c.state.Ports[uid]
	if len(ports) == 0 {
		delete(c.state.Ports, uid)
	} else {
		c.state.Ports[uid] = ports
	}
	if err := c.nat.Sync(c.state); err != nil {
		// As it was: whoever tries again has it to do again.
		delete(c.state.Ports, uid)
		if had {
			c.state.Ports[uid] = before
		}
		return fmt.Errorf("the Pod's host ports: %w", err)
	}
	return nil
}
