package learn

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"portal/internal/plan"
	"portal/internal/trace"
)

func TestReadKubeProxy(t *testing.T) {
	pods := []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	for _, c := range []struct {
		name, text  string
		given, want trace.Settings
		says        string
	}{
		{"kubeadm's", "kind: KubeProxyConfiguration\nmode: \"\"\nclusterCIDR: 10.244.0.0/16\n", trace.Settings{}, trace.Settings{Mode: "iptables", ClusterCIDRs: pods}, "mode iptables"},
		{
			"nftables", "kind: KubeProxyConfiguration\nmode: nftables\nnodePortAddresses: [primary]\nnftables: {masqueradeAll: true}\n", trace.Settings{},
			trace.Settings{Mode: "nftables", NodePorts: plan.NodePortAddresses{Primary: true}, MasqueradeAll: true}, "mode nftables",
		},
		{"flags win", "kind: KubeProxyConfiguration\nmode: ipvs\nclusterCIDR: 10.0.0.0/8\n", trace.Settings{Mode: "nftables", ClusterCIDRs: pods}, trace.Settings{Mode: "nftables", ClusterCIDRs: pods}, "mode nftables"},
		{"another file", "kind: Other\nmode: ipvs\n", trace.Settings{}, trace.Settings{}, ""},
		{"no file", "", trace.Settings{}, trace.Settings{}, ""},
	} {
		got := c.given
		says := readKubeProxy(c.text, &got)
		if !reflect.DeepEqual(got, c.want) || !strings.Contains(says, c.says) || c.says == "" && says != "" {
			t.Errorf("%s: %+v, %q; want %+v, %q", c.name, got, says, c.want, c.says)
		}
	}
}
