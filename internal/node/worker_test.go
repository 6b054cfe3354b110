package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"

	"portal/internal/node/life"
	noderuntime "portal/internal/node/runtime"
	"portal/internal/node/runtime/shim"
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

// TestResumePanics: a Pod that an earlier agent left, and whose remains can't be looked at, is looked at again after a while.
func TestResumePanics(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c"}}, SecurityContext: &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: "kernel.core_pattern", Value: "x"}}},
	}}
	events := record.NewFakeRecorder(10)
	client := fake.NewClientset(pod)
	a := &Agent{
		Options: Options{Client: client, NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Log: slog.New(slog.DiscardHandler)}, recorder: events,
		found: map[types.UID]*noderuntime.Pod{"u": {UID: "u", Dir: t.TempDir()}}, workers: map[types.UID]*worker{},
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer a.running.Wait()
	defer cancel()
	a.seen(ctx, pod) // there is no network yet
	if e := <-events.Events; !strings.HasPrefix(e, "Warning FailedSync ") || a.panics.Load() == 0 {
		t.Errorf("event %q, %d panics", e, a.panics.Load())
	}
	changed := pod.DeepCopy()
	changed.Spec.HostNetwork = true // which needs none
	a.seen(ctx, changed)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		now, err := client.CoreV1().Pods("default").Get(ctx, "p", metav1.GetOptions{})
		if err == nil && now.Status.Reason == "SysctlForbidden" && now.Status.PodIP == "192.0.2.1" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the Pod is not looked at again: %v, %+v", err, now.Status)
		}
	}
}

// TestHelperPanics: what panics beside a worker's decisions has failed, is counted, and is tried again.
func TestHelperPanics(t *testing.T) {
	command := corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{
			Name: "c", LivenessProbe: &corev1.Probe{ProbeHandler: command, PeriodSeconds: 100},
			Lifecycle: &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: command.Exec}},
		}},
	}}
	client := fake.NewClientset(pod)
	var patches atomic.Int32
	client.PrependReactor("patch", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		if patches.Add(1) == 1 {
			panic("while writing")
		}
		return false, nil, nil
	})
	begin := func() (*worker, *bytes.Buffer) {
		var log bytes.Buffer
		a := &Agent{Options: Options{Client: client, NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Log: slog.New(slog.NewTextHandler(&log, nil))}, recorder: record.NewFakeRecorder(100)}
		w := newWorker(a, pod, nil)
		w.statuses["r"] = &shim.Status{ID: "r", Started: time.Now()}
		return w, &log
	}
	hook := life.Hook{Container: "c", Run: "r"}
	for _, c := range []struct {
		name  string
		start func(context.Context, *worker) // with the worker's lock
		// after says what is missing then.
		after func(*worker) string
	}{
		{"the start of a container", func(ctx context.Context, w *worker) { // there is no store of images
			w.carryOut(ctx, pod, life.StartContainer{Container: "c"})
		}, func(w *worker) string {
			if f := w.observed.Failures["c"]; f == nil || f.Reason != "CreateContainerError" || !strings.HasPrefix(f.Message, "panic: ") || len(w.busy) > 0 {
				return fmt.Sprintf("%+v, busy with %v", f, w.busy)
			}
			return ""
		}},
		{"the start of a sandbox", func(ctx context.Context, w *worker) { // there is no runtime
			w.carryOut(ctx, pod, life.CreateSandbox{})
		}, func(w *worker) string {
			if f := w.observed.SandboxFailure; f == nil || !strings.HasPrefix(f.Message, "panic: ") || len(w.busy) > 0 {
				return fmt.Sprintf("%+v, busy with %v", f, w.busy)
			}
			return ""
		}},
		{"a probe", func(ctx context.Context, w *worker) { // there is no sandbox
			w.watchProbes(ctx, pod, []life.Probe{{Container: "c", Run: "r", Kind: life.Liveness}})
		}, func(w *worker) string {
			if n := w.agent.panics.Load(); n < 2 {
				return fmt.Sprintf("it was tried %d times", n)
			}
			return ""
		}},
		{"a hook", func(ctx context.Context, w *worker) {
			w.carryOut(ctx, pod, life.RunHook{Hook: hook})
		}, func(w *worker) string {
			if got := w.observed.Hooks[hook]; !got.Done || got.Failure == "" {
				return fmt.Sprintf("%+v", got)
			}
			return ""
		}},
		{"a write of the status", func(ctx context.Context, w *worker) {
			w.write(ctx, &corev1.PodStatus{Phase: corev1.PodPending, Message: "mine"})
		}, func(w *worker) string {
			w.write(context.Background(), w.writer.last) // as every step does
			if got, err := client.CoreV1().Pods("default").Get(context.Background(), "p", metav1.GetOptions{}); err != nil || got.Status.Message != "mine" || !w.settled() {
				return fmt.Sprintf("%+v, %v", got.Status, err)
			}
			return ""
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			w, log := begin()
			w.locked(func() { c.start(ctx, w) })
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				missing := ""
				w.locked(func() { missing = c.after(w) })
				if missing == "" {
					break
				}
				if time.Now().After(end) {
					t.Fatal(missing)
				}
			}
			cancel()
			w.helpers.Wait()
			if w.agent.panics.Load() == 0 {
				t.Error("it is not counted")
			}
			if text := log.String(); !strings.Contains(text, "panicked") || !strings.Contains(text, "goroutine ") || !strings.Contains(text, "pod=p") {
				t.Errorf("logged:\n%s", text)
			}
		})
	}
}

