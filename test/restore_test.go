package test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// TestControllersAfterARestore restores the store beneath an API server to an older state while the controllers run
// outside. What they have cached never happened, and they must notice: whether they find the server behind the version
// that they know, or beyond it because others have written since. Those who lost the Lease meanwhile go on, too.
func TestControllersAfterARestore(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	for _, c := range []struct {
		name string
		// writes is how many others make before the controllers see the server again.
		writes int
		elect  bool
	}{
		{"server behind, one process", 0, false},
		{"server behind, election", 0, true},
		{"server beyond, election", 400, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			restore(t, c.writes, c.elect)
		})
	}
}

func restore(t *testing.T, writes int, elect bool) {
	dir, port := t.TempDir(), harness.FreePort()
	store, snapshot := filepath.Join(dir, "data", "etcd"), filepath.Join(dir, "snapshot")
	var api *harness.API
	start := func() kubernetes.Interface {
		t.Helper()
		var err error
		if api, err = harness.StartPortalAt(dir, port, "--controllers", "none"); err != nil {
			t.Fatal(err)
		}
		return connect(t, api.Kubeconfig)
	}
	t.Cleanup(func() { api.Kill() })
	// A server of some age: the Lease is in the snapshot too.
	start()
	metrics := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	controllers := func() *harness.Process {
		t.Helper()
		p, err := harness.Start(dir, "controllers", harness.Portal(), "controllers", "--kubeconfig", api.Kubeconfig,
			fmt.Sprintf("--leader-elect=%t", elect), "--metrics-bind-address", metrics)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		return p
	}
	first := controllers()
	addService(t, connect(t, api.Kubeconfig), "before")
	expectSlice(t, connect(t, api.Kubeconfig), "before")
	first.Kill()
	stop(t, api)
	if err := os.CopyFS(snapshot, os.DirFS(store)); err != nil {
		t.Fatal(err)
	}
	client := start()
	running := controllers()
	for i := range 100 {
		configMap(t, client, fmt.Sprintf("lost-%d", i))
	}
	addService(t, client, "lost")
	expectSlice(t, client, "lost")

	if writes > 0 {
		signal(t, running, syscall.SIGSTOP)
	}
	stop(t, api)
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(store, os.DirFS(snapshot)); err != nil {
		t.Fatal(err)
	}
	client = start()
	addService(t, client, "after")
	for i := range writes {
		configMap(t, client, fmt.Sprintf("other-%d", i))
	}
	if writes > 0 {
		time.Sleep(5 * time.Second) // the Lease can't be renewed any more
		signal(t, running, syscall.SIGCONT)
	}
	expectSlice(t, client, "after")
	select {
	case <-running.Done():
		t.Fatalf("the controllers have ended:\n%s", running.Tail())
	default:
	}
	resp, err := http.Get("http://" + metrics + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
		t.Errorf("/healthz: %s: %s", resp.Status, body)
	}
}

func stop(t *testing.T, api *harness.API) {
	t.Helper()
	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
}

func signal(t *testing.T, p *harness.Process, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(p.Pid(), s); err != nil {
		t.Fatal(err)
	}
}

func configMap(t *testing.T, client kubernetes.Interface, name string) {
	t.Helper()
	_, err := client.CoreV1().ConfigMaps("default").Create(context.Background(),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

func addService(t *testing.T, client kubernetes.Interface, name string) {
	t.Helper()
	_, err := client.CoreV1().Services("default").Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// expectSlice waits until the controllers have given a Service a slice.
func expectSlice(t *testing.T, client kubernetes.Interface, name string) {
	t.Helper()
	ctx := t.Context()
	var found []string
	// Half a minute and more go by on a busy machine: an election takes up to ten seconds, and what was restored has two.
	for end := time.Now().Add(90 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		list, err := client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		found = nil
		for _, slice := range list.Items {
			found = append(found, slice.Labels[discoveryv1.LabelServiceName])
		}
		if slices.Contains(found, name) {
			return
		}
	}
	t.Fatalf("no slice of Service %s, only of %v", name, found)
}
