package test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	ossignal "os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"portal/test/harness"
)

// TestRotatedAuthorityOfAPeerIsTrusted: two servers share a CA; after one of them has rotated its own, its clients are known
// to the other, and a server with a CA of its own is refused.
func TestRotatedAuthorityOfAPeerIsTrusted(t *testing.T) {
	t.Parallel()
	cluster := startEtcd(t, 1)
	pair := startPair(t, cluster)
	before := adminCertificate(t, pair[0].api.Kubeconfig)
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "certs", "renew", "ca", "--kubeconfig", pair[0].api.Kubeconfig, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "ca (earlier)") {
		t.Errorf("the CA before is not listed: %s", out)
	}
	// What `certs list` says is the same as asked of the server, and as read from its files.
	asked, err := harness.Run(t.Context(), nil, harness.Portal(), "certs", "list", "--kubeconfig", pair[0].api.Kubeconfig, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	read, err := harness.Run(t.Context(), nil, harness.Portal(), "certs", "list", "--data-dir", filepath.Dir(pair[0].api.Kubeconfig), "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca", "ca (earlier)", "server", "admin"} {
		if !strings.Contains(asked, strconv.Quote(name)) || !strings.Contains(read, strconv.Quote(name)) {
			t.Errorf("%s is not listed: asked %s, read %s", name, asked, read)
		}
	}
	if after := adminCertificate(t, pair[0].api.Kubeconfig); after == before {
		t.Error("the administrator's certificate is still the old CA's")
	}
	// Its clients at the other server: the certificate that the new CA signed, and the bundle with all CAs.
	config, err := clientcmd.LoadFromFile(pair[0].api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Clusters["portal"].Server = pair[1].api.URL
	other := filepath.Join(t.TempDir(), "other.kubeconfig")
	if err := clientcmd.WriteToFile(*config, other); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		out, err := harness.Run(t.Context(), nil, harness.Portal(), "kubectl", "--kubeconfig", other, "get", "namespaces")
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v\n%s", err, out)
		}
		time.Sleep(200 * time.Millisecond)
	}
	foreign, err := harness.StartPortalAt(t.TempDir(), harness.FreePort(), "--controllers", "none", "--etcd-servers", cluster[0].ClientURL)
	if err == nil {
		foreign.Kill()
		t.Fatal("a server with another CA started")
	}
	if !strings.Contains(err.Error(), "--adopt-ca") {
		t.Errorf("it says %v", err)
	}
}

func adminCertificate(t *testing.T, kubeconfig string) string {
	t.Helper()
	config, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return string(config.AuthInfos["admin"].ClientCertificateData)
}

// TestIdleConnectionsLeaveDescriptorsForEtcd: with few files allowed, many idle connections neither end the server nor keep
// clients out.
func TestIdleConnectionsLeaveDescriptorsForEtcd(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	dir, port := t.TempDir(), harness.FreePort()
	address := fmt.Sprintf("127.0.0.1:%d", port)
	script := fmt.Sprintf("ulimit -n 160; exec %s server --controllers none --data-dir %s --listen %s", harness.Portal(), filepath.Join(dir, "data"), address)
	process, err := harness.Start(dir, "portal", "/bin/sh", "-c", script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(process.Kill)
	api := &harness.API{Process: process, URL: "https://" + address, Kubeconfig: filepath.Join(dir, "data", "admin.kubeconfig")}
	if err := api.WaitReady(30 * time.Second); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	for i := range 20 {
		body := serviceBody(fmt.Sprintf("s%d", i), `{"ports":[{"port":80}]}`)
		if code, answer := admin(t, api).ask(t, "POST", services, body); code != 201 {
			t.Fatalf("with 200 idle connections: %d %s", code, answer)
		}
	}
	select {
	case <-api.Done():
		t.Fatalf("the server ended: %s", api.Tail())
	default:
	}
}

// TestHangupEndsInOrder: a terminal that closes drains the server like any other end, and nohup makes it stay.
func TestHangupEndsInOrder(t *testing.T) {
	t.Parallel()
	// Processes that this one starts would ignore it if whoever started this one did, with nohup for example.
	hangup := make(chan os.Signal, 1)
	ossignal.Notify(hangup, syscall.SIGHUP)
	t.Cleanup(func() { ossignal.Stop(hangup) })
	api := startPortal(t, "--controllers", "none")
	if err := syscall.Kill(api.Pid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if err := api.Wait(20 * time.Second); err != nil {
		t.Errorf("after SIGHUP: %v\n%s", err, api.Tail())
	}

	nohup, err := exec.LookPath("nohup")
	if err != nil {
		t.Fatal(err)
	}
	dir, port := t.TempDir(), harness.FreePort()
	address := fmt.Sprintf("127.0.0.1:%d", port)
	process, err := harness.Start(dir, "portal", nohup, harness.Portal(), "server", "--controllers", "none",
		"--data-dir", filepath.Join(dir, "data"), "--listen", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(process.Kill)
	stays := &harness.API{Process: process, URL: "https://" + address}
	if err := stays.WaitReady(30 * time.Second); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(stays.Pid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if err := stays.WaitReady(10 * time.Second); err != nil {
		t.Errorf("under nohup: %v", err)
	}
}

// TestUnknownKindIsSaidToBeUnknown: kubectl looks for a CustomResourceDefinition before it says so.
func TestUnknownKindIsSaidToBeUnknown(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	file := filepath.Join(t.TempDir(), "x.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: example.com/v1\nkind: Nonsense\nmetadata: {name: x}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"create"}, {"apply"}, {"apply", "--server-side"}} {
		out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"kubectl", "--kubeconfig", api.Kubeconfig, "-f", file}, args...)...)
		if err == nil || !strings.Contains(out, `no matches for kind "Nonsense"`) || strings.Contains(out, "list CRDs") {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
	}
}
