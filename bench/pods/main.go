// Command pods measures a node of a lab: how soon a Pod answers through its Service, how long many Pods take to start, what the agent
// has in memory then, and what is left when they are gone, also after the agent was killed in between.
//
//	go run ./bench/pods [-pods 200] [-single 30]
//
// It needs root. It ends with status 1 if a target is missed. There is no peer: a kubelet with a container runtime takes about 1.5 s
// for what is 0.5 s at most here.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"portal/bench/report"
	"portal/internal/lab"
	"portal/test/harness"
)

type options struct {
	pods, single   int
	portal, output string
	mode           string
}

const portal = "portal"

func main() {
	var o options
	flag.IntVar(&o.pods, "pods", 200, "Pods that are started together")
	flag.IntVar(&o.single, "single", 30, "Pods that are started one after the other")
	flag.StringVar(&o.portal, "portal", harness.Portal(), "Portal's binary")
	flag.StringVar(&o.mode, "proxy-mode", "", "mode of the node's proxy; default: what it chooses")
	flag.StringVar(&o.output, "o", "", "JSON file to write the report to")
	flag.Parse()
	report.Main("bench-pods", func(ctx context.Context, _ []string) (bool, error) { return run(ctx, o) })
}

// The limits that are promised.
const (
	startLimit  = 60  // s
	memoryLimit = 100 // MB
	answerLimit = 500 // ms
)

func run(ctx context.Context, o options) (met bool, err error) {
	r := report.New("pods", "Pods of one node", nil, []string{portal})
	r.Version(portal, o.portal, "version")
	r.Note("A lab of one node: server, agent with proxy and DNS, and all Pods share this machine.")
	dir, err := os.MkdirTemp("", "bench-pods-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	// The lab's server and the Pods' shims run the same binary and share its pages: anonymous memory is the agent's alone.
	binary, err := filepath.Abs(o.portal)
	if err != nil {
		return false, err
	}
	report.Logf("starting a lab of one node")
	l, err := lab.Start(ctx, lab.Options{
		Name: fmt.Sprintf("bench%d", os.Getpid()), Nodes: 1, Dir: filepath.Join(dir, "lab"), Portal: binary, ProxyMode: o.mode, NodeArgs: []string{"--max-pods", fmt.Sprint(o.pods + 20)},
	})
	if err != nil {
		return false, err
	}
	defer func() {
		if e := l.Close(); err == nil {
			err = e
		}
	}()
	b := &bench{lab: l, node: l.Node(node)}
	if err := b.warmUp(ctx); err != nil {
		return false, fmt.Errorf("the first Pod: %w", err)
	}
	if err := b.one(ctx, o.single, r.At("one Pod after the other on an idle lab", o.single, "Pods")); err != nil {
		return false, err
	}
	for _, kind := range []workload{sleeping, serving} {
		if err := b.many(ctx, o.pods, kind, r.At(kind.about, o.pods, "Pods")); err != nil {
			return false, fmt.Errorf("%s: %w", kind.about, err)
		}
	}
	if err := b.killed(ctx, o.pods, r.At("the agent is killed while Pods start, and again while they end", o.pods, "Pods")); err != nil {
		return false, fmt.Errorf("killing the agent: %w", err)
	}
	return r.Finish(o.output)
}
