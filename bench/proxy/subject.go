package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"portal/test/harness"
)

const (
	kube   = "kube-proxy"
	portal = "portal"

	metricsAddr = "127.0.0.1:10249"
)

// readAnew has the kernel forget what it holds of a binary. One that was just built is in its cache in pieces of two
// megabytes, each of which counts as a whole for the memory of whoever touches a byte of it; one that was read is not.
func readAnew(binary string) error {
	f, err := os.Open(binary)
	if err != nil {
		return err
	}
	defer f.Close()
	return errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// startProxy starts a proxy. Both read the same configuration, with the shortest pause between syncs that kube-proxy
// was recorded with.
func startProxy(o options, c *cluster, who, mode, dir string) (*harness.Process, error) {
	sync := map[string]any{"minSyncPeriod": "20ms"}
	data, err := json.Marshal(map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": mode,
		"clientConnection": map[string]any{"kubeconfig": c.api.Kubeconfig, "qps": 1000, "burst": 2000},
		"clusterCIDR":      podRange, "hostnameOverride": nodeName, "iptables": sync, "nftables": sync, "ipvs": sync,
		"metricsBindAddress": metricsAddr, "healthzBindAddress": "127.0.0.1:10256",
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0},
	})
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, who+".config")
	if err := os.WriteFile(config, data, 0o600); err != nil {
		return nil, err
	}
	if who == kube {
		return harness.Start(dir, who, o.kubeProxy, "--config", config)
	}
	return harness.Start(dir, who, o.portal, "proxy", "--config", config)
}

// syncs reads from a proxy's metrics how often it has told the kernel something, and how long that took in all.
func syncs(patience time.Duration) (n int, took time.Duration, err error) {
	client := http.Client{Timeout: patience}
	resp, err := client.Get("http://" + metricsAddr + "/metrics")
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		name, _, _ = strings.Cut(name, "{")
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		switch name {
		case "kubeproxy_sync_proxy_rules_duration_seconds_count":
			n += int(v)
		case "kubeproxy_sync_proxy_rules_duration_seconds_sum":
			took += time.Duration(v * float64(time.Second))
		}
	}
	return n, took, lines.Err()
}

// usage is a process' memory, now and at most, in MB, and its processor time.
func usage(pid int) (resident, peak float64, cpu time.Duration, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, 0, err
	}
	for line := range strings.Lines(string(status)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kib, _ := strconv.ParseFloat(f[1], 64)
		switch f[0] {
		case "VmRSS:":
			resident = kib / 1024
		case "VmHWM:":
			peak = kib / 1024
		}
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, 0, err
	}
	// Behind the name, which may hold spaces: own time and that of children it has waited for, user and system each.
	f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	for _, text := range f[11:15] {
		ticks, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, 0, 0, err
		}
		cpu += time.Duration(ticks) * (time.Second / 100)
	}
	return resident, peak, cpu, nil
}
