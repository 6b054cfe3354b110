package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	kubeversion "k8s.io/component-base/version"

	"portal/internal/apiserver"
	"portal/internal/clusterdns"
	"portal/internal/hostnet"
	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/node"
	"portal/internal/node/disk"
	"portal/internal/node/image"
	"portal/internal/node/network"
	"portal/internal/node/network/peers"
	"portal/internal/reports"
)

// nodeOptions are the flags of portal node.
type nodeOptions struct {
	kubeconfig    string
	name, zone    string
	nodeIP        string
	podCIDR       string
	bridge        string
	clusterCIDR   string
	tunnel        string
	podMTU        int
	masquerade    bool
	cniConfDir    string
	cniBinDirs    []string
	imageMap      string
	images        imageStoreOptions
	collection    image.Thresholds
	evictionHard  string
	transition    time.Duration
	hide          []string
	clusterDNS    []string
	clusterDomain string
	maxPods       int
	podProcesses  int64
	cgroupRoot    string
	streamAddress []string
	streamPort    uint16
	parts         partOptions
	join          joinOptions
	cleanup       bool
	logs          logOptions
}

func newNodeCommand() *cobra.Command { return new(nodeOptions).command() }

// command has the flags of the options, which have their defaults from then on.
func (o *nodeOptions) command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Run the Pods of one node, as processes in namespaces, with its proxy and DNS",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp+"; instead of --server")
	o.join.addFlags(f, identity.Node)
	f.Lookup("data-dir").Usage = "folder for the Pods, their logs and volumes, and for the certificate and key of this machine (default: " + defaultNodeDir() + ")"
	f.StringVar(&o.name, "name", "", "the name of this machine's Node; default: its host name")
	f.StringVar(&o.zone, "zone", "", "the zone that this machine is in: the Node's label topology.kubernetes.io/zone")
	f.StringVar(&o.nodeIP, "node-ip", "", "addresses by which others reach this machine, at most one of each family; default: those of its default routes")
	f.StringVar(&o.podCIDR, "pod-cidr", "", "prefixes of this node's Pods, at most one of each family; default: what the server's --cluster-cidr gives it")
	f.StringVar(&o.bridge, "bridge", network.DefaultBridge, "the bridge that Pods are connected to; it is made if there is none")
	f.StringVar(&o.clusterCIDR, "cluster-cidr", "", "prefixes of all Pods of the cluster, at most one of each family; default: those of the Nodes that this node knows")
	f.StringVar(&o.tunnel, "tunnel", string(peers.Auto), "nodes whose Pods are reached through a VXLAN tunnel: auto (those that are on no link of this machine), always, never")
	f.IntVar(&o.podMTU, "pod-mtu", 0, "MTU of Pods' interfaces; default: what fits the links and tunnels to other nodes")
	f.BoolVar(&o.masquerade, "masquerade", true, "what Pods send outside of the cluster leaves with this node's address")
	f.StringVar(&o.cniConfDir, "cni-conf-dir", "", "folder with a CNI configuration: its plugins connect Pods, instead of a bridge")
	f.StringSliceVar(&o.cniBinDirs, "cni-bin-dir", []string{"/opt/cni/bin"}, "folders with CNI plugins, for --cni-conf-dir")
	f.StringVar(&o.imageMap, "image-map", "", "file that maps images to folders")
	o.images.addFlags(f)
	f.IntVar(&o.collection.High, "image-gc-high-threshold", 85, "percentage of the disk in use from which on unused images are removed; 100: never")
	f.IntVar(&o.collection.Low, "image-gc-low-threshold", 80, "percentage of the disk in use down to which unused images are removed")
	f.DurationVar(&o.collection.MinAge, "minimum-image-ttl-duration", 2*time.Minute, "how long an image stays at least after it was pulled or used")
	f.StringVar(&o.evictionHard, "eviction-hard", "nodefs.available<5%,nodefs.inodesFree<5%", "what the disk must have left; with less, unused images go, and Pods that take much of it; empty: nothing goes")
	f.DurationVar(&o.transition, "eviction-pressure-transition-period", 5*time.Minute, "how long the node takes no new Pods after its disk was full")
	f.StringSliceVar(&o.hide, "hide", nil, "further paths of this machine that Pods of the image host don't see")
	f.StringSliceVar(&o.clusterDNS, "cluster-dns", nil, "addresses of the cluster's DNS servers, for Pods' resolv.conf; default: those of the Service kube-dns")
	f.StringVar(&o.clusterDomain, "cluster-domain", "cluster.local", "the cluster's DNS zone")
	f.IntVar(&o.maxPods, "max-pods", 250, "the most Pods that the node says it can run")
	f.Int64Var(&o.podProcesses, "pod-max-pids", 4096, "the most processes and threads that a Pod may have")
	f.StringVar(&o.cgroupRoot, "cgroup-root", "", "path of the control groups below which those of Pods are; default: portal/NAME")
	f.StringSliceVar(&o.streamAddress, "stream-address", nil, "addresses of this machine to serve logs, exec, attach and port-forward of Pods at, to clients of the cluster who may use them; default: the node's")
	f.Uint16Var(&o.streamPort, "stream-port", 10250, "port to serve them at; 0: they are not served")
	o.parts.addFlags(f, "port 53 of this node's addresses among its Pods, as an endpoint of the Service kube-dns",
		"turn on forwarding and make a strict rp_filter loose where packets to Services are lost otherwise; they stay so when this ends")
	f.StringVar(&o.parts.healthz, "proxy-healthz-bind-address", "0.0.0.0:10256", "address:port of the proxy's /healthz and /livez, by which load balancers know whether to send traffic here; empty: none")
	conntrackFlags(f, &o.parts.conntrack)
	f.BoolVar(&o.cleanup, "cleanup", false, "end the Pods of this machine, remove all that a node left on it (with the same --data-dir, --bridge, --cgroup-root and --cni-conf-dir), and exit")
	o.logs.addFlags(f)
	return cmd
}

