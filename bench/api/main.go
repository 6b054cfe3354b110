// Command api measures Portal's API server beside kube-apiserver: creating Services with an EndpointSlice each, listing
// them, watching them, a change that goes to thousands of watches, and who may do what. Each server has a fresh etcd of the
// same version, on this machine, in one run. It knows both servers only as processes and by their API; only single decisions
// of Portal's authorizers are timed from within.
//
//	go run ./bench/api [-n 10000] [-clients 16,24] [-fan-out 2000] [-o FILE]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"portal/bench/report"
	"portal/test/harness"
)

// options are what can be chosen about a measurement.
type options struct {
	services int
	clients  []int
	servers  []string
	samples  int
	lists    int
	watchers int
	updates  int
	fanOut   int
	changes  int
	reviews  int
	output   string
	profiles string
}

func main() {
	report.Main("bench-api", func(ctx context.Context, args []string) (bool, error) {
		opts, err := parse(args, os.Stderr)
		if err != nil {
			return false, err
		}
		return run(ctx, opts)
	})
}

func parse(args []string, stderr io.Writer) (options, error) {
	opts := options{servers: allServers()}
	flags := flag.NewFlagSet("bench-api", flag.ContinueOnError)
	flags.SetOutput(stderr)
	clients := flags.String("clients", "16,24", "numbers of clients to create Services with, one run for each")
	servers := flags.String("servers", strings.Join(opts.servers, ","), "servers to measure")
	flags.IntVar(&opts.services, "n", 10_000, "Services to create; targets are meant for 10000")
	flags.IntVar(&opts.samples, "samples", 1000, "creates that a p99 is taken from")
	flags.IntVar(&opts.lists, "lists", 7, "lists that a median is taken from; 0 leaves lists out")
	flags.IntVar(&opts.watchers, "watchers", 100, "watches that every update goes to; 0 leaves watches out")
	flags.IntVar(&opts.updates, "updates", 2000, "updates sent to the watches, one after the other and then from 16 clients; few of them miss what a collection of garbage costs")
	flags.IntVar(&opts.fanOut, "fan-out", 2000, "watches of EndpointSlices, each on a connection of its own, as of so many nodes; 0 leaves this out")
	flags.IntVar(&opts.changes, "changes", 500, "how often a slice that all of them watch is changed")
	flags.IntVar(&opts.reviews, "reviews", 5000, "questions to each server about what somebody may do; 0 leaves authorization out")
	flags.StringVar(&opts.output, "o", "", "JSON file to write the report to")
	flags.StringVar(&opts.profiles, "profile", "", "folder for CPU and heap profiles of the servers; taking them costs time")
	if err := flags.Parse(args); err != nil {
		return opts, err
	}
	for _, text := range strings.Split(*clients, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return opts, fmt.Errorf("-clients %q: must be numbers from 1 on, e.g. 16,24", *clients)
		}
		opts.clients = append(opts.clients, n)
	}
	opts.servers = strings.Split(*servers, ",")
	for _, name := range opts.servers {
		if !slices.Contains(allServers(), name) {
			return opts, fmt.Errorf("-servers %q: must be among %s", name, strings.Join(allServers(), ","))
		}
	}
	switch {
	case flags.NArg() > 0:
		return opts, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case opts.services <= fewServices:
		return opts, fmt.Errorf("-n %d: must be more than %d", opts.services, fewServices)
	case opts.samples < 1 || opts.updates < 1 || opts.changes < 1:
		return opts, errors.New("-samples, -updates and -changes must be at least 1")
	case opts.lists < 0 || opts.watchers < 0 || opts.fanOut < 0 || opts.reviews < 0:
		return opts, errors.New("-lists, -watchers, -fan-out and -reviews must be at least 0")
	}
	return opts, nil
}

// checkBinaries reports a missing binary before minutes of work.
func checkBinaries(servers []string) error {
	need := map[string]string{}
	for _, name := range servers {
		if name == kubernetes {
			need[harness.Peer("kube-apiserver")] = "make peers"
		} else {
			need[harness.Portal()] = "make build"
		}
		if name != portalEmbedded {
			need[harness.Peer("etcd")] = "make peers"
		}
	}
	for path, remedy := range need {
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%s is missing: run %s", path, remedy)
		}
	}
	return nil
}

// run measures every server with every number of clients, and says whether Portal met all targets.
func run(ctx context.Context, opts options) (bool, error) {
	if err := checkBinaries(opts.servers); err != nil {
		return false, err
	}
	r := report.New("api", "API server beside kube-apiserver", []string{kubernetes}, []string{portal, portalEmbedded})
	r.Version(portal, harness.Portal(), "version")
	r.Version(kubernetes, harness.Peer(kubernetes), "--version")
	r.Version("etcd", harness.Peer("etcd"), "--version")
	r.Note("%s and %s each have an etcd process of their own, %s has it inside. Clients know the servers by a token and speak protobuf.",
		kubernetes, portal, portalEmbedded)
	r.Note("Both authorize by RBAC with %d bindings, the clients' own among them, and write a line to the audit log for every request.", bindings)
	r.Note("kube-apiserver runs as shipped, but for the ServiceAccount admission plugin. It does work that Portal does not have: " +
		"admission plugins for kinds that Portal lacks, watch caches of all of Kubernetes' kinds, " +
		"and controllers of its own, such as those that repair service addresses and ports. " +
		"Portal runs with its controllers turned off, because kube-apiserver has none of these in it.")
	for round, clients := range opts.clients {
		order := slices.Clone(opts.servers)
		if round%2 == 1 {
			slices.Reverse(order) // so that a change in the machine's load does not always hit the same server
		}
		for _, name := range order {
			// Reads don't depend on the number of writing clients.
			if err := measure(ctx, opts, r, name, clients, round == 0); err != nil {
				return false, fmt.Errorf("%s with %d clients: %w", name, clients, err)
			}
		}
	}
	if opts.reviews > 0 {
		if err := measureDecisions(authorizing(r)); err != nil {
			return false, err
		}
	}
	judge(r, opts)
	return r.Finish(opts.output)
}

// measure starts a server, takes every figure from it and ends it.
func measure(ctx context.Context, opts options, r *report.Report, name string, clients int, reads bool) error {
	dir, err := os.MkdirTemp("", "bench-api-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	report.Logf("%s with %d clients", name, clients)
	subject, err := startSubject(dir, name)
	if err != nil {
		return err
	}
	defer subject.stop()
	if err := prepareAccess(ctx, subject); err != nil {
		return err
	}
	load, err := newLoad(subject, clients)
	if err != nil {
		return err
	}
	if err := load.measure(ctx, opts, creating(r, opts, clients)); err != nil {
		return err
	}
	if reads && opts.lists > 0 {
		if err := measureLists(ctx, subject, listing(r, opts), opts.lists); err != nil {
			return err
		}
	}
	if reads && opts.watchers > 0 {
		if err := measureWatches(ctx, subject, watching(r, opts), opts.watchers, opts.updates); err != nil {
			return err
		}
	}
	if reads && opts.reviews > 0 {
		if err := measureReviews(ctx, subject, authorizing(r), opts.reviews); err != nil {
			return err
		}
	}
	if reads && opts.fanOut > 0 {
		return measureFanOut(ctx, subject, fanningOut(r, opts), opts)
	}
	return nil
}
