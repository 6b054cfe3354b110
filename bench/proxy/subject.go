package main

import (
	"encoding/json"
	"os"
	"path/filepath"

	"portal/bench/report"
)

const (
	kube   = "kube-proxy"
	portal = "portal"
)

// startProxy starts a proxy. Both read the same configuration. Periods between syncs are each one's default; the client's
// rate limit is raised for both, because a first list is a single request anyway.
func startProxy(o options, c *cluster, subject, mode, dir string) (*report.Subject, error) {
	data, err := json.Marshal(map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": mode,
		"clientConnection": map[string]any{"kubeconfig": c.api.Kubeconfig, "qps": 1000, "burst": 2000},
		"clusterCIDR":      podRange + "," + podRange6, "hostnameOverride": nodeName,
		"metricsBindAddress": "127.0.0.1:10249", "healthzBindAddress": "127.0.0.1:10256",
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0},
	})
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, subject+".config")
	if err := os.WriteFile(config, data, 0o600); err != nil {
		return nil, err
	}
	if subject == kube {
		return report.Start(dir, subject, o.kubeProxy, "--config", config)
	}
	return report.Start(dir, subject, o.portal, "proxy", "--config", config)
}
