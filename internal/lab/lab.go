// Package lab runs a cluster on one computer, for trying and for tests: a server and some nodes, each in namespaces of its own, with
// a switch and a router between them and a client outside. Packets are real; nothing of the computer's own network is changed. It
// starts the ordinary programs, and knows nothing of how they work.
package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// DefaultClusterCIDRs are the Pod ranges of a lab whose options have none; without IPv6 the first alone.
var DefaultClusterCIDRs = []string{"10.244.0.0/16", "fd00:244::/56"}

// Options are a lab's.
type Options struct {
	Name  string
	Nodes int
	// Dir is where all of its files are. It is removed at the end.
	Dir string
	// Portal is the binary to run.
	Portal string
	// ProxyMode is that of the nodes; empty: what they choose.
	ProxyMode string
	// Zones is how many zones the nodes are spread over; 0: they are in none.
	Zones int
	// BalancerPools are the pools of the nodes' load balancers, as flags; empty: they have none.
	BalancerPools []string
	// ImageMap is a file that maps images to folders; empty: none.
	ImageMap string
	// ServiceCIDRs and ClusterCIDRs are the server's; empty: its defaults, and the usual Pod ranges.
	ServiceCIDRs, ClusterCIDRs []string
	// ServerArgs and NodeArgs are added to the programs' arguments.
	ServerArgs, NodeArgs []string
	// StartTimeout is how long its parts may take to be ready; 0: DefaultStartTimeout.
	StartTimeout time.Duration
	// Progress, if not nil, is called when a step of the start is done.
	Progress func(step string, took time.Duration)
}

// DefaultDir is where the files of a lab are unless its options say otherwise.
func DefaultDir(name string) string { return filepath.Join("/var/lib/portal/lab", name) }

// Validate says what is wrong with the options, naming the flags.
func (o *Options) Validate() error {
	if err := ValidName(o.Name); err != nil {
		return fmt.Errorf("--name: %w", err)
	}
	if o.Nodes < 1 || o.Nodes > MaxNodes {
		return fmt.Errorf("--nodes %d: must be from 1 to %d", o.Nodes, MaxNodes)
	}
	if o.Zones < 0 || o.Zones > o.Nodes {
		return fmt.Errorf("--zones %d: must be from 0 to %d, the number of nodes", o.Zones, o.Nodes)
	}
	if o.ImageMap != "" {
		if _, err := os.Stat(o.ImageMap); err != nil {
			return fmt.Errorf("--image-map: %w", err)
		}
	}
	return o.validateRanges()
}

// The parts of the Pod ranges that nodes get, as the server cuts them unless ServerArgs say otherwise.
const (
	nodeBits4, nodeBits6 = 24, 64
	nodeBitsFlag         = "--node-cidr-mask-size"
)

// validateRanges says what is wrong with the ranges of Services and Pods: one of each family, with room for the nodes, apart from each other
// and from the lab's own networks.
func (o *Options) validateRanges() error {
	type taken struct {
		prefix netip.Prefix
		what   string
	}
	var others []taken
	for _, n := range []network{inside, outside} {
		others = append(others, taken{n.v4, "the lab's own network"}, taken{n.v6, "the lab's own network"})
	}
	cut := slices.ContainsFunc(o.ServerArgs, func(arg string) bool { return strings.HasPrefix(arg, nodeBitsFlag) })
	for _, list := range []struct {
		flag, like string
		ranges     []string
	}{{"service-cluster-ip-range", "10.96.0.0/16", o.ServiceCIDRs}, {"cluster-cidr", "10.244.0.0/16", o.ClusterCIDRs}} {
		families := map[bool]bool{}
		for _, text := range list.ranges {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				return fmt.Errorf("--%s %q: must be a range like %s", list.flag, text, list.like)
			}
			p = p.Masked()
			if families[p.Addr().Is4()] {
				return fmt.Errorf("--%s %s: has more than one range of a family", list.flag, strings.Join(list.ranges, ","))
			}
			families[p.Addr().Is4()] = true
			for _, other := range others {
				if p.Overlaps(other.prefix) {
					return fmt.Errorf("--%s %s: overlaps %s, %s", list.flag, text, other.what, other.prefix)
				}
			}
			others = append(others, taken{p, "--" + list.flag})
			bits := nodeBits6
			if p.Addr().Is4() {
				bits = nodeBits4
			}
			if list.flag == "cluster-cidr" && !cut && (p.Bits() > bits || bits-p.Bits() < 16 && 1<<(bits-p.Bits()) < o.Nodes) {
				return fmt.Errorf("--cluster-cidr %s: has no room for %d nodes, each of which gets a /%d: use a larger range or fewer --nodes", text, o.Nodes, bits)
			}
		}
	}
	return nil
}

