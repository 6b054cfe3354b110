package server

import (
	"github.com/prometheus/client_golang/prometheus"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Names and labels are CoreDNS'. A view is a CoreDNS feature that Portal does not have.
var (
	descRequests  = desc("coredns_dns_requests_total", "Number of DNS requests by zone, protocol, family and type.", "server", "zone", "view", "proto", "family", "type")
	descResponses = desc("coredns_dns_responses_total", "Number of DNS responses by zone, code and source.", "server", "zone", "view", "rcode", "plugin")
	descDuration  = desc("coredns_dns_request_duration_seconds", "Time to answer the batch that a request came in, in seconds.", "server", "zone", "view")
	descDO        = desc("coredns_dns_do_requests_total", "Number of requests with the DO bit.", "server", "zone", "view")
	descInSize    = desc("coredns_dns_request_size_bytes", "Size of requests in bytes.", "server", "zone", "view", "proto")
	descOutSize   = desc("coredns_dns_response_size_bytes", "Size of responses in bytes.", "server", "zone", "view", "proto")
	descDropped   = desc("portal_dns_dropped_total", "Number of messages without a response, by reason.", "server", "reason")
	descRecords   = desc("portal_dns_names", "Number of names of the cluster.")
	descReady     = desc("portal_dns_ready", "Whether everything has been listed once (1) or not (0).")
)

// Describe implements prometheus.Collector.
func (s *Server) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descRequests, descResponses, descDuration, descDO, descInSize, descOutSize, descDropped, descRecords, descReady} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. UDP and TCP are one server, and CoreDNS does not label responses with the protocol:
// series are made of sums over the protocols that share their labels.
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
		m.collectRequests(ch, c, server, pr.String())
		if c.inSize.total() > 0 {
			ch <- c.inSize.metric(descInSize, sizeBuckets, 1, server, ".", "", pr.String())
			ch <- c.outSize.metric(descOutSize, sizeBuckets, 1, server, ".", "", pr.String())
		}
	}
	for server, c := range servers {
		m.collectResponses(ch, c, server)
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

func (m *metrics) collectRequests(ch chan<- prometheus.Metric, c *counters, server, proto string) {
	for z := range c.requests {
		for t := range c.requests[z] {
			for f, v := range c.requests[z][t] {
				if v > 0 {
					ch <- count(descRequests, v, server, m.zone(z), "", proto, [...]string{"1", "2"}[f], typeName(t))
				}
			}
		}
	}
}

func (m *metrics) collectResponses(ch chan<- prometheus.Metric, c *counters, server string) {
	for z := range c.responses {
		for src := range c.responses[z] {
			for r, v := range c.responses[z][src] {
				if v > 0 {
					ch <- count(descResponses, v, server, m.zone(z), "", rcodeName(r), source(src).String())
				}
			}
		}
	}
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