func defaultNodeDir() string {
	return filepath.Join(apiserver.DefaultOptions().DataDir, string(identity.Node))
}

func (o *nodeOptions) run(cmd *cobra.Command) (err error) {
	log, err := o.logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo)
	if err != nil {
		return usageError{err}
	}
	options, err := o.options()
	if err != nil {
		return usageError{err}
	}
	if o.cleanup {
		return o.cleanUp(cmd, log, options)
	}
	if err := mayRunPods(); err != nil {
		return err
	}
	waiting := func(h instance.Holder) {
		log.Info("another process has a part in this network namespace, waiting for it to end", "holder", h.String(), "upTo", handover)
	}
	lock, err := instance.Acquire(cmd.Context(), instance.Node+options.Bridge, handover, waiting)
	if err != nil {
		return err
	}
	defer lock.Release()
	var agent *node.Agent
	undo := node.Fresh(node.Leftover{DataDir: options.DataDir, CgroupRoot: cmp.Or(options.CgroupRoot, node.DefaultCgroupRoot(options.Name)), Beside: besideAgent})
	defer func() {
		if agent == nil || !agent.Registered() {
			if e := undo(); e != nil {
				log.Warn("not all that was made for the node could be removed", "err", e)
			}
		}
	}()
	if options.Images.Mappings, err = withOwnImage(options.Images.Mappings, options.DataDir); err != nil {
		return fmt.Errorf("--data-dir: %w", err)
	}
	who, err := o.identities(cmd.Context(), log, options)
	if err != nil {
		return err
	}
	options.Log = log
	if options.Client, err = client(who.node); err != nil {
		return err
	}
	if options.NodesClient, err = client(who.proxy); err != nil {
		return err
	}
	if len(options.NodeIPs) == 0 {
		if options.NodeIPs, err = ownAddresses(); err != nil {
			return err
		}
	}
	options.Stream.Authorities = o.authorities(options.DataDir, who.node)
	may, err := o.parts.claim(cmd.Context(), waiting)
	if err != nil {
		return err
	}
	defer may.release()
	collectAt(garbage)
	ctx, cancel := context.WithCancel(cmd.Context())
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	var running runningProxy
	if may.noProxy == "" {
		options.Drained = running.drained
	}
	options.Stream.State = nodeState(options, &running, may, &o.parts.balancers.balancingOptions)
	options.Stream.Traffic = nodeTraffic(ctx, &running, &beside)
	options.DNS = o.parts.nodeDNS(cmd, log, who.dns, options.Name, options.ClusterDomain, may)
	if agent, err = node.New(options); err != nil {
		return err
	}
	for _, renew := range who.renew {
		beside.Go(func() { renew(ctx) })
	}
	o.parts.balancing.Add(1) // the proxy waits for the balancer, which is started after it
	if may.noProxy == "" {
		beside.Go(func() {
			p := o.parts.startProxy(ctx, log, proxySettings{node: options.Name, bridge: options.Bridge, api: who.proxy, running: &running}, &beside)
			if p.note != "" && ctx.Err() == nil {
				log.Error("the proxy does not run", "why", p.note)
			}
		})
	} else if o.parts.proxy != "none" {
		log.Warn("the proxy does not run", "why", may.noProxy)
	}
	o.parts.balancers.dir = filepath.Join(options.DataDir, balancingDir)
	o.parts.startBalancer(ctx, log, options.Name, who.lb, &beside)
	o.parts.balancing.Done()
	startReport(ctx, o.parts.report, log, who.node, options.Name, reports.Agent, agentReport(agent), &beside)
	return agent.Run(ctx)
}

