package apiserver

import (
	"context"
	"sync"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"portal/internal/alloc"
)

// The names are kube-apiserver's, so that dashboards find them.
var (
	addressesAllocated = gauge("clusterip_allocator", "allocated_ips", "Cluster IPs that Services hold, by range.", "cidr")
	addressesAvailable = gauge("clusterip_allocator", "available_ips", "Cluster IPs that are free, by range.", "cidr")
	portsAllocated     = gauge("nodeport_allocator", "allocated_ports", "Node ports that Services hold.")
	portsAvailable     = gauge("nodeport_allocator", "available_ports", "Node ports that are free.")
)

// What has no counterpart in kube-apiserver is Portal's.
var (
	systemFailing = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name: "portal_system_object_failing", StabilityLevel: metrics.ALPHA,
		Help: "1 for an object of the system that could not be reconciled, 0 for one that is as it should be.",
	}, []string{"object"})
	certificateExpiration = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Name: "portal_certificate_expiration_timestamp_seconds", StabilityLevel: metrics.ALPHA,
		Help: "When a certificate of this server expires, in seconds since 1970. It is renewed after two thirds of its life.",
	}, []string{"name"})
	connectionsRefused = metrics.NewCounter(&metrics.CounterOpts{
		Name: "portal_apiserver_connections_limited_total", StabilityLevel: metrics.ALPHA,
		Help: "Connections refused, or closed for another one, because the limit derived from the number of open files was reached.",
	})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(addressesAllocated, addressesAvailable, portsAllocated, portsAvailable,
		systemFailing, certificateExpiration, connectionsRefused)
})

func gauge(subsystem, name, help string, labels ...string) *metrics.GaugeVec {
	return metrics.NewGaugeVec(&metrics.GaugeOpts{
		Namespace: "kube_apiserver", Subsystem: subsystem, Name: name, Help: help, StabilityLevel: metrics.ALPHA,
	}, labels)
}

// reportEvery is how old the figures of what is allocated may be.
const reportEvery = 10 * time.Second

// reportAllocation keeps the figures until ctx ends.
func reportAllocation(ctx context.Context, allocator *alloc.Allocator) {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		addressesAllocated.Reset()
		addressesAvailable.Reset()
		for _, p := range allocator.Ranges() {
			used, size := allocator.InUse(p)
			addressesAllocated.WithLabelValues(p.String()).Set(float64(used))
			addressesAvailable.WithLabelValues(p.String()).Set(float64(size - used))
		}
		used, size := allocator.PortsInUse()
		portsAllocated.WithLabelValues().Set(float64(used))
		portsAvailable.WithLabelValues().Set(float64(size - used))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
