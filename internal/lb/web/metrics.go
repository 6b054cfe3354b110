package web

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// The names follow Envoy's: a listener's downstream is the client, rq are requests.
var (
	listenerLabels = []string{"namespace", "name", "port", "listener"}

	requestsMetric = prometheus.NewDesc("portal_lb_http_downstream_rq_total", "Requests, by the first digit of the status that the client got; none: it left before.", append(listenerLabels[:4:4], "response_code_class"), nil)
	activeMetric   = prometheus.NewDesc("portal_lb_http_downstream_rq_active", "Requests under way.", listenerLabels, nil)
	retriesMetric  = prometheus.NewDesc("portal_lb_http_downstream_rq_retry_total", "Attempts at another endpoint or connection after one failed.", listenerLabels, nil)
	upgradesMetric = prometheus.NewDesc("portal_lb_http_downstream_cx_upgrades_total", "Connections that speak another protocol after an upgrade.", listenerLabels, nil)
	http2Metric    = prometheus.NewDesc("portal_lb_http_downstream_cx_http2_active", "Connections of clients that speak HTTP/2.", listenerLabels, nil)
)

// Describe sends nothing: which listeners there are changes.
func (s *Server) Describe(chan<- *prometheus.Desc) {}

// Collect sends the counters of every listener of the configuration.
func (s *Server) Collect(out chan<- prometheus.Metric) {
	for name, l := range *s.listeners.Load() {
		labels := []string{l.Owner.Namespace, l.Owner.Name, strconv.Itoa(int(l.Address.Port())), name}
		send := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64, more ...string) {
			out <- prometheus.MustNewConstMetric(desc, kind, value, append(labels[:4:4], more...)...)
		}
		stats := s.Stats(name)
		for class := range stats.Requests {
			label := "none"
			if class > 0 {
				label = strconv.Itoa(class) + "xx"
			}
			send(requestsMetric, prometheus.CounterValue, float64(stats.Requests[class].Load()), label)
		}
		send(activeMetric, prometheus.GaugeValue, float64(stats.Active.Load()))
		send(retriesMetric, prometheus.CounterValue, float64(stats.Retries.Load()))
		send(upgradesMetric, prometheus.CounterValue, float64(stats.Upgrades.Load()))
		send(http2Metric, prometheus.GaugeValue, float64(stats.HTTP2.Load()))
	}
}
