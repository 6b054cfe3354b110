package main

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// kubeProxyConfiguration is kube-proxy's configuration file. What has no meaning here is read and left.
type kubeProxyConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	FeatureGates     map[string]bool `json:"featureGates"`
	ClientConnection struct {
		Kubeconfig         string  `json:"kubeconfig"`
		AcceptContentTypes string  `json:"acceptContentTypes"`
		ContentType        string  `json:"contentType"`
		QPS                float32 `json:"qps"`
		Burst              int     `json:"burst"`
	} `json:"clientConnection"`
	Logging map[string]any `json:"logging"`

	HostnameOverride            string `json:"hostnameOverride"`
	BindAddress                 string `json:"bindAddress"`
	HealthzBindAddress          string `json:"healthzBindAddress"`
	MetricsBindAddress          string `json:"metricsBindAddress"`
	BindAddressHardFail         bool   `json:"bindAddressHardFail"`
	EnableProfiling             bool   `json:"enableProfiling"`
	ShowHiddenMetricsForVersion string `json:"showHiddenMetricsForVersion"`

	Mode     string `json:"mode"`
	IPTables struct {
		syncConfiguration
		LocalhostNodePorts *bool `json:"localhostNodePorts"`
	} `json:"iptables"`
	NFTables syncConfiguration `json:"nftables"`
	IPVS     struct {
		syncConfiguration
		Scheduler     string          `json:"scheduler"`
		ExcludeCIDRs  []string        `json:"excludeCIDRs"`
		StrictARP     bool            `json:"strictARP"`
		TCPTimeout    metav1.Duration `json:"tcpTimeout"`
		TCPFinTimeout metav1.Duration `json:"tcpFinTimeout"`
		UDPTimeout    metav1.Duration `json:"udpTimeout"`
	} `json:"ipvs"`
	Winkernel map[string]any `json:"winkernel"`

	DetectLocalMode string `json:"detectLocalMode"`
	DetectLocal     struct {
		BridgeInterface     string `json:"bridgeInterface"`
		InterfaceNamePrefix string `json:"interfaceNamePrefix"`
	} `json:"detectLocal"`
	ClusterCIDR       string   `json:"clusterCIDR"`
	NodePortAddresses []string `json:"nodePortAddresses"`

	OOMScoreAdj *int32 `json:"oomScoreAdj"`
	Conntrack   struct {
		MaxPerCore            *int             `json:"maxPerCore"`
		Min                   *int             `json:"min"`
		TCPEstablishedTimeout *metav1.Duration `json:"tcpEstablishedTimeout"`
		TCPCloseWaitTimeout   *metav1.Duration `json:"tcpCloseWaitTimeout"`
		TCPBeLiberal          bool             `json:"tcpBeLiberal"`
		UDPTimeout            metav1.Duration  `json:"udpTimeout"`
		UDPStreamTimeout      metav1.Duration  `json:"udpStreamTimeout"`
	} `json:"conntrack"`
	ConfigSyncPeriod    metav1.Duration `json:"configSyncPeriod"`
	PortRange           string          `json:"portRange"`
	WindowsRunAsService bool            `json:"windowsRunAsService"`
}

// syncConfiguration is what modes have in common.
type syncConfiguration struct {
	MasqueradeBit *int            `json:"masqueradeBit"`
	MasqueradeAll bool            `json:"masqueradeAll"`
	SyncPeriod    metav1.Duration `json:"syncPeriod"`
	MinSyncPeriod metav1.Duration `json:"minSyncPeriod"`
}