// ValidName says what is wrong with a lab's name.
func ValidName(name string) error {
	if problems := validation.IsDNS1123Label(name); len(problems) > 0 || len(name) > 32 {
		return fmt.Errorf("%q must have 1 to 32 characters of a-z, 0-9 and -", name)
	}
	return nil
}

// Lab is one that this process runs.
type Lab struct {
	Options
	Router, Server, Client *Machine
	// Nodes are the machines of the nodes, by the Nodes' names.
	machines map[string]*Machine

	API        *kubernetes.Clientset
	Config     *rest.Config
	Kubeconfig string

	relay  *relay
	record *record
}

// DefaultStartTimeout is how long the parts of a lab may take to be ready, unless options say otherwise.
const DefaultStartTimeout = 2 * time.Minute

// Start starts a lab. The caller must Close it; it is also gone when this process ends, up to files.
func Start(ctx context.Context, o Options) (_ *Lab, err error) {
	if o.Dir == "" {
		o.Dir = DefaultDir(o.Name)
	}
	if o.Portal == "" {
		if o.Portal, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	if o.Progress == nil {
		o.Progress = func(string, time.Duration) {}
	}
	if o.StartTimeout <= 0 {
		o.StartTimeout = DefaultStartTimeout
	}
	if len(o.ClusterCIDRs) == 0 {
		o.ClusterCIDRs = DefaultClusterCIDRs
		if !hasIPv6() {
			o.ClusterCIDRs = DefaultClusterCIDRs[:1]
		}
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("run this as root: it makes namespaces")
	}
	l := &Lab{Options: o, machines: map[string]*Machine{}, Kubeconfig: filepath.Join(o.Dir, "admin.kubeconfig")}
	if l.record, err = claim(o.Name, o.Dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	ctx, cancel := context.WithTimeoutCause(ctx, o.StartTimeout, fmt.Errorf("the lab was not ready within %v", o.StartTimeout))
	defer cancel()
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"machines", func(context.Context) error { return l.startMachines() }},
		{"network", func(context.Context) error { return l.connect() }},
		{"server", l.startServer},
		{"nodes", l.startNodes},
	} {
		began := time.Now()
		if err := step.do(ctx); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = errors.Join(cause, err)
			}
			return nil, err
		}
		o.Progress(step.name, time.Since(began))
	}
	return l, nil
}

// NodeNames are the names of the nodes, in their order.
func (l *Lab) NodeNames() (out []string) {
	for i := range l.Nodes {
		out = append(out, nodeName(i+1))
	}
	return out
}

func nodeName(number int) string { return "node" + strconv.Itoa(number) }

// Node is the machine of a node, nil if there is none of this name.
func (l *Lab) Node(name string) *Machine { return l.machines[name] }

func (l *Lab) startMachines() error {
	names := append([]string{routerName, serverName, ClientName}, l.NodeNames()...)
	hosts := l.hosts()
	var all sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, name := range names {
		all.Go(func() {
			m, err := startMachine(l.Name, name, l.Portal, l.machineDir(name), hosts)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
				return
			}
			l.machines[name] = m
		})
	}
	all.Wait()
	l.Router, l.Server, l.Client = l.machines[routerName], l.machines[serverName], l.machines[ClientName]
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	pids := map[string]int{}
	for name, m := range l.machines {
		pids[name] = m.PID
	}
	return l.record.write(pids)
}

