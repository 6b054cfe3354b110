package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/proxy"
)

// write puts text into a file of the test's own.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const configHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// TestProxyMistakes: each is told in one line that names what is wrong.
func TestProxyMistakes(t *testing.T) {
	empty := write(t, "kubeconfig", "apiVersion: v1\nkind: Config\n")
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"argument", []string{"now"}, `portal proxy takes no arguments, only flags: "now"`},
		{"flag", []string{"--proxy-mod", "x"}, "unknown flag --proxy-mod: did you mean --proxy-mode?"},
		{"mode", []string{"--proxy-mode", "fast"}, `--proxy-mode: "fast" is not one of auto, nftables, iptables`},
		{"cluster CIDR", []string{"--cluster-cidr", "10.0.0.0/8,11.0.0.0/8"}, `--cluster-cidr: "10.0.0.0/8,11.0.0.0/8" has more than one prefix of a family`},
		{"node ports", []string{"--nodeport-addresses", "here"}, `--nodeport-addresses: "here" is neither a prefix such as 192.0.2.0/24 nor one of primary, localhost, all`},
		{"detection", []string{"--detect-local-mode", "BridgeInterface"}, "--detect-local-mode: BridgeInterface needs --pod-bridge-interface"},
		{"address", []string{"--metrics-bind-address", "here"}, `--metrics-bind-address: "here" is not ADDRESS:PORT`},
		{"period", []string{"--min-sync-period", "-1s"}, "--min-sync-period: -1s is less than nothing"},
		{"no such kubeconfig", []string{"--kubeconfig", "/nowhere"}, "--kubeconfig: stat /nowhere: no such file or directory"},
		{"empty kubeconfig", []string{"--kubeconfig", empty}, "--kubeconfig " + empty + ": "},
		{"no such config", []string{"--config", "/nowhere"}, "--config /nowhere: open /nowhere: no such file or directory"},
		{"unknown field", []string{"--config", write(t, "c", configHead+"mod: nftables\n")}, `unknown field "mod"`},
		{"wrong type", []string{"--config", write(t, "c", configHead+"clusterCIDR: [10.0.0.0/8]\n")}, "cannot unmarshal array"},
		{"another kind", []string{"--config", write(t, "c", "apiVersion: v1\nkind: Pod\n")}, `apiVersion is "v1" and kind "Pod"; want`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stderr bytes.Buffer
			code := run(t.Context(), append([]string{"proxy"}, c.args...), &stderr)
			if got := stderr.String(); code != 2 || !strings.Contains(got, c.want) || strings.Count(got, "\n") != 1 {
				t.Errorf("status %d, said %q, want 2 and %q", code, got, c.want)
			}
		})
	}
}

// TestProxyPortInUse: the line says which flag helps.
func TestProxyPortInUse(t *testing.T) {
	if err := mayAdminister(); err != nil {
		t.Skip("needs the capability NET_ADMIN: ", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	kubeconfig := write(t, "kubeconfig", `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]}`)
	var stderr bytes.Buffer
	code := run(t.Context(), []string{"proxy", "--kubeconfig", kubeconfig, "--metrics-bind-address", "", "--healthz-bind-address", l.Addr().String()}, &stderr)
	if got := stderr.String(); code != 1 || !strings.Contains(got, "address already in use: another program has it, perhaps a kube-proxy; end it, or choose another with --healthz-bind-address") {
		t.Errorf("status %d, said %q", code, got)
	}
}

// TestProxyConfigFile: the file sets what no flag does.
func TestProxyConfigFile(t *testing.T) {
	file := write(t, "config", configHead+`
mode: iptables
clientConnection: {kubeconfig: /kc, qps: 5, burst: 10}
hostnameOverride: Node-1
clusterCIDR: 10.244.0.0/16,fd00:244::/64
nodePortAddresses: [primary, 10.0.0.0/8]
healthzBindAddress: 127.0.0.1
iptables: {minSyncPeriod: 2s, masqueradeAll: true, masqueradeBit: 15, localhostNodePorts: false}
nftables: {minSyncPeriod: 3s, masqueradeBit: 13}
conntrack: {maxPerCore: 0, min: 5, tcpEstablishedTimeout: 1h}
featureGates: {Something: true}
`)
	parse := func(args ...string) (*proxyOptions, proxy.Config) {
		cmd := newProxyCommand()
		var o proxyOptions
		cmd.ResetFlags()
		o.flags(cmd)
		if err := cmd.ParseFlags(append([]string{"--config", file}, args...)); err != nil {
			t.Fatal(err)
		}
		if err := o.readConfig(cmd.Flags()); err != nil {
			t.Fatal(err)
		}
		c, err := o.proxyConfig()
		if err != nil {
			t.Fatal(err)
		}
		return &o, c
	}
	o, c := parse()
	got := fmt.Sprint(o.mode, o.kubeconfig, c.Node, c.ClusterCIDRs, c.NodePorts, o.healthz, o.metrics, c.MinSync["iptables"], c.MinSync["nftables"], c.MasqueradeAll, c.LocalhostNodePorts, o.conntrack)
	want := "iptables/kcnode-1[10.244.0.0/16 fd00:244::/64]{true false false [10.0.0.0/8]}127.0.0.1:10256127.0.0.1:102492s3strue false{0 5 1h0m0s 0s false 0s 0s}"
	if strings.ReplaceAll(got, " ", "") != strings.ReplaceAll(want, " ", "") {
		t.Errorf("\n got %s\nwant %s", got, want)
	}
	if o.masqueradeBit != 15 {
		t.Errorf("masqueradeBit is %d, want that of the mode iptables", o.masqueradeBit)
	}
	o, c = parse("--proxy-mode", "nftables", "--hostname-override", "other", "--nodeport-addresses", "all", "--min-sync-period", "4s")
	if o.mode != "nftables" || c.Node != "other" || !c.NodePorts.All || c.NodePorts.Primary || c.MinSync["nftables"] != 4*time.Second || c.MasqueradeAll || o.masqueradeBit != 13 {
		t.Errorf("flags beside the file do not win: %s %+v", o.mode, c)
	}
}

// TestForbiddenIsNotAway: an API that forbids answers, and the log says what to grant.
func TestForbiddenIsNotAway(t *testing.T) {
	var out bytes.Buffer
	tell := tellAPI(slog.New(slog.NewTextHandler(&out, nil)), "https://192.0.2.1:6443")
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", errors.New("no"))
	for range 3 {
		tell(watch.Status{Source: intent.Nodes, Err: forbidden})
	}
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "grant list and watch on nodes") || strings.Contains(got, "does not answer") {
		t.Errorf("said %s", got)
	}
	out.Reset()
	tell(watch.Status{Source: intent.Services, Err: errors.New("connection refused")})
	tell(watch.Status{Source: intent.EndpointSlices, Err: errors.New("connection refused")})
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "the API does not answer") {
		t.Errorf("said %s", got)
	}
}