// TestFailedWrite: what others change in the node's conditions while a write fails is written again.
func TestFailedWrite(t *testing.T) {
	with := func(ready corev1.ConditionStatus, message string) *corev1.PodStatus {
		return &corev1.PodStatus{Message: message, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"}, Status: *with(corev1.ConditionTrue, "")}
	client := fake.NewClientset(pod)
	a := &Agent{Options: Options{Client: client, NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Log: slog.New(slog.DiscardHandler)}, recorder: record.NewFakeRecorder(10)}
	w := newWorker(a, pod, nil)
	patches := make(chan string, 10)
	client.PrependReactor("patch", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		patches <- string(action.(clienttesting.PatchAction).GetPatch())
		lost := pod.DeepCopy()
		lost.Status = *with(corev1.ConditionFalse, "")
		w.update(lost) // by the node controller
		return true, nil, errors.New("unavailable")
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer w.helpers.Wait()
	defer cancel()
	for i, want := range []bool{false, true} {
		for end := time.Now().Add(20 * time.Second); len(patches) == 0; time.Sleep(10 * time.Millisecond) {
			w.locked(func() { w.write(ctx, with(corev1.ConditionTrue, "mine")) })
			if time.Now().After(end) {
				t.Fatal("nothing is written")
			}
		}
		if patch := <-patches; strings.Contains(patch, `"Ready"`) != want {
			t.Errorf("write %d: %s", i, patch)
		}
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

// TestTerminationMessage: it is the end of what the container wrote for it, or of its log, and not more than its part of what a Pod's may say
// together.
func TestTerminationMessage(t *testing.T) {
	dir := t.TempDir()
	r, err := noderuntime.New(noderuntime.Options{Dir: filepath.Join(dir, "pods"), Logs: filepath.Join(dir, "logs"), CgroupRoot: fmt.Sprintf("portal-test-%d-message", os.Getpid())})
	if err != nil {
		if os.Geteuid() != 0 {
			t.Skipf("needs root: %v", err)
		}
		t.Fatal(err)
	}
	defer func() {
		if err := r.Cgroups.Remove(""); err != nil {
			t.Error(err)
		}
	}()
	if err := os.MkdirAll(filepath.Join(dir, "pods", "u", "containers", "r"), 0o700); err != nil {
		t.Fatal(err)
	}
	sandbox := r.Lookup("u")
	var log, lines strings.Builder
	for i := range 100 {
		fmt.Fprintf(&log, "2026-01-01T00:00:00Z stdout P begin\n2026-01-01T00:00:00Z stdout F  %d\n", i)
		if i >= 20 {
			fmt.Fprintf(&lines, "begin %d\n", i)
		}
	}
	long := "begins" + strings.Repeat("ü", 2500)
	for name, c := range map[string]struct {
		wrote, log string
		containers int
		policy     corev1.TerminationMessagePolicy
		code       int
		want       string
	}{
		"short":           {"why", log.String(), 1, corev1.TerminationMessageFallbackToLogsOnError, 1, "why"},
		"long":            {long, "", 1, "", 0, long[len(long)-4096:]},
		"one of many":     {long, "", 4, "", 0, long[len(long)-4096:][:3072]},
		"one of odd many": {"x" + long[len(long)-4095+1:], "", 5, "", 0, "x" + strings.Repeat("ü", (12288/5-1)/2)},
		"the log":         {"", log.String(), 1, corev1.TerminationMessageFallbackToLogsOnError, 1, strings.TrimSuffix(lines.String(), "\n")},
		"a long log":      {"", "2026-01-01T00:00:00Z stdout F " + strings.Repeat("y", 5000) + "\n", 1, corev1.TerminationMessageFallbackToLogsOnError, 1, strings.Repeat("y", 2048)},
		"no error":        {"", log.String(), 1, corev1.TerminationMessageFallbackToLogsOnError, 0, ""},
		"another policy":  {"", log.String(), 1, corev1.TerminationMessageReadFile, 1, ""},
	} {
		pod := &corev1.Pod{}
		for i := range c.containers {
			pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: fmt.Sprint("c", i), TerminationMessagePolicy: c.policy})
		}
		w := newWorker(&Agent{}, pod, nil)
		w.sandbox = sandbox
		for path, text := range map[string]string{terminationFile(sandbox, "r"): c.wrote, filepath.Join(sandbox.LogDir(), "r.log"): c.log} {
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if got := w.terminationMessage("c0", &shim.Status{ID: "r", ExitCode: c.code}); got != c.want {
			t.Errorf("%s: %d bytes, want %d:\n%.100q\n%.100q", name, len(got), len(c.want), got, c.want)
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
