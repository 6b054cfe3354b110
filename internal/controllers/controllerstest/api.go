// Package controllerstest gives tests an API server to run controllers against, and a way to break it.
package controllerstest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ErrNoServer says that the reference server isn't there.
var ErrNoServer = errors.New("no reference API server: build the peers into .cache/peers")

var shared struct {
	once   sync.Once
	config *rest.Config
	stop   func()
	err    error
}

// APIServer is an API server without controllers that the tests of a package share: Portal's own, in this process.
// With PORTAL_TEST_SERVER=reference it is kube-apiserver from .cache/peers, and with PORTAL_TEST_KUBECONFIG that one.
// Tests keep to namespaces of their own. Main ends it.
func APIServer(t testing.TB) *rest.Config {
	t.Helper()
	shared.once.Do(func() {
		switch path := os.Getenv("PORTAL_TEST_KUBECONFIG"); {
		case path != "":
			shared.config, shared.err = clientcmd.BuildConfigFromFlags("", path)
		case os.Getenv("PORTAL_TEST_SERVER") == "reference":
			shared.config, shared.stop, shared.err = StartReference(os.TempDir(), filepath.Join(root(), ".cache", "peers"))
		default:
			shared.config, shared.stop, shared.err = StartPortal()
		}
	})
	if errors.Is(shared.err, ErrNoServer) {
		t.Skip(shared.err)
	} else if shared.err != nil {
		t.Fatal(shared.err)
	}
	return rest.CopyConfig(shared.config)
}

// Main runs a package's tests and ends the server that they shared.
func Main(m *testing.M) {
	code := m.Run()
	if shared.stop != nil {
		shared.stop()
	}
	os.Exit(code)
}

func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..")
}

// StartReference starts etcd and kube-apiserver from a folder, on loopback, with their data in a new folder under dir.
func StartReference(dir, peers string) (config *rest.Config, stop func(), err error) {
	for _, name := range []string{"etcd", "kube-apiserver"} {
		if _, err := os.Stat(filepath.Join(peers, name)); err != nil {
			return nil, nil, ErrNoServer
		}
	}
	if dir, err = os.MkdirTemp(dir, "portal-api-"); err != nil {
		return nil, nil, err
	}
	var processes []*exec.Cmd
	stop = func() {
		for i := len(processes) - 1; i >= 0; i-- {
			_ = processes[i].Process.Kill()
			_ = processes[i].Wait()
		}
		_ = os.RemoveAll(dir)
	}
	defer func() {
		if err != nil {
			stop()
		}
	}()
	start := func(name string, args ...string) error {
		log, err := os.Create(filepath.Join(dir, name+".log"))
		if err != nil {
			return err
		}
		defer log.Close()
		cmd := exec.Command(filepath.Join(peers, name), args...)
		cmd.Stdout, cmd.Stderr = log, log
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			return err
		}
		processes = append(processes, cmd)
		return nil
	}
	ports, err := freePorts(3)
	if err != nil {
		return nil, nil, err
	}
	at := func(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", ports[i]) }
	tokens, key := filepath.Join(dir, "tokens.csv"), filepath.Join(dir, "sa.key")
	if err = os.WriteFile(tokens, []byte("secret,admin,1,system:masters\n"), 0o600); err != nil {
		return nil, nil, err
	}
	if err = writeKey(key); err != nil {
		return nil, nil, err
	}
	err = errors.Join(
		start("etcd", "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync",
			"--listen-client-urls", at(0), "--advertise-client-urls", at(0),
			"--listen-peer-urls", at(1), "--initial-advertise-peer-urls", at(1), "--initial-cluster", "default="+at(1)),
		start("kube-apiserver", "--etcd-servers", at(0), "--secure-port", fmt.Sprint(ports[2]), "--bind-address", "127.0.0.1",
			"--cert-dir", filepath.Join(dir, "certs"), "--service-cluster-ip-range", "10.96.0.0/16,fd00:96::/112",
			"--service-account-key-file", key, "--service-account-signing-key-file", key,
			"--service-account-issuer", "https://kubernetes.default.svc", "--token-auth-file", tokens,
			"--authorization-mode", "RBAC", "--disable-admission-plugins", "ServiceAccount",
			"--max-requests-inflight", "4000", "--max-mutating-requests-inflight", "2000"))
	if err != nil {
		return nil, nil, err
	}
	config = &rest.Config{
		Host: fmt.Sprintf("https://127.0.0.1:%d", ports[2]), BearerToken: "secret", QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		WarningHandler:  rest.NoWarnings{},
	}
	return config, stop, waitReady(config)
}

func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

func waitReady(config *rest.Config) error {
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, config.Host+"/readyz", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+config.BearerToken)
		if resp, err := client.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("the API server at %s did not become ready within a minute", config.Host)
}
