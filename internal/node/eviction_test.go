package node

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"portal/internal/node/disk"
	"portal/internal/node/image"
	"portal/internal/node/runtime"
	"portal/internal/node/runtime/shim"
)

// TestFullDisk: while the disk is full and no Pod is to blame, that is said once.
func TestFullDisk(t *testing.T) {
	var log bytes.Buffer
	a := &Agent{
		Options: Options{DataDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil)), Eviction: Eviction{Thresholds: disk.Thresholds{Bytes: disk.Amount{Number: 1 << 62}}}},
		images:  image.NewStore(image.Options{}), nodeChanged: make(chan struct{}, 1),
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*freeInterval+freeInterval/2)
	defer cancel()
	ended := make(chan struct{})
	go func() { defer close(ended); a.guardDisk(ctx) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("it does not end")
	}
	if n := strings.Count(log.String(), "no Pod is to be evicted"); n != 1 {
		t.Errorf("it is said %d times:\n%s", n, log.String())
	}
}

// TestDiskPanics: what panics while the disk is guarded is counted, and looked at again. Of one Pod, it does not keep others from being
// looked at.
func TestDiskPanics(t *testing.T) {
	usage := corev1.ResourceList{corev1.ResourceEphemeralStorage: resource.MustParse("1Mi")}
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Limits: usage}}}}}
	a := &Agent{Options: Options{DataDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}, recorder: record.NewFakeRecorder(100), nodeChanged: make(chan struct{}, 1), workers: map[types.UID]*worker{}}
	for _, uid := range []types.UID{"1", "2"} {
		w := newWorker(a, pod, nil)
		w.sandbox = &runtime.Pod{} // of no runtime
		w.statuses["r"] = &shim.Status{Meta: []byte("{}")}
		a.workers[uid] = w
	}
	a.enforceLimits(t.Context())
	if got := a.panics.Load(); got != 2 {
		t.Errorf("%d Pods were looked at", got)
	}
	clear(a.workers)
	a.Eviction.Thresholds = disk.Thresholds{Bytes: disk.Amount{Number: 1 << 62}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.guardDisk(ctx) }() // there is no store of images
	for end := time.Now().Add(30 * time.Second); a.panics.Load() < 3; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not look for room")
		}
	}
	cancel()
	<-ended
}
