// Command flood shows that one client harms nobody: 200 connections of one user ask Portal's API server for everything, while
// another user works, nodes renew their Leases and a leader holds its own. It measures what the others notice, the server's
// memory, and what fairness costs when nobody floods. It knows the server only as a process and by its API.
//
//	go run ./bench/flood [-connections 200] [-duration 60s] [-idle 60s] [-modes fair,limit]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

type options struct {
	connections, objects int
	duration, idle       time.Duration
	modes                []string
	// child is set in the process that floods: the server's address.
	child string
}

// modes are how the server shares itself.
var modes = map[string][]string{
	"fair":  nil, // as it comes
	"limit": {"--enable-priority-and-fairness=false"},
}

// rounds are how often the second user is measured alone and then flooded.
const rounds = 4

// slowdown is how many times slower than alone the second user may be.
const slowdown = 3

func main() { report.Main("bench-flood", start) }

// start runs the benchmark or, in the process that floods, the flood.
func start(ctx context.Context, args []string) (bool, error) {
	opts, err := parse(args, os.Stderr)
	switch {
	case err != nil:
		return false, err
	case opts.child != "":
		flood(ctx, opts)
		return true, nil
	}
	return run(ctx, opts)
}

func parse(args []string, stderr io.Writer) (options, error) {
	var opts options
	flags := flag.NewFlagSet("bench-flood", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&opts.connections, "connections", 200, "connections of the user who floods")
	flags.IntVar(&opts.objects, "objects", 2000, "ConfigMaps that are there to be asked for")
	flags.DurationVar(&opts.duration, "duration", time.Minute, "how long the flood lasts, in four parts")
	flags.DurationVar(&opts.idle, "idle", time.Minute, "how long the second user is measured alone, in four parts")
	list := flags.String("modes", "fair,limit", "fair: as Portal comes; limit: with --enable-priority-and-fairness=false")
	flags.StringVar(&opts.child, "child", "", "internal: flood this server")
	if err := flags.Parse(args); err != nil {
		return opts, err
	}
	opts.modes = strings.Split(*list, ",")
	for _, mode := range opts.modes {
		if _, ok := modes[mode]; !ok {
			return opts, fmt.Errorf("-modes %q: must be among fair, limit", mode)
		}
	}
	switch {
	case flags.NArg() > 0:
		return opts, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case opts.connections < 1 || opts.objects < 1:
		return opts, errors.New("-connections and -objects must be at least 1")
	case opts.child == "" && (opts.duration < rounds*time.Second || opts.idle < rounds*time.Second):
		return opts, errors.New("-duration and -idle must be at least 4s")
	}
	return opts, nil
}

// run measures the modes one after the other, and says whether the first met the targets.
func run(ctx context.Context, opts options) (bool, error) {
	var first *result
	fmt.Printf("%-6s %16s %16s %10s %12s %13s %14s %9s %11s %13s\n", "mode", "creates/s (CPU)", "gets/s (CPU)", "p99 alone", "p99 flooded",
		"lease, worst", "leader, worst", "MB alone", "MB flooded", "flood ok/429")
	for _, mode := range opts.modes {
		r, err := measure(ctx, opts, modes[mode])
		if err != nil {
			return false, fmt.Errorf("%s: %w", mode, err)
		}
		fmt.Printf("%-6s %16s %16s %10s %12s %13s %14s %9.0f %11.0f %13s\n", mode, r.creates, r.gets, round(r.alone), round(r.flooded),
			round(r.lease), round(r.leader), r.memoryAlone, r.memoryFlooded,
			fmt.Sprintf("%d/%d", r.good, r.refused))
		if first == nil {
			first = r
		}
	}
	problems := first.problems()
	for _, problem := range problems {
		fmt.Println("missed:", problem)
	}
	return len(problems) == 0, ctx.Err()
}

func round(d time.Duration) string { return d.Round(100 * time.Microsecond).String() }

type result struct {
	creates, gets              rate
	alone, flooded             time.Duration
	lease, leader              time.Duration
	failed                     []string
	memoryAlone, memoryFlooded float64 // in MB
	good, refused              int     // requests of the flood
}

