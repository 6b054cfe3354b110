// Command proxy measures Portal's service proxy beside kube-proxy, in the same mode, on the same objects of the same API
// server (Portal's), one after the other in one run. It needs root, and does everything in network namespaces of its own.
//
//	go run ./bench/proxy [-modes nftables,iptables] [-services 10,1000,10000] [-endpoints 2]
//
// For each: how long the first full sync takes; how long it is from the process' start until the last Service answers; how
// long from a changed endpoint's write to the API until connections go there; memory; how long a new connection takes to
// its first byte, beside one made directly to the backend: the physical limit. For Portal also how changes arrive at 20 a
// second. It ends with status 1 if a target is missed. Seconds differ from machine to machine; what counts is the ratio.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"portal/test/harness"
)

type options struct {
	modes     []string
	services  []int
	endpoints int
	starts    int
	changes   int
	conns     int
	churn     time.Duration
	cut       time.Duration
	patience  time.Duration
	who       []string
	portal    string
	kubeProxy string
	json      bool
	haproxy   bool
}

func main() {
	var o options
	modes := flag.String("modes", "nftables,iptables", "modes to measure")
	services := flag.String("services", "10,1000,10000", "numbers of Services, one round for each; empty: only what is measured beside HAProxy")
	who := flag.String("who", kube+","+portal, "who takes part")
	flag.IntVar(&o.endpoints, "endpoints", 2, "endpoints of each Service")
	flag.IntVar(&o.starts, "starts", 5, "how often each is started, up to 1,000 Services; the median counts")
	flag.IntVar(&o.changes, "changes", 20, "endpoints changed, one after the other")
	flag.IntVar(&o.conns, "connections", 3000, "new connections whose first byte is timed")
	flag.DurationVar(&o.churn, "churn", 20*time.Second, "how long endpoints change at 20 a second, for Portal; 0 leaves it out")
	flag.DurationVar(&o.cut, "cut", 20*time.Minute, "after how long one that isn't ready is given up")
	flag.DurationVar(&o.patience, "patience", time.Minute, "after how long a changed endpoint that isn't reached is a failure")
	flag.StringVar(&o.portal, "portal", harness.Portal(), "Portal's binary")
	flag.StringVar(&o.kubeProxy, "kube-proxy", harness.Peer("kube-proxy"), "kube-proxy's binary")
	flag.BoolVar(&o.json, "json", false, "print JSON instead of a table")
	flag.BoolVar(&o.haproxy, "haproxy", true, "measure the userspace mode beside HAProxy")
	flag.Parse()
	if err := o.read(*modes, *services, *who); err != nil {
		fmt.Fprintln(os.Stderr, "bench/proxy:", err)
		os.Exit(2)
	}
	met, err := run(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/proxy:", err)
	}
	if err != nil || !met {
		os.Exit(1)
	}
}

func (o *options) read(modes, services, who string) error {
	o.modes, o.who = strings.Split(modes, ","), strings.Split(who, ",")
	for text := range strings.SplitSeq(services, ",") {
		if services == "" {
			break
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 10 {
			return fmt.Errorf("-services %q: numbers of 10 and more, with commas between them", services)
		}
		o.services = append(o.services, n)
	}
	if o.endpoints < 1 || o.starts < 1 || o.changes < 1 || o.conns < 1 {
		return errors.New("-endpoints, -starts, -changes and -connections must be at least 1")
	}
	for _, path := range []string{o.portal, o.kubeProxy} {
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%w: `make build peers` makes it", err)
		}
	}
	return nil
}

// inside says that this process is the one in the namespace.
const inside = "PORTAL_BENCH_INSIDE"

func run(o options) (bool, error) {
	if os.Getenv(inside) == "" {
		return reexec()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := errors.Join(readAnew(o.portal), readAnew(o.kubeProxy)); err != nil {
		return false, err
	}
	net, err := buildNetwork()
	if err != nil {
		return false, err
	}
	defer net.close()
	r := &report{Started: time.Now(), Endpoints: o.endpoints}
	for _, n := range o.services {
		if err := round(ctx, o, net, n, r); err != nil {
			return false, err
		}
	}
	if o.haproxy {
		if err := besideHAProxy(ctx, o, net, r); err != nil {
			return false, fmt.Errorf("beside HAProxy: %w", err)
		}
	}
	r.judge()
	if o.json {
		return r.Met, r.writeJSON(os.Stdout)
	}
	r.writeTable(os.Stdout)
	return r.Met, nil
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
	signal.Ignore(os.Interrupt)
	if err := cmd.Run(); err != nil {
		os.Exit(max(1, cmd.ProcessState.ExitCode()))
	}
	return true, nil
}

// rest is how long the API server has, before each measurement, to finish what the objects just made or changed have set
// off.
const rest = 2 * time.Second

// round measures everybody on one number of Services.
func round(ctx context.Context, o options, net *network, n int, r *report) error {
	dir, err := os.MkdirTemp("", "bench-proxy")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	say("starting an API server and making %d Services of %d endpoints", n, o.endpoints)
	c, err := newCluster(ctx, dir, n, o.endpoints)
	if err != nil {
		return err
	}
	defer c.stop()
	for _, mode := range o.modes {
		for _, who := range o.who {
			say("%s, %s mode, %d Services", who, mode, n)
			time.Sleep(rest)
			out, err := measure(ctx, o, net, c, who, mode)
			if err != nil {
				return fmt.Errorf("%s, %s mode, %d Services: %w", who, mode, n, err)
			}
			r.Results = append(r.Results, out)
			say("  %s", out)
		}
	}
	return nil
}

func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}
