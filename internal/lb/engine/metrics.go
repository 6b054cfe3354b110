package engine

import (
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/lb/config"
)

// The names follow those of Envoy's statistics: a listener's downstream is the client, a cluster is a pool, cx are connections.
var (
	ofListener = []string{"namespace", "name", "port", "listener"}
	ofPool     = []string{"namespace", "name", "port"}
	ofEndpoint = []string{"namespace", "name", "port", "endpoint"}

	listenerTotal      = desc("listener_downstream_cx_total", "Connections that clients opened.", ofListener)
	listenerActive     = desc("listener_downstream_cx_active", "Connections of clients that are open.", ofListener)
	listenerOverflow   = desc("listener_downstream_cx_overflow_total", "Connections closed at once because the listener or the client has too many.", append(slices.Clip(ofListener), "limit"))
	listenerIdle       = desc("listener_downstream_cx_idle_timeout_total", "Connections closed because nothing passed for the idle timeout.", ofListener)
	listenerTLSErr     = desc("listener_ssl_connection_error_total", "TLS handshakes with clients that failed.", ofListener)
	listenerHeader     = desc("listener_proxy_protocol_error_total", "Connections from trusted proxies with a malformed PROXY header.", ofListener)
	listenerIn         = desc("listener_downstream_cx_rx_bytes_total", "Bytes from clients of connections that are passed on.", ofListener)
	listenerOut        = desc("listener_downstream_cx_tx_bytes_total", "Bytes to clients of connections that are passed on.", ofListener)
	listenerInfo       = desc("listener_info", "1; the labels say what the listener is.", append(slices.Clip(ofListener), "kind", "protocol"))
	poolRetries        = desc("cluster_upstream_rq_retry_total", "Connections and requests given to another endpoint after one failed.", ofPool)
	poolNone           = desc("cluster_upstream_cx_none_healthy_total", "Connections and requests for which the pool had no endpoint.", ofPool)
	poolBusy           = desc("cluster_upstream_cx_overflow_total", "Connections and requests refused because every endpoint has as many as it may have.", ofPool)
	poolMembers        = desc("cluster_membership_total", "Endpoints of the pool.", ofPool)
	poolHealthy        = desc("cluster_membership_healthy", "Endpoints of the pool that are healthy and not ejected.", ofPool)
	endpointTotal      = desc("endpoint_upstream_cx_total", "Connections or requests given to the endpoint.", ofEndpoint)
	endpointActive     = desc("endpoint_upstream_cx_active", "Connections or requests that the endpoint has.", ofEndpoint)
	endpointFailed     = desc("endpoint_upstream_cx_connect_fail_total", "Connections to the endpoint that failed.", ofEndpoint)
	endpointErrors     = desc("endpoint_upstream_rq_error_total", "Requests that the endpoint broke off, or answered with 502, 503 or 504.", ofEndpoint)
	endpointEjections  = desc("endpoint_outlier_detection_ejections_total", "Times that the endpoint was ejected for failures in a row.", ofEndpoint)
	endpointEjected    = desc("endpoint_outlier_detection_ejected", "1 while the endpoint is ejected, else 0.", ofEndpoint)
	endpointHealthy    = desc("endpoint_health_check_healthy", "1 if the endpoint's checks say that it is healthy, or if it has none, else 0.", ofEndpoint)
	endpointChecks     = desc("endpoint_health_check_attempt_total", "Health checks of the endpoint.", ofEndpoint)
	endpointCheckFails = desc("endpoint_health_check_failure_total", "Health checks of the endpoint that failed.", ofEndpoint)
	endpointIn         = desc("endpoint_upstream_cx_tx_bytes_total", "Bytes sent to the endpoint.", ofEndpoint)
	endpointOut        = desc("endpoint_upstream_cx_rx_bytes_total", "Bytes received from the endpoint.", ofEndpoint)
	bytesSpliced       = desc("spliced_bytes_total", "Bytes passed on inside the kernel.", nil)
	bytesCopied        = desc("copied_bytes_total", "Bytes passed on through the process.", nil)
)

func desc(name, help string, labels []string) *prometheus.Desc {
	return prometheus.NewDesc("portal_lb_"+name, help, labels, nil)
}

// collector reads the counters when metrics are asked for.
type collector struct{ e *Engine }