// readConfig sets what the configuration file says and no flag does.
func (o *proxyOptions) readConfig(flags *pflag.FlagSet) error {
	raw, err := os.ReadFile(o.config)
	if err != nil {
		return err
	}
	var c kubeProxyConfiguration
	if err := yaml.UnmarshalStrict(raw, &c); err != nil {
		return plainYAMLError(err)
	}
	if want := "kubeproxy.config.k8s.io/v1alpha1"; c.APIVersion != want || c.Kind != "KubeProxyConfiguration" {
		return fmt.Errorf("apiVersion is %q and kind %q; want %s and KubeProxyConfiguration", c.APIVersion, c.Kind, want)
	}
	set := setter{flags}
	set.text("kubeconfig", &o.kubeconfig, c.ClientConnection.Kubeconfig)
	set.text("hostname-override", &o.hostname, c.HostnameOverride)
	set.text("bind-address", &o.bindAddress, c.BindAddress)
	set.text("healthz-bind-address", &o.healthz, c.HealthzBindAddress)
	set.text("metrics-bind-address", &o.metrics, c.MetricsBindAddress)
	set.text("proxy-mode", &o.mode, c.Mode)
	set.text("detect-local-mode", &o.detectLocal, c.DetectLocalMode)
	set.text("pod-bridge-interface", &o.bridge, c.DetectLocal.BridgeInterface)
	set.text("pod-interface-name-prefix", &o.interfacePrefix, c.DetectLocal.InterfaceNamePrefix)
	set.text("cluster-cidr", &o.clusterCIDR, c.ClusterCIDR)
	set.text("ipvs-scheduler", &o.ipvs.Scheduler, c.IPVS.Scheduler)
	set.flag("ipvs-strict-arp", &o.ipvs.StrictARP, c.IPVS.StrictARP)
	set.period("ipvs-tcp-timeout", &o.ipvs.TCPTimeout, c.IPVS.TCPTimeout.Duration)
	set.period("ipvs-tcpfin-timeout", &o.ipvs.TCPFinTimeout, c.IPVS.TCPFinTimeout.Duration)
	set.period("ipvs-udp-timeout", &o.ipvs.UDPTimeout, c.IPVS.UDPTimeout.Duration)
	set.flag("profiling", &o.profiling, c.EnableProfiling)
	for mode, d := range map[string]metav1.Duration{
		"iptables": c.IPTables.MinSyncPeriod, "nftables": c.NFTables.MinSyncPeriod, "ipvs": c.IPVS.MinSyncPeriod,
	} {
		set.period(minSyncFlag(mode), o.modeMinSync[mode], d.Duration)
	}
	if !flags.Changed("nodeport-addresses") {
		o.nodePortAddresses = c.NodePortAddresses
	}
	if v := c.IPTables.LocalhostNodePorts; v != nil {
		set.flag("iptables-localhost-nodeports", &o.localhostNodePorts, *v)
	}
	set.flag("masquerade-all", &o.masqueradeAll, c.masqueradeAll(o.mode))
	if v := c.masqueradeBit(o.mode); v != nil && !flags.Changed("iptables-masquerade-bit") {
		o.masqueradeBit = *v
	}
	c.setConntrack(o, set)
	return nil
}

// masqueradeAll is set for each mode; for a mode without a part of its own, and for one that is yet to be chosen, any
// part counts.
func (c *kubeProxyConfiguration) masqueradeAll(mode string) bool {
	switch mode {
	case "nftables":
		return c.NFTables.MasqueradeAll
	case "iptables", "ipvs":
		return c.IPTables.MasqueradeAll
	}
	return c.NFTables.MasqueradeAll || c.IPTables.MasqueradeAll
}

// masqueradeBit is set for each mode in the same way.
func (c *kubeProxyConfiguration) masqueradeBit(mode string) *int {
	switch mode {
	case "nftables":
		return c.NFTables.MasqueradeBit
	case "iptables", "ipvs":
		return c.IPTables.MasqueradeBit
	}
	return cmp.Or(c.NFTables.MasqueradeBit, c.IPTables.MasqueradeBit)
}

func (c *kubeProxyConfiguration) setConntrack(o *proxyOptions, set setter) {
	t, l := &c.Conntrack, &o.conntrack
	number := func(flag string, to *int, from *int) {
		if from != nil && !set.flags.Changed(flag) {
			*to = *from
		}
	}
	number("conntrack-max-per-core", &l.MaxPerCore, t.MaxPerCore)
	number("conntrack-min", &l.Min, t.Min)
	if d := t.TCPEstablishedTimeout; d != nil {
		set.period("conntrack-tcp-timeout-established", &l.TCPEstablished, d.Duration)
	}
	if d := t.TCPCloseWaitTimeout; d != nil {
		set.period("conntrack-tcp-timeout-close-wait", &l.TCPCloseWait, d.Duration)
	}
	set.flag("conntrack-tcp-be-liberal", &l.TCPLiberal, t.TCPBeLiberal)
	set.period("conntrack-udp-timeout", &l.UDP, t.UDPTimeout.Duration)
	set.period("conntrack-udp-timeout-stream", &l.UDPStream, t.UDPStreamTimeout.Duration)
}

// setter sets options from a file, unless a flag was given or the file says nothing.
type setter struct{ flags *pflag.FlagSet }

func (s setter) text(flag string, to *string, from string) {
	if from != "" && !s.flags.Changed(flag) {
		*to = from
	}
}

func (s setter) flag(flag string, to *bool, from bool) {
	if !s.flags.Changed(flag) {
		*to = from
	}
}

func (s setter) period(flag string, to *time.Duration, from time.Duration) {
	if from != 0 && !s.flags.Changed(flag) {
		*to = from
	}
}

// plainYAMLError takes away what a library says about itself.
func plainYAMLError(err error) error {
	text := err.Error()
	for _, prefix := range []string{"error unmarshaling JSON: ", "error converting YAML to JSON: ", "while decoding JSON: ", "json: "} {
		text = strings.TrimPrefix(text, prefix)
	}
	return fmt.Errorf("%s", text)
}
