package main

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"portal/internal/intent/watch"
	"portal/internal/lb"
	"portal/internal/node"
	"portal/internal/nodereport"
	"portal/internal/proxy"
	"portal/internal/reports"
	"portal/internal/reports/publish"
)

// reportFlag lets a part publish what it says about itself.
func reportFlag(f *pflag.FlagSet, report *bool) {
	f.BoolVar(report, "report", true, "publish how this is doing as a NodeReport (portal.dev) in the API, if that is allowed")
}

// publishReport writes a part's NodeReport until the context ends.
func publishReport(ctx context.Context, log *slog.Logger, config *rest.Config, node, part string, status func() reports.Status) {
	p, err := publish.New(publish.Options{Config: config, Node: node, Part: part, Version: version, Status: status, Log: log})
	if err != nil {
		log.Warn("this part does not report to the API", "part", part, "why", err)
		return
	}
	p.Run(ctx)
}

// conntrackInterval is how often the table of connections is looked at for reports.
const conntrackInterval = 10 * time.Second

// proxyReport is what a proxy says about itself, as often as it is asked.
func proxyReport(p *proxy.Proxy, w *watch.Watcher) func() reports.Status {
	var synced uint64
	table := occasionally(conntrackInterval, nodereport.Conntrack)
	return func() reports.Status {
		fed := w.Revision() // before the summary: what came since may wait
		s := p.Summary()
		if s.InSync {
			synced = fed
		}
		return nodereport.ProxyStatus(s, synced, table(), time.Now())
	}
}

// occasionally remembers what a function returned for a while. It is for one goroutine.
func occasionally[T any](every time.Duration, f func() T) func() T {
	var last T
	var at time.Time
	return func() T {
		if now := time.Now(); now.Sub(at) >= every {
			last, at = f(), now
		}
		return last
	}
}

// followerReport is what a part says that only follows the API.
func followerReport(ready func() bool, mode string, revision func() uint64) func() reports.Status {
	return func() reports.Status {
		fed := revision()
		return nodereport.Follower(ready(), mode, fed, time.Now())
	}
}

// balancerReport is what a load balancer says about itself.
func balancerReport(b *lb.Balancer, mode string) func() reports.Status {
	return func() reports.Status {
		s := b.Summary()
		out := nodereport.Follower(s.Ready, mode, 0, time.Now())
		if s.Ready {
			out.Services = &s.Services
			if s.Problem != "" {
				out.State, out.Message = reports.Degraded, s.Problem
			}
		}
		return out
	}
}

// agentReport is what the agent that runs a node's Pods says about itself.
func agentReport(a *node.Agent) func() reports.Status {
	return func() reports.Status {
		s := a.Summary()
		out := reports.Status{State: reports.Running, Mode: "processes"}
		switch {
		case !s.Ready:
			out.State, out.Message = reports.Starting, "waits for the node's Pod CIDRs"
		case s.Network != "":
			out.State, out.Message = reports.Failing, "can't connect Pods: "+s.Network
		case s.Disk != "":
			out.State, out.Message = reports.Degraded, "takes no more Pods: "+s.Disk
		}
		return out
	}
}

// startReport publishes beside other things if that is wanted and it is known for which Node.
func startReport(ctx context.Context, wanted bool, log *slog.Logger, config *rest.Config, node, part string, status func() reports.Status, beside *sync.WaitGroup) {
	if wanted && node != "" {
		beside.Go(func() { publishReport(ctx, log, config, node, part, status) })
	}
}

// announceMode says in which ways a balancer announces addresses.
func (o *balancerOptions) announceMode() string { return strings.Join(o.announce, ",") }
