package node

import (
	"bytes"
	"context"
	"log/slog"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"portal/internal/node/life"
)

// TestPanic: a step that panics is logged and tried again after a while, and the worker goes on.
func TestPanic(t *testing.T) {
	// A sysctl of the whole node: the Pod is rejected, so that nothing has to run.
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c"}}, SecurityContext: &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: "kernel.core_pattern", Value: "x"}}},
	}}
	var log bytes.Buffer
	events := record.NewFakeRecorder(10)
	client := fake.NewClientset(pod)
	a := &Agent{Options: Options{Client: client, NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Log: slog.New(slog.NewTextHandler(&log, nil))}, recorder: events}
	w := newWorker(a, pod, nil)
	w.life = nil // every decision panics
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); w.run(ctx) }()
	select {
	case e := <-events.Events:
		if !strings.HasPrefix(e, "Warning FailedSync ") || !strings.Contains(e, "nil pointer") {
			t.Errorf("event %q", e)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("no Event says that the sync failed")
	}
	w.mu.Lock()
	w.life = life.New()
	w.mu.Unlock()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		now, err := client.CoreV1().Pods("default").Get(ctx, "p", metav1.GetOptions{})
		if err == nil && now.Status.Reason == "SysctlForbidden" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the Pod is not looked at again: %v, %+v", err, now.Status)
		}
	}
	cancel()
	<-ended
	if text := log.String(); !strings.Contains(text, "panicked") || !strings.Contains(text, "life.go") || !strings.Contains(text, "pod=p") {
		t.Errorf("logged:\n%s", text)
	}
}

// TestLongGrace: a Pod that is gone from the API has its grace period, however long that is, and so has a hook that sleeps.
func TestLongGrace(t *testing.T) {
	grace := int64(math.MaxInt64)
	pod := &corev1.Pod{Spec: corev1.PodSpec{TerminationGracePeriodSeconds: &grace, Containers: []corev1.Container{{
		Name: "c", Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: grace}}},
	}}}}
	w := newWorker(&Agent{Options: Options{NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}}, pod, nil)
	w.deleted = true
	if at := w.view().DeletionTimestamp; at.Year() < 2200 {
		t.Errorf("it is to have ended by %s", at)
	}
	hook := life.Hook{Container: "c", Run: "r", PreStop: true}
	w.runHook(t.Context(), pod, life.RunHook{Hook: hook, Timeout: 50 * time.Millisecond})
	if got := w.observed.Hooks[hook]; got.Failure == "" {
		t.Errorf("the hook did not sleep: %+v", got)
	}
}

func TestPanicBackoff(t *testing.T) {
	for panics, want := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 6: 32 * time.Second, 7: time.Minute, 1000: time.Minute} {
		if got := panicBackoff(panics); got != want {
			t.Errorf("after %d: %s, want %s", panics, got, want)
		}
	}
}

// TestBounded: what is quoted of others fits an Event, and is text.
func TestBounded(t *testing.T) {
	for text, want := range map[string]string{"plain": "plain", "\xff\xfe": "?", "ü": "ü"} {
		if got := bounded(text, 100); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	for _, text := range []string{strings.Repeat("x", 5000), strings.Repeat("ü", 5000), strings.Repeat("\xff", 5000)} {
		if got := bounded(text, maxMessage); len(got) > maxMessage || !utf8.ValidString(got) || !strings.HasSuffix(got, "…") {
			t.Errorf("%d bytes: %q", len(got), got)
		}
	}
}
