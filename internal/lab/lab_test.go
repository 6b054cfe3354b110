package lab

import (
	"strings"
	"testing"
)

// TestValidate: what is wrong with options is said before anything is made, and names the flag.
func TestValidate(t *testing.T) {
	for _, c := range []struct {
		change func(*Options)
		want   string // empty: nothing is wrong
	}{
		{func(*Options) {}, ""},
		{func(o *Options) { o.Nodes = 0 }, "--nodes 0: must be from 1 to 200"},
		{func(o *Options) { o.Nodes = 201 }, "--nodes 201: must be"},
		{func(o *Options) { o.Zones = 4 }, "--zones 4: must be from 0 to 3"},
		{func(o *Options) { o.Name = "Lab" }, "--name: "},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.244.0.0/16", "fd00:244::/56"} }, ""},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.244.0.0/22"} }, ""},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.244.0.0/23"} }, "--cluster-cidr 10.244.0.0/23: has no room for 3 nodes, each of which gets a /24"},
		{func(o *Options) { o.ClusterCIDRs, o.Nodes = []string{"10.244.0.0/25"}, 1 }, "has no room for 1 nodes"},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.244.0.0/16", "fd00:244::/63"} }, "--cluster-cidr fd00:244::/63: has no room"},
		{func(o *Options) {
			o.ClusterCIDRs, o.ServerArgs = []string{"10.244.0.0/25"}, []string{"--node-cidr-mask-size-ipv4=28"}
		}, ""},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.244.0.0"} }, `--cluster-cidr "10.244.0.0": must be a range like 10.244.0.0/16`},
		{func(o *Options) { o.ClusterCIDRs = []string{"10.244.0.0/16", "10.245.0.0/16"} }, "--cluster-cidr 10.244.0.0/16,10.245.0.0/16: has more than one range of a family"},
		{func(o *Options) { o.ClusterCIDRs = []string{"192.168.0.0/16"} }, "--cluster-cidr 192.168.0.0/16: overlaps the lab's own network, 192.168.100.0/24"},
		{func(o *Options) { o.ServiceCIDRs = []string{"10.300.0.0/16"} }, `--service-cluster-ip-range "10.300.0.0/16": must be a range like 10.96.0.0/16`},
		{func(o *Options) { o.ServiceCIDRs, o.ClusterCIDRs = []string{"10.96.0.0/16"}, []string{"10.0.0.0/8"} }, "--cluster-cidr 10.0.0.0/8: overlaps --service-cluster-ip-range, 10.96.0.0/16"},
	} {
		o := Options{Name: "lab", Nodes: 3}
		c.change(&o)
		err := o.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.HasPrefix(err.Error(), c.want) && !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}