// mayRunPods says, before anything else fails for it, that this takes root.
func mayRunPods() error {
	if os.Geteuid() != 0 || mayAdminister() != nil {
		return errors.New("run this as root: it makes namespaces for Pods")
	}
	return nil
}

// client makes a client without a rate limit: the server's own limits the load.
func client(config *rest.Config) (kubernetes.Interface, error) {
	config = rest.CopyConfig(config)
	config.QPS = -1
	config.WarningHandler = rest.NoWarnings{} // warnings are for people
	return kubernetes.NewForConfig(config)
}

// nodeDNS is what serves names for a node: at the addresses that it has among its Pods, or where the flag says.
func (o *partOptions) nodeDNS(cmd *cobra.Command, log *slog.Logger, api *rest.Config, node, zone string, may *parts) func(context.Context, []netip.Addr, func(bool)) {
	switch {
	case o.dns == "none":
		return nil
	case may.noVIP != "":
		log.Warn("DNS does not run", "why", may.noVIP)
		return nil
	}
	return func(ctx context.Context, addrs []netip.Addr, serving func(bool)) {
		var listen []netip.AddrPort
		for _, a := range addrs {
			listen = append(listen, netip.AddrPortFrom(a, clusterdns.Port))
		}
		if o.dns != "auto" {
			listen, _ = addrPorts([]string{o.dns}) // validated
			serving = func(bool) {}                // it is no endpoint of kube-dns
		}
		for wait(ctx, 0) {
			err := o.serveNames(ctx, cmd, log, api, o.reported(node), zone, listen, "", func() { serving(true) })
			if ctx.Err() != nil {
				return
			}
			serving(false)
			log.Error("DNS stopped, retrying", "err", err)
			wait(ctx, 5*time.Second)
		}
	}
}

