// Command controllers measures Portal's controllers against kube-controller-manager: both work on the same API server, on
// the same objects, one after the other in one run.
//
//	go run ./bench/controllers [-services 10000] [-pods 20000] [-api portal|kube-apiserver]
//
// The API server is Portal's, because it is the faster one: where writes wait for the API server, all controllers look alike.
//
// For each: how long a cold start takes until every EndpointSlice is written; how long a Pod's change takes to reach
// its slice under steady changes; how many slice writes the rollover of one big Service takes; memory and CPU time. Then,
// for Portal alone, its leader is killed in the middle of a rollover. It ends with status 1 if a target is missed.
//
// kube-controller-manager takes part twice: as it comes, and without its client's rate limit. Targets are against the
// second, because the limit is a setting.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

type options struct {
	services, pods, namespaces int
	portal                     string
	rate                       int
	churn                      time.Duration
	big, killRoll              int
	subjects                   string
	api                        string
	seed                       uint64
	output                     string
}

// The subjects.
const (
	kube          = "kube-controller-manager"
	kubeUnlimited = "kube-controller-manager-unlimited"
	portal        = "portal"
)

func main() {
	var o options
	flag.IntVar(&o.services, "services", 10_000, "Services")
	flag.IntVar(&o.pods, "pods", 20_000, "Pods, spread evenly over the Services")
	flag.IntVar(&o.namespaces, "namespaces", 10, "namespaces that they are in")
	flag.StringVar(&o.portal, "portal", harness.Portal(), "Portal's binary")
	flag.IntVar(&o.rate, "rate", 50, "Pod changes a second")
	flag.DurationVar(&o.churn, "churn", 30*time.Second, "how long Pods change at that rate")
	flag.IntVar(&o.big, "big", 1000, "Pods of the Service that rolls over")
	flag.IntVar(&o.killRoll, "kill-roll", 5000, "Pods that roll over while the leader is killed; 0 leaves that out")
	flag.StringVar(&o.api, "api", "portal", "API server that all subjects work on: portal or kube-apiserver")
	flag.StringVar(&o.subjects, "subjects", strings.Join([]string{kube, kubeUnlimited, portal}, ","), "subjects to measure: kube-controller-manager as it comes, the same without its client's rate limit, Portal")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of everything random")
	flag.StringVar(&o.output, "o", "", "JSON file to write the report to")
	flag.Parse()
	report.Main("bench-controllers", func(ctx context.Context, _ []string) (bool, error) {
		return report.InFolder("controllers", func(dir string) (bool, error) { return run(ctx, o, dir) })
	})
}

func run(ctx context.Context, o options, dir string) (bool, error) {
	r := report.New("controllers", "Controllers beside kube-controller-manager", []string{kube, kubeUnlimited}, []string{portal})
	r.Version(portal, o.portal, "version")
	r.Version(kube, harness.Peer(kube), "--version")
	r.Note("All run the controllers of Endpoints, EndpointSlices and their mirroring on the same API server (-api %s).", o.api)
	api, stop, err := startAPI(o, dir)
	if err != nil {
		return false, err
	}
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := newCluster(ctx, api, o, dir)
	if err != nil {
		return false, err
	}
	report.Logf("creating %d Services and %d Pods in %d namespaces, and one Service of %d Pods", o.services, o.pods, o.namespaces, o.big)
	begin := time.Now()
	if err := c.populate(ctx); err != nil {
		return false, err
	}
	report.Logf("created in %s", time.Since(begin).Round(time.Second))

	// The API server may run from Portal's binary too; it must not share the controllers' pages.
	if c.portal, err = report.Private(o.portal, c.dir); err != nil {
		return false, err
	}
	at := r.At(fmt.Sprintf("%d Pods in %d namespaces", o.pods, o.namespaces), o.services, "Services")
	for _, name := range strings.Split(o.subjects, ",") {
		if err := c.measure(ctx, name, at); err != nil {
			return false, fmt.Errorf("%s: %w", name, err)
		}
	}
	if strings.Contains(o.subjects, portal) {
		for _, name := range []string{latencyP99, coldStart, rolloverWrites} {
			at.WantTimes(portal, name, kubeUnlimited, 1)
		}
	}
	if o.killRoll > 0 {
		kill, err := c.killLeader(ctx)
		if err != nil {
			return false, fmt.Errorf("killing the leader: %w", err)
		}
		const takeover, stalest = "until the standby writes", "longest that a dead Pod's endpoint stays"
		at := r.At("the leader is killed in a rollover", o.killRoll, "Pods")
		at.Lower(portal, takeover, kill.takeover.Seconds(), "s")
		at.Lower(portal, stalest, kill.stalest.Seconds(), "s")
		at.WantWithin(portal, takeover, 15)
		at.WantWithin(portal, stalest, 15)
	}
	return r.Finish(o.output)
}

