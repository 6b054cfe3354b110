package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/lab"
	"portal/internal/top"
)

func newTopCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "top", Short: "Show live figures", Args: subcommand, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(newTopServicesCommand())
	return cmd
}

// topOptions are the flags of `portal top services`.
type topOptions struct {
	kubeconfig, output, sort string
	namespace, lab, node     string
	interval, timeout        time.Duration
	once, endpoints          bool
	rows                     int
}

func newTopServicesCommand() *cobra.Command {
	var o topOptions
	cmd := &cobra.Command{
		Use:   "services",
		Short: "Show the connections, bytes and resets of each Service on this machine, live",
		Long: `Show new and open connections, bytes and resets of each Service and endpoint, as this machine's connection tracking has them. It is
for root on a node; with --lab, for a node of a lab on this machine. Bytes need accounting (net.netfilter.nf_conntrack_acct=1). Resets are
counted when connection tracking forgets the connection, 10 seconds later by default. While too many connections come to count each, some
of them are counted and stand for all, and a line below the table says so.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVarP(&o.namespace, "namespace", "n", "", "only Services of this namespace (default: all)")
	f.StringVarP(&o.output, "output", "o", "", "json for programs: an object for each sample")
	f.StringVar(&o.sort, "sort", "new", "the column that comes first: new, open, bytes or resets")
	f.BoolVar(&o.once, "once", false, "print one sample, of one interval, and end")
	f.BoolVarP(&o.endpoints, "endpoints", "e", false, "show each endpoint too")
	f.IntVar(&o.rows, "rows", 40, "how many Services to show at most; 0: all")
	f.DurationVar(&o.interval, "interval", 2*time.Second, "time between two samples")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "time limit for reading from the API at the start")
	f.StringVar(&o.lab, "lab", "", "name of the lab that --node is in")
	f.StringVar(&o.node, "node", "", "the lab's node to look at")
	return cmd
}

func (o *topOptions) run(cmd *cobra.Command) error {
	if err := checkOutput(o.output); err != nil {
		return err
	}
	switch {
	case o.interval < 100*time.Millisecond || o.interval > time.Hour:
		return usageError{fmt.Errorf("--interval %v: must be from 100ms to 1h", o.interval)}
	case (o.lab == "") != (o.node == ""):
		return usageError{errors.New("--lab and --node: give both, or none of them")}
	}
	if err := (&top.Sample{}).Sort(o.sort); err != nil {
		return usageError{fmt.Errorf("--sort: %w", err)}
	}
	config, inside, err := o.where()
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	options := top.Options{Cluster: intent.NewCluster(intent.Services, intent.EndpointSlices), Interval: o.interval}
	if err := inside(func() (err error) {
		have, err := hostnet.Interfaces{}.List()
		if err != nil {
			return err
		}
		options.Local = have.Local
		options.Kernel, err = top.Open()
		return err
	}); err != nil {
		return err
	}
	defer options.Kernel.Close()
	stop, err := o.follow(ctx, config, options.Cluster)
	if err != nil {
		return err
	}
	defer stop()
	t := top.New(options)
	defer t.Close()
	for {
		sample, err := t.Next(ctx)
		if err != nil {
			return err
		}
		if err := o.show(cmd.OutOrStdout(), sample); err != nil || o.once {
			return err
		}
	}
}

// where finds the API, and the network namespace to look at.
func (o *topOptions) where() (*rest.Config, func(func() error) error, error) {
	inside := func(f func() error) error { return f() }
	if o.lab != "" {
		running, err := findLab(o.lab)
		if err != nil {
			return nil, nil, err
		}
		var machine *lab.Machine
		if machine, err = running.Machine(o.node); err != nil {
			return nil, nil, usageError{fmt.Errorf("--node: %w", err)}
		}
		inside = machine.Do
		if o.kubeconfig == "" {
			o.kubeconfig = labKubeconfig(running)
		}
	}
	config, err := apiConfig(o.kubeconfig)
	if err != nil {
		return nil, nil, usageError{err}
	}
	return config, inside, nil
}

// follow feeds the cluster, and waits until everything has been listed.
func (o *topOptions) follow(ctx context.Context, config *rest.Config, cluster *intent.Cluster) (stop func(), err error) {
	// A watcher would go on trying.
	if err := reachable(ctx, config, o.timeout); err != nil {
		return nil, err
	}
	w, err := watch.New(cluster, watch.Options{Config: config, Sources: []intent.Source{intent.Services, intent.EndpointSlices}})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Run(ctx)
	}()
	stop = func() {
		cancel()
		<-done
	}
	for end := time.Now().Add(o.timeout); !cluster.Complete(); {
		if !wait(ctx, 10*time.Millisecond) || time.Now().After(end) {
			stop()
			for _, s := range w.Status() {
				if s.Err != nil {
					return nil, fmt.Errorf("list %s: %w", s.Source, s.Err)
				}
			}
			return nil, fmt.Errorf("the API has not listed Services within %v", o.timeout)
		}
	}
	return stop, nil
}

// show prints a sample.
func (o *topOptions) show(w io.Writer, s *top.Sample) error {
	if o.namespace != "" {
		s.Services = slices.DeleteFunc(s.Services, func(x top.Service) bool { return x.Namespace != o.namespace })
	}
	if err := s.Sort(o.sort); err != nil {
		return err
	}
	if o.output == "json" {
		return printJSON(w, s)
	}
	var b strings.Builder
	if f, ok := w.(*os.File); ok && !o.once && isTerminal(f) {
		b.WriteString("\x1b[H\x1b[2J") // a table that is replaced
	}
	printTop(&b, s, o.rows, o.endpoints)
	_, err := io.WriteString(w, b.String())
	return err
}

func printTop(out io.Writer, s *top.Sample, rows int, endpoints bool) {
	fmt.Fprintf(out, "%s, figures a second over %.3g s\n\n", s.At.Format(time.TimeOnly), s.Interval.Seconds())
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "NEW/S\tOPEN\tBYTES/S\tRESETS/S\tNEW\tBYTES\tRESETS\t  SERVICE\n")
	line := func(c *top.Counts, name string) {
		fmt.Fprintf(table, "%.1f\t%d\t%s\t%.1f\t%d\t%s\t%d\t  %s\n", c.NewRate, c.Open, humanize.IBytes(uint64(c.ByteRate)), c.ResetsRate, c.New, humanize.IBytes(c.Bytes), c.Resets, name)
	}
	shown := s.Services
	if rows > 0 && len(shown) > rows {
		shown = shown[:rows]
	}
	for i := range shown {
		x := &shown[i]
		name := x.Namespace + "/" + x.Name
		if x.Port != "" {
			name += ":" + x.Port
		}
		line(&x.Counts, name+"/"+x.Protocol)
		for j := range x.Endpoints {
			if !endpoints {
				break
			}
			who := "(no endpoint: rejected, or relayed by the proxy)"
			if a := x.Endpoints[j].Address; a.IsValid() {
				who = a.String()
			}
			line(&x.Endpoints[j].Counts, "  → "+who)
		}
	}
	_ = table.Flush()
	if len(shown) == 0 {
		fmt.Fprintln(out, "No connection to a Service yet.")
	}
	if more := len(s.Services) - len(shown); more > 0 {
		fmt.Fprintf(out, "and %d more (--rows 0 shows all)\n", more)
	}
	for _, note := range s.Notes {
		fmt.Fprintf(out, "\n%s\n", note)
	}
}