// options checks the flags, naming the one that is wrong.
func (o *nodeOptions) options() (node.Options, error) {
	out := node.Options{
		Zone: o.zone, Bridge: o.bridge, Hidden: o.hide, ClusterDNS: o.clusterDNS, ClusterDomain: strings.Trim(o.clusterDomain, "."), MaxPods: o.maxPods,
		PodMTU: o.podMTU, Masquerade: o.masquerade, Tunnels: peers.Tunnels(o.tunnel), CNIConfDir: o.cniConfDir, CNIBinDirs: o.cniBinDirs,
		PodProcesses: o.podProcesses, CgroupRoot: o.cgroupRoot, Version: kubeversion.Get().GitVersion, DataDir: o.join.dataDir,
	}
	var err error
	fail := func(flag string, e error) {
		if err == nil && e != nil {
			err = fmt.Errorf("--%s: %w", flag, e)
		}
	}
	var e error
	if out.Name, e = machineName(o.name); e == nil {
		e = identity.ValidMachine(out.Name)
	}
	fail("name", e)
	if out.DataDir == "" {
		out.DataDir = defaultNodeDir()
	}
	out.DataDir, e = filepath.Abs(out.DataDir)
	fail("data-dir", e)
	if o.nodeIP != "" {
		for _, text := range strings.Split(o.nodeIP, ",") {
			a, e := parseAddr(text)
			if e == nil && (a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.Zone() != "") {
				e = fmt.Errorf("%s is no address by which others can reach this machine", a)
			}
			fail("node-ip", e)
			out.NodeIPs = append(out.NodeIPs, a)
		}
		if len(out.NodeIPs) > 2 || len(out.NodeIPs) == 2 && out.NodeIPs[0].Is4() == out.NodeIPs[1].Is4() {
			fail("node-ip", fmt.Errorf("%q has more than one address of a family", o.nodeIP))
		}
	}
	out.PodCIDRs, e = prefixesOfFamilies(o.podCIDR)
	fail("pod-cidr", e)
	for _, p := range out.PodCIDRs {
		if p.Bits() > p.Addr().BitLen()-2 {
			fail("pod-cidr", fmt.Errorf("%s has no room for Pods: give a prefix such as 10.244.1.0/24", p))
		}
	}
	out.ClusterCIDRs, e = prefixesOfFamilies(o.clusterCIDR)
	fail("cluster-cidr", e)
	if !slices.Contains([]peers.Tunnels{peers.Auto, peers.Always, peers.Never}, out.Tunnels) {
		fail("tunnel", fmt.Errorf("%q is not auto, always or never", o.tunnel))
	}
	if o.podMTU != 0 && (o.podMTU < 1280 || o.podMTU > 65535) {
		fail("pod-mtu", fmt.Errorf("%d is not between 1280 and 65535", o.podMTU))
	}
	if o.imageMap != "" {
		out.Images.Mappings, e = image.ReadMap(o.imageMap)
		fail("image-map", e)
	}
	if e := o.images.apply(&out.Images); e != nil && err == nil {
		err = e
	}
	out.ImageCollection = o.collection
	if c := o.collection; c.High < 1 || c.High > 100 {
		fail("image-gc-high-threshold", fmt.Errorf("%d must be a percentage from 1 to 100", c.High))
	} else if c.Low < 0 || c.Low >= c.High {
		fail("image-gc-low-threshold", fmt.Errorf("%d must be less than --image-gc-high-threshold, %d", c.Low, c.High))
	} else if c.MinAge < 0 {
		fail("minimum-image-ttl-duration", fmt.Errorf("%s must not be negative", c.MinAge))
	}
	out.Eviction.Transition = o.transition
	out.Eviction.Thresholds, e = disk.ParseThresholds(o.evictionHard)
	fail("eviction-hard", e)
	if o.transition < 0 {
		fail("eviction-pressure-transition-period", fmt.Errorf("%s must not be negative", o.transition))
	}
	if o.bridge == "" || len(o.bridge) > 15 || o.bridge == "." || o.bridge == ".." || strings.ContainsAny(o.bridge, "/: \t\n") {
		fail("bridge", fmt.Errorf("%q can't be the name of an interface: 1 to 15 characters, none of which is /, : or a space", o.bridge))
	}
	if len(validation.IsValidLabelValue(o.zone)) > 0 {
		fail("zone", fmt.Errorf("%q can't be a label's value: at most 63 letters, digits, -, _ and ., with a letter or digit at both ends", o.zone))
	}
	if len(validation.IsDNS1123Subdomain(out.ClusterDomain)) > 0 {
		fail("cluster-domain", fmt.Errorf("%q is no DNS zone such as cluster.local", o.clusterDomain))
	}
	if slices.Contains(strings.Split(o.cgroupRoot, "/"), "..") {
		fail("cgroup-root", fmt.Errorf("%q must not contain '..'", o.cgroupRoot))
	}
	if o.maxPods < 1 {
		fail("max-pods", fmt.Errorf("%d is less than 1", o.maxPods))
	}
	if o.podProcesses < 1 {
		fail("pod-max-pids", fmt.Errorf("%d is less than 1", o.podProcesses))
	}
	for _, text := range o.clusterDNS {
		_, e := parseAddr(text)
		fail("cluster-dns", e)
	}
	out.Stream.Port = o.streamPort
	for _, text := range o.streamAddress {
		a, e := parseAddr(text)
		fail("stream-address", e)
		out.Stream.Addresses = append(out.Stream.Addresses, a)
	}
	if o.kubeconfig != "" && o.join.server != "" {
		err = errors.New("--kubeconfig and --server: give one of them")
	}
	if e := o.parts.validate(); err == nil {
		err = e
	}
	return out, err
}

func parseAddr(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(strings.TrimSpace(text))
	if err != nil {
		return a, fmt.Errorf("%q is no IP address", text)
	}
	return a, nil
}

// ownAddresses are this machine's first of each family.
func ownAddresses() (out []netip.Addr, err error) {
	list, err := hostnet.Interfaces{}.List()
	if err != nil {
		return nil, err
	}
	for _, a := range list.Node {
		if len(out) == 0 || len(out) == 1 && out[0].Is4() != a.Is4() {
			out = append(out, a)
		}
	}
	if len(out) == 0 {
		return nil, usageError{errors.New("--node-ip: this machine has no address by which others could reach it; say which to use")}
	}
	return out, nil
}
