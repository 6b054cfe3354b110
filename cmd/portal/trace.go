package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/internal/lb"
	"portal/internal/lb/announce"
	"portal/internal/plan"
	"portal/internal/trace"
)

// traceOptions are the flags of `portal trace`.
type traceOptions struct {
	kubeconfig, output string
	question           trace.Question
	mode, zone         string
	clusterCIDRs       []string
	nodePorts          []string
	masqueradeAll      bool
	timeout            time.Duration
	liveOptions
}

func newTraceCommand() *cobra.Command {
	var o traceOptions
	cmd := &cobra.Command{
		Use:   "trace --from POD|NODE|client|ADDRESS --to ADDRESS:PORT[/PROTOCOL]|NAME:PORT[/PROTOCOL]",
		Short: "Show which way a packet goes, and where it ends",
		Long: `Show a packet's way in words: the answer of DNS, the frontend that it meets, the route by where it comes from, policies, the endpoints
with their odds, what is rewritten, and where it arrives; or why it does not. It is worked out from the objects of any Kubernetes, with
the right to read them; no packet is sent. What the API does not know of the nodes' proxies, such as their mode, is given by flags.

With --live, a packet is really sent as well, by root on the node (or, with --lab, anywhere in a lab): one connection that is closed at
once, or one empty datagram. The rules that it meets in nf_tables, the connection that conntrack makes of it and what the node's proxy
says of itself are shown, and where they differ from what was worked out.

The exit status is 0 if the packet arrives (or leaves the cluster), 1 if it does not or does
something else than was worked out, 2 if the question is wrong.`,
		Example: "  portal trace --from my-pod --to my-service:80\n" +
			"  portal trace --from client --to 192.0.2.11:30080\n" +
			"  portal trace --from node1 --to 10.96.0.10:53/UDP -o json",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVar(&o.question.From, "from", "", "who sends: a Pod (NAME or NAMESPACE/NAME), a node, client (somebody outside), or an address")
	f.StringVar(&o.question.To, "to", "", "where to: ADDRESS:PORT or NAME:PORT, with /UDP or /SCTP if it is not TCP")
	f.StringVarP(&o.question.Namespace, "namespace", "n", metav1.NamespaceDefault, "the namespace of the Pod, and of short names for others")
	f.StringVar(&o.question.Via, "via", "", "the node that a packet from outside comes to first (default: the one that has the address, or announces it)")
	outputFlag(f, &o.output)
	f.StringVar(&o.mode, "proxy-mode", "", "the nodes' proxy mode: "+strings.Join(trace.ModeNames(), ", ")+" (default: what Portal's nodes report, else the ConfigMap of kube-proxy, else nftables; in a lab, what runs there)")
	f.StringSliceVar(&o.clusterCIDRs, "cluster-cidr", nil, "the Pods' prefixes that the proxies are configured with (default: Portal's own nodes know their Pods, others those of all nodes)")
	f.StringSliceVar(&o.nodePorts, "nodeport-addresses", nil, "what the proxies are configured with (default: that of the mode)")
	f.BoolVar(&o.masqueradeAll, "masquerade-all", false, "the proxies are configured so")
	f.StringVar(&o.zone, "zone", "cluster.local", "the cluster's DNS domain")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "time limit for reading from the API")
	f.BoolVar(&o.live, "live", false, "send a real packet too, and show what the kernel does with it")
	f.StringVar(&o.lab, "lab", "", "name of the lab on this machine in which the packet is sent, with --live")
	f.StringVar(&o.netns, "netns", "", "network namespace of the Pod that sends, such as /proc/PID/ns/net, with --live")
	f.DurationVar(&o.patience, "patience", 3*time.Second, "how long to wait for an answer to the packet, with --live")
	return cmd
}

// errDiffers ends the command with exit status 1; the report has said why.
var errDiffers = errors.New("the packet does something else than was worked out")

// errNotThere ends the command with exit status 1; the report has said why.
var errNotThere = errors.New("the packet does not arrive")

func (o *traceOptions) run(cmd *cobra.Command) error {
	if err := checkOutput(o.output); err != nil {
		return err
	}
	settings, err := o.settings()
	if err != nil {
		return usageError{err}
	}
	if o.lab != "" && o.kubeconfig == "" {
		running, err := findLab(o.lab)
		if err != nil {
			return err
		}
		o.kubeconfig = labKubeconfig(running)
	}
	client, _, err := apiClient(o.kubeconfig)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), o.timeout)
	defer cancel()
	objects, unseen, err := readObjects(ctx, client)
	if err != nil {
		return err
	}
	learned := o.learn(ctx, client, objects, &settings)
	world, err := trace.NewWorld(objects, settings)
	if err != nil {
		return usageError{fmt.Errorf("--proxy-mode: %w", err)}
	}
	report, err := world.Trace(o.question)
	if bad := (*trace.MistakeError)(nil); errors.As(err, &bad) {
		return usageError{fmt.Errorf("--%s: %w", bad.Part, bad.Err)}
	}
	if err != nil {
		return err
	}
	report.Assumptions = append(report.Assumptions, unseen...)
	switch {
	case learned != "":
		report.Assumptions = append(report.Assumptions, learned)
	case o.mode == "":
		report.Assumptions = append(report.Assumptions, "the nodes' proxy mode is "+report.Mode+" (--proxy-mode for another)")
	}
	out := liveReport{Report: report}
	if o.live {
		if out.Live, err = o.sendLive(cmd.Context(), world, objects, report); err != nil {
			return err
		}
	}
	return o.print(cmd.OutOrStdout(), &out)
}

