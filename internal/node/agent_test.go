package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"portal/internal/nettest"
	"portal/internal/node/image"
	"portal/internal/node/network"
	"portal/internal/node/network/nat"
	"portal/internal/node/runtime"
)

// TestProcess: while an agent runs, the umask of whoever started it has no effect on what it makes for Pods, and Pods go before it when memory
// is scarce. Both are as before when it has ended.
func TestProcess(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	score := func() string {
		data, err := os.ReadFile("/proc/self/oom_score_adj")
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(data))
	}
	umask := func() int {
		now := unix.Umask(0)
		unix.Umask(now)
		return now
	}
	defer unix.Umask(unix.Umask(0o077))
	before := score()
	want := "-999"
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(want), 0); err != nil {
		t.Log("this machine does not let its processes be protected")
		want = before
	} else if err := os.WriteFile("/proc/self/oom_score_adj", []byte(before), 0); err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset()
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, kruntime.Object, error) {
		return true, nil, errors.New("unavailable") // so that it goes no further
	})
	a, err := New(Options{
		Client: client, Name: "n", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, DataDir: t.TempDir(),
		CgroupRoot: fmt.Sprintf("portal-test-%d-agent", os.Getpid()), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	select {
	case <-a.registered:
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(30 * time.Second):
		t.Error("it does not register")
	}
	if got := umask(); got != 0o022 {
		t.Errorf("the umask is %o", got)
	}
	if got := score(); got != want {
		t.Errorf("the score is %s", got)
	}
	cancel()
	<-ended
	if err := a.runtime.Cgroups.Remove(""); err != nil {
		t.Error(err)
	}
	if got := umask(); got != 0o077 || score() != before {
		t.Errorf("afterwards the umask is %o, and the score %s", got, score())
	}
}

// TestLoopsPanic: what panics while the Node or its Lease is written, images are collected or Pods are kept connected is counted and tried
// again, and the agent goes on.
func TestLoopsPanic(t *testing.T) {
	client := fake.NewClientset()
	var nodes, leases atomic.Int32
	for resource, count := range map[string]*atomic.Int32{"nodes": &nodes, "leases": &leases} {
		client.PrependReactor("get", resource, func(clienttesting.Action) (bool, kruntime.Object, error) {
			if count.Add(1) == 1 {
				panic("while reading " + resource)
			}
			return false, nil, nil
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	agent := func(images *image.Store) *Agent {
		return &Agent{
			Options:    Options{Client: client, Name: "n", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Log: slog.New(slog.DiscardHandler)},
			registered: make(chan struct{}), up: make(chan struct{}), nodeChanged: make(chan struct{}, 1), images: images, connections: &connections{changed: make(chan struct{}, 1)},
			host: hostFacts{capacity: corev1.ResourceList{}},
		}
	}
	writes, collects, connects := agent(image.NewStore(image.Options{Dir: t.TempDir()})), agent(nil), agent(nil)
	connects.connections.change()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { writes.keepNode(ctx) })
	running.Go(func() { writes.keepLease(ctx) })
	running.Go(func() { collects.collectImages(ctx) })
	running.Go(func() { connects.keepConnected(ctx) }) // there is no network
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, err := client.Tracker().Get(coordinationv1.SchemeGroupVersion.WithResource("leases"), corev1.NamespaceNodeLease, "n")
		if err == nil && writes.panics.Load() == 2 && collects.panics.Load() == 2 && connects.panics.Load() > 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the Lease: %v; panics: %d, %d, %d", err, writes.panics.Load(), collects.panics.Load(), connects.panics.Load())
		}
	}
}

// TestFailedSandbox: one that can't be finished gives all back that it had: addresses, interface, processes and control groups.
func TestFailedSandbox(t *testing.T) {
	n := nettest.NewNamespace(t)
	dir := t.TempDir()
	r, err := runtime.New(runtime.Options{Dir: filepath.Join(dir, "pods"), Logs: filepath.Join(dir, "logs"), CgroupRoot: fmt.Sprintf("portal-test-%d-sandbox", os.Getpid())})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Cgroups.Remove(""); err != nil {
			t.Error(err)
		}
	}()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"}, Spec: corev1.PodSpec{
		Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/proc/none", Type: ptr.To(corev1.HostPathDirectory)}}}},
	}}
	n.Do(func() {
		b, err := network.NewBridge(network.BridgeOptions{Dir: filepath.Join(dir, "addresses"), Bridge: "br", CIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}})
		if err == nil {
			err = b.Setup()
		}
		if err != nil {
			t.Error(err)
			return
		}
		a := &Agent{Options: Options{DataDir: dir, Log: slog.New(slog.DiscardHandler)}, runtime: r, network: b, connections: &connections{bridge: b, nat: nat.New(), state: nat.State{Ports: map[string][]nat.Port{}}}, recorder: record.NewFakeRecorder(10)}
		_, _, err = a.sandbox(t.Context(), pod, func([]netip.Addr) fileSources { return fileSources{} })
		var volume *volumeError
		if !errors.As(err, &volume) {
			t.Errorf("it failed with %v", err)
		}
		if addrs, err := b.Addresses("u"); err != nil || len(addrs) > 0 {
			t.Errorf("it has %v, %v", addrs, err)
		}
		if links, err := network.Attached("br"); err != nil || links > 0 {
			t.Errorf("%d interfaces are left, %v", links, err)
		}
		if p := r.Lookup("u"); p == nil || p.PID != 0 {
			t.Errorf("%+v", p)
		}
	})
}
