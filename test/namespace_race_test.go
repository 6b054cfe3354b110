package test

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

// TestNamespaceDeletionRace deletes namespaces through one server while another one, stopped in the middle of creating
// objects in them, goes on when they are gone. What it creates then must not stay.
func TestNamespaceDeletionRace(t *testing.T) {
	need(t, harness.Portal(), "build")
	etcd := startEtcd(t, 1)[0].ClientURL
	first, second := twoServers(t, etcd)
	here, there := plain(t, first.Kubeconfig), plain(t, second.Kubeconfig)
	ctx := t.Context()
	for round := 0; ; round++ {
		if round == 20 {
			t.Fatal("no object was created in a namespace that was gone: this has tested nothing")
		}
		name := fmt.Sprintf("race-%d", round)
		if _, err := here.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		late := createWhileDeleted(t, here, there, second, name)
		if late == 0 {
			continue
		}
		t.Logf("round %d: %d objects were created in a namespace that was gone", round, late)
		expectNothingIn(t, here, name)
		return
	}
}

// twoServers are two servers on one etcd, of which the first runs the controllers.
func twoServers(t *testing.T, etcd string) (first, second *harness.API) {
	t.Helper()
	dirs := []string{t.TempDir(), t.TempDir()}
	var servers []*harness.API
	for i, controllers := range []string{"*", "none"} {
		if i == 1 {
			copyAuthority(t, filepath.Join(dirs[0], "data"), filepath.Join(dirs[1], "data"))
		}
		api, err := harness.StartPortal(dirs[i], "--controllers", controllers, "--etcd-servers", etcd, "--advertise-address", advertised)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(api.Kill)
		servers = append(servers, api)
	}
	return servers[0], servers[1]
}

// createWhileDeleted has objects created through the second server, stops it, deletes the namespace through the first,
// lets the second one go on, and says how many objects were there after the namespace was gone.
func createWhileDeleted(t *testing.T, here, there kubernetes.Interface, second *harness.API, namespace string) int {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var creating sync.WaitGroup
	defer func() { cancel(); creating.Wait() }()
	var gone atomic.Bool
	var late atomic.Int32
	for i := range 8 {
		creating.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				_, err := there.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c-%d-%d", i, n)}}, metav1.CreateOptions{})
				if err == nil && gone.Load() {
					late.Add(1)
				}
				if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
					return
				}
			}
		})
	}
	time.Sleep(200 * time.Millisecond)
	signal(t, second.Process, syscall.SIGSTOP)
	defer func() { _ = syscall.Kill(second.Pid(), syscall.SIGCONT) }()
	if err := here.CoreV1().Namespaces().Delete(ctx, namespace, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		_, err := here.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("namespace %s is still there: %v", namespace, err)
		}
	}
	gone.Store(true)
	signal(t, second.Process, syscall.SIGCONT)
	time.Sleep(300 * time.Millisecond)
	cancel()
	creating.Wait()
	return int(late.Load())
}

func expectNothingIn(t *testing.T, client kubernetes.Interface, namespace string) {
	t.Helper()
	var left []string
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		list, err := client.CoreV1().ConfigMaps(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		left = nil
		for _, c := range list.Items {
			left = append(left, c.Name)
		}
		if len(left) == 0 {
			return
		}
	}
	t.Fatalf("still in namespace %s, which is gone: %v", namespace, left)
}
