package mirror

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

const subsystem = "endpoint_slice_mirroring_controller"

var (
	addressesSkipped = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Subsystem: subsystem, Name: "addresses_skipped_per_sync", StabilityLevel: metrics.ALPHA,
		Help:    "Number of addresses skipped in each sync because they are invalid or too many.",
		Buckets: metrics.ExponentialBuckets(2, 2, 15),
	}, nil)
	sliceChanges = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem: subsystem, Name: "changes", StabilityLevel: metrics.ALPHA,
		Help: "Number of EndpointSlices created, updated and deleted.",
	}, []string{"operation"})
	syncDuration = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Subsystem: subsystem, Name: "endpoints_sync_duration", StabilityLevel: metrics.ALPHA,
		Help:    "Duration of a sync of one Endpoints object in seconds.",
		Buckets: metrics.ExponentialBuckets(0.001, 2, 15),
	}, nil)

	registerMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(addressesSkipped, sliceChanges, syncDuration)
	})
)
