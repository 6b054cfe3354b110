package lb

import (
	"math/big"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	metricAddresses  = prometheus.NewDesc("portal_lb_pool_addresses", "Addresses of a pool.", []string{"pool"}, nil)
	metricClaimed    = prometheus.NewDesc("portal_lb_pool_addresses_in_use", "Addresses of a pool that Services have, as the leader knows.", []string{"pool"}, nil)
	metricWaiting    = prometheus.NewDesc("portal_lb_services_without_address", "Services of type LoadBalancer that could not get an address, as the leader knows.", nil, nil)
	metricLeader     = prometheus.NewDesc("portal_lb_leader", "1 if this process is the leader of its class, which allocates addresses, else 0.", nil, nil)
	metricFailures   = prometheus.NewDesc("portal_lb_sync_failures_total", "Passes over all Services that failed and were tried again.", nil, nil)
	metricPoolsBad   = prometheus.NewDesc("portal_lb_config_stale", "1 if the ConfigMap of pools can't be used, else 0.", nil, nil)
	metricBlocked    = prometheus.NewDesc("portal_lb_config_unknown", "1 if the ConfigMap of pools could not be used since this process started: while it leads, no address is allocated or released. Else 0.", nil, nil)
	metricAnnounced  = prometheus.NewDesc("portal_lb_announced_addresses", "Addresses that this node announces.", nil, nil)
	metricMembers    = prometheus.NewDesc("portal_lb_members", "Nodes that are alive and announce addresses, as this node knows.", nil, nil)
	metricAnswers    = prometheus.NewDesc("portal_lb_l2_responses_total", "ARP requests and neighbour solicitations that this node answered.", nil, nil)
	metricGratuitous = prometheus.NewDesc("portal_lb_l2_gratuitous_total", "Unsolicited announcements of addresses, by ARP or neighbour advertisements.", nil, nil)
	metricContests   = prometheus.NewDesc("portal_lb_l2_conflicts_total", "Packets by which another machine announced an address that this node announces.", nil, nil)
)

// Describe and Collect make a Balancer a prometheus.Collector.
func (b *Balancer) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(b, out) }

// Collect sends the metrics as they are now.
func (b *Balancer) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	flag := func(d *prometheus.Desc, yes bool) {
		v := 0.0
		if yes {
			v = 1
		}
		gauge(d, v)
	}
	counter := func(d *prometheus.Desc, v uint64) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v))
	}
	stats := b.controller.Stats()
	pools, unknown := b.allPools()
	for _, p := range pools {
		size, _ := new(big.Float).SetInt(p.Size()).Float64()
		gauge(metricAddresses, size, p.Name)
		if stats.Leading {
			gauge(metricClaimed, float64(stats.Claimed[p.Name]), p.Name)
		}
	}
	flag(metricLeader, stats.Leading)
	if stats.Leading {
		gauge(metricWaiting, float64(stats.Waiting))
	}
	counter(metricFailures, uint64(stats.Failures))
	b.mu.Lock()
	bad := b.poolsErr != nil
	b.mu.Unlock()
	flag(metricPoolsBad, bad)
	flag(metricBlocked, unknown != nil)
	if b.announcer == nil {
		return
	}
	own, members := b.announcer.Status()
	gauge(metricAnnounced, float64(len(own)))
	gauge(metricMembers, float64(members))
	answers, gratuitous, contests := b.responder.Counts()
	counter(metricAnswers, answers)
	counter(metricGratuitous, gratuitous)
	counter(metricContests, contests)
}

// Ready says whether the first lists are in.
func (b *Balancer) Ready() bool {
	ready := b.services.hasSynced() && b.namespaces.hasSynced() && b.claims.hasSynced() && b.config.hasSynced()
	if b.announcer != nil {
		ready = ready && b.slices.hasSynced() && b.nodes.hasSynced() && b.leases.hasSynced()
	}
	return ready
}