const (
	// renewDeadline is after how long without a renewal a leader gives up, leaseDuration when a node counts as lost.
	renewDeadline, leaseDuration = 10 * time.Second, 40 * time.Second
	// memoryGrowth is how many MB of memory a flood may cost.
	memoryGrowth = (256 << 20) / 1e6
)

func (r *result) problems() (out []string) {
	if r.flooded > slowdown*r.alone {
		out = append(out, fmt.Sprintf("the second user's p99 grew from %s to %s, more than %d times", round(r.alone), round(r.flooded), slowdown))
	}
	if r.lease > leaseDuration {
		out = append(out, "a node would have been lost: "+round(r.lease)+" between renewals")
	}
	if r.leader > renewDeadline {
		out = append(out, "the leader would have given up: "+round(r.leader)+" between renewals")
	}
	if r.memoryFlooded-r.memoryAlone > memoryGrowth {
		out = append(out, fmt.Sprintf("memory grew by %.0f MB", r.memoryFlooded-r.memoryAlone))
	}
	return append(out, r.failed...)
}

// measure runs one server, alone and flooded.
func measure(ctx context.Context, opts options, flags []string) (*result, error) {
	dir, err := os.MkdirTemp("", "bench-flood")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "tokens"), []byte(tokens()), 0o600); err != nil {
		return nil, err
	}
	api, err := harness.StartPortal(dir, append([]string{"--token-auth-file", filepath.Join(dir, "tokens")}, flags...)...)
	if err != nil {
		return nil, err
	}
	defer api.Kill()
	if err := prepare(ctx, api, opts.objects); err != nil {
		return nil, err
	}
	r := &result{}
	second := newUser(api.URL, "second")
	if r.creates, err = throughput(ctx, api, "POST"); err != nil {
		return nil, err
	}
	if r.gets, err = throughput(ctx, api, "GET"); err != nil {
		return nil, err
	}
	// Alone and flooded take turns: a machine that is slower for a while is so for both.
	var alone, flooded []time.Duration
	for range rounds {
		alone = append(alone, second.work(ctx, opts.idle/rounds)...)
		used, err := report.ReadOwn(api.Pid())
		if err != nil {
			return nil, err
		}
		r.memoryAlone = max(r.memoryAlone, used.Anonymous)
		waited, err := r.flood(ctx, opts, api, second)
		if err != nil {
			return nil, err
		}
		flooded = append(flooded, waited...)
	}
	r.alone, r.flooded = p99(alone), p99(flooded)
	r.failed = append(r.failed, second.failures()...)
	return r, ctx.Err()
}

// flood is one round: what the second user waited for while the other one flooded.
func (r *result) flood(ctx context.Context, opts options, api *harness.API, second *user) ([]time.Duration, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	length := opts.duration / rounds
	during, stop := context.WithTimeout(ctx, length)
	defer stop()
	// The clients of a flood are on other machines; here they should not take the CPU from those that measure.
	child := exec.CommandContext(during, "nice", "-n", "19", self, "-child", api.URL, "-connections", fmt.Sprint(opts.connections),
		"-duration", length.String())
	child.Cancel = func() error { return child.Process.Signal(syscall.SIGTERM) }
	var counted strings.Builder
	child.Stdout, child.Stderr = &counted, os.Stderr
	if err := child.Start(); err != nil {
		return nil, err
	}
	watch := newRenewals(api.URL)
	go watch.run(during)
	peak := make(chan float64)
	go func() { peak <- peakMemory(during, api.Pid()) }()
	waited := second.work(during, length)
	stop()
	_ = child.Wait()
	r.memoryFlooded = max(r.memoryFlooded, <-peak)
	lease, leader, failed := watch.wait()
	r.lease, r.leader, r.failed = max(r.lease, lease), max(r.leader, leader), append(r.failed, failed...)
	var good, refused int
	if _, err := fmt.Sscanf(counted.String(), "%d/%d", &good, &refused); err != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("the process that floods printed %q: %w", counted.String(), err)
	}
	r.good, r.refused = r.good+good, r.refused+refused
	return waited, nil
}

func p99(all []time.Duration) time.Duration {
	return time.Duration(report.Quantile(all, 0.99) * float64(time.Millisecond))
}
