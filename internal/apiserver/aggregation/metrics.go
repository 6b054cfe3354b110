package aggregation

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// The names are kube-aggregator's.
var (
	unavailable = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name: "aggregator_unavailable_apiservice", StabilityLevel: metrics.ALPHA,
		Help: "1 for an APIService with a Service that is not available, 0 for one that is.",
	}, []string{"name"})
	unavailableTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "aggregator_unavailable_apiservice_total", StabilityLevel: metrics.ALPHA,
		Help: "How often an APIService with a Service became unavailable, by reason.",
	}, []string{"name", "reason"})
)

// RegisterMetrics makes them known, once.
var RegisterMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(unavailable, unavailableTotal) })

// count keeps the metrics of an APIService.
func (r *remote) count(before, found condition) {
	if found.available() {
		unavailable.WithLabelValues(r.name).Set(0)
		return
	}
	unavailable.WithLabelValues(r.name).Set(1)
	if before.available() || before.reason != found.reason {
		unavailableTotal.WithLabelValues(r.name, found.reason).Inc()
	}
}
