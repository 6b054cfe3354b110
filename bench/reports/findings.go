package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"syscall"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

// looked is what the controller logs after each look.
var looked = regexp.MustCompile(`msg="looked at the cluster" .*took=(\S+) nextIn=(\S+)`)

const (
	findingsShare = "of a core, at that pace"
	// findingsTarget is what Events may cost while nobody looks at them, in percent of a core.
	findingsTarget = 1
)

// measureFindings runs the controller of findings as a process of its own until it has looked at the cluster, and measures what that look
// costs it and the server.
func measureFindings(ctx context.Context, c *cluster, r *report.Report) error {
	at := r.At(fmt.Sprintf("the controller findings, %d Pods on %d nodes", c.services*c.pods, c.nodes), c.services, "Services")
	defer func() { at.WantWithin(portal, findingsShare, findingsTarget) }()
	report.Logf("starting the controller findings, which looks at the cluster after %s", firstLook)
	p, err := harness.Start(c.dir, "findings", harness.Portal(), "controllers", "--kubeconfig", c.api.Kubeconfig, "--controllers", "findings", "--leader-elect=false", "--v", "2")
	if err != nil {
		return err
	}
	defer p.Kill()
	began := time.Now()
	if !wait(ctx, firstLook-ahead) { // its informers have listed everything
		return ctx.Err()
	}
	background, err := c.share(ctx, ahead/2)
	if err != nil {
		return err
	}
	own, err := report.Read(p.Pid())
	if err != nil {
		return fmt.Errorf("%w\n%s", err, p.Tail())
	}
	server, err := c.cpu()
	if err != nil {
		return err
	}
	from, sampler := time.Now(), report.Follow(p.Pid())
	defer sampler.Stop()
	took, next, err := awaitLook(ctx, p, began.Add(firstLook+patience))
	if err != nil {
		return err
	}
	lookCost, err := sampler.Read()
	if err != nil {
		return err
	}
	after, err := c.cpu()
	if err != nil {
		return err
	}
	ownCPU := (lookCost.CPU - own.CPU).Seconds()
	serverCPU := (after - server).Seconds() - background*time.Since(from).Seconds()
	at.Lower(portal, "time of a look", took.Seconds(), "s")
	at.Lower(portal, "CPU of the controller for a look", ownCPU, "s")
	at.Lower(portal, "CPU of the server for a look", serverCPU, "s")
	at.Lower(portal, "memory that a look adds, peak", sampler.Peak().Anonymous-own.Anonymous, "MB")
	at.Lower(portal, "time until the next look, while the cluster changes", next.Seconds(), "s")
	at.Lower(portal, findingsShare, (ownCPU+serverCPU)/next.Seconds()*100, "%")
	r.Note("The controller findings is measured as a process beside the server (portal controllers), by its first look; usually it is a part of the server.")
	return nil
}

const (
	// firstLook is when the controller looks for the first time, ahead how long before it the measurement begins.
	firstLook = 30 * time.Second
	ahead     = 8 * time.Second
)

// share is the part of a core that the server uses now.
func (c *cluster) share(ctx context.Context, during time.Duration) (float64, error) {
	before, err := c.cpu()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	if !wait(ctx, during) {
		return 0, ctx.Err()
	}
	after, err := c.cpu()
	return (after - before).Seconds() / time.Since(began).Seconds(), err
}

// awaitLook waits until the controller has looked, and returns how long that took and when it looks again.
func awaitLook(ctx context.Context, p *harness.Process, end time.Time) (took, next time.Duration, err error) {
	for wait(ctx, 20*time.Millisecond) {
		data, err := os.ReadFile(p.Log)
		if err != nil {
			return 0, 0, err
		}
		if m := looked.FindSubmatch(data); m != nil {
			if took, err = time.ParseDuration(string(m[1])); err == nil {
				next, err = time.ParseDuration(string(m[2]))
			}
			return took, next, err
		}
		if time.Now().After(end) {
			return 0, 0, fmt.Errorf("the controller findings did not look at the cluster:\n%s", p.Tail())
		}
	}
	return 0, 0, ctx.Err()
}

// peakMemory is the most resident memory that a process had that has ended, in MB.
func peakMemory(state *os.ProcessState) float64 {
	if usage, ok := state.SysUsage().(*syscall.Rusage); ok {
		return float64(usage.Maxrss) * 1024 / 1e6
	}
	return 0
}
