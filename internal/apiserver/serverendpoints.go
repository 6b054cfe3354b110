package apiserver

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"portal/internal/store"
)

// serverEndpoints keeps the endpoints of the kubernetes Service in line with the servers that are alive. Each server has a key
// in etcd under a lease, and each reconciles the endpoints, so that the last one left corrects them.
type serverEndpoints struct {
	etcd   *clientv3.Client
	client kubernetes.Interface
	// self is invalid for a server that others cannot reach; it still reconciles the endpoints.
	self netip.AddrPort
}

const (
	memberPrefix = store.Prefix + "/servers/"
	memberTTL    = 10 // seconds until a server that died is no endpoint any more
	resync       = 30 * time.Second
	// rejoinAfter and rejoinAtMost are the pauses before a server whose registration was lost registers again: an etcd at its quota
	// grants no leases, for as long as it takes somebody to make room.
	rejoinAfter  = time.Second
	rejoinAtMost = 30 * time.Second
)

func newServerEndpoints(s *Server) *serverEndpoints {
	e := &serverEndpoints{etcd: s.store.Client(), client: s.endpointsClient}
	if s.opts.advertise.IsValid() {
		e.self = netip.AddrPortFrom(s.opts.advertise, s.opts.port)
	} else {
		klog.InfoS("this server is no endpoint of the kubernetes Service: it listens on loopback only, and no --advertise-address is given")
	}
	return e
}

// run keeps this server registered and reconciles the endpoints until ctx ends, and then removes this server.
func (e *serverEndpoints) run(ctx context.Context) {
	pause := rejoinAfter
	for ctx.Err() == nil {
		start := time.Now()
		err := e.register(ctx)
		if ctx.Err() != nil {
			return
		}
		if pause = min(2*pause, rejoinAtMost); time.Since(start) > rejoinAtMost {
			pause = rejoinAfter
		}
		klog.InfoS("registration of this server was interrupted, registering again", "err", err, "in", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// register registers this server and reconciles until the lease or a watch is lost.
func (e *serverEndpoints) register(ctx context.Context) error {
	inner, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	lease, err := e.etcd.Grant(inner, memberTTL)
	if err != nil {
		return err
	}
	// The endpoints lose this server before it stops answering, while it drains.
	defer e.leave(context.WithoutCancel(ctx), lease.ID)
	if e.self.IsValid() {
		if _, err := e.etcd.Put(inner, memberPrefix+e.self.String(), "", clientv3.WithLease(lease.ID)); err != nil {
			return err
		}
	}
	alive, err := e.etcd.KeepAlive(inner, lease.ID)
	if err != nil {
		return err
	}
	changed := e.etcd.Watch(inner, memberPrefix, clientv3.WithPrefix())
	tick := time.NewTicker(resync)
	defer tick.Stop()
	for {
		if err := e.reconcile(inner); err != nil && ctx.Err() == nil {
			klog.InfoS("endpoints of the kubernetes Service could not be written, retrying", "err", err)
		}
		if err := await(ctx, alive, changed, tick.C); err != nil {
			return err
		}
	}
}

// await returns nil when it is time to reconcile again.
func await(ctx context.Context, alive <-chan *clientv3.LeaseKeepAliveResponse, changed clientv3.WatchChan, tick <-chan time.Time) error {
	for {
		select {
		case _, ok := <-alive:
			if !ok {
				return context.Canceled
			}
		case resp, ok := <-changed:
			if !ok {
				return context.Canceled
			}
			if resp.Err() != nil || len(resp.Events) > 0 {
				return resp.Err()
			}
		case <-tick:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (e *serverEndpoints) leave(ctx context.Context, lease clientv3.LeaseID) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := e.etcd.Revoke(ctx, lease); err != nil {
		klog.V(2).InfoS("registration of this server could not be revoked, it expires by itself", "err", err)
		return
	}
	if err := e.reconcile(ctx); err != nil {
		klog.V(2).InfoS("endpoints of the kubernetes Service could not be written at the end", "err", err)
	}
}

// members lists the servers that are alive.
func (e *serverEndpoints) members(ctx context.Context) ([]netip.AddrPort, error) {
	resp, err := e.etcd.Get(ctx, memberPrefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	var out []netip.AddrPort
	for _, kv := range resp.Kvs {
		if member, err := netip.ParseAddrPort(strings.TrimPrefix(string(kv.Key), memberPrefix)); err == nil {
			out = append(out, member)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out, nil
}

func (e *serverEndpoints) reconcile(ctx context.Context) error {
	members, err := e.members(ctx)
	if err != nil {
		return err
	}
	if err := e.writeEndpoints(ctx, members); err != nil {
		return err
	}
	return e.writeSlices(ctx, members)
}

// byPort groups members by their port: a subset or slice has one set of ports for all its addresses.
func byPort(members []netip.AddrPort) map[uint16][]netip.Addr {
	out := map[uint16][]netip.Addr{}
	for _, member := range members {
		out[member.Port()] = append(out[member.Port()], member.Addr())
	}
	return out
}

func sortedPorts(groups map[uint16][]netip.Addr) []uint16 {
	var ports []uint16
	for port := range groups {
		ports = append(ports, port)
	}
	slices.Sort(ports)
	return ports
}

// writeEndpoints writes the Endpoints object, with the label that keeps controllers from mirroring it.
func (e *serverEndpoints) writeEndpoints(ctx context.Context, members []netip.AddrPort) error {
	want := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{
		Name: defaultName, Namespace: metav1.NamespaceDefault,
		Labels: map[string]string{discoveryv1.LabelSkipMirror: "true"},
	}}
	groups := byPort(members)
	for _, port := range sortedPorts(groups) {
		subset := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "https", Port: int32(port), Protocol: corev1.ProtocolTCP}}}
		for _, addr := range groups[port] {
			subset.Addresses = append(subset.Addresses, corev1.EndpointAddress{IP: addr.String()})
		}
		want.Subsets = append(want.Subsets, subset)
	}
	client := e.client.CoreV1().Endpoints(metav1.NamespaceDefault)
	current, err := client.Get(ctx, defaultName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = client.Create(ctx, want, metav1.CreateOptions{})
		return ignoreRace(err)
	}
	if err != nil || equality.Semantic.DeepEqual(current.Subsets, want.Subsets) && current.Labels[discoveryv1.LabelSkipMirror] == "true" {
		return err
	}
	want.ResourceVersion = current.ResourceVersion
	_, err = client.Update(ctx, want, metav1.UpdateOptions{})
	return ignoreRace(err)
}

// ignoreRace drops errors which say that another server was faster: it wrote the same.
func ignoreRace(err error) error {
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
