// Command proxy measures Portal's service proxy beside kube-proxy, in the same mode, on the same objects of the same API
// server (Portal's), one after the other in one run. It needs root, and does everything in network namespaces of its own.
//
//	go run ./bench/proxy [-modes nftables,iptables] [-services 10,1000,10000] [-mix 1000] [-o FILE]
//
// For each: how long it is from the process' start until the last Service answers, on a clean machine, on a restart with
// rules in place and on a restart with 1 % of the Services changed meanwhile; how long from a changed endpoint's write to
// the API until connections go there, alone and at 20 changes a second, and what these cost; memory; how long a new
// connection takes to its first byte, beside one made directly to the backend. It ends with status 1 if a target is missed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"portal/bench/report"
	"portal/test/harness"
)

type options struct {
	modes         []string
	services      []int
	mix           []int
	iptables      int
	endpoints     int
	starts        int
	situations    []string
	changes       int
	conns         int
	churn         time.Duration
	settle        time.Duration
	startTimeout  time.Duration
	changeTimeout time.Duration
	seed          uint64
	subjects      []string
	portal        string
	kubeProxy     string
	output        string
	haproxy       bool
}

func main() {
	var o options
	modes := flag.String("modes", "nftables,iptables", "modes to measure")
	services := flag.String("services", "10,1000,10000", "numbers of Services with one port and -endpoints endpoints, one round for each")
	mix := flag.String("mix", "1000", "numbers of Services of a realistic mix, one round for each")
	subjects := flag.String("subjects", kube+","+portal, "proxies to measure")
	situations := flag.String("situations", strings.Join(situations, ","), "situations to start in")
	flag.IntVar(&o.iptables, "iptables-services", 1000, "the iptables mode is measured with at most so many Services: at 10,000 a start of kube-proxy takes minutes")
	flag.IntVar(&o.endpoints, "endpoints", 2, "endpoints of each Service outside the mix")
	flag.IntVar(&o.starts, "starts", 3, "how often each is started in each situation, as long as that takes less than 15 s; the median counts")
	flag.IntVar(&o.changes, "changes", 15, "endpoints changed, one after the other")
	flag.IntVar(&o.conns, "connections", 3000, "new connections whose first byte is timed")
	flag.DurationVar(&o.churn, "churn", 10*time.Second, "how long endpoints change at 20 a second; 0 leaves it out")
	flag.DurationVar(&o.settle, "settle", 10*time.Second, "how long the proxy is left alone before its memory is read")
	flag.DurationVar(&o.startTimeout, "start-timeout", 20*time.Minute, "how long a start may take before it is given up")
	flag.DurationVar(&o.changeTimeout, "change-timeout", time.Minute, "how long it may take until a changed endpoint is reached")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of the mix")
	flag.StringVar(&o.portal, "portal", harness.Portal(), "Portal's binary")
	flag.StringVar(&o.kubeProxy, "kube-proxy", harness.Peer("kube-proxy"), "kube-proxy's binary")
	flag.StringVar(&o.output, "o", "", "JSON file to write the report to")
	flag.BoolVar(&o.haproxy, "haproxy", true, "measure the userspace mode beside HAProxy")
	flag.Parse()
	report.Main("bench-proxy", func(ctx context.Context, _ []string) (bool, error) {
		if err := o.read(*modes, *services, *mix, *subjects, *situations); err != nil {
			return false, err
		}
		if os.Getenv(inside) == "" {
			return reexec()
		}
		return report.InFolder("proxy", func(dir string) (bool, error) { return runAll(ctx, o, dir) })
	})
}

func (o *options) read(modes, services, mix, subjects, kinds string) (err error) {
	o.modes, o.subjects, o.situations = strings.Split(modes, ","), strings.Split(subjects, ","), strings.Split(kinds, ",")
	if o.services, err = numbers("-services", services); err != nil {
		return err
	}
	if o.mix, err = numbers("-mix", mix); err != nil {
		return err
	}
	if o.endpoints < 1 || o.endpoints > maxEndpoints || o.starts < 1 || o.changes < 1 || o.conns < 1 {
		return fmt.Errorf("-starts, -changes and -connections must be at least 1, -endpoints from 1 to %d", maxEndpoints)
	}
	for _, s := range o.situations {
		if !slices.Contains(situations, s) {
			return fmt.Errorf("-situations %q: must be among %s", s, strings.Join(situations, ","))
		}
	}
	if o.situations[0] != clean {
		return fmt.Errorf("-situations %s: must begin with %s, which programs the rules that a restart finds", kinds, clean)
	}
	for _, subject := range o.subjects {
		if _, err := os.Stat(*o.binary(subject)); err != nil {
			return fmt.Errorf("%w: `make build peers` builds it", err)
		}
	}
	return nil
}

