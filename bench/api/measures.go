package main

import "fmt"

// measurement is a line of the table.
type measurement struct {
	name   string
	format string
	of     func(*result) float64
	// has says whether the figure was taken; nil means always.
	taken func(*result) bool
	// compared figures are shown as a share of kube-apiserver's.
	compared bool
	target   *target
	// only names the one server that the target is for; "" means all of Portal's.
	only string
}

func (m measurement) has(r *result) bool { return m.taken == nil || m.taken(r) }

func (m measurement) applies(r *result) bool { return m.has(r) && (m.only == "" || m.only == r.Server) }

// target is what a figure, or its share of kube-apiserver's, must be.
type target struct {
	text  string
	share bool
	met   func(float64) bool
}

// value is the figure that the target is about; it is unknown if kube-apiserver was not measured.
func (t *target) value(m measurement, own, peer *result) (float64, bool) {
	if !t.share {
		return m.of(own), true
	}
	if peer == nil || !m.has(peer) {
		return 0, false
	}
	if m.of(peer) == 0 {
		return 1, m.of(own) == 0
	}
	return m.of(own) / m.of(peer), true
}

func atLeast(share float64) *target {
	return &target{fmt.Sprintf("at least %g×", share), true, func(v float64) bool { return v >= share }}
}

func atMost(share float64) *target {
	return &target{fmt.Sprintf("at most %g×", share), true, func(v float64) bool { return v <= share }}
}

func atMostItself(limit float64) *target {
	return &target{fmt.Sprintf("at most %g", limit), false, func(v float64) bool { return v <= limit }}
}

// noSlower allows for what two runs of the same server differ by.
const noSlower = 1.05

// measures are the lines of the table, in order, with what was promised.
func measures(r *report) []measurement {
	atFew, atMany := fmt.Sprintf("at %d", fewServices), fmt.Sprintf("at %d", r.Services)
	listed := func(x *result) bool { return x.Lists != nil }
	watched := func(x *result) bool { return x.Watch != nil }
	return []measurement{
		{name: "Services created a second", format: "%.1f", compared: true, target: atLeast(4), of: func(x *result) float64 { return x.PerSecond }},
		{name: "failed requests", format: "%.0f", target: atMostItself(0), of: func(x *result) float64 { return float64(x.Failed) }},
		{name: "create p50 " + atFew + ", ms", format: "%.1f", compared: true, of: func(x *result) float64 { return x.Few.P50 }},
		{name: "create p99 " + atFew + ", ms", format: "%.1f", compared: true, of: func(x *result) float64 { return x.Few.P99 }},
		{name: "create p50 " + atMany + ", ms", format: "%.1f", compared: true, of: func(x *result) float64 { return x.Many.P50 }},
		{name: "create p99 " + atMany + ", ms", format: "%.1f", compared: true, of: func(x *result) float64 { return x.Many.P99 }},
		{name: "p99 " + atMany + " / p99 " + atFew, format: "%.2f", target: atMostItself(2), of: growth},
		{name: "server CPU a Service, ms", format: "%.2f", compared: true, of: func(x *result) float64 { return x.CPU }},
		{name: "etcd CPU a Service, ms", format: "%.2f", compared: true, of: func(x *result) float64 { return x.EtcdCPU }, taken: hasEtcd},
		{name: "the clients' CPU a Service, ms", format: "%.2f", compared: true, of: func(x *result) float64 { return x.ClientCPU }},
		{name: "memory of the server, MB", format: "%.0f", compared: true, target: atMost(0.5), only: portal, of: func(x *result) float64 { return x.Memory }},
		{name: "  without its program's pages, MB", format: "%.0f", compared: true, of: func(x *result) float64 { return x.MemoryPrivate }},
		{name: "memory with etcd, MB", format: "%.0f", compared: true, target: atMost(0.5), only: portalEmbedded, of: func(x *result) float64 { return x.Memory + x.EtcdMemory }},
		{name: "peak memory of the server, MB", format: "%.0f", compared: true, of: func(x *result) float64 { return x.MemoryPeak }},
		{name: "list, ms", format: "%.1f", compared: true, taken: listed, target: atMost(noSlower), of: func(x *result) float64 { return x.Lists.Full }},
		{name: fmt.Sprintf("list in pages of %d, ms", pageSize), format: "%.1f", compared: true, taken: listed, target: atMost(noSlower), of: func(x *result) float64 { return x.Lists.Paged }},
		{name: "list at resourceVersion=0, ms", format: "%.1f", compared: true, taken: listed, target: atMost(noSlower), of: func(x *result) float64 { return x.Lists.Cached }},
		{name: "server CPU for the three lists, ms", format: "%.1f", compared: true, taken: listed, of: func(x *result) float64 { return x.Lists.CPU }},
		{name: "last watcher after answer p50, ms", format: "%.2f", compared: true, taken: watched, of: func(x *result) float64 { return x.Watch.AfterAnswer.P50 }},
		{name: "last watcher after answer p99, ms", format: "%.2f", compared: true, taken: watched, of: func(x *result) float64 { return x.Watch.AfterAnswer.P99 }},
		{name: "last watcher after request p50, ms", format: "%.2f", compared: true, taken: watched, target: atMost(noSlower), of: func(x *result) float64 { return x.Watch.AfterRequest.P50 }},
		{name: "last watcher after request p99, ms", format: "%.2f", compared: true, taken: watched, target: atMost(noSlower), of: func(x *result) float64 { return x.Watch.AfterRequest.P99 }},
		{name: "events a second", format: "%.0f", compared: true, taken: watched, target: atLeast(1), of: func(x *result) float64 { return x.Watch.EventsPerSecond }},
		{name: "server CPU an update to all, ms", format: "%.2f", compared: true, taken: watched, of: func(x *result) float64 { return x.Watch.CPU }},
		{name: "watches that the server ended", format: "%.0f", taken: watched, of: func(x *result) float64 { return float64(x.Watch.Reopened) }},
	}
}

func growth(x *result) float64 {
	if x.Few.P99 == 0 {
		return 0
	}
	return x.Many.P99 / x.Few.P99
}

func hasEtcd(x *result) bool { return x.Server != portalEmbedded }
