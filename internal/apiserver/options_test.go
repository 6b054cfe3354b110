package apiserver

import (
	"strings"
	"testing"
)

func TestOptionsNameTheFlag(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Options)
		want   string // "" if it is right
	}{
		{"defaults", func(*Options) {}, ""},
		{"listen without a port", func(o *Options) { o.Listen = "127.0.0.1" }, "--listen"},
		{"listen with a name as port", func(o *Options) { o.Listen = "127.0.0.1:https" }, "--listen"},
		{"loopback advertised", func(o *Options) { o.AdvertiseAddress = "127.0.0.1" }, "--advertise-address"},
		{"no address advertised", func(o *Options) { o.AdvertiseAddress = "here" }, "--advertise-address"},
		{"a range that is none", func(o *Options) { o.ServiceCIDRs = []string{"10.96.0.0"} }, "--service-cluster-ip-range"},
		{"host bits", func(o *Options) { o.ServiceCIDRs = []string{"10.96.0.1/16"} }, "did you mean 10.96.0.0/16"},
		{"two IPv4 ranges", func(o *Options) { o.ServiceCIDRs = []string{"10.96.0.0/16", "10.97.0.0/16"} }, "--service-cluster-ip-range"},
		{"IPv6 first", func(o *Options) { o.ServiceCIDRs = []string{"fd00:96::/112", "10.96.0.0/16"} }, ""},
		{"one range", func(o *Options) { o.ServiceCIDRs = []string{"10.96.0.0/24"} }, ""},
		{"a wide IPv6 range", func(o *Options) { o.ServiceCIDRs = []string{"fd00::/48"} }, "/64 or smaller"},
		{"a tiny range", func(o *Options) { o.ServiceCIDRs = []string{"10.96.0.0/31"} }, "too small"},
		{"ports the wrong way round", func(o *Options) { o.NodePorts = "32767-30000" }, "--service-node-port-range"},
		{"port zero", func(o *Options) { o.NodePorts = "0-100" }, "--service-node-port-range"},
		{"etcd without a scheme", func(o *Options) { o.Store.Servers = []string{"10.0.0.1:2379"} }, "--etcd-servers"},
		{"etcd key alone", func(o *Options) { o.Store.KeyFile = "x" }, "--etcd-keyfile"},
		{"etcd CA without servers", func(o *Options) { o.Store.CAFile = "x" }, "--etcd-servers"},
		{"no folder", func(o *Options) { o.DataDir = "" }, "--data-dir"},
		{"nothing in flight", func(o *Options) { o.MaxInFlight = 0 }, "--max-requests-inflight"},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts := DefaultOptions()
			c.change(&opts)
			err := opts.Validate()
			switch {
			case c.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}