// hosts is the file by which machines know each other's names.
func (l *Lab) hosts() string {
	out := "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"
	add := func(name string, addrs []netip.Addr) {
		for _, a := range addrs {
			out += a.String() + " " + name + "\n"
		}
	}
	add(routerName, inside.host(routerHost))
	add(serverName, inside.host(serverHost))
	add(ClientName, outside.host(clientHost))
	for i := range l.Nodes {
		add(nodeName(i+1), inside.host(firstNodeHost+i+1))
	}
	return out
}

func (l *Lab) machineDir(name string) string { return filepath.Join(l.Dir, "machines", name) }

// NodeDir is the data directory of a node.
func NodeDir(dir, node string) string { return filepath.Join(dir, "machines", node, "data") }

func (l *Lab) connect() error {
	if err := setupRouter(l.Router); err != nil {
		return err
	}
	if err := connect(l.Router, l.Server, inside, serverHost); err != nil {
		return err
	}
	if err := connect(l.Router, l.Client, outside, clientHost); err != nil {
		return err
	}
	for i := range l.Nodes {
		if err := connect(l.Router, l.machines[nodeName(i+1)], inside, firstNodeHost+i+1); err != nil {
			return err
		}
	}
	return nil
}

func serverAddress() string {
	return net.JoinHostPort(inside.host(serverHost)[0].String(), strconv.Itoa(apiPort))
}

func (l *Lab) startServer(ctx context.Context) error {
	dir := NodeDir(l.Dir, serverName)
	args := []string{l.Portal, "server", "--data-dir", dir, "--listen", serverAddress(), "--cluster-cidr", strings.Join(l.ClusterCIDRs, ",")}
	if len(l.ServiceCIDRs) > 0 {
		args = append(args, "--service-cluster-ip-range", strings.Join(l.ServiceCIDRs, ","))
	}
	if err := l.Server.run(l.Log(serverName), append(args, l.ServerArgs...)...); err != nil {
		return err
	}
	var err error
	if l.relay, err = newRelay(l.Server, serverAddress()); err != nil {
		return err
	}
	return l.waitFor(ctx, serverName, func() error {
		if l.API == nil {
			if err := l.writeKubeconfig(filepath.Join(dir, "admin.kubeconfig")); err != nil {
				return err
			}
		}
		return l.API.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// writeKubeconfig makes a kubeconfig that works on this computer of the server's own.
func (l *Lab) writeKubeconfig(path string) error {
	config, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return err
	}
	for _, cluster := range config.Clusters {
		cluster.Server = "https://" + l.relay.listener.Addr().String()
	}
	if err := clientcmd.WriteToFile(*config, l.Kubeconfig); err != nil {
		return err
	}
	if l.Config, err = clientcmd.BuildConfigFromFlags("", l.Kubeconfig); err != nil {
		return err
	}
	l.Config.QPS = -1
	l.API, err = kubernetes.NewForConfig(l.Config)
	return err
}

// Log is the file that the program of a machine logs to.
func (l *Lab) Log(name string) string { return filepath.Join(l.machineDir(name), name+".log") }

// waitFor calls ready until it succeeds. A failure says what the machine's program last logged.
func (l *Lab) waitFor(ctx context.Context, name string, ready func() error) error {
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w; the end of its log: %s", name, err, tail(l.Log(name)))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func tail(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}

// Cut unplugs a machine from the network; Heal plugs it in again.
func (l *Lab) Cut(name string) error { return l.record.running().Cut(name) }

// Heal undoes Cut.
func (l *Lab) Heal(name string) error { return l.record.running().Heal(name) }

// Link sets the quality of a machine's link.
func (l *Lab) Link(name string, q Quality) error { return l.record.running().Link(name, q) }

// PowerOff ends all that runs on a machine, at once and for good.
func (l *Lab) PowerOff(name string) error {
	m := l.machines[name]
	if m == nil {
		return fmt.Errorf("there is no machine %s", name)
	}
	m.end()
	return nil
}

// Close ends the lab and removes all that it made.
func (l *Lab) Close() error {
	if l.relay != nil {
		l.relay.close()
	}
	var all sync.WaitGroup
	for _, m := range l.machines {
		all.Go(m.end)
	}
	all.Wait()
	return l.record.erase()
}
