// Package cni connects Pods as a CNI configuration says (https://www.cni.dev): its plugins give them interfaces, addresses and routes.
// What was attached is kept in files, so that another process can detach it. It knows nothing of what the plugins do.
package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
	"portal/internal/node/network"
)

// Options are a Network's.
type Options struct {
	// ConfDir has configurations; the first by name is used, as kubelets' runtimes do.
	ConfDir string
	BinDirs []string
	// Dir keeps what is attached.
	Dir string
}

// Network connects Pods with CNI plugins.
type Network struct {
	Options
	plugins *libcni.CNIConfig
}

var _ network.Network = (*Network)(nil)

const (
	// timeout is how long the plugins may take for one Pod.
	timeout       = 90 * time.Second
	interfaceName = "eth0"
)

// New makes a Network. It starts nothing.
func New(o Options) *Network {
	return &Network{Options: o, plugins: libcni.NewCNIConfigWithCacheDir(o.BinDirs, filepath.Join(o.Dir, "cni"), nil)}
}

// config is the configuration of this moment.
func (n *Network) config() (*libcni.NetworkConfigList, error) {
	files, err := libcni.ConfFiles(n.ConfDir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("there is no CNI configuration (.conflist, .conf or .json) in %s", n.ConfDir)
	}
	slices.Sort(files)
	file := files[0]
	list, err := load(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(list.Plugins) == 0 {
		return nil, fmt.Errorf("%s: it names no plugin", file)
	}
	for _, p := range list.Plugins {
		if !slices.ContainsFunc(n.BinDirs, func(dir string) bool { _, err := os.Stat(filepath.Join(dir, p.Network.Type)); return err == nil }) {
			return nil, fmt.Errorf("%s: the plugin %s is not in %s", file, p.Network.Type, strings.Join(n.BinDirs, ", "))
		}
	}
	return list, nil
}

func load(file string) (*libcni.NetworkConfigList, error) {
	if filepath.Ext(file) == ".conflist" {
		return libcni.NetworkConfFromFile(file)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	one, err := libcni.NetworkPluginConfFromBytes(data)
	if err != nil {
		return nil, err
	}
	return libcni.ConfListFromConf(one)
}

// Setup checks that there is a configuration, and that its plugins are ready.
func (n *Network) Setup() error {
	list, err := n.config()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := n.plugins.GetStatusNetworkList(ctx, list); err != nil {
		return fmt.Errorf("the CNI network %s is not ready: %w", list.Name, err)
	}
	return nil
}

// MapsPorts says whether a plugin takes care of ports of the node.
func (n *Network) MapsPorts() bool {
	list, err := n.config()
	return err == nil && slices.ContainsFunc(list.Plugins, func(p *libcni.PluginConfig) bool { return p.Network.Capabilities["portMappings"] })
}

// portMapping is what plugins with that capability get.
type portMapping struct {
	HostPort      uint16 `json:"hostPort"`
	ContainerPort uint16 `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// Attach has the plugins connect a Pod. One that is connected already is checked, and connected anew if that fails.
func (n *Network) Attach(ctx context.Context, pod network.Pod, namespace string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	list, err := n.config()
	if err != nil {
		return nil, err
	}
	id, err := identify(namespace)
	if err != nil {
		return nil, fmt.Errorf("open the Pod's network namespace: %w", err)
	}
	if err := loopback(namespace); err != nil {
		return nil, err
	}
	if n.attachedTo(pod.UID) == id {
		if addrs, err := n.Addresses(pod.UID); err == nil && len(addrs) > 0 && n.check(ctx, pod.UID) == nil {
			return addrs, nil
		}
	}
	if err := n.Detach(ctx, pod.UID); err != nil {
		return nil, err
	}
	rt := &libcni.RuntimeConf{
		ContainerID: pod.UID, NetNS: namespace, IfName: interfaceName,
		Args: [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", pod.Namespace}, {"K8S_POD_NAME", pod.Name}, {"K8S_POD_INFRA_CONTAINER_ID", pod.UID}, {"K8S_POD_UID", pod.UID},
		},
	}
	if len(pod.Ports) > 0 {
		var list []portMapping
		for _, p := range pod.Ports {
			m := portMapping{HostPort: p.HostPort, ContainerPort: p.Pod, Protocol: strings.ToLower(p.Protocol)}
			if p.Host.IsValid() {
				m.HostIP = p.Host.String()
			}
			list = append(list, m)
		}
		rt.CapabilityArgs = map[string]any{"portMappings": list}
	}
	// Before anything is made: what is not known would stay.
	if err := n.attach(pod.UID, id); err != nil {
		return nil, err
	}
	result, err := n.plugins.AddNetworkList(ctx, list, rt)
	if err == nil {
		var addrs []netip.Addr
		if addrs, err = addresses(result); err == nil && len(addrs) == 0 {
			err = errors.New("the plugins gave the Pod no address")
		}
		if err == nil {
			return addrs, nil
		}
	}
	// As the specification wants: what a part of the plugins made is taken back.
	clean, stop := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer stop()
	if e := n.plugins.DelNetworkList(clean, list, rt); e != nil {
		err = fmt.Errorf("%w (and it could not be undone: %w)", err, e)
	}
	return nil, fmt.Errorf("the CNI network %s: %w", list.Name, err)
}

func addresses(result types.Result) (out []netip.Addr, err error) {
	r, err := types100.GetResult(result)
	if err != nil {
		return nil, err
	}
	for _, ip := range r.IPs {
		// Those of other interfaces are the node's, for example.
		if i := ip.Interface; i != nil && *i >= 0 && *i < len(r.Interfaces) && r.Interfaces[*i].Sandbox == "" {
			continue
		}
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}

// attachment is what the plugins were told when they connected a Pod.
type attachment struct {
	list *libcni.NetworkConfigList
	rt   *libcni.RuntimeConf
}

func (n *Network) attachments(pod string) (out []attachment, err error) {
	list, err := n.plugins.GetCachedAttachments(pod)
	if err != nil {
		return nil, err
	}
	for _, a := range list {
		config, err := libcni.NetworkConfFromBytes(a.Config)
		if err != nil {
			return nil, fmt.Errorf("what is written down about the Pod %s: %w", a.ContainerID, err)
		}
		out = append(out, attachment{config, &libcni.RuntimeConf{
			ContainerID: a.ContainerID, NetNS: a.NetNS, IfName: a.IfName, Args: a.CniArgs, CapabilityArgs: a.CapabilityArgs,
		}})
	}
	return out, nil
}

// check asks the plugins whether a Pod is still connected, those that know how to tell.
func (n *Network) check(ctx context.Context, pod string) error {
	list, err := n.attachments(pod)
	if err != nil {
		return err
	}
	for _, a := range list {
		if err := n.plugins.CheckNetworkList(ctx, a.list, a.rt); err != nil && !errors.Is(err, libcni.ErrorCheckNotSupp) {
			return err
		}
	}
	return nil
}

// Addresses are those that the plugins gave to a Pod.
func (n *Network) Addresses(pod string) (out []netip.Addr, err error) {
	list, err := n.attachments(pod)
	if err != nil {
		return nil, err
	}
	for _, a := range list {
		result, err := n.plugins.GetNetworkListCachedResult(a.list, a.rt)
		if err != nil {
			return nil, err
		}
		if result == nil {
			continue
		}
		addrs, err := addresses(result)
		if err != nil {
			return nil, err
		}
		out = append(out, addrs...)
	}
	return out, nil
}

// Detach has the plugins disconnect a Pod, with the configuration that it was connected with.
func (n *Network) Detach(ctx context.Context, pod string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	list, err := n.attachments(pod)
	if err != nil {
		return err
	}
	for _, a := range list {
		if id, err := identify(a.rt.NetNS); err != nil || id != n.attachedTo(pod) {
			a.rt.NetNS = "" // it is gone, and its path may be another's
		}
		if err := n.plugins.DelNetworkList(ctx, a.list, a.rt); err != nil {
			return fmt.Errorf("the CNI network %s: %w", a.list.Name, err)
		}
	}
	if err := os.Remove(n.namespaceFile(pod)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Sweep detaches all Pods but those that are kept, and lets the plugins collect what is left of others.
func (n *Network) Sweep(ctx context.Context, keep map[string]bool) error {
	all, err := n.attachments("")
	if err != nil {
		return err
	}
	var errs []error
	valid := []types.GCAttachment{}
	for _, a := range all {
		if keep[a.rt.ContainerID] {
			valid = append(valid, types.GCAttachment{ContainerID: a.rt.ContainerID, IfName: a.rt.IfName})
		} else {
			errs = append(errs, n.Detach(ctx, a.rt.ContainerID))
		}
	}
	if list, err := n.config(); err == nil {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		errs = append(errs, n.plugins.GCNetworkList(ctx, list, &libcni.GCArgs{ValidAttachments: valid}))
	}
	return errors.Join(errs...)
}

// identify tells network namespaces apart that have the same path one after the other.
func identify(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), nil
}

func (n *Network) namespaceFile(pod string) string {
	return filepath.Join(n.Dir, "namespaces", pod)
}

// attach writes down which network namespace a Pod has.
func (n *Network) attach(pod, id string) error {
	if err := os.MkdirAll(filepath.Dir(n.namespaceFile(pod)), 0o700); err != nil {
		return err
	}
	return os.WriteFile(n.namespaceFile(pod), []byte(id), 0o600)
}

func (n *Network) attachedTo(pod string) string {
	data, _ := os.ReadFile(n.namespaceFile(pod))
	return string(data)
}

// loopback takes up a Pod's loopback interface, which no plugin is asked to.
func loopback(namespace string) error {
	ns, err := netns.GetFromPath(namespace)
	if err != nil {
		return fmt.Errorf("open the Pod's network namespace: %w", err)
	}
	defer ns.Close()
	inside, err := hostnet.OpenNetlink(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("enter the Pod's network namespace: %w", err)
	}
	defer inside.Close()
	lo, err := inside.LinkByName("lo")
	if err != nil {
		return err
	}
	return inside.LinkSetUp(lo)
}
