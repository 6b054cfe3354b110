package forward

import (
	"github.com/prometheus/client_golang/prometheus"
)

var rcodeNames = [...]string{"NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"}

// Names and labels are CoreDNS'. There is one cache and one view.
var (
	descEntries  = prometheus.NewDesc("coredns_cache_entries", "Entries of the cache.", []string{"server", "type", "zones", "view"}, nil)
	descHits     = prometheus.NewDesc("coredns_cache_hits_total", "Answers from the cache.", []string{"server", "type", "zones", "view"}, nil)
	descRequests = prometheus.NewDesc("coredns_cache_requests_total", "Questions to the cache.", []string{"server", "zones", "view"}, nil)
	descMisses   = prometheus.NewDesc("coredns_cache_misses_total", "Questions that the cache could not answer.", []string{"server", "zones", "view"}, nil)
	descPrefetch = prometheus.NewDesc("coredns_cache_prefetch_total", "Answers renewed before their time.", []string{"server", "zones", "view"}, nil)
	descStale    = prometheus.NewDesc("coredns_cache_served_stale_total", "Answers given past their time.", []string{"server", "zones", "view"}, nil)
	descEvicted  = prometheus.NewDesc("coredns_cache_evictions_total", "Entries that made room for others.", []string{"server", "type", "zones", "view"}, nil)
	descHealthy  = prometheus.NewDesc("portal_dns_upstream_healthy", "Whether an upstream answers.", []string{"to"}, nil)
)

func (f *Forwarder) initMetrics() {
	f.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "coredns_proxy_request_duration_seconds", Help: "Time that upstreams took.", Buckets: prometheus.ExponentialBuckets(0.00025, 2, 16),
	}, []string{"proxy_name", "to", "rcode"})
	f.failures = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "coredns_proxy_healthcheck_failures_total", Help: "Exchanges with upstreams that failed.",
	}, []string{"proxy_name", "to"})
	f.broken = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "coredns_forward_healthcheck_broken_total", Help: "Times that all upstreams were found failing.",
	})
}

// Describe implements prometheus.Collector.
func (f *Forwarder) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descEntries, descHits, descRequests, descMisses, descPrefetch, descStale, descEvicted, descHealthy} {
		ch <- d
	}
	f.duration.Describe(ch)
	f.failures.Describe(ch)
	f.broken.Describe(ch)
}

// Collect implements prometheus.Collector.
func (f *Forwarder) Collect(ch chan<- prometheus.Metric) {
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	if f.cache != nil {
		success, denial := f.cache.count()
		ch <- prometheus.MustNewConstMetric(descEntries, prometheus.GaugeValue, float64(success), "", "success", ".", "")
		ch <- prometheus.MustNewConstMetric(descEntries, prometheus.GaugeValue, float64(denial), "", "denial", ".", "")
		hits, denials, misses := f.hits.Load(), f.denials.Load(), f.misses.Load()
		count(descHits, hits, "", "success", ".", "")
		count(descHits, denials, "", "denial", ".", "")
		count(descMisses, misses, "", ".", "")
		count(descRequests, hits+denials+misses, "", ".", "")
		count(descPrefetch, f.prefetched.Load(), "", ".", "")
		count(descStale, f.stales.Load(), "", ".", "")
		count(descEvicted, f.cache.evicted.Load(), "", "success", ".", "")
	}
	for _, u := range f.upstreams {
		up := 0.0
		if u.healthy() {
			up = 1
		}
		ch <- prometheus.MustNewConstMetric(descHealthy, prometheus.GaugeValue, up, u.String())
	}
	f.duration.Collect(ch)
	f.failures.Collect(ch)
	f.broken.Collect(ch)
}
