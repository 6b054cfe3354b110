package audit

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var (
	findingsFound = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Namespace: "portal", Subsystem: "audit", Name: "findings", StabilityLevel: metrics.ALPHA,
		Help: "What the last audit found wrong with claims on addresses and ports, and did not repair.",
	}, []string{"problem"})
	repairsDone = metrics.NewCounterVec(&metrics.CounterOpts{
		Namespace: "portal", Subsystem: "audit", Name: "repairs_total", StabilityLevel: metrics.ALPHA,
		Help: "Repairs of claims on addresses and ports: repaired, changed by somebody else meanwhile, or failed.",
	}, []string{"problem", "result"})
	lastRun = metrics.NewGauge(&metrics.GaugeOpts{
		Namespace: "portal", Subsystem: "audit", Name: "last_run_timestamp_seconds", StabilityLevel: metrics.ALPHA,
		Help: "When the last audit that could read everything ended.",
	})
	duration = metrics.NewHistogram(&metrics.HistogramOpts{
		Namespace: "portal", Subsystem: "audit", Name: "duration_seconds", StabilityLevel: metrics.ALPHA,
		Help:    "How long audits took.",
		Buckets: metrics.ExponentialBuckets(0.001, 4, 9),
	})

	registerMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(findingsFound, repairsDone, lastRun, duration)
	})
)

// measure records the result of an audit. Problems that were not found are recorded too, as 0, so that an alert can end.
func measure(report Report) {
	count := map[Problem]int{}
	for _, f := range report.Findings {
		count[f.Problem]++
	}
	for _, p := range Problems {
		findingsFound.WithLabelValues(string(p)).Set(float64(count[p]))
	}
	for _, r := range report.Repairs {
		repairsDone.WithLabelValues(string(r.Problem), string(r.Outcome)).Inc()
	}
}
