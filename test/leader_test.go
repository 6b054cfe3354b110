package test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// TestLeaderIdentity: a server's identity is its own. One that comes back on the same machine and address is not the one
// that was there before, since that one may be another machine of the same name which still runs.
func TestLeaderIdentity(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	etcd := startEtcd(t, 1)[0].ClientURL
	reader, err := harness.StartPortal(t.TempDir(), "--controllers", "none", "--etcd-servers", etcd, "--advertise-address", advertised)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(reader.Kill)
	client := plain(t, reader.Kubeconfig)
	dir, port := t.TempDir(), harness.FreePort()
	copyAuthority(t, filepath.Dir(reader.Kubeconfig), filepath.Join(dir, "data"))
	start := func() *harness.API {
		t.Helper()
		api, err := harness.StartPortalAt(dir, port, "--etcd-servers", etcd, "--advertise-address", advertised)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(api.Kill)
		return api
	}
	first := start()
	before := waitHolder(t, client, "")
	first.Kill()
	again := start()
	waitHolder(t, client, before)
	// One that ends in order releases the Lease.
	stop(t, again)
	if got, _ := holder(t, client); got != "" {
		t.Errorf("%s holds the Lease after it has ended", got)
	}
}

// TestEmbeddedLeaderIsBackAtOnce: nobody else can have the embedded etcd open, so a server that was killed does not have
// to wait until its own Lease has run out.
func TestEmbeddedLeaderIsBackAtOnce(t *testing.T) {
	need(t, harness.Portal(), "build")
	dir := t.TempDir()
	before := ""
	for range 2 {
		api, err := harness.StartPortal(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(api.Kill)
		ready := time.Now()
		client := plain(t, api.Kubeconfig)
		before = waitHolder(t, client, before)
		if _, since := holder(t, client); since.Sub(ready) > 5*time.Second {
			t.Errorf("leads %s after it was ready", since.Sub(ready))
		}
		time.Sleep(time.Second) // a Lease that was just renewed
		api.Kill()
	}
}

// waitHolder waits until somebody holds the Lease who is not the one before.
func waitHolder(t *testing.T, client kubernetes.Interface, before string) string {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if got, _ := holder(t, client); got != "" && got != before {
			return got
		}
	}
	got, _ := holder(t, client)
	t.Fatalf("the Lease is held by %q, and before it was %q", got, before)
	return ""
}

// copyAuthority gives a server the certificate authority of another one.
func copyAuthority(t *testing.T, from, to string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(to, "pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.crt", "ca.key"} {
		data, err := os.ReadFile(filepath.Join(from, "pki", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, "pki", name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// holder is who holds the controllers' Lease, and since when.
func holder(t *testing.T, client kubernetes.Interface) (string, time.Time) {
	t.Helper()
	lease, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(t.Context(), "portal-controllers", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil || lease.Spec.AcquireTime == nil {
		return "", time.Time{}
	}
	return *lease.Spec.HolderIdentity, lease.Spec.AcquireTime.Time
}