func (c collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(out chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter(bytesSpliced, c.e.copied.spliced.Load())
	counter(bytesCopied, c.e.copied.copied.Load())
	c.e.mu.Lock()
	listeners := slices.Collect(maps.Values(c.e.listeners))
	c.e.mu.Unlock()
	tags := map[config.Owner]map[string]string{}
	for _, l := range listeners {
		cfg, n := l.state.Load().cfg, &l.counters
		labels := []string{cfg.Owner.Namespace, cfg.Owner.Name, strconv.Itoa(int(cfg.Address.Port())), cfg.Name}
		with := func(more ...string) []string { return append(slices.Clip(labels), more...) }
		counter(listenerTotal, n.total.Load(), labels...)
		gauge(listenerActive, float64(n.active.Load()), labels...)
		counter(listenerOverflow, n.overLimit.Load(), with("listener")...)
		counter(listenerOverflow, n.overClientLimit.Load(), with("client")...)
		counter(listenerIdle, n.idleTimeouts.Load(), labels...)
		counter(listenerTLSErr, n.handshakeFailures.Load(), labels...)
		counter(listenerHeader, n.headerFailures.Load(), labels...)
		counter(listenerIn, n.bytesIn.Load(), labels...)
		counter(listenerOut, n.bytesOut.Load(), labels...)
		gauge(listenerInfo, 1, with(cfg.Owner.Kind, string(cfg.Protocol))...)
		if len(cfg.Tags) > 0 {
			tags[cfg.Owner] = cfg.Tags
		}
	}
	for owner, t := range tags {
		out <- tagsMetric(owner, t)
	}
	c.pools(counter, gauge)
}

func (c collector) pools(counter func(*prometheus.Desc, uint64, ...string), gauge func(*prometheus.Desc, float64, ...string)) {
	checks := c.e.checks.Results()
	seen := map[string]bool{}
	pools := *c.e.pools.Load()
	for _, name := range slices.Sorted(maps.Keys(pools)) { // so that the same one has the longer label each time
		p := pools[name]
		cfg := p.Config()
		labels := []string{cfg.Owner.Namespace, cfg.Owner.Name, cfg.Port}
		// Several pools of one port, for example of an Ingress and of the Service itself, are distinguished by the pool's name.
		if id := strings.Join(labels, "\x00"); seen[id] {
			labels[2] = name
		} else {
			seen[id] = true
		}
		counter(poolRetries, p.Counters.Retries.Load(), labels...)
		counter(poolNone, p.Counters.NoEndpoint.Load(), labels...)
		counter(poolBusy, p.Counters.Busy.Load(), labels...)
		healthy := 0
		members := p.Endpoints()
		for _, e := range members {
			if e.Healthy() && !e.Ejected() {
				healthy++
			}
			l := append(slices.Clip(labels), net.JoinHostPort(e.Address.Addr().String(), strconv.Itoa(int(e.Address.Port()))))
			counter(endpointTotal, e.Counters.Begun.Load(), l...)
			gauge(endpointActive, float64(e.Active()), l...)
			counter(endpointFailed, e.Counters.ConnectFailures.Load(), l...)
			counter(endpointErrors, e.Counters.Failures.Load(), l...)
			counter(endpointEjections, e.Counters.Ejections.Load(), l...)
			gauge(endpointEjected, number(e.Ejected()), l...)
			gauge(endpointHealthy, number(e.Healthy()), l...)
			if r, ok := checks[name][e.Address]; ok {
				counter(endpointChecks, r.Checks, l...)
				counter(endpointCheckFails, r.Failures, l...)
			}
			counter(endpointIn, e.Counters.BytesIn.Load(), l...)
			counter(endpointOut, e.Counters.BytesOut.Load(), l...)
		}
		gauge(poolMembers, float64(len(members)), labels...)
		gauge(poolHealthy, float64(healthy), labels...)
	}
}

// tagsMetric shows tags as labels, as kube-state-metrics shows those of objects.
func tagsMetric(owner config.Owner, tags map[string]string) prometheus.Metric {
	names, values := []string{"namespace", "name"}, []string{owner.Namespace, owner.Name}
	for _, k := range slices.Sorted(maps.Keys(tags)) {
		name := "tag_" + strings.Map(func(r rune) rune {
			if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
				return r
			}
			return '_'
		}, k)
		if !slices.Contains(names, name) {
			names, values = append(names, name), append(values, strings.ToValidUTF8(tags[k], "\uFFFD"))
		}
	}
	return prometheus.MustNewConstMetric(desc("tags", "1; the labels are the tags that a user gave the balancer.", names), prometheus.GaugeValue, 1, values...)
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
