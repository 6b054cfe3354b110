package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

const (
	leaseDuration = 40 * time.Second
	leaseInterval = 10 * time.Second
	// nodeInterval is how often the Node is compared with what it should be, and nodeReport how often it is written even if nothing
	// changed.
	nodeInterval = 10 * time.Second
	nodeReport   = 5 * time.Minute
	retryDelay   = time.Second

	// nameFile says which Node a data directory is of, lockFile keeps others out of it, imagesDir is where images are kept in it.
	nameFile, lockFile, imagesDir = "node.name", "node.lock", "images"
)

// lock keeps two agents from using one data directory.
func lock(dir string) (func(), error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	// Volumes in it are open to all, and may have programs that run as root.
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	// One that was just killed may hold it for another moment.
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			_ = f.Close()
			return nil, fmt.Errorf("another portal node uses %s: stop it, or choose another --data-dir", dir)
		}
	}
}

// claim keeps which Node a data directory is of. Another one would take the Pods in it for those that the API no longer has.
func claim(dir, name string) error {
	path := filepath.Join(dir, nameFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return os.WriteFile(path, []byte(name+"\n"), 0o600)
	}
	if err != nil {
		return err
	}
	if owner := strings.TrimSpace(string(data)); owner != name && owner != "" {
		return fmt.Errorf("%s is the data directory of the Node %s, not of %s: use --name %s, or choose another --data-dir", dir, owner, name, owner)
	}
	return nil
}

// hostFacts are what a node says about its machine.
type hostFacts struct {
	info     corev1.NodeSystemInfo
	capacity corev1.ResourceList
}

func readHost(dir string) (hostFacts, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return hostFacts{}, err
	}
	var memory unix.Sysinfo_t
	if err := unix.Sysinfo(&memory); err != nil {
		return hostFacts{}, err
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		return hostFacts{}, err
	}
	word := func(path string) string {
		data, _ := os.ReadFile(path)
		return strings.TrimSpace(string(data))
	}
	system := "Linux"
	for _, line := range strings.Split(word("/etc/os-release"), "\n") {
		if text, ok := strings.CutPrefix(line, "PRETTY_NAME="); ok {
			system = strings.Trim(text, `"`)
		}
	}
	return hostFacts{
		info: corev1.NodeSystemInfo{
			MachineID: word("/etc/machine-id"), BootID: word("/proc/sys/kernel/random/boot_id"), KernelVersion: unix.ByteSliceToString(name.Release[:]),
			OSImage: system, OperatingSystem: goruntime.GOOS, Architecture: goruntime.GOARCH,
		},
		capacity: corev1.ResourceList{
			corev1.ResourceCPU:              *resource.NewQuantity(int64(goruntime.NumCPU()), resource.DecimalSI),
			corev1.ResourceMemory:           *resource.NewQuantity(int64(memory.Totalram)*int64(memory.Unit), resource.BinarySI),
			corev1.ResourceEphemeralStorage: *resource.NewQuantity(int64(disk.Blocks)*disk.Bsize, resource.BinarySI),
		},
	}, nil
}

// keepNode registers the Node and keeps what it says true.
func (a *Agent) keepNode(ctx context.Context) {
	var written time.Time
	failed, registered := "", false
	up := a.up
	for {
		wait := nodeInterval
		err := a.attempt("write the Node", func() error { return a.report(ctx, &written) })
		switch {
		case ctx.Err() != nil:
			return
		case apierrors.IsConflict(err):
			wait = 50 * time.Millisecond // somebody else wrote it in between: the controllers, for example
		case err != nil:
			wait = retryDelay
			if failed != err.Error() {
				a.Log.Warn("the Node could not be written, retrying", "node", a.Name, "err", err)
			}
			failed = err.Error()
		default:
			failed = ""
			if !registered {
				registered = true
				close(a.registered)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-up:
			up = nil // told once, immediately
		case <-a.nodeChanged:
		case <-time.After(wait):
		}
	}
}

// ready says whether the node can run Pods.
func (a *Agent) ready() bool {
	select {
	case <-a.up:
		return true
	default:
		return false
	}
}

// report writes the Node if it differs from what it should be, or was not written for long.
func (a *Agent) report(ctx context.Context, written *time.Time) error {
	nodes := a.Client.CoreV1().Nodes()
	node, err := nodes.Get(ctx, a.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		node, err = a.register(ctx)
	}
	if err != nil {
		return err
	}
	labelled := node.DeepCopy()
	changed := a.label(labelled)
	if a.announce(labelled) || changed {
		if node, err = nodes.Update(ctx, labelled, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	next := node.DeepCopy()
	a.status(next)
	if equality.Semantic.DeepEqual(next.Status, node.Status) && time.Since(*written) < nodeReport {
		return nil
	}
	for i := range next.Status.Conditions {
		next.Status.Conditions[i].LastHeartbeatTime = metav1.Now()
	}
	if _, err := nodes.UpdateStatus(ctx, next, metav1.UpdateOptions{}); err != nil {
		return err
	}
	*written = time.Now()
	return nil
}

// register makes the Node. It has the Pod CIDRs that this node uses already, if it does: somebody has deleted the Node, and its Pods keep
// their addresses, which others must go on finding here.
func (a *Agent) register(ctx context.Context) (*corev1.Node, error) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: a.Name}}
	a.label(node)
	cidrs := a.PodCIDRs
	if a.ready() && len(a.connections.cidrs) > 0 {
		cidrs = a.connections.cidrs
	}
	for _, p := range cidrs {
		node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, p.String()) // so that other nodes know them
	}
	nodes := a.Client.CoreV1().Nodes()
	made, err := nodes.Create(ctx, node, metav1.CreateOptions{})
	if apierrors.IsForbidden(err) && len(cidrs) > len(a.PodCIDRs) {
		node.Spec.PodCIDRs = nil
		if made, err := nodes.Create(ctx, node, metav1.CreateOptions{}); err == nil {
			a.Log.Error("node registered without the Pod CIDRs that it uses, which another node has by now: its Pods can't be reached, restart it and replace them",
				"node", a.Name, "podCIDRs", fmt.Sprint(cidrs))
			return made, nil
		}
	}
	if err == nil {
		a.Log.Info("node registered", "node", a.Name)
	}
	return made, err
}

