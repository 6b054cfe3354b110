package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"portal/internal/apiserver"
	"portal/internal/lab"
	"portal/internal/lb/pool"
	"portal/internal/node/image"
)

// labOptions are the flags of `portal lab`.
type labOptions struct{ lab.Options }

func newLabCommand() *cobra.Command {
	var o labOptions
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Run a cluster of several nodes in network namespaces on this machine, in the foreground",
		Long: `Run a server and several nodes, each in namespaces of its own, with a switch and a router between them and a client outside, for
trying and testing. Packets are real, and nothing of this machine's network is changed. All of it is gone when the command ends.`,
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.IntVar(&o.Nodes, "nodes", 3, "number of nodes")
	f.StringVar(&o.Name, "name", "lab", "name of the lab, for the other commands")
	f.StringVar(&o.Dir, "data-dir", "", "folder for all of its files; it is removed when the lab ends (default: "+lab.DefaultDir("NAME")+")")
	f.StringVar(&o.ProxyMode, "proxy-mode", "auto", "proxy mode of the nodes: none, auto, "+strings.Join(proxyModeNames(), ", "))
	f.IntVar(&o.Zones, "zones", 0, "number of zones that the nodes are spread over; 0: they are in none")
	f.StringArrayVar(&o.BalancerPools, "load-balancer-pool", nil, "addresses for Services of type LoadBalancer: a `pool` as of portal lb --pool, such as 192.168.100.240-192.168.100.250; the nodes announce them; may be repeated")
	f.StringVar(&o.ImageMap, "image-map", "", "file that maps images to folders, for the nodes")
	f.StringSliceVar(&o.ServiceCIDRs, "service-cluster-ip-range", nil, "ranges of cluster IPs (default: those of portal server)")
	f.StringSliceVar(&o.ClusterCIDRs, "cluster-cidr", nil, "ranges of the Pods' addresses (default: 10.244.0.0/16,fd00:244::/56)")
	f.DurationVar(&o.StartTimeout, "start-timeout", lab.DefaultStartTimeout, "how long its parts may take to be ready")
	cmd.AddCommand(newLabExecCommand(), newLabCutCommand(true), newLabCutCommand(false), newLabLinkCommand(), newLabKubectlCommand(), newLabDeleteCommand(), newLabListCommand())
	return cmd
}

// apart checks that no pool has addresses of Services or Pods.
func (o *labOptions) apart(pools pool.Set) error {
	services, pods := o.ServiceCIDRs, o.ClusterCIDRs
	if len(services) == 0 {
		services = apiserver.DefaultOptions().ServiceCIDRs
	}
	if len(pods) == 0 {
		pods = lab.DefaultClusterCIDRs
	}
	var reserved []pool.Reserved
	add := func(what string, list []string) {
		for _, text := range list {
			if p, err := netip.ParsePrefix(text); err == nil { // Validate, or the server, says what is wrong with others
				reserved = append(reserved, pool.Reserved{Prefix: p.Masked(), What: what})
			}
		}
	}
	add("the Service range", services)
	for _, text := range pods {
		for _, r := range reserved {
			if p, err := netip.ParsePrefix(text); err == nil && p.Overlaps(r.Prefix) {
				return fmt.Errorf("--cluster-cidr %s: overlaps %s %s", text, r.What, r.Prefix)
			}
		}
	}
	add("the Pod range", pods)
	for i, p := range pools {
		if at, with, found := p.Overlap(reserved); found {
			return fmt.Errorf("--load-balancer-pool %q: %w", o.BalancerPools[i], pool.OverlapError(p.Ranges[at], with))
		}
	}
	return nil
}

func (o *labOptions) run(cmd *cobra.Command) error {
	if o.ProxyMode != "none" && !knownMode(o.ProxyMode) {
		return usageError{fmt.Errorf("--proxy-mode: %q is not one of none, auto, %s", o.ProxyMode, strings.Join(proxyModeNames(), ", "))}
	}
	if err := o.Validate(); err != nil {
		return usageError{err}
	}
	if o.StartTimeout <= 0 {
		return usageError{fmt.Errorf("--start-timeout: %v is not longer than 0", o.StartTimeout)}
	}
	if o.ImageMap != "" {
		if _, err := image.ReadMap(o.ImageMap); err != nil {
			return usageError{fmt.Errorf("--image-map: %w", err)}
		}
	}
	pools, err := (&balancerOptions{prefix: "load-balancer-", pools: o.BalancerPools, announce: []string{announceL2}, onStop: onStopWithdraw, l2OnStop: onStopKeep}).read()
	if err == nil {
		err = o.apart(pools)
	}
	if err != nil {
		return usageError{err}
	}
	if unix.Geteuid() != 0 {
		return errors.New("run this as root: it makes namespaces")
	}
	out := cmd.OutOrStdout()
	began := time.Now()
	fmt.Fprintln(out, labTitle(o.Name, o.Nodes))
	o.Progress = func(step string, _ time.Duration) {
		fmt.Fprintf(out, "  %5.1f s  %s\n", time.Since(began).Seconds(), step)
	}
	l, err := lab.Start(cmd.Context(), o.Options)
	if err != nil {
		return err
	}
	labWelcome(out, l, time.Since(began))
	<-cmd.Context().Done()
	fmt.Fprintln(out, "Ending ...")
	if err := l.Close(); err != nil {
		return err
	}
	fmt.Fprintf(out, "The lab %s is gone.\n", o.Name)
	return nil
}

