package main

import (
	"cmp"
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"

	"portal/internal/dns/corefile"
	"portal/internal/dns/forward"
)

// readCorefile takes settings from a Corefile that no flag gives.
func (o *dnsOptions) readCorefile(cmd *cobra.Command) error {
	raw, err := os.ReadFile(o.corefile)
	if err != nil {
		return err
	}
	c, err := corefile.Parse(o.corefile, string(raw))
	if err != nil {
		return err
	}
	k := c.Kubernetes
	given := func(flag string) bool { return cmd.Flags().Changed(flag) }
	set := func(flag string, when bool, apply func()) {
		if when && !given(flag) {
			apply()
		}
	}
	port := "53"
	if c.Port != 0 {
		port = fmt.Sprint(c.Port)
	}
	set("listen", true, func() {
		o.listen = []string{":" + port}
		if len(c.Bind) > 0 {
			o.listen = nil
			for _, b := range c.Bind {
				o.listen = append(o.listen, net.JoinHostPort(b, port))
			}
		}
	})
	set("zone", true, func() { o.zones, o.reverse = k.Zones, k.Reverse })
	set("ttl", true, func() {
		o.ttl = 5 // the plugin's own default
		if k.TTL >= 0 {
			o.ttl = k.TTL
		}
	})
	set("pods", true, func() { o.pods = k.Pods })
	set("kubeconfig", k.Kubeconfig != "", func() { o.kubeconfig, o.context = k.Kubeconfig, k.Context })
	o.endpoint = k.Endpoint
	set("namespaces", len(k.Namespaces) > 0, func() { o.namespaces = k.Namespaces })
	set("labels", k.Labels != "", func() { o.selector = k.Labels })
	set("namespace-labels", k.NamespaceLabels != "", func() { o.nsSelector = k.NamespaceLabels })
	set("endpoint-pod-names", k.EndpointPodNames, func() { o.endpointPodNames = true })
	set("no-endpoints", k.NoEndpoints, func() { o.noEndpoints = true })
	set("ignore-empty-service", k.IgnoreEmpty, func() { o.ignoreEmpty = true })
	set("fallthrough", true, func() { o.fallthroughs = k.Fallthrough })
	set("upstream", true, func() {
		o.forwards, o.refused = c.Forwards, c.Refused
		if o.forwards == nil {
			o.upstreams = []string{"none"}
		}
	})
	o.hosts = c.Hosts
	for i := range c.Forwards {
		f := &c.Forwards[i]
		o.maxWaiting = max(o.maxWaiting, f.MaxConcurrent)
		if given("cache-size") {
			f.Cache = cmp.Or(f.Cache, &corefile.Cache{MinTTL: forward.Defaults().MinTTL, MaxTTL: forward.Defaults().MaxTTL, MinNegativeTTL: forward.Defaults().MinNegativeTTL, MaxNegativeTTL: forward.Defaults().MaxNegativeTTL})
			f.Cache.Entries = 0 // what the flag says
		}
		if given("serve-stale") && f.Cache != nil {
			f.Cache.Stale = o.stale
		}
	}
	set("max-udp-size", c.BufSize != 0, func() { o.maxUDPSize = c.BufSize })
	set("autopath", c.Autopath, func() { o.autopath = true })
	set("search", c.Autopath, func() { o.search = forward.SearchPath("/etc/resolv.conf") })
	set("log-queries", c.Log, func() { o.logQueries = true })
	set("health-bind-address", c.Health != "", func() { o.health = c.Health })
	set("ready-bind-address", c.Ready != "", func() { o.ready = c.Ready })
	set("metrics-bind-address", c.Prometheus != "", func() { o.metrics = c.Prometheus })
	set("allow-transfer", len(c.TransferTo) > 0, func() {
		o.allowTransfer = nil
		for _, t := range c.TransferTo {
			if t == "*" {
				o.allowTransfer = append(o.allowTransfer, "0.0.0.0/0", "::/0")
			} else {
				o.allowTransfer = append(o.allowTransfer, t)
			}
		}
	})
	return nil
}
