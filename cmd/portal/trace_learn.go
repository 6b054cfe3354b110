package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"

	"portal/internal/plan"
	"portal/internal/trace"
)

// learn finds out how the nodes' proxies are configured, as far as flags don't say, and returns where it learned that. In a lab the
// proxies are asked; elsewhere the ConfigMap that kubeadm writes for kube-proxy may be there.
func (o *traceOptions) learn(ctx context.Context, client kubernetes.Interface, s *trace.Settings) string {
	if o.lab != "" {
		running, err := findLab(o.lab)
		if err != nil || s.Mode != "" {
			return ""
		}
		for name := range running.Machines {
			m, err := running.Machine(name)
			if err != nil || !strings.HasPrefix(name, "node") {
				continue
			}
			if state, err := proxyState(ctx, m.Do); err == nil && slices.Contains(trace.ModeNames(), state.Mode) {
				s.Mode = state.Mode
				return fmt.Sprintf("all nodes have the proxy mode of %s, %s", name, state.Mode)
			}
		}
		return ""
	}
	found, err := client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, "kube-proxy", metav1.GetOptions{})
	if err != nil {
		return "" // it is not there, or not for us
	}
	return readKubeProxy(found.Data["config.conf"], s)
}

// readKubeProxy takes over what a KubeProxyConfiguration says and settings don't.
func readKubeProxy(text string, s *trace.Settings) string {
	var c struct {
		Kind              string   `json:"kind"`
		Mode              string   `json:"mode"`
		ClusterCIDR       string   `json:"clusterCIDR"`
		NodePortAddresses []string `json:"nodePortAddresses"`
		IPTables          struct {
			MasqueradeAll bool `json:"masqueradeAll"`
		} `json:"iptables"`
		NFTables struct {
			MasqueradeAll bool `json:"masqueradeAll"`
		} `json:"nftables"`
	}
	if yaml.Unmarshal([]byte(text), &c) != nil || c.Kind != "KubeProxyConfiguration" {
		return ""
	}
	if s.Mode == "" {
		if s.Mode = c.Mode; !slices.Contains(trace.ModeNames(), s.Mode) {
			s.Mode = "iptables" // kube-proxy's default
		}
	}
	if len(s.ClusterCIDRs) == 0 && c.ClusterCIDR != "" {
		for _, text := range strings.Split(c.ClusterCIDR, ",") {
			if p, err := netip.ParsePrefix(strings.TrimSpace(text)); err == nil {
				s.ClusterCIDRs = append(s.ClusterCIDRs, p.Masked())
			}
		}
	}
	if n, err := plan.ParseNodePortAddresses(c.NodePortAddresses); err == nil && len(s.NodePorts.Prefixes) == 0 && !s.NodePorts.Primary && !s.NodePorts.All && !s.NodePorts.Localhost {
		s.NodePorts = n
	}
	s.MasqueradeAll = s.MasqueradeAll || c.IPTables.MasqueradeAll && s.Mode != "nftables" || c.NFTables.MasqueradeAll && s.Mode == "nftables"
	return "the nodes' proxies are configured as the ConfigMap kube-system/kube-proxy says (mode " + s.Mode + ")"
}
