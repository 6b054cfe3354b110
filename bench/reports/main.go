// Command reports measures what it costs the API server that the parts of 1,000 nodes report, and how long `portal explain` takes over 10,000
// Services, from its start to its last line. The nodes are simulated: they watch, renew their Leases and publish reports as real ones do, while
// endpoints change. It knows the server only as a process and by its API.
//
//	go run ./bench/reports [-nodes 1000] [-services 10000] [-churn 10] [-duration 12m] [-looks 5]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

type options struct {
	nodes, services, pods, looks int
	churn                        float64
	duration                     time.Duration
}

const (
	// shareTarget is what reports may cost of the server's CPU time, explainTarget how long explain may take.
	shareTarget   = 0.02
	explainTarget = 5 * time.Second
	// calibration is how many reports are written to find out what one costs.
	calibration = 4000
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	opts, err := parse(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	met := false
	if err == nil {
		met, err = run(ctx, opts)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-reports:", err)
		os.Exit(2)
	}
	if !met {
		os.Exit(1)
	}
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("bench-reports", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&o.nodes, "nodes", 1000, "nodes, each with a proxy, a DNS server and an agent that report")
	flags.IntVar(&o.services, "services", 10000, "Services")
	flags.IntVar(&o.pods, "pods", 2, "Pods of a Service")
	flags.Float64Var(&o.churn, "churn", 10, "changes of endpoints a second, which every node watches")
	flags.DurationVar(&o.duration, "duration", 12*time.Minute, "how long to measure; reports are refreshed after 7.5 to 12.5 minutes")
	flags.IntVar(&o.looks, "looks", 5, "how often explain is run")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case o.nodes < 1 || o.services < 1 || o.pods < 1 || o.looks < 1:
		return o, errors.New("-nodes, -services, -pods and -looks must be at least 1")
	case o.duration < 10*time.Second || o.churn <= 0:
		return o, errors.New("-duration must be at least 10s, and -churn more than 0")
	}
	return o, nil
}

func run(ctx context.Context, o options) (met bool, err error) {
	dir, err := os.MkdirTemp("", "bench-reports-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	api, err := harness.StartPortal(dir)
	if err != nil {
		return false, err
	}
	defer api.Kill()
	c, err := newCluster(api, o)
	if err != nil {
		return false, err
	}
	began := time.Now()
	if err := c.fill(ctx); err != nil {
		return false, err
	}
	fmt.Printf("%d nodes, %d Services, %d Pods after %s\n", o.nodes, o.services, o.services*o.pods, time.Since(began).Round(time.Second))
	nodes := startNodes(ctx, c)
	defer nodes.stop()
	if err := nodes.reported(ctx); err != nil {
		return false, err
	}
	share, err := measureReports(ctx, c, nodes)
	if err != nil {
		return false, err
	}
	longest, err := measureExplain(ctx, c)
	if err != nil {
		return false, err
	}
	met = true
	for _, t := range []struct {
		missed bool
		text   string
	}{
		{share >= shareTarget, fmt.Sprintf("reports take %.2f %% of the server's CPU time; at most %.0f %% are wanted", share*100, shareTarget*100)},
		{longest >= explainTarget, fmt.Sprintf("explain took up to %s; at most %s are wanted", longest.Round(10*time.Millisecond), explainTarget)},
	} {
		if t.missed {
			met = false
			fmt.Println("missed:", t.text)
		}
	}
	return met, ctx.Err()
}

// cpu is the CPU time that the server has taken.
func (c *cluster) cpu() (time.Duration, error) {
	u, err := report.Read(c.api.Pid())
	return u.CPU, err
}

// measureReports is the share of the server's CPU time that goes into reports while endpoints change.
func measureReports(ctx context.Context, c *cluster, n *nodes) (float64, error) {
	before, err := c.cpu()
	if err != nil {
		return 0, err
	}
	writes, renewals, changes := n.writes.Load(), n.renewals.Load(), c.changes.Load()
	began := time.Now()
	if !wait(ctx, c.duration) {
		return 0, ctx.Err()
	}
	took := time.Since(began)
	after, err := c.cpu()
	if err != nil {
		return 0, err
	}
	writes, renewals, changes = n.writes.Load()-writes, n.renewals.Load()-renewals, c.changes.Load()-changes
	n.stop()
	one, err := c.costOfWrite(ctx)
	if err != nil {
		return 0, err
	}
	total := after - before
	share := float64(writes) * one.Seconds() / total.Seconds()
	fmt.Printf("in %s: %.1f changes of endpoints/s, %.1f Leases/s, %.1f reports/s (%d)\n", took.Round(time.Second),
		float64(changes)/took.Seconds(), float64(renewals)/took.Seconds(), float64(writes)/took.Seconds(), writes)
	fmt.Printf("server: %.1f %% of a core, of which reports (%s each): %.2f %%\n", total.Seconds()/took.Seconds()*100, one.Round(time.Microsecond), share*100)
	return share, nil
}

func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
