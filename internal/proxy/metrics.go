package proxy

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
)

// metrics are kube-proxy's where the meaning is the same, and our own.
type metrics struct {
	duration, full, partial, programming *prometheus.HistogramVec
	last, lastQueued, noLocal            *prometheus.GaugeVec
	servicesPending, slicesPending       prometheus.Gauge
	servicesTotal, slicesTotal           prometheus.Counter
	healthz, livez                       *prometheus.CounterVec
	failed                               map[string]*prometheus.CounterVec // by the names that modes give

	failures, drifts, fallbacks prometheus.Counter
	refused, problems, foreign  prometheus.Gauge
	lost                        *lostTotals
	waiting                     [2]int
}

func newMetrics(modes []backend.Mode) *metrics {
	family, code := []string{"ip_family"}, []string{"code"}
	m := &metrics{
		duration:    histogram("sync_proxy_rules_duration_seconds", "Duration of syncs, in seconds.", latency()),
		full:        histogram("sync_full_proxy_rules_duration_seconds", "Duration of full syncs, in seconds.", latency()),
		partial:     histogram("sync_partial_proxy_rules_duration_seconds", "Duration of incremental syncs, in seconds.", latency()),
		programming: histogram("network_programming_duration_seconds", "Time from a change of endpoints in the cluster until it is in sync on this node, in seconds.", programming()),
		last:        gauges("sync_proxy_rules_last_timestamp_seconds", "Time of the last successful sync, in seconds since 1970.", family),
		lastQueued:  gauges("sync_proxy_rules_last_queued_timestamp_seconds", "Time when a sync was last queued, in seconds since 1970.", family),
		noLocal:     gauges("sync_proxy_rules_no_local_endpoints_total", "Ports that lose traffic because a policy says Local and no endpoint is here.", []string{"traffic_policy", "ip_family"}),

		servicesPending: gauge("kubeproxy_sync_proxy_rules_service_changes_pending", "Changes of Services that are not in sync yet."),
		slicesPending:   gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Changes of EndpointSlices that are not in sync yet."),
		servicesTotal:   counter("kubeproxy_sync_proxy_rules_service_changes_total", "Changes of Services."),
		slicesTotal:     counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices."),
		healthz:         counters("proxy_healthz_total", "Answers of /healthz.", code),
		livez:           counters("proxy_livez_total", "Answers of /livez.", code),
		failed:          map[string]*prometheus.CounterVec{},

		failures:  counter("portal_proxy_sync_failures_total", "Syncs that failed, in any mode."),
		drifts:    counter("portal_proxy_drifts_total", "Times that rules were found changed by somebody else."),
		fallbacks: counter("portal_proxy_fallbacks_total", "Syncs that the mode could make only by its second, slower way."),
		refused:   gauge("portal_proxy_refused_frontends", "Frontends that the kernel refused."),
		foreign:   gauge("portal_proxy_foreign_rules", "Chains, tables and virtual servers that another proxy left, as found at the start."),
		problems:  gauge("portal_proxy_network_problems", "Settings and missing routes of this machine because of which packets to Services are lost."),
	}
	for _, mode := range modes {
		t := mode.Traits()
		for _, name := range []string{t.FailureMetric, t.PartialFailureMetric} {
			if name != "" && m.failed[name] == nil {
				m.failed[name] = counters(name, "Syncs that failed in the mode "+mode.Name()+".", family)
			}
		}
	}
	m.lost = &lostTotals{}
	return m
}

const namespace = "kubeproxy"

func histogram(name, help string, buckets []float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, []string{"ip_family"})
}

