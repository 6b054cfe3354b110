package forward

import (
	"sync"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
)

var rcodeNames = [...]string{"NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"}

// Names and labels are CoreDNS'. A view is a CoreDNS feature that Portal does not have.
var (
	descEntries  = prometheus.NewDesc("coredns_cache_entries", "Number of entries in the cache.", []string{"server", "type", "zones", "view"}, nil)
	descHits     = prometheus.NewDesc("coredns_cache_hits_total", "Number of cache hits.", []string{"server", "type", "zones", "view"}, nil)
	descRequests = prometheus.NewDesc("coredns_cache_requests_total", "Number of cache lookups.", []string{"server", "zones", "view"}, nil)
	descMisses   = prometheus.NewDesc("coredns_cache_misses_total", "Number of cache misses.", []string{"server", "zones", "view"}, nil)
	descPrefetch = prometheus.NewDesc("coredns_cache_prefetch_total", "Number of entries refreshed before they expired.", []string{"server", "zones", "view"}, nil)
	descStale    = prometheus.NewDesc("coredns_cache_served_stale_total", "Number of responses served from expired entries.", []string{"server", "zones", "view"}, nil)
	descEvicted  = prometheus.NewDesc("coredns_cache_evictions_total", "Number of entries evicted because the cache was full.", []string{"server", "type", "zones", "view"}, nil)
	descHealthy  = prometheus.NewDesc("portal_dns_upstream_healthy", "Whether an upstream passes its health check (1) or not (0).", []string{"to"}, nil)
)

// Metrics collects the metrics of forwarders. Several share one, so that an upstream of two zones is one series.
type Metrics struct {
	mu         sync.Mutex
	forwarders []*Forwarder
	duration   *prometheus.HistogramVec
	failures   *prometheus.CounterVec
	broken     prometheus.Counter
}

// NewMetrics returns a collector without forwarders.
func NewMetrics() *Metrics {
	return &Metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "coredns_proxy_request_duration_seconds", Help: "Time that upstreams took to respond, in seconds.", Buckets: prometheus.ExponentialBuckets(0.00025, 2, 16),
		}, []string{"proxy_name", "to", "rcode"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coredns_proxy_healthcheck_failures_total", Help: "Number of failed health checks of upstreams.",
		}, []string{"proxy_name", "to"}),
		broken: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coredns_forward_healthcheck_broken_total", Help: "Number of queries that found all upstreams unhealthy.",
		}),
	}
}

func (m *Metrics) add(f *Forwarder) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forwarders = append(m.forwarders, f)
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descEntries, descHits, descRequests, descMisses, descPrefetch, descStale, descEvicted, descHealthy} {
		ch <- d
	}
	m.duration.Describe(ch)
	m.failures.Describe(ch)
	m.broken.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	healthy := map[string]float64{}
	for _, f := range m.forwarders {
		f.collect(ch)
		for _, u := range f.upstreams {
			up := 0.0
			if u.healthy() {
				up = 1
			}
			if other, known := healthy[u.String()]; !known || up < other {
				healthy[u.String()] = up
			}
		}
	}
	for to, up := range healthy {
		ch <- prometheus.MustNewConstMetric(descHealthy, prometheus.GaugeValue, up, to)
	}
	m.duration.Collect(ch)
	m.failures.Collect(ch)
	m.broken.Collect(ch)
}

// collect sends the metrics of a forwarder's cache.
func (f *Forwarder) collect(ch chan<- prometheus.Metric) {
	if f.cache == nil {
		return
	}
	zone := dns.Fqdn(f.o.Zone)
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	success, denial := f.cache.count()
	ch <- prometheus.MustNewConstMetric(descEntries, prometheus.GaugeValue, float64(success), "", "success", zone, "")
	ch <- prometheus.MustNewConstMetric(descEntries, prometheus.GaugeValue, float64(denial), "", "denial", zone, "")
	hits, denials, misses := f.hits.Load(), f.denials.Load(), f.misses.Load()
	count(descHits, hits, "", "success", zone, "")
	count(descHits, denials, "", "denial", zone, "")
	count(descMisses, misses, "", zone, "")
	count(descRequests, hits+denials+misses, "", zone, "")
	count(descPrefetch, f.prefetched.Load(), "", zone, "")
	count(descStale, f.stales.Load(), "", zone, "")
	count(descEvicted, f.cache.evicted.Load(), "", "success", zone, "")
}
