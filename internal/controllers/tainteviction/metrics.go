package tainteviction

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

const subsystem = "taint_eviction_controller"

var (
	deletions = metrics.NewCounter(&metrics.CounterOpts{
		Subsystem: subsystem, Name: "pod_deletions_total", StabilityLevel: metrics.ALPHA,
		Help: "Number of Pods evicted from nodes with NoExecute taints.",
	})
	latency = metrics.NewHistogram(&metrics.HistogramOpts{
		Subsystem: subsystem, Name: "pod_deletion_duration_seconds", StabilityLevel: metrics.ALPHA,
		Help:    "Time in seconds from when a Pod had to leave its node until it was deleted.",
		Buckets: []float64{0.005, 0.025, 0.1, 0.5, 1, 2.5, 10, 30, 60, 120, 180, 240},
	})

	registerMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(deletions, latency) })
)
