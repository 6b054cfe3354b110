package main

import (
	"fmt"

	"portal/bench/report"
)

// The places where figures are taken.

func creating(r *report.Report, opts options, clients int) report.At {
	return r.At(fmt.Sprintf("creating Services with an EndpointSlice each, %d clients", clients), opts.services, "Services")
}

func listing(r *report.Report, opts options) report.At {
	return r.At("listing Services", opts.services, "Services")
}

func watching(r *report.Report, opts options) report.At {
	return r.At(fmt.Sprintf("updates of Services to watches, at %d Services", opts.services), opts.watchers, "watches")
}

func fanningOut(r *report.Report, opts options) report.At {
	return r.At(fmt.Sprintf("changes of one EndpointSlice with %d endpoints to watches of their own connection each, at %d Services",
		fanOutEndpoints, opts.services), opts.fanOut, "watches")
}

func authorizing(r *report.Report) report.At {
	return r.At("authorization by RBAC", bindings, "bindings")
}

// The names of figures that targets are about.
const (
	createRate    = "Services created"
	failed        = "failed requests"
	createGrowth  = "create p99 at the end, compared with that at the start"
	listFull      = "list"
	listPaged     = "list in pages"
	listCached    = "list at resourceVersion=0"
	lastWatchP50  = "request until the last watcher has it, p50"
	lastWatchP99  = "request until the last watcher has it, p99"
	eventRate     = "events with 16 writers"
	anonymousBoth = "anonymous memory with etcd"
	decisionP99   = "one decision of Portal's authorizers, p99"
)

// noSlower allows for what two runs of the same server differ by.
const noSlower = 0.95

// judge compares Portal with kube-apiserver and with what was promised.
func judge(r *report.Report, opts options) {
	for _, server := range opts.servers {
		if server == kubernetes {
			continue
		}
		for _, clients := range opts.clients {
			at := creating(r, opts, clients)
			at.WantTimes(server, createRate, kubernetes, 4)
			at.WantWithin(server, failed, 0)
			at.WantWithin(server, createGrowth, 2)
			if server == portalEmbedded { // etcd is in it
				at.WantTimes(server, anonymousBoth, kubernetes, 2)
			} else {
				at.WantTimes(server, report.AnonymousSteady, kubernetes, 2)
				at.WantTimes(server, report.PSSSteady, kubernetes, 2)
			}
		}
		if opts.lists > 0 {
			for _, name := range []string{listFull, listPaged, listCached} {
				listing(r, opts).WantTimes(server, name, kubernetes, noSlower)
			}
		}
		if opts.watchers > 0 {
			// From the request, for what a server gains by answering early or late is nothing to the watcher.
			at := watching(r, opts)
			at.WantTimes(server, lastWatchP50, kubernetes, noSlower)
			at.WantTimes(server, lastWatchP99, kubernetes, noSlower)
			at.WantTimes(server, eventRate, kubernetes, 1)
		}
		if opts.fanOut > 0 {
			fanningOut(r, opts).WantTimes(server, lastWatchP99, kubernetes, 1)
		}
		if opts.reviews > 0 && server == portal {
			authorizing(r).WantWithin(server, decisionP99, 50)
		}
	}
}
