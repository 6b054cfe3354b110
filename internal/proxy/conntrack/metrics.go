package conntrack

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/intent"
)

// Metrics registers kube-proxy's figures about passes over the table and one of our own, and returns what records them.
func Metrics(r prometheus.Registerer) Report {
	label := []string{"ip_family"}
	took := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "kubeproxy_conntrack_reconciler_sync_duration_seconds", Help: "Duration of passes that find and delete stale flows, in seconds.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
	}, label)
	deleted := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kubeproxy_conntrack_reconciler_deleted_entries_total", Help: "Stale flows that were deleted.",
	}, label)
	failed := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "portal_proxy_conntrack_failures_total", Help: "Passes over the kernel's flow table that failed and were repeated.",
	}, label)
	r.MustRegister(took, deleted, failed)
	return func(f intent.Family, n int, d time.Duration, err error) {
		name := fmt.Sprintf("IPv%d", f)
		took.WithLabelValues(name).Observe(d.Seconds())
		deleted.WithLabelValues(name).Add(float64(n))
		if err != nil {
			failed.WithLabelValues(name).Inc()
		}
	}
}
