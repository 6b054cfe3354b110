// Command reports measures what insight costs: what the reports of 1,000 nodes take of the API server's CPU time while endpoints change, how
// long `portal explain` takes over 10,000 Services from its start to its last line, what one look of the controller `findings` at them costs, and
// what `portal top services` takes of a processor at 20,000 new connections a second. The nodes are simulated: they watch, renew their Leases
// and publish reports as real ones do. It knows Portal only as processes and by its API.
//
//	go run ./bench/reports [-nodes 1000] [-services 10000] [-churn 10] [-duration 12m] [-looks 5] [-rate 20000] [-parts reports,explain,findings,top]
//
// The last part needs root, for a lab. It ends with status 1 if a target is missed, and with 2 if something could not be measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

type options struct {
	nodes, services, pods, looks, rate int
	churn                              float64
	duration                           time.Duration
	parts                              []string
	output, profiles                   string
	// flood is set in the process that makes connections: the address to send to.
	flood string
}

// portal is the subject: there is no peer.
const portal = "portal"

// The parts of the benchmark.
const (
	partReports  = "reports"
	partExplain  = "explain"
	partFindings = "findings"
	partTop      = "top"
)

var allParts = []string{partReports, partExplain, partFindings, partTop}

func main() { report.Main("bench-reports", start) }

// start runs the benchmark or, in the process that makes connections, the flood.
func start(ctx context.Context, args []string) (bool, error) {
	o, err := parse(args, os.Stderr)
	switch {
	case err != nil:
		return false, err
	case o.flood != "":
		return true, flood(ctx, o.flood, o.rate)
	}
	return run(ctx, o)
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("bench-reports", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.nodes, "nodes", 1000, "nodes, each with a proxy, a DNS server and an agent that report")
	flags.IntVar(&o.services, "services", 10000, "Services")
	flags.IntVar(&o.pods, "pods", 2, "Pods of a Service")
	flags.Float64Var(&o.churn, "churn", 10, "changes of endpoints a second, which every node watches")
	flags.DurationVar(&o.duration, "duration", 12*time.Minute, "how long reports are measured; they are refreshed after 7.5 to 12.5 minutes")
	flags.IntVar(&o.looks, "looks", 5, "how often explain is run")
	flags.IntVar(&o.rate, "rate", 20000, "new connections a second that top counts")
	parts := flags.String("parts", strings.Join(allParts, ","), "what to measure")
	flags.StringVar(&o.output, "o", "", "JSON file to write the report to")
	flags.StringVar(&o.profiles, "profile", "", "folder for profiles of the server while reports are written; taking them costs time")
	flags.StringVar(&o.flood, "flood", "", "internal: make connections to this address")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.parts = strings.Split(*parts, ",")
	for _, part := range o.parts {
		if !slices.Contains(allParts, part) {
			return o, fmt.Errorf("-parts %q: must be among %s", part, strings.Join(allParts, ", "))
		}
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.nodes < 2*atOnce:
		return o, fmt.Errorf("-nodes must be at least %d: several reports are written at a time", 2*atOnce)
	case o.services < 1 || o.pods < 1 || o.looks < 1 || o.rate < 1:
		return o, errors.New("-services, -pods, -looks and -rate must be at least 1")
	case o.duration < 10*time.Second || o.churn <= 0:
		return o, errors.New("-duration must be at least 10s, and -churn more than 0")
	case o.has(partTop) && o.flood == "" && os.Geteuid() != 0:
		return o, errors.New("-parts top: needs root; -parts reports,explain,findings leaves it out")
	}
	return o, nil
}

func (o *options) has(part string) bool { return slices.Contains(o.parts, part) }

// run measures one part after the other. A part that fails leaves the others' figures as they are.
func run(ctx context.Context, o options) (bool, error) {
	r := report.New("reports", "What reports, explain, findings and top cost", nil, []string{portal})
	r.Version(portal, harness.Portal(), "version")
	var errs []error
	if o.has(partReports) || o.has(partExplain) || o.has(partFindings) {
		errs = append(errs, runCluster(ctx, o, r))
	}
	if o.has(partTop) && ctx.Err() == nil {
		errs = append(errs, measureTop(ctx, o, r))
	}
	met, err := r.Finish(o.output)
	return met, errors.Join(append(errs, err, ctx.Err())...)
}

// runCluster measures what takes a server with nodes and Services.
func runCluster(ctx context.Context, o options, r *report.Report) error {
	dir, err := os.MkdirTemp("", "bench-reports-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// The controller findings runs in a process of its own, when it is measured.
	api, err := harness.StartPortal(dir, "--controllers", "*,-findings")
	if err != nil {
		return err
	}
	defer api.Kill()
	c, err := newCluster(api, o, dir)
	if err != nil {
		return err
	}
	defer c.stop()
	if err := c.fill(ctx); err != nil {
		return fmt.Errorf("fill the cluster: %w", err)
	}
	nodes, err := startNodes(ctx, c)
	defer nodes.stop()
	if err != nil {
		return err
	}
	if err := nodes.reported(ctx); err != nil {
		return err
	}
	var errs []error
	if o.has(partReports) {
		errs = append(errs, measureReports(ctx, c, nodes, r))
	}
	nodes.stop()
	if o.has(partExplain) && ctx.Err() == nil {
		errs = append(errs, measureExplain(ctx, c, r))
	}
	if o.has(partFindings) && ctx.Err() == nil {
		errs = append(errs, measureFindings(ctx, c, r))
	}
	return errors.Join(errs...)
}

// cpu is the CPU time that the server has taken.
func (c *cluster) cpu() (time.Duration, error) {
	u, err := report.Read(c.api.Pid())
	return u.CPU, err
}

func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
