package test

import (
	"context"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"portal/test/harness"
)

var dataplaneModes = flag.String("dataplane.modes", "nftables", "the modes in which this project's own recorded scenarios are tried")

// laboratories are the modes of the proxy with how their packets are compared with those that kube-proxy sent. A relay
// in userspace hides the client's address.
var laboratories = []struct {
	mode string
	args []string
}{
	{"nftables", []string{"--mode", "nftables"}},
	{"iptables", []string{"--mode", "iptables"}},
	{"userspace", []string{"--mode", "any", "--any-source"}},
}

// TestDataplaneConformance sends packets through Portal's proxy, in each mode and in namespaces, and demands what became of
// them with kube-proxy.
func TestDataplaneConformance(t *testing.T) {
	t.Parallel()
	for _, l := range laboratories {
		t.Run(l.mode, func(t *testing.T) {
			t.Parallel()
			experiment(t, l.mode, "pt", harness.Recorded("dataplane", "golden.json"), nil, append(l.args, laboratoryAPI(t)...))
		})
	}
}

// TestDataplaneMore does the same with this project's further scenarios: see test/recorded/README.md.
func TestDataplaneMore(t *testing.T) {
	t.Parallel()
	for _, l := range laboratories {
		if !strings.Contains(*dataplaneModes, l.mode) {
			continue
		}
		t.Run(l.mode, func(t *testing.T) {
			t.Parallel()
			otherwise := maps.Clone(otherwiseInAll)
			maps.Copy(otherwise, otherwiseIn[l.mode])
			experiment(t, l.mode, "pm", harness.Recorded("dataplane", "more-golden.json"), otherwise,
				append(l.args, append(laboratoryAPI(t), "--scenarios", harness.Recorded("dataplane", "more-scenarios.json"))...))
		})
	}
}

const (
	leavesItsService = "a slice that goes over to another Service leaves the one it was of"
	notLedOn         = "what has been led to an endpoint is not led on to another Service: dropped, not refused"
	rangesHold       = "source ranges hold, also if the load balancer's IP is listed as an external one"
	answersPassHere  = "a relay's answers come back the way the question went; kube-proxy's take another and are not recognised"
	sessionsEnd      = "sessions end with the process"
)

// otherwiseInAll and otherwiseIn are the probes whose answer is not kube-proxy's, and why.
var (
	otherwiseInAll = map[string]string{
		"slice-relabelled: 1.1": leavesItsService,
		"slice-relabelled: 2.0": leavesItsService,
		"slice-relabelled: 2.1": leavesItsService,
	}
	otherwiseIn = map[string]map[string]string{
		"nftables": {
			"etp-local-hairpin: 0.2":      "a Pod reaches itself through another node's port too",
			"endpoint-is-cluster-ip: 0.0": notLedOn,
			"endpoint-is-cluster-ip: 0.1": notLedOn,
			"endpoint-is-cluster-ip: 0.2": notLedOn,
		},
		"iptables": {
			"lb-is-externalip-ranges: 0.0": rangesHold,
			"lb-is-externalip-ranges: 0.1": rangesHold,
			"lb-is-externalip-ranges: 0.2": rangesHold,
			"lb-is-externalip-ranges: 0.3": rangesHold,
			"lb-is-externalip-ranges: 0.4": rangesHold,
		},
		"userspace": {
			"etp-local-one-node: 0.5":           answersPassHere,
			"etp-local-other-node: 0.1":         answersPassHere,
			"etp-local-udp: 1.1":                answersPassHere,
			"etp-local-hairpin: 0.3":            answersPassHere,
			"etp-local-terminating: 0.1":        answersPassHere,
			"both-local: 0.5":                   answersPassHere,
			"both-local-other: 0.1":             answersPassHere,
			"hints-etp-local: 0.1":              answersPassHere,
			"endpoint-moves-node: 0.1":          answersPassHere,
			"endpoint-outside-local: 0.6":       answersPassHere,
			"addresses-localhost: 0.9":          "localhost is ::1 too, where the mode can",
			"addresses-localhost-cluster: 0.11": "localhost is ::1 too, where the mode can",
			"restart-udp-flow-kept: 1.0":        sessionsEnd,
			"restart-udp-service-deleted: 1.0":  sessionsEnd,
			"restart-udp-service-deleted: 1.1":  sessionsEnd,
		},
	}
)

// laboratoryAPI starts Portal's API server and says how to reach it.
func laboratoryAPI(t *testing.T) []string {
	t.Helper()
	tokens := filepath.Join(t.TempDir(), "tokens.csv")
	if err := os.WriteFile(tokens, []byte(harness.KubeToken+",admin,1,system:masters\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--controllers", "none", "--token-auth-file", tokens)
	return []string{"--api", api.URL, "--token", harness.KubeToken}
}

// experiment runs recorded scenarios with Portal's proxy, in namespaces whose names begin with prefix and the mode. Some probes may end otherwise.
func experiment(t *testing.T, mode, prefix, record string, otherwise map[string]string, args []string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	for _, tool := range []string{"python3", "ip", "nft", "iptables", "iptables-restore"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatal("a tool is missing: ", err)
		}
	}
	work := t.TempDir()
	args = append(args, "--check", record, "--work", work, "--prefix", prefix+mode[:2],
		"--proxy", harness.Portal()+" proxy --config {config} --proxy-mode "+mode)
	out, err := harness.Run(context.Background(), []string{"PYTHONDONTWRITEBYTECODE=1"}, "python3", append([]string{harness.Recorded("dataplane", "lab.py")}, args...)...)
	passed, ok := harness.Probes(t, out, otherwise)
	if err != nil && otherwise == nil || !ok {
		log, _ := os.ReadFile(filepath.Join(work, "proxy-node-a.log"))
		t.Fatalf("%d passed: %v\n%s\nthe proxy of node-a:\n%s", passed, err, out, log)
	}
	t.Logf("%d probes answered as recorded", passed)
}
