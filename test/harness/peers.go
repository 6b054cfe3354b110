package harness

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Etcd is a running member of an etcd cluster.
type Etcd struct {
	*Process
	ClientURL string
	// What its flags --name, --initial-advertise-peer-urls, --initial-cluster and --data-dir say.
	Member, PeerURL, Cluster, DataDir string

	flags []string
	dir   string
}

// StartEtcd runs an etcd cluster of n members, each in a folder below dir, and waits until they answer.
func StartEtcd(dir string, n int) ([]*Etcd, error) { return StartEtcdWith(dir, n) }

// StartEtcdWith is StartEtcd with more flags.
func StartEtcdWith(dir string, n int, flags ...string) ([]*Etcd, error) {
	var members []*Etcd
	var initial []string
	for i := range n {
		name := fmt.Sprintf("etcd%d", i)
		m := &Etcd{
			ClientURL: fmt.Sprintf("http://127.0.0.1:%d", FreePort()), Member: name, PeerURL: fmt.Sprintf("http://127.0.0.1:%d", FreePort()),
			DataDir: filepath.Join(dir, name, "data"), dir: filepath.Join(dir, name), flags: flags,
		}
		initial = append(initial, name+"="+m.PeerURL)
		members = append(members, m)
	}
	for _, m := range members {
		m.Cluster = strings.Join(initial, ",")
		if err := m.Start(); err != nil {
			return nil, err
		}
	}
	for _, m := range members {
		if err := m.WaitHealthy(20 * time.Second); err != nil {
			return nil, err
		}
	}
	return members, nil
}

// Start runs the member, again if it was killed.
func (e *Etcd) Start() error {
	if err := os.MkdirAll(e.dir, 0o700); err != nil {
		return err
	}
	var err error
	e.Process, err = Start(e.dir, e.Member, Peer("etcd"), append([]string{
		"--name", e.Member, "--data-dir", e.DataDir,
		"--listen-client-urls", e.ClientURL, "--advertise-client-urls", e.ClientURL,
		"--listen-peer-urls", e.PeerURL, "--initial-advertise-peer-urls", e.PeerURL, "--initial-cluster", e.Cluster,
		"--max-txn-ops", "1024", "--log-level", "error",
	}, e.flags...)...)
	if err != nil {
		return fmt.Errorf("%w (run `make peers` first)", err)
	}
	return nil
}

// WaitHealthy waits until the member is part of a cluster with a leader.
func (e *Etcd) WaitHealthy(limit time.Duration) error {
	err := poll(limit, func() error {
		resp, err := insecure.Get(e.ClientURL + "/health")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("/health: %s", resp.Status)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s is not healthy: %w\n%s", e.Name, err, e.Tail())
	}
	return nil
}

// KubeToken is the administrator's token of a server started by StartKubeAPIServer.
const KubeToken = "test-admin"

// StartKubeAPIServer runs Kubernetes' own API server on an etcd, with the service ranges that Portal has by default.
func StartKubeAPIServer(dir, etcd string, args ...string) (*API, error) {
	return StartKubeAPIServerOf(dir, "kube-apiserver", etcd, args...)
}

// StartKubeAPIServerOf is StartKubeAPIServer with the peer of a name: that of another version of Kubernetes.
func StartKubeAPIServerOf(dir, peer, etcd string, args ...string) (*API, error) {
	key, tokens := filepath.Join(dir, "sa.key"), filepath.Join(dir, "tokens.csv")
	if err := writeKey(key); err != nil {
		return nil, err
	}
	if err := os.WriteFile(tokens, []byte(KubeToken+",admin,1,system:masters\n"), 0o600); err != nil {
		return nil, err
	}
	port := FreePort()
	p, err := Start(dir, peer, Peer(peer), append([]string{
		"--etcd-servers", etcd, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(port), "--cert-dir", filepath.Join(dir, "certs"),
		"--service-cluster-ip-range", "10.96.0.0/16,fd00:96::/112",
		"--service-account-key-file", key, "--service-account-signing-key-file", key,
		"--service-account-issuer", "https://kubernetes.default.svc",
		"--token-auth-file", tokens, "--authorization-mode", "RBAC", "--disable-admission-plugins", "ServiceAccount",
	}, args...)...)
	if err != nil {
		return nil, fmt.Errorf("%w (run `make peers` first)", err)
	}
	api := &API{Process: p, URL: fmt.Sprintf("https://127.0.0.1:%d", port), Kubeconfig: filepath.Join(dir, "kube.kubeconfig")}
	config := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: kube
  cluster:
    server: %s
    insecure-skip-tls-verify: true
users:
- name: admin
  user:
    token: %s
contexts:
- name: kube
  context:
    cluster: kube
    user: admin
current-context: kube
`, api.URL, KubeToken)
	if err := os.WriteFile(api.Kubeconfig, []byte(config), 0o600); err != nil {
		return nil, err
	}
	return api, api.WaitReady(90 * time.Second)
}
