package main

import (
	"fmt"
	"slices"
)

// measurement is a line of the table.
type measurement struct {
	name   string
	format string
	of     func(*result) float64
	// taken says whether there is such a figure; nil means always.
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

// figure is a line that is shown as a share of kube-apiserver's too.
func figure(name, format string, of func(*result) float64) measurement {
	return measurement{name: name, format: format, of: of, compared: true}
}

// alone leaves out the share.
func (m measurement) alone() measurement { m.compared = false; return m }

func (m measurement) when(taken func(*result) bool) measurement { m.taken = taken; return m }

func (m measurement) want(t *target) measurement { m.target = t; return m }

// judgedFor says that the target is for one of Portal's servers only.
func (m measurement) judgedFor(server string) measurement { m.only = server; return m }

// measures are the lines of the table, in order, with what was promised.
func measures(r *report) []measurement {
	atFew, atMany := fmt.Sprintf("at %d", fewServices), fmt.Sprintf("at %d", r.Services)
	return slices.Concat([]measurement{
		figure("Services created a second", "%.1f", func(x *result) float64 { return x.PerSecond }).want(atLeast(4)),
		figure("failed requests", "%.0f", func(x *result) float64 { return float64(x.Failed) }).alone().want(atMostItself(0)),
		figure("create p50 "+atFew+", ms", "%.1f", func(x *result) float64 { return x.Few.P50 }),
		figure("create p99 "+atFew+", ms", "%.1f", func(x *result) float64 { return x.Few.P99 }),
		figure("create p50 "+atMany+", ms", "%.1f", func(x *result) float64 { return x.Many.P50 }),
		figure("create p99 "+atMany+", ms", "%.1f", func(x *result) float64 { return x.Many.P99 }),
		figure("p99 "+atMany+" / p99 "+atFew, "%.2f", growth).alone().want(atMostItself(2)),
		figure("server CPU a Service, ms", "%.2f", func(x *result) float64 { return x.CPU }),
		figure("etcd CPU a Service, ms", "%.2f", func(x *result) float64 { return x.EtcdCPU }).when(hasEtcd),
		figure("the clients' CPU a Service, ms", "%.2f", func(x *result) float64 { return x.ClientCPU }),
		figure("memory of the server, MB", "%.0f", func(x *result) float64 { return x.Memory }).want(atMost(0.5)).judgedFor(portal),
		figure("  without its program's pages, MB", "%.0f", func(x *result) float64 { return x.MemoryPrivate }),
		figure("  at its peak, MB", "%.0f", func(x *result) float64 { return x.MemoryPeak }),
		figure("memory with etcd, MB", "%.0f", func(x *result) float64 { return x.Memory + x.EtcdMemory }).
			want(atMost(0.5)).judgedFor(portalEmbedded),
	}, listMeasures(), watchMeasures())
}

func listMeasures() []measurement {
	out := []measurement{
		figure("list, ms", "%.1f", func(x *result) float64 { return x.Lists.Full }).want(atMost(noSlower)),
		figure(fmt.Sprintf("list in pages of %d, ms", pageSize), "%.1f", func(x *result) float64 { return x.Lists.Paged }).want(atMost(noSlower)),
		figure("list at resourceVersion=0, ms", "%.1f", func(x *result) float64 { return x.Lists.Cached }).want(atMost(noSlower)),
		figure("server CPU for the three lists, ms", "%.1f", func(x *result) float64 { return x.Lists.CPU }),
	}
	for i := range out {
		out[i] = out[i].when(func(x *result) bool { return x.Lists != nil })
	}
	return out
}

func watchMeasures() []measurement {
	out := []measurement{
		figure("last watcher after answer p50, ms", "%.2f", func(x *result) float64 { return x.Watch.AfterAnswer.P50 }),
		figure("last watcher after answer p99, ms", "%.2f", func(x *result) float64 { return x.Watch.AfterAnswer.P99 }),
		// From the request, for what a server gains by answering early or late is nothing to the watcher.
		figure("last watcher after request p50, ms", "%.2f", func(x *result) float64 { return x.Watch.AfterRequest.P50 }).want(atMost(noSlower)),
		figure("last watcher after request p99, ms", "%.2f", func(x *result) float64 { return x.Watch.AfterRequest.P99 }).want(atMost(noSlower)),
		figure("events a second", "%.0f", func(x *result) float64 { return x.Watch.EventsPerSecond }).want(atLeast(1)),
		figure("server CPU an update to all, ms", "%.2f", func(x *result) float64 { return x.Watch.CPU }),
		figure("watches that the server ended", "%.0f", func(x *result) float64 { return float64(x.Watch.Reopened) }).alone(),
	}
	for i := range out {
		out[i] = out[i].when(func(x *result) bool { return x.Watch != nil })
	}
	return out
}

func growth(x *result) float64 {
	if x.Few.P99 == 0 {
		return 0
	}
	return x.Many.P99 / x.Few.P99
}

func hasEtcd(x *result) bool { return x.Server != portalEmbedded }