// print writes the report; its verdict is the exit status.
func (o *traceOptions) print(w io.Writer, r *liveReport) (err error) {
	switch {
	case o.output == "json" && r.Live != nil:
		err = printJSON(w, r)
	case o.output == "json":
		err = printJSON(w, r.Report)
	default:
		if err = r.Report.Print(w); err == nil && r.Live != nil {
			err = printLive(w, r.Node, r.Live)
		}
	}
	switch {
	case err != nil:
		return err
	case r.Live != nil && len(r.Live.Differences) > 0:
		return errDiffers
	case !r.Verdict.Good():
		return errNotThere
	}
	return nil
}

// settings are what the flags say of the nodes' proxies.
func (o *traceOptions) settings() (s trace.Settings, err error) {
	s = trace.Settings{Mode: o.mode, MasqueradeAll: o.masqueradeAll, Zone: o.zone}
	if !o.live && o.netns != "" {
		return s, errors.New("--netns: is for --live")
	}
	if o.patience <= 0 || o.patience > time.Minute {
		return s, fmt.Errorf("--patience %v: must be more than 0 and at most 1m", o.patience)
	}
	if o.question.From == "" {
		return s, errors.New("--from: is required: a Pod, a node, client, or an address")
	}
	if o.question.To == "" {
		return s, errors.New("--to: is required: ADDRESS:PORT or NAME:PORT")
	}
	for _, text := range o.clusterCIDRs {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return s, fmt.Errorf("--cluster-cidr %q: must be a prefix such as 10.244.0.0/16", text)
		}
		s.ClusterCIDRs = append(s.ClusterCIDRs, p.Masked())
	}
	if s.NodePorts, err = plan.ParseNodePortAddresses(o.nodePorts); err != nil {
		return s, fmt.Errorf("--nodeport-addresses: %w", err)
	}
	return s, nil
}

// readObjects lists what a trace is made from, and says what this user may not see. Without Services, slices and nodes there is nothing
// to say.
func readObjects(ctx context.Context, client kubernetes.Interface) (o *trace.Objects, unseen []string, err error) {
	o = &trace.Objects{}
	all := metav1.ListOptions{ResourceVersion: "0"} // from the watch cache
	services, err := client.CoreV1().Services("").List(ctx, all)
	if err != nil {
		return nil, nil, fmt.Errorf("list Services: %w", err)
	}
	endpoints, err := client.DiscoveryV1().EndpointSlices("").List(ctx, all)
	if err != nil {
		return nil, nil, fmt.Errorf("list EndpointSlices: %w", err)
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, all)
	if err != nil {
		return nil, nil, fmt.Errorf("list Nodes: %w", err)
	}
	o.Services, o.Slices, o.Nodes = services.Items, endpoints.Items, nodes.Items
	optional := func(what, without string, err error) error {
		if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
			unseen = append(unseen, what+" can't be read here: "+without)
			return nil
		}
		if err != nil {
			return fmt.Errorf("list %s: %w", what, err)
		}
		return nil
	}
	pods, err := client.CoreV1().Pods("").List(ctx, all)
	if err := optional("Pods", "their addresses have no names", err); err != nil {
		return nil, nil, err
	} else if pods != nil {
		o.Pods = pods.Items
	}
	namespaces, err := client.CoreV1().Namespaces().List(ctx, all)
	if err := optional("Namespaces", "those with Services are known", err); err != nil {
		return nil, nil, err
	} else if namespaces != nil {
		o.Namespaces = namespaces.Items
	}
	ranges, err := client.NetworkingV1().ServiceCIDRs().List(ctx, all)
	if err := optional("ServiceCIDRs", "the ranges of cluster IPs are not known", err); err != nil {
		return nil, nil, err
	} else if ranges != nil {
		o.Ranges = ranges.Items
	}
	// Without them the trace says which node it assumes.
	leases, err := client.CoordinationV1().Leases(lb.Namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0", LabelSelector: announce.MemberLabel})
	switch {
	case err == nil:
		o.Announced = announce.Holders(leases.Items)
	case !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err):
		return nil, nil, fmt.Errorf("list Leases: %w", err)
	}
	return o, unseen, nil
}
