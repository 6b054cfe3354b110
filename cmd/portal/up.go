package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/server"
)

// upOptions are the flags of `portal up`: those of the server, and of what runs beside it.
type upOptions struct {
	server server.Options
	logs   logOptions
	parts  partOptions
	pods   string

	running runningProxy
}

// Of so many file descriptors one is for DNS, one for the proxy mode userspace, and one for that in case it turns out to be the only mode, and not
// for connections to the API: however many clients each has, etcd, which ends the process when it can't open a file, keeps its own.
const (
	upDNSShare       = 8
	upUserspaceShare = 4
	upAutoShare      = 8
)

func newUpCommand() *cobra.Command {
	o := upOptions{server: server.DefaultOptions()}
	o.server.DataDir = usualDataDir()
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run everything on this machine, in the foreground",
		Long: `Run the server, Pods, the proxy and DNS on this machine in the foreground, and print where they are and what to type next. When
it ends, so do the Pods; the next run starts them again.

Without root it runs the server and DNS at ` + fallbackDNS + `. Pods and the proxy need root: they program the kernel.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	addServerFlags(f, &o.server)
	o.logs.addFlags(f)
	f.StringVar(&o.pods, "run-pods", "auto", "run Pods on this machine while this runs: auto (if that is allowed) or none")
	f.Lookup("cluster-cidr").Usage += "; if Pods run here: " + strings.Join(upPodCIDRs(), ",")
	o.parts.addFlags(f, "the tenth address of the service range, or "+fallbackDNS+" if that is not allowed",
		"while this runs, turn on forwarding and make a strict rp_filter loose if packets to Services would be lost otherwise")
	return cmd
}

// validate checks the flags before anything is started.
func (o *upOptions) validate() error {
	if err := o.server.Validate(); err != nil {
		return err
	}
	if o.pods != "auto" && o.pods != "none" {
		return fmt.Errorf("--run-pods: %q is not one of auto, none", o.pods)
	}
	return o.parts.validate()
}

func (o *upOptions) run(cmd *cobra.Command) error {
	log, err := o.logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelWarn) // a person reads this terminal
	if err != nil {
		return usageError{err}
	}
	if err := o.validate(); err != nil {
		return usageError{err}
	}
	out := cmd.OutOrStdout()
	// Before anything waits: another one that runs would only be found out at the end of that.
	if err := o.server.Free(); err != nil {
		return err
	}
	said := map[instance.Holder]bool{}
	waiting := func(h instance.Holder) {
		if !said[h] {
			fmt.Fprintf(out, "Waiting up to %s for %v to end: it has this machine's proxy, DNS or Pods ...\n", 2*handover, h)
		}
		said[h] = true
	}
	parts, err := o.parts.claim(cmd.Context(), waiting)
	if err != nil {
		return err
	}
	defer parts.release()
	addrs, noPods := o.claimPods(cmd.Context(), parts, waiting)
	o.server.NodeInstead = atLoopback(addrs)
	if noPods == "" && !cmd.Flags().Changed("cluster-cidr") {
		o.server.ClusterCIDRs = upPodCIDRs()
	}
	o.shareFiles()
	adapt(cmd.Context(), &o.server.Options)
	fmt.Fprintln(out, "Portal is starting ...")
	// What runs beside the server ends with the same signal, and is waited for.
	var beside sync.WaitGroup
	err = server.Run(cmd.Context(), o.server, func(_ context.Context, info server.Info) error {
		// Not in here: the controllers, which nodes wait for, start when this returns.
		beside.Go(func() {
			if err := o.start(cmd, log, info, parts, addrs, noPods, &beside); err != nil {
				log.Error("could not print the start message", "err", err)
			}
		})
		return nil
	})
	beside.Wait()
	if err == nil || stopped(cmd.Context(), err) {
		fmt.Fprintln(out, "Portal has stopped.")
	}
	return err
}

// shareFiles bounds what parts take of the process' file descriptors.
func (o *upOptions) shareFiles() {
	if o.parts.dns != "none" {
		o.parts.dnsShare = upDNSShare
	}
	switch o.parts.proxy {
	case "userspace":
		o.parts.proxyShare = upUserspaceShare
	case "auto":
		o.parts.proxyShare = upAutoShare
	}
	for _, share := range []int{o.parts.dnsShare, o.parts.proxyShare} {
		if share > 0 {
			o.server.FilesBeside += 1 / float64(share)
		}
	}
}

// start starts what runs beside the server, and says where it is.
func (o *upOptions) start(cmd *cobra.Command, log *slog.Logger, info server.Info, parts *parts, addrs []netip.Addr, noPods string, beside *sync.WaitGroup) error {
	o.parts.balancing.Add(1) // the proxy waits for the balancer, which is started after it
	defer o.parts.balancing.Done()
	pods := upPods{note: noPods}
	if noPods == "" {
		pods = o.startPods(cmd, log, info, parts, addrs, beside)
	}
	// DNS before the proxy: its endpoints, which the API has from an earlier run, are then this machine's when the proxy sees them.
	var dns *upDNS
	if o.parts.dns != "none" {
		var err error
		if dns, err = o.startDNS(cmd, log, info, parts, pods.dns, beside); err != nil {
			fmt.Fprintf(cmd.OutOrStdout(), "DNS could not be started: %v\n", err)
		}
	}
	proxy := partProxy{note: parts.noProxy}
	if proxy.note == "" {
		proxy = o.startProxy(cmd.Context(), log, info, beside)
	}
	if machine, err := machineName(""); err == nil {
		o.parts.balancers.dir, o.parts.balancers.ephemeral = filepath.Join(o.server.DataDir, "balancing"), true
		o.parts.startBalancer(cmd.Context(), log, machine, info.As(identity.LB.User(machine), identity.LB.Group()), beside)
	}
	if cmd.Context().Err() != nil {
		return nil
	}
	return welcome(cmd.OutOrStdout(), info, pods, proxy, dns, o.parts.balancers.pools)
}

// startDNS runs the DNS server beside the API. Its failure leaves the rest running.
func (o *upOptions) startDNS(cmd *cobra.Command, log *slog.Logger, info server.Info, parts *parts, bridged bool, beside *sync.WaitGroup) (*upDNS, error) {
	if bridged {
		return findDNS(cmd.Context(), info)
	}
	machine, err := machineName("")
	if err != nil {
		return nil, err
	}
	dns, err := o.prepareDNS(cmd.Context(), info, parts.noVIP, parts.noProxy == "")
	if err != nil {
		return nil, err
	}
	config := info.As(identity.DNS.User(machine), identity.DNS.Group())
	open, failed := make(chan struct{}), make(chan error, 1)
	beside.Go(func() {
		err := dns.run(cmd.Context(), cmd, log, config, o.parts.reported(machine), func() { close(open) })
		select {
		case <-open:
			if err != nil {
				log.Error("DNS stopped", "err", err)
			}
		default:
			failed <- err
		}
	})
	select {
	case <-open:
		return dns, nil
	case err := <-failed:
		return nil, err
	}
}

// startProxy runs the proxy on this machine until the context ends, and then removes its rules.
func (o *upOptions) startProxy(ctx context.Context, log *slog.Logger, info server.Info, beside *sync.WaitGroup) partProxy {
	machine, err := machineName("")
	if err != nil {
		return partProxy{note: "none: " + err.Error()}
	}
	return o.parts.startProxy(ctx, log, proxySettings{
		node: machine, clusterCIDR: strings.Join(o.server.ClusterCIDRs, ","), api: info.As(identity.Proxy.User(machine), identity.Proxy.Group()), temporary: true, running: &o.running,
	}, beside)
}
