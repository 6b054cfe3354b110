package server

import (
	"github.com/prometheus/client_golang/prometheus"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// The names and labels are CoreDNS'. A view is a thing of CoreDNS that has no counterpart here.
var (
	descRequests  = desc("coredns_dns_requests_total", "DNS requests by zone, protocol, family and type.", "server", "zone", "view", "proto", "family", "type")
	descResponses = desc("coredns_dns_responses_total", "DNS responses by zone, code and who answered.", "server", "zone", "view", "rcode", "plugin")
	descDuration  = desc("coredns_dns_request_duration_seconds", "Time to answer a request, of the batch it came in.", "server", "zone", "view")
	descDO        = desc("coredns_dns_do_requests_total", "Requests with the DO bit.", "server", "zone", "view")
	descInSize    = desc("coredns_dns_request_size_bytes", "Sizes of requests.", "server", "zone", "view", "proto")
	descOutSize   = desc("coredns_dns_response_size_bytes", "Sizes of responses.", "server", "zone", "view", "proto")
	descDropped   = desc("portal_dns_dropped_total", "Messages that got no answer.", "server", "reason")
	descRecords   = desc("portal_dns_names", "Names answered from memory.")
	descReady     = desc("portal_dns_ready", "Whether the whole cluster has been seen once.")
)

// Describe implements prometheus.Collector.
func (s *Server) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descRequests, descResponses, descDuration, descDO, descInSize, descOutSize, descDropped, descRecords, descReady} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	m := s.metrics
	all, servers := &counters{}, map[string]*counters{}
	for p, c := range m.sums() {
		all.addAll(c)
		server, pr := m.serverLabel(proto(p)), proto(p)
		if servers[server] == nil {
			servers[server] = &counters{}
		}
		servers[server].addAll(c)
		for z := range c.requests {
			for t := range c.requests[z] {
				for f := range c.requests[z][t] {
					if v := c.requests[z][t][f]; v > 0 {
						ch <- count(descRequests, v, server, m.zone(z), "", pr.String(), [...]string{"1", "2"}[f], typeName(t))
					}
				}
			}
			for src := range c.responses[z] {
				for r := range c.responses[z][src] {
					if v := c.responses[z][src][r]; v > 0 {
						ch <- count(descResponses, v, server, m.zone(z), "", rcodeName(r), source(src).String())
					}
				}
			}
		}
		if c.inSize.total() == 0 {
			continue
		}
		ch <- c.inSize.metric(descInSize, sizeBuckets, 1, server, ".", "", pr.String())
		ch <- c.outSize.metric(descOutSize, sizeBuckets, 1, server, ".", "", pr.String())
	}
	for server, c := range servers { // UDP and TCP are one server
		if c.times.total() > 0 {
			ch <- c.times.metric(descDuration, timeBuckets, 1e-9, server, ".", "")
			ch <- count(descDO, c.do, server, ".", "")
		}
	}
	for reason, n := range map[string]uint64{"unreadable": all.dropped, "rate": all.limited, "unsent": all.unsent} {
		ch <- count(descDropped, n, m.serverLabel(protoUDP), reason)
	}
	ready := 0.0
	if s.zones.Ready() {
		ready = 1
	}
	ch <- prometheus.MustNewConstMetric(descReady, prometheus.GaugeValue, ready)
	ch <- prometheus.MustNewConstMetric(descRecords, prometheus.GaugeValue, float64(s.zones.Names()))
}

func count(d *prometheus.Desc, v uint64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

func (h *histogram) total() (n uint64) {
	for i := range h.counts {
		n += h.counts[i]
	}
	return n
}

func (h *histogram) metric(d *prometheus.Desc, bounds []float64, unit float64, labels ...string) prometheus.Metric {
	buckets, n := make(map[float64]uint64, len(bounds)), uint64(0)
	for i, b := range bounds {
		n += h.counts[i]
		buckets[b] = n
	}
	return prometheus.MustNewConstHistogram(d, h.total(), float64(h.sum)*unit, buckets, labels...)
}

func (m *metrics) serverLabel(p proto) string { return p.scheme() + "://" + m.server }

func (m *metrics) zone(i int) string {
	if i < len(m.zones) {
		return m.zones[i]
	}
	return "."
}

func typeName(i int) string {
	if i < len(types) {
		return types[i].name
	}
	return "other"
}

func rcodeName(i int) string {
	if i < len(rcodes) {
		return rcodes[i]
	}
	return "other"
}
