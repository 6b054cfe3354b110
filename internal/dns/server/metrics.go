package server

import (
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/dns/wire"
)

// proto is the protocol of a query.
type proto uint8

const (
	protoUDP proto = iota
	protoTCP
	protoTLS
	protoHTTPS
	protos
)

func (p proto) stream() bool { return p != protoUDP }

func (p proto) String() string { return [...]string{"udp", "tcp", "tcp", "https"}[p] }

func (p proto) scheme() string { return [...]string{"dns", "dns", "tls", "https"}[p] }

// source is what an answer comes from, by the names of CoreDNS' plugins.
type source uint8

const (
	sourceServer source = iota
	sourceZone
	sourceCache
	sourceForward
	sourceHosts
	sources
)

func (s source) String() string { return [...]string{"", "kubernetes", "cache", "forward", "hosts"}[s] }

// maxZones is how many zones are counted separately; the last place is for all others.
const maxZones = 6

// types have a counter each; the others share one, as in CoreDNS.
var types = [...]struct {
	code uint16
	name string
}{
	{wire.TypeA, "A"}, {wire.TypeAAAA, "AAAA"}, {wire.TypeSRV, "SRV"}, {wire.TypePTR, "PTR"}, {wire.TypeTXT, "TXT"},
	{wire.TypeSOA, "SOA"}, {wire.TypeNS, "NS"}, {wire.TypeCNAME, "CNAME"}, {15, "MX"}, {65, "HTTPS"}, {255, "ANY"},
	{43, "DS"}, {48, "DNSKEY"}, {wire.TypeAXFR, "AXFR"}, {wire.TypeIXFR, "IXFR"},
}

const typeOther = len(types)

var typeIndex = func() (t [256]uint8) {
	for i := range t {
		t[i] = uint8(typeOther)
	}
	for i, e := range types {
		t[e.code] = uint8(i)
	}
	return t
}()

var rcodes = [...]string{"NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "BADVERS"}

const rcodeBadVers = len(rcodes) - 1

// timeBuckets are CoreDNS' for request_duration_seconds.
var timeBuckets = prometheus.ExponentialBuckets(0.00025, 2, 16)

// sizeBuckets are CoreDNS' for message sizes.
var sizeBuckets = []float64{0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16e3, 32e3, 48e3, 64e3}

// counters belong to one worker, which holds the lock while it answers a batch, so that counting is an addition.
type counters struct {
	mu        sync.Mutex
	requests  [maxZones][typeOther + 1][2]uint64
	responses [maxZones][sources][len(rcodes) + 1]uint64
	do        uint64
	dropped   uint64
	limited   uint64
	unsent    uint64
	times     histogram
	inSize    histogram
	outSize   histogram
}

type histogram struct {
	counts [17]uint64
	sum    uint64
}

func (h *histogram) observe(i int, n, v uint64) {
	h.counts[i] += n
	h.sum += v
}

func (c *counters) response(q *wire.Query, out []byte, zone int, from netip.Addr, src source) {
	typ, family := typeOther, 0
	if zone < 0 {
		zone = maxZones - 1
	}
	if q.QType < 256 {
		typ = int(typeIndex[q.QType])
	}
	if !from.Is4() {
		family = 1
	}
	rcode := len(rcodes)
	switch {
	case q.EDNS && q.Version != 0: // its code is an extended one
		rcode = rcodeBadVers
	case len(out) > 3 && int(out[3]&15) < rcodeBadVers:
		rcode = int(out[3] & 15)
	}
	c.requests[zone][typ][family]++
	c.responses[zone][src][rcode]++
	if q.DO {
		c.do++
	}
	c.inSize.observe(bucket(len(q.Raw)), 1, uint64(len(q.Raw)))
	c.outSize.observe(bucket(len(out)), 1, uint64(len(out)))
}

func bucket(size int) int {
	for i, b := range sizeBuckets {
		if size <= int(b) {
			return i
		}
	}
	return len(sizeBuckets)
}

// spent records that n queries were answered within a time.
func (c *counters) spent(n int, d time.Duration) {
	i, limit := 0, 250*time.Microsecond
	for i < len(timeBuckets) && d > limit {
		limit *= 2
		i++
	}
	c.times.observe(i, uint64(n), uint64(n)*uint64(d))
}

// metrics adds up the workers' counters when they are collected.
type metrics struct {
	server string
	zones  []string

	mu    sync.Mutex
	live  map[*counters]proto
	ended [protos]*counters // sums of closed connections

	refusedConns     prometheus.Counter
	refusedRecursion prometheus.Counter
	evicted          prometheus.Counter
	latency          *prometheus.HistogramVec
	apiUp            *prometheus.GaugeVec
	apiSince         *prometheus.GaugeVec
}

func newMetrics(server string, zones []string) *metrics {
	m := &metrics{server: server, zones: zones, live: map[*counters]proto{}}
	for p := range m.ended {
		m.ended[p] = &counters{}
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m.refusedConns = counter("portal_dns_connections_refused_total", "Number of connections closed because there were too many.")
	m.refusedRecursion = counter("portal_dns_recursion_refused_total", "Number of queries for names outside the cluster that were refused because --allow-recursion does not include the client.")
	m.evicted = counter("coredns_forward_max_concurrent_rejects_total", "Number of queries that failed because too many waited for upstreams.")
	m.latency = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "coredns_kubernetes_dns_programming_duration_seconds", Buckets: prometheus.ExponentialBuckets(0.001, 2, 20),
		Help: "Time from a change of endpoints until it is answered, in seconds.",
	}, []string{"service_kind"})
	m.apiUp = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "portal_dns_api_connected", Help: "Whether a resource is being watched (1), or its last known state is served (0)."}, []string{"resource"})
	m.apiSince = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "portal_dns_api_changed_timestamp_seconds", Help: "Unix time of the last change of portal_dns_api_connected."}, []string{"resource"})
	return m
}

func (m *metrics) counters(p proto) *counters {
	c := &counters{}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live[c] = p
	return c
}

// merge adds the counters of a worker that has ended to the sums.
func (m *metrics) merge(p proto, c *counters) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.live, c)
	m.ended[p].addAll(c)
}

// addAll adds other counters, whose lock the caller holds.
func (c *counters) addAll(o *counters) {
	for z := range c.requests {
		for t := range c.requests[z] {
			for f := range c.requests[z][t] {
				c.requests[z][t][f] += o.requests[z][t][f]
			}
		}
		for s := range c.responses[z] {
			for r := range c.responses[z][s] {
				c.responses[z][s][r] += o.responses[z][s][r]
			}
		}
	}
	c.do += o.do
	c.dropped += o.dropped
	c.limited += o.limited
	c.unsent += o.unsent
	for _, p := range [][2]*histogram{{&c.times, &o.times}, {&c.inSize, &o.inSize}, {&c.outSize, &o.outSize}} {
		for i := range p[0].counts {
			p[0].counts[i] += p[1].counts[i]
		}
		p[0].sum += p[1].sum
	}
}

// sums returns the counters so far, by protocol.
func (m *metrics) sums() [protos]*counters {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out [protos]*counters
	for p := range out {
		out[p] = &counters{}
		out[p].addAll(m.ended[p])
	}
	for c, p := range m.live {
		c.mu.Lock()
		out[p].addAll(c)
		c.mu.Unlock()
	}
	return out
}
