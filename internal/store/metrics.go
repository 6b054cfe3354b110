package store

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var (
	writesRefused = metrics.NewGauge(&metrics.GaugeOpts{
		Name: "portal_storage_writes_refused", StabilityLevel: metrics.ALPHA,
		Help: "1 while etcd refuses writes because it is at its quota, its disk is full or it has found its data corrupt, otherwise 0.",
	})
	sizeBytes = memberGauge("portal_storage_size_bytes", "Size of etcd's database in bytes, by endpoint.")
	inUse     = memberGauge("portal_storage_in_use_bytes", "Bytes of etcd's database that hold data, by endpoint.")
	quota     = memberGauge("portal_storage_quota_bytes", "Size in bytes at which etcd refuses writes, by endpoint; 0 if it does not say.")

	defragmentations = metrics.NewCounter(&metrics.CounterOpts{
		Name: "portal_storage_defragmentations_total", StabilityLevel: metrics.ALPHA,
		Help: "Times that this server has defragmented etcd.",
	})
)

func memberGauge(name, help string) *metrics.GaugeVec {
	return metrics.NewGaugeVec(&metrics.GaugeOpts{Name: name, Help: help, StabilityLevel: metrics.ALPHA}, []string{"endpoint"})
}

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(writesRefused, sizeBytes, inUse, quota, defragmentations)
})

func measure(members []MemberStatus, refused bool) {
	if refused {
		writesRefused.Set(1)
	} else {
		writesRefused.Set(0)
	}
	for _, m := range members {
		if m.Error != "" {
			continue
		}
		sizeBytes.WithLabelValues(m.Endpoint).Set(float64(m.SizeBytes))
		inUse.WithLabelValues(m.Endpoint).Set(float64(m.InUseBytes))
		quota.WithLabelValues(m.Endpoint).Set(float64(m.QuotaBytes))
	}
}