// startAPI starts the API server, without controllers of its own.
func startAPI(o options, dir string) (api *harness.API, stop func(), err error) {
	switch o.api {
	case "kube-apiserver":
		etcd, err := harness.StartEtcdWith(dir, 1, "--unsafe-no-fsync")
		if err != nil {
			return nil, nil, err
		}
		api, err := harness.StartKubeAPIServer(dir, etcd[0].ClientURL, "--max-requests-inflight", "4000", "--max-mutating-requests-inflight", "2000")
		if err != nil {
			etcd[0].Kill()
			return nil, nil, err
		}
		return api, func() { api.Kill(); etcd[0].Kill() }, nil
	case "portal":
		api, err := harness.StartPortal(dir, "--controllers", "none")
		if err != nil {
			return nil, nil, err
		}
		return api, api.Kill, nil
	}
	return nil, nil, fmt.Errorf("-api %s: must be portal or kube-apiserver", o.api)
}

// The names of the figures that targets are about.
const (
	coldStart      = "cold start until every slice is written"
	latencyP99     = "Pod's change until its slice has it, p99"
	rolloverWrites = "slice writes of the rollover"
)

// measure runs one subject from nothing.
func (c *cluster) measure(ctx context.Context, name string, at report.At) error {
	if err := c.deleteSlices(ctx); err != nil {
		return err
	}
	begin := time.Now()
	p, err := c.start(name)
	if err != nil {
		return err
	}
	defer p.Kill()
	if err := c.seen.waitUntil(ctx, 20*time.Minute, c.allSynced); err != nil {
		return fmt.Errorf("cold start: %w", err)
	}
	cold := time.Since(begin)
	report.Logf("%s: all slices written after %s", name, cold.Round(time.Millisecond))
	at.Lower(name, coldStart, cold.Seconds(), "s")
	if err := c.waitEndpoints(ctx); err != nil {
		return err
	}
	started, err := p.Read()
	if err != nil {
		return err
	}
	latencies, lost, err := c.churn(ctx, rand.New(rand.NewPCG(c.seed, 2)))
	if err != nil {
		return err
	}
	if err := c.waitIdle(ctx); err != nil {
		return err
	}
	churned, err := p.Read()
	if err != nil {
		return err
	}
	at.Lower(name, "CPU of the cold start", started.CPU.Seconds(), "s")
	at.Lower(name, "Pod's change until its slice has it, p50", report.Quantile(latencies, 0.5), "ms")
	at.Lower(name, latencyP99, report.Quantile(latencies, 0.99), "ms")
	at.Lower(name, "changes that never arrived", float64(lost), "")
	at.Lower(name, fmt.Sprintf("CPU for each change at %d/s", c.rate), report.Milliseconds(churned.CPU-started.CPU)/float64(max(len(latencies), 1)), "ms")
	if err := c.measureRollover(ctx, name, at); err != nil {
		return err
	}
	used, err := p.Read()
	if err != nil {
		return err
	}
	at.Memory(name, used, p.Peak())
	report.Logf("%s: latency p50 %.1f ms, p99 %.1f ms, %.0f MB anonymous", name, report.Quantile(latencies, 0.5), report.Quantile(latencies, 0.99), used.Anonymous)
	return nil
}

// measureRollover replaces the Pods of the big Service and counts the writes.
func (c *cluster) measureRollover(ctx context.Context, name string, at report.At) error {
	before := c.seen.writesOf(bigNamespace + "/" + bigName)
	begin := time.Now()
	if err := c.rollOver(ctx); err != nil {
		return err
	}
	if err := c.seen.waitUntil(ctx, 5*time.Minute, c.bigSynced); err != nil {
		return fmt.Errorf("rollover: %w", err)
	}
	at.Lower(name, fmt.Sprintf("rollover of %d Pods until slices are right", c.big), time.Since(begin).Seconds(), "s")
	if err := c.waitIdle(ctx); err != nil {
		return err
	}
	at.Lower(name, rolloverWrites, float64(c.seen.writesOf(bigNamespace+"/"+bigName)-before), "")
	return nil
}