// label gives the Node the labels that it should have, and says whether that changed it.
func (a *Agent) label(node *corev1.Node) bool {
	want := map[string]string{corev1.LabelHostname: a.Name, corev1.LabelOSStable: goruntime.GOOS, corev1.LabelArchStable: goruntime.GOARCH}
	if a.Zone != "" {
		want[corev1.LabelTopologyZone] = a.Zone
	}
	changed := false
	if node.Labels == nil {
		node.Labels = map[string]string{}
	}
	for k, v := range want {
		if node.Labels[k] != v {
			node.Labels[k], changed = v, true
		}
	}
	return changed
}

func (a *Agent) status(node *corev1.Node) {
	s := &node.Status
	s.Addresses = nil
	for _, ip := range a.NodeIPs {
		s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
	}
	s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: a.Name})
	s.DaemonEndpoints.KubeletEndpoint.Port = int32(a.Stream.Port)
	s.NodeInfo = a.host.info
	s.NodeInfo.ContainerRuntimeVersion, s.NodeInfo.KubeletVersion = "portal://"+a.Version, a.Version
	s.Capacity = a.host.capacity.DeepCopy()
	s.Capacity[corev1.ResourcePods] = *resource.NewQuantity(int64(a.MaxPods), resource.DecimalSI)
	s.Allocatable = s.Capacity.DeepCopy()
	s.Images = a.nodeImages()
	set := func(kind corev1.NodeConditionType, status corev1.ConditionStatus, reason, message string) {
		for i := range s.Conditions {
			if c := &s.Conditions[i]; c.Type == kind {
				if c.Status != status {
					c.LastTransitionTime = metav1.Now()
				}
				c.Status, c.Reason, c.Message = status, reason, message
				return
			}
		}
		s.Conditions = append(s.Conditions, corev1.NodeCondition{Type: kind, Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.Now()})
	}
	if !a.ready() {
		set(corev1.NodeReady, corev1.ConditionFalse, "NodeNotReady", "the network is not set up: the node waits for its Pod CIDRs")
		return
	}
	if why := a.connections.problem(); why != "" {
		set(corev1.NodeReady, corev1.ConditionFalse, "NetworkNotReady", "Pods can't be connected: "+why)
		set(corev1.NodeNetworkUnavailable, corev1.ConditionTrue, "NetworkNotReady", why)
		return
	}
	set(corev1.NodeReady, corev1.ConditionTrue, "NodeReady", "portal node is running Pods")
	if why, on := a.diskPressure(); on {
		set(corev1.NodeDiskPressure, corev1.ConditionTrue, "DiskPressure", why)
	} else {
		set(corev1.NodeDiskPressure, corev1.ConditionFalse, "NoDiskPressure", "the disk has enough space")
	}
	set(corev1.NodeNetworkUnavailable, corev1.ConditionFalse, "RouteCreated", "the bridge and routes are programmed")
}

// keepLease renews the node's Lease.
func (a *Agent) keepLease(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-a.registered: // it owns the Lease
	}
	failed := false
	for {
		wait := leaseInterval
		if err := a.attempt("renew the Lease", func() error { return a.renew(ctx) }); err != nil && ctx.Err() == nil {
			wait = retryDelay
			if !failed {
				a.Log.Warn("the Lease could not be renewed, retrying", "node", a.Name, "err", err)
			}
			failed = true
		} else {
			failed = false
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (a *Agent) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaseInterval)
	defer cancel()
	leases := a.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	now := metav1.NewMicroTime(time.Now())
	lease, err := leases.Get(ctx, a.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		node, err := a.Client.CoreV1().Nodes().Get(ctx, a.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		_, err = leases.Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: a.Name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: types.UID(node.UID)}}},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &a.Name, LeaseDurationSeconds: ptr.To(int32(leaseDuration / time.Second)), RenewTime: &now},
		}, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	lease.Spec.HolderIdentity, lease.Spec.RenewTime, lease.Spec.LeaseDurationSeconds = &a.Name, &now, ptr.To(int32(leaseDuration/time.Second))
	_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}
