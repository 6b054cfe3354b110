package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

const redisMaster = `apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Service
  metadata: {name: redis-master, namespace: default}
  spec: {clusterIP: 10.0.0.11, clusterIPs: [10.0.0.11], ports: [{port: 6379}]}
- apiVersion: v1
  kind: Service
  metadata: {name: elsewhere, namespace: other}
  spec: {clusterIP: 10.0.0.12, ports: [{port: 80}]}
`

// call runs a command as main does and returns what it printed.
func call(cmd *cobra.Command, stdin string, args ...string) (string, error) {
	var out strings.Builder
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	err := cmd.Execute()
	return out.String(), err
}

// The example of the Kubernetes documentation, to the letter.
func TestEnvPrintsTheSeed(t *testing.T) {
	const want = `REDIS_MASTER_SERVICE_HOST=10.0.0.11
REDIS_MASTER_SERVICE_PORT=6379
REDIS_MASTER_PORT=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP_PROTO=tcp
REDIS_MASTER_PORT_6379_TCP_PORT=6379
REDIS_MASTER_PORT_6379_TCP_ADDR=10.0.0.11
`
	for _, format := range []string{"docker", "sh"} {
		got, err := call(newEnvCommand(), redisMaster, "-n", "default", "-f", "-", "--format", format)
		if err != nil || !strings.HasPrefix(got, want) || format == "docker" && got != want {
			t.Errorf("%s: %v\n%s", format, err, got)
		}
	}
	file := filepath.Join(t.TempDir(), "services.yaml")
	if err := os.WriteFile(file, []byte(redisMaster), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := call(newEnvCommand(), "", "--all", "-f", file); err != nil || !strings.Contains(got, "ELSEWHERE_SERVICE_HOST=10.0.0.12") {
		t.Errorf("--all: %v\n%s", err, got)
	}
	if got, err := call(newEnvCommand(), redisMaster, "-n", "default", "--no-service-links", "-f", "-"); err != nil || got != "" {
		t.Errorf("without links: %v\n%s", err, got)
	}
	if got, err := call(newEnvCommand(), redisMaster, "-n", "default", "--format", "json", "-f", "-"); err != nil || !strings.Contains(got, `"name": "REDIS_MASTER_SERVICE_HOST"`) {
		t.Errorf("json: %v\n%s", err, got)
	}
}

// A wrong flag is one clear line that names it.
func TestDNSRefusesWrongFlags(t *testing.T) {
	for _, c := range []struct{ flag, value, want string }{
		{"--ttl", "9999", "--ttl: 9999 is not from 0 to 3600"},
		{"--pods", "maybe", `--pods: "maybe" is not one of insecure, verified, disabled`},
		{"--listen", "here", `--listen: "here" is not ADDRESS:PORT`},
		{"--upstream", "dns.example", "--upstream:"},
		{"--autopath", "true", "--autopath: needs --pods verified"},
		{"--kubeconfig", "/no/such/file", "--kubeconfig:"},
		{"--zone", ".", "zone \".\""},
		{"--corefile", "/no/such/file", "--corefile:"},
		{"--allow-transfer", "x", "--allow-transfer:"},
		{"--max-udp-size", "100", "--max-udp-size:"},
	} {
		args := []string{c.flag + "=" + c.value}
		if c.flag != "--listen" {
			args = append(args, "--listen=127.0.0.1:0")
		}
		if c.flag != "--upstream" {
			args = append(args, "--upstream=none")
		}
		if c.flag == "--zone" {
			args = append(args, "--kubeconfig="+emptyKubeconfig(t))
		}
		_, err := call(newDNSCommand(), "", args...)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s %s: %v", c.flag, c.value, err)
		}
		if !errors.As(err, new(usageError)) {
			t.Errorf("%s %s: not told as a mistake in usage", c.flag, c.value)
		}
	}
	if _, err := call(newEnvCommand(), "", "--format", "xml"); !errors.As(err, new(usageError)) {
		t.Errorf("env --format xml: %v", err)
	}
}

func emptyKubeconfig(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{apiVersion: v1, kind: Config, current-context: x, clusters: [{name: x, cluster: {server: "http://127.0.0.1:1"}}], users: [{name: x, user: {}}], contexts: [{name: x, context: {cluster: x, user: x}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