func (o *options) binary(subject string) *string {
	if subject == kube {
		return &o.kubeProxy
	}
	return &o.portal
}

func numbers(flag, text string) (out []int, err error) {
	for one := range strings.SplitSeq(text, ",") {
		if text == "" {
			break
		}
		n, err := strconv.Atoi(one)
		if err != nil || n < 10 || n > 30_000 {
			return nil, fmt.Errorf("%s %q: must be numbers from 10 to 30000, with commas between them", flag, text)
		}
		out = append(out, n)
	}
	return out, nil
}

// inside is set in the environment of the process that runs in the namespace.
const inside = "PORTAL_BENCH_INSIDE"

func runAll(ctx context.Context, o options, dir string) (met bool, err error) {
	r := report.New("proxy", "Service proxy beside kube-proxy", []string{kube, "direct", "haproxy"}, []string{portal})
	r.Version(kube, o.kubeProxy, "--version")
	r.Version(portal, o.portal, "version")
	r.Version("haproxy", "haproxy", "-v")
	r.Note("A start is timed from the process' start until the last Service answers as the API says. On a restart the rules of " +
		"the run before are in place and Services answer all the time; it ends when the last of those that changed while the " +
		"proxy was down answers with its new endpoint: one of them, or 1 %%.")
	r.Note("Both proxies read the same KubeProxyConfiguration with default sync periods. Changes that are made one after the " +
		"other are far enough apart that kube-proxy's minSyncPeriod of 1 s delays none of them.")
	r.Note("Mixed Services have 1 to 4 ports, 1 to 200 endpoints by a heavy-tailed distribution and both address families; 10 %% have " +
		"affinity, 20 %% are of type NodePort or LoadBalancer, 5 %% have a Local policy.")
	for _, subject := range o.subjects {
		// The API server runs from Portal's binary too; it must not share the proxy's pages.
		if *o.binary(subject), err = report.Private(*o.binary(subject), dir); err != nil {
			return false, err
		}
	}
	net, err := buildNetwork()
	if err != nil {
		return false, err
	}
	defer net.close()
	if err := rounds(ctx, o, net, r); err != nil {
		return false, err
	}
	if o.haproxy {
		if err := besideHAProxy(ctx, o, net, r); err != nil {
			return false, fmt.Errorf("beside HAProxy: %w", err)
		}
	}
	return r.Finish(o.output)
}

// reexec runs this program again in a network namespace of its own, so that nothing it does touches the machine's.
func reexec() (bool, error) {
	if os.Geteuid() != 0 {
		return false, errors.New("needs root, for network namespaces")
	}
	self, err := os.Executable()
	if err != nil {
		return false, err
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		os.Exit(max(1, cmd.ProcessState.ExitCode()))
	}
	return true, nil
}

// rest is how long the API server has before each measurement to process the objects that were just written.
const rest = time.Second

func rounds(ctx context.Context, o options, net *network, r *report.Report) error {
	fewest := map[string]report.At{}
	for _, n := range o.services {
		if err := round(ctx, o, net, uniform(o.endpoints), n, r, fewest); err != nil {
			return err
		}
	}
	for _, n := range o.mix {
		if err := round(ctx, o, net, mixed(o.seed), n, r, map[string]report.At{}); err != nil {
			return err
		}
	}
	return nil
}

// round measures every subject on one workload of one size. fewest holds the place with the fewest Services of each mode.
func round(ctx context.Context, o options, net *network, load workload, n int, r *report.Report, fewest map[string]report.At) error {
	dir, err := os.MkdirTemp("", "bench-proxy")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	report.Logf("starting an API server and creating %d Services (%s)", n, load.name)
	c, err := newCluster(ctx, dir, load, n)
	if err != nil {
		return err
	}
	defer c.stop()
	for _, mode := range o.modes {
		if mode == "iptables" && n > o.iptables {
			continue
		}
		at := r.At(fmt.Sprintf("%s mode, %s", mode, load.name), n, "Services")
		if _, ok := fewest[mode]; !ok {
			fewest[mode] = at
		}
		for _, subject := range o.subjects {
			report.Logf("%s, %s", subject, at)
			time.Sleep(rest)
			err := (&session{o: o, net: net, c: c, subject: subject, mode: mode, at: at}).measure(ctx)
			switch {
			case errors.Is(err, errTimeout):
				r.Note("%s, %s: given up after %s.", subject, at, o.startTimeout)
			case err != nil:
				return fmt.Errorf("%s, %s: %w", subject, at, err)
			}
		}
		if slices.Contains(o.subjects, portal) {
			judge(at, fewest[mode], r, o, mode)
		}
	}
	return nil
}