func gauges(name, help string, labels []string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func counters(name, help string, labels []string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func gauge(name, help string) prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func latency() []float64 { return prometheus.ExponentialBuckets(0.001, 2, 15) }

// programming has the steps that the service level objective of Kubernetes is read with.
func programming() []float64 {
	out := []float64{0.25, 0.5}
	for _, run := range []struct {
		from, step float64
		n          int
	}{{1, 1, 59}, {60, 5, 12}, {120, 30, 7}} {
		out = append(out, prometheus.LinearBuckets(run.from, run.step, run.n)...)
	}
	return out
}

// Register adds the proxy's metrics to a registry.
func (p *Proxy) Register(r prometheus.Registerer) error {
	m := p.metrics
	for _, c := range []prometheus.Collector{
		m.duration, m.full, m.partial, m.programming, m.last, m.lastQueued, m.noLocal, m.servicesPending, m.slicesPending, m.servicesTotal,
		m.slicesTotal, m.healthz, m.livez, m.failures, m.drifts, m.fallbacks, m.refused, m.problems, m.foreign, (*counts)(p),
	} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	for _, c := range m.failed {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	p.Health.answers = func(path string, code int) {
		if path == "/livez" {
			m.livez.WithLabelValues(strconv.Itoa(code)).Inc()
		} else {
			m.healthz.WithLabelValues(strconv.Itoa(code)).Inc()
		}
	}
	return nil
}

// pending adds to what waits; negative: nothing waits any more.
func (m *metrics) pending(services, slices int) {
	m.waiting[0], m.waiting[1] = max(0, m.waiting[0]+services), max(0, m.waiting[1]+slices)
	if services < 0 {
		m.waiting = [2]int{}
	}
	m.servicesPending.Set(float64(m.waiting[0]))
	m.slicesPending.Set(float64(m.waiting[1]))
}

func (m *metrics) changed(services, slices int) {
	m.servicesTotal.Add(float64(services))
	m.slicesTotal.Add(float64(slices))
}

func (m *metrics) queued(families []intent.Family, now time.Time) {
	for _, f := range families {
		m.lastQueued.WithLabelValues(familyName(f)).Set(seconds(now))
	}
}

func (m *metrics) syncFailed(t backend.Traits, families []intent.Family, full bool) {
	m.failures.Inc()
	name := t.PartialFailureMetric
	if full {
		name = t.FailureMetric
	}
	if c := m.failed[name]; c != nil {
		for _, f := range families {
			c.WithLabelValues(familyName(f)).Inc()
		}
	}
}

func (m *metrics) synced(d *plan.Delta, s *plan.Snapshot, families []intent.Family, start, now time.Time, triggers []trigger) {
	share := shares(d, s, families)
	for _, f := range families {
		name := familyName(f)
		m.last.WithLabelValues(name).Set(seconds(now))
		m.noLocal.WithLabelValues("internal", name).Set(float64(m.lost.of(f).Internal))
		m.noLocal.WithLabelValues("external", name).Set(float64(m.lost.of(f).External))
		part, took := share[f]
		if !took {
			continue
		}
		seconds := part * now.Sub(start).Seconds()
		m.duration.WithLabelValues(name).Observe(seconds)
		if d.Full {
			m.full.WithLabelValues(name).Observe(seconds)
		} else {
			m.partial.WithLabelValues(name).Observe(seconds)
		}
	}
	for _, t := range triggers {
		m.programming.WithLabelValues(familyName(t.family)).Observe(now.Sub(t.at).Seconds())
	}
}

// shares divides a sync among the families that it was about. Both are programmed together; kube-proxy, whose figures these
// are to be compared with, programs one after the other.
func shares(d *plan.Delta, s *plan.Snapshot, families []intent.Family) map[intent.Family]float64 {
	count, total := map[intent.Family]int{}, 0
	add := func(f intent.Family) { count[f]++; total++ }
	switch {
	case d.Full:
		for k := range s.Frontends {
			add(k.Family)
		}
		for _, f := range families {
			add(f)
		}
	case d.Facts:
		for _, f := range families {
			add(f)
		}
	}
	for i := range d.Frontends {
		add(d.Frontends[i].Family)
	}
	out := map[intent.Family]float64{}
	for f, n := range count {
		out[f] = float64(n) / float64(total)
	}
	return out
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// lostTotals sums what all plans lose, as they come and go.
type lostTotals struct{ v4, v6 plan.Lost }

func (l *lostTotals) of(f intent.Family) *plan.Lost {
	if f == intent.IPv6 {
		return &l.v6
	}
	return &l.v4
}

func (l *lostTotals) replace(old, next *plan.Service) {
	add := func(s *plan.Service, by int) {
		if s == nil {
			return
		}
		for f, lost := range s.Lost {
			l.of(f).Internal += by * lost.Internal
			l.of(f).External += by * lost.External
		}
	}
	add(old, -1)
	add(next, 1)
}

// counts reads sizes when they are asked for.
type counts Proxy

var (
	servicesDesc  = prometheus.NewDesc("portal_proxy_services", "Services that this node proxies.", nil, nil)
	frontendsDesc = prometheus.NewDesc("portal_proxy_frontends", "Addresses and ports on which Services answer on this node.", nil, nil)
	modeDesc      = prometheus.NewDesc("portal_proxy_mode", "The mode that runs: 1.", []string{"mode"}, nil)
)

func (*counts) Describe(c chan<- *prometheus.Desc) {
	c <- servicesDesc
	c <- frontendsDesc
	c <- modeDesc
}

func (n *counts) Collect(c chan<- prometheus.Metric) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.snap != nil {
		c <- prometheus.MustNewConstMetric(servicesDesc, prometheus.GaugeValue, float64(len(n.snap.Services)))
		c <- prometheus.MustNewConstMetric(frontendsDesc, prometheus.GaugeValue, float64(len(n.snap.Frontends)))
	}
	if n.status.Mode != "" {
		c <- prometheus.MustNewConstMetric(modeDesc, prometheus.GaugeValue, 1, n.status.Mode)
	}
}