func labTitle(name string, nodes int) string {
	return fmt.Sprintf("Lab %s: a server and %s", name, counted(nodes, "node", "nodes"))
}

func labWelcome(out io.Writer, l *lab.Lab, took time.Duration) {
	name := ""
	if l.Name != "lab" {
		name = " --name " + l.Name
	}
	fmt.Fprintf(out, `The lab is ready after %.1f s.
  nodes       %s
  kubeconfig  %s

Try, in another terminal:
  export KUBECONFIG=%s
  portal kubectl get nodes -o wide
  portal lab exec%s node1 -- ip address
  portal lab exec%s client -- ip route get 192.168.100.11
  portal lab cut%s node1
  portal lab heal%s node1

Ctrl-C ends it, and removes all that it made.
`, took.Seconds(), strings.Join(l.NodeNames(), ", "), l.Kubeconfig, l.Kubeconfig, name, name, name, name)
}

// nameFlag says which lab a command is about.
func nameFlag(cmd *cobra.Command, name *string) {
	cmd.Flags().StringVar(name, "name", "lab", "name of the lab")
}

func labKubeconfig(running *lab.Running) string {
	return filepath.Join(running.Dir, "admin.kubeconfig")
}

func findLab(name string) (*lab.Running, error) {
	if err := lab.ValidName(name); err != nil {
		return nil, usageError{fmt.Errorf("--name: %w", err)}
	}
	if unix.Geteuid() != 0 {
		return nil, errors.New("run this as root: labs are root's")
	}
	return lab.Find(name)
}

// oneMachine wants the name of a machine.
func oneMachine(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{fmt.Errorf("%s takes the name of one machine: a node, server or client", cmd.CommandPath())}
	}
	return nil
}

func newLabCutCommand(off bool) *cobra.Command {
	var name string
	cmd := &cobra.Command{Use: "heal [--name NAME] MACHINE", Short: "Plug a machine into the network again", Args: oneMachine}
	if off {
		cmd.Use, cmd.Short = "cut [--name NAME] MACHINE", "Unplug a machine from the network"
	}
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		running, err := findLab(name)
		if err != nil {
			return err
		}
		if off {
			return running.Cut(args[0])
		}
		return running.Heal(args[0])
	}
	nameFlag(cmd, &name)
	return cmd
}

func newLabLinkCommand() *cobra.Command {
	var name string
	var q lab.Quality
	cmd := &cobra.Command{
		Use:   "link [--name NAME] MACHINE [--latency D] [--jitter D] [--loss PERCENT]",
		Short: "Set the latency and loss of a machine's link, in each direction; without flags it is as good as new",
		Args:  oneMachine,
		RunE: func(_ *cobra.Command, args []string) error {
			switch {
			case q.Latency < 0 || q.Latency > time.Minute:
				return usageError{fmt.Errorf("--latency %v: must be from 0 to 1m", q.Latency)}
			case q.Jitter < 0 || q.Jitter > q.Latency:
				return usageError{fmt.Errorf("--jitter %v: must be from 0 to the latency, %v", q.Jitter, q.Latency)}
			case q.Loss < 0 || q.Loss > 100:
				return usageError{fmt.Errorf("--loss %v: must be from 0 to 100", q.Loss)}
			}
			running, err := findLab(name)
			if err != nil {
				return err
			}
			return running.Link(args[0], q)
		},
	}
	nameFlag(cmd, &name)
	cmd.Flags().DurationVar(&q.Latency, "latency", 0, "how much longer each packet takes, like 20ms")
	cmd.Flags().DurationVar(&q.Jitter, "jitter", 0, "by how much the latency varies")
	cmd.Flags().Float64Var(&q.Loss, "loss", 0, "percentage of packets that are lost")
	return cmd
}

func newLabKubectlCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "kubectl [--name NAME] [command]",
		Short:              "kubectl for the lab's server",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			name := "lab"
			if len(args) >= 2 && args[0] == "--name" {
				name, args = args[1], args[2:]
			} else if len(args) >= 1 && strings.HasPrefix(args[0], "--name=") {
				name, args = strings.TrimPrefix(args[0], "--name="), args[1:]
			}
			running, err := findLab(name)
			if err != nil {
				return err
			}
			if err := os.Setenv("KUBECONFIG", labKubeconfig(running)); err != nil {
				return err
			}
			return runKubectl(cmd.Context(), args)
		},
	}
}

func newLabDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "delete NAME",
		Short: "End a lab, and remove what is left of one that was killed",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("lab delete takes the name of one lab, as `portal lab list` shows it")}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := lab.ValidName(args[0]); err != nil {
				return usageError{err}
			}
			if unix.Geteuid() != 0 {
				return errors.New("run this as root: labs are root's")
			}
			if err := lab.Delete(args[0]); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "lab %s deleted\n", args[0])
			return err
		},
	}
}

func newLabListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "The labs on this machine", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := lab.Names()
			if len(names) == 0 && os.Geteuid() != 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "Labs belong to root: run this as root to see them.")
			}
			for _, name := range names {
				state := "not running: `portal lab delete " + name + "` removes what is left of it"
				if running, err := lab.Find(name); err == nil {
					state = fmt.Sprintf("pid %d, %d machines, %s", running.PID, len(running.Machines), running.Dir)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s  %s\n", name, state)
			}
			return nil
		},
	}
}
