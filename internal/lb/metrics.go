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
	metricSession    = prometheus.NewDesc("portal_lb_bgp_session_up", "1 if the BGP session with a peer is up, else 0.", []string{"peer"}, nil)
	metricRoutes     = prometheus.NewDesc("portal_lb_bgp_announced_routes", "Routes that are announced to a peer by BGP.", []string{"peer"}, nil)
	metricFlaps      = prometheus.NewDesc("portal_lb_bgp_session_flaps_total", "BGP sessions with a peer that were up and got lost.", []string{"peer"}, nil)
	metricBGPFails   = prometheus.NewDesc("portal_lb_bgp_sync_failures_total", "Changes of BGP peers and routes that failed and were tried again.", nil, nil)
	metricPeersBad   = prometheus.NewDesc("portal_lb_bgp_config_stale", "1 if BGP's part of the ConfigMap can't be used, else 0.", nil, nil)
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
	b.balancing.collect(out)
	if b.speaker != nil {
		sessions, failures := b.speaker.Status()
		for _, st := range sessions {
			up := 0.0
			if st.Up {
				up = 1
			}
			gauge(metricSession, up, st.Peer.String())
			gauge(metricRoutes, float64(st.Routes), st.Peer.String())
			out <- prometheus.MustNewConstMetric(metricFlaps, prometheus.CounterValue, float64(st.Flaps), st.Peer.String())
		}
		counter(metricBGPFails, failures)
		b.peers.mu.Lock()
		stale := b.peers.err != nil
		b.peers.mu.Unlock()
		flag(metricPeersBad, stale)
	}
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
	ready := b.services.hasSynced() && b.namespaces.hasSynced() && b.claims.hasSynced() && b.config.hasSynced() && b.nodes.hasSynced()
	if b.announcer != nil || b.speaker != nil || b.Balancing != nil {
		ready = ready && b.slices.hasSynced()
	}
	if b.announcer != nil {
		ready = ready && b.leases.hasSynced()
	}
	return ready
}

var (
	metricListeners = prometheus.NewDesc("portal_lb_listeners", "Listeners that the balancing process of this node is configured with.", nil, nil)
	metricCaptured  = prometheus.NewDesc("portal_lb_captured_ports", "Addresses and ports whose packets are led to the balancing process of this node.", nil, nil)
	metricFilters   = prometheus.NewDesc("portal_lb_source_filters", "Addresses and ports that only some sources may use, by rules of this node.", nil, nil)
	metricIngresses = prometheus.NewDesc("portal_lb_ingresses", "Ingresses that are served.", nil, nil)
	metricProblems  = prometheus.NewDesc("portal_lb_problems", "Problems of Services and Ingresses, which are in their Events.", nil, nil)
	metricUnsynced  = prometheus.NewDesc("portal_lb_balancing_out_of_sync", "1 if the balancing process or the rules that lead to it are not as they should be, else 0.", nil, nil)
	metricUnsyncs   = prometheus.NewDesc("portal_lb_balancing_failures_total", "Passes that failed to bring the balancing process and the rules that lead to it in sync.", nil, nil)
)

// collect sends the metrics of the proxying way.
func (p *balancing) collect(out chan<- prometheus.Metric) {
	if p.Balancing == nil {
		return
	}
	p.mu.Lock()
	s := p.stats
	p.mu.Unlock()
	for d, v := range map[*prometheus.Desc]int{metricListeners: s.listeners, metricCaptured: s.captured, metricFilters: s.filters, metricIngresses: s.ingresses, metricProblems: s.problems} {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v))
	}
	failing := 0.0
	if s.failing {
		failing = 1
	}
	out <- prometheus.MustNewConstMetric(metricUnsynced, prometheus.GaugeValue, failing)
	out <- prometheus.MustNewConstMetric(metricUnsyncs, prometheus.CounterValue, float64(s.failures))
}
