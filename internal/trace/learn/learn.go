// Package learn finds out, through the API, how the nodes' proxies are configured: what a trace assumes if nobody says otherwise.
package learn

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"

	"portal/internal/nodereport"
	"portal/internal/plan"
	"portal/internal/trace"
)

const (
	// asked is how many nodes are asked at most, and patience how long one may take.
	asked    = 3
	patience = 2 * time.Second
)

// Settings fills in what settings don't say, and returns where that is known from; empty: nobody says anything. Nodes of Portal's own are
// asked; elsewhere the ConfigMap that kubeadm writes for kube-proxy may be there.
func Settings(ctx context.Context, client kubernetes.Interface, nodes []string, s *trace.Settings) string {
	if s.Mode == "" {
		if node, mode := ask(ctx, client, nodes); mode != "" {
			s.Mode = mode
			return fmt.Sprintf("all nodes have the proxy mode of %s, %s", node, mode)
		}
	}
	found, err := client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, "kube-proxy", metav1.GetOptions{})
	if err != nil {
		return "" // it is not there, or not for us
	}
	return readKubeProxy(found.Data["config.conf"], s)
}

// ask asks some nodes which mode their proxy has, all at once; the first in their order that answers counts, so that the same question
// gets the same words.
func ask(ctx context.Context, client kubernetes.Interface, nodes []string) (node, mode string) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	nodes = nodes[:min(len(nodes), asked)]
	answers := make([]chan string, len(nodes))
	for i, name := range nodes {
		answers[i] = make(chan string, 1)
		go func() {
			// Of one Service that nobody has: the whole answer would be long.
			data, err := client.CoreV1().RESTClient().Get().Resource("nodes").Name(name).SubResource("proxy").Suffix(nodereport.Path).Param("service", "none/none").Do(ctx).Raw()
			var report nodereport.Report
			if err != nil || json.Unmarshal(data, &report) != nil || report.Proxy == nil || !slices.Contains(trace.ModeNames(), report.Proxy.Mode) {
				answers[i] <- ""
				return
			}
			answers[i] <- report.Proxy.Mode
		}()
	}
	for i, name := range nodes {
		if mode := <-answers[i]; mode != "" {
			return name, mode
		}
	}
	return "", ""
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
