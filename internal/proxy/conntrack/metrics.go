package conntrack

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/intent"
)

// Metrics registers kube-proxy's figures about passes over the table, and returns what New wants to be told by.
func Metrics(r prometheus.Registerer) func(intent.Family, int, time.Duration) {
	label := []string{"ip_family"}
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "kubeproxy_conntrack_reconciler_sync_duration_seconds", Help: "How long it took to find stale flows and end them.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
	}, label)
	deleted := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kubeproxy_conntrack_reconciler_deleted_entries_total", Help: "Stale flows that were ended.",
	}, label)
	r.MustRegister(took, deleted)
	return func(f intent.Family, n int, d time.Duration) {
		name := fmt.Sprintf("IPv%d", f)
		took.WithLabelValues(name).Observe(d.Seconds())
		deleted.WithLabelValues(name).Add(float64(n))
	}
}
