package node

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/node/life"
	"portal/internal/rmtree"
)

func (w *worker) event(warning bool, reason, message string) {
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	w.agent.recorder.Event(w.pod, kind, reason, bounded(message, maxMessage))
}

// bounded is a text that the API takes, of so many bytes at most.
func bounded(text string, most int) string {
	if len(text) > most {
		text = text[:most-len("…")] + "…"
	}
	return strings.ToValidUTF8(text, "?")
}

// do runs something beside the worker, once at a time for a key. If it panics, it counts as being done for a while longer, so that it is
// not begun again at once. It is called with the worker's lock.
func (w *worker) do(ctx context.Context, key string, f func()) {
	if w.busy[key] {
		return
	}
	w.busy[key] = true
	w.helpers.Go(func() {
		err := w.attempt(key, func() error { f(); return nil })
		panics := 0
		w.locked(func() {
			if panics = w.panics[key] + 1; err == nil {
				panics = 0
				delete(w.panics, key)
			} else {
				w.panics[key] = panics
			}
		})
		if panics > 0 {
			pause(ctx, panicBackoff(panics))
		}
		w.locked(func() { delete(w.busy, key) })
		w.poke()
	})
}

// beside runs something beside the worker, and again after a while if it panics.
func (w *worker) beside(ctx context.Context, what string, f func()) {
	w.helpers.Go(func() {
		for panics := 1; ; panics++ {
			if err := w.attempt(what, func() error { f(); return nil }); err == nil || !pause(ctx, panicBackoff(panics)) {
				return
			}
		}
	})
}

// carryOut begins what was decided.
func (w *worker) carryOut(ctx context.Context, pod *corev1.Pod, action life.Action) {
	if external(pod) && w.carryOutExternal(action) {
		return
	}
	switch action := action.(type) {
	case life.CreateSandbox:
		w.do(ctx, "sandbox", func() { w.createSandbox(ctx, pod) })
	case life.StopSandbox:
		w.do(ctx, "sandbox", func() { w.stopSandbox(ctx) })
	case life.Forget:
		if w.settled() || w.deleted {
			// Not while a sandbox is being made: its shim would outlive its folder.
			w.do(ctx, "sandbox", func() { w.forget(ctx, pod) })
		}
	case life.StartContainer:
		w.do(ctx, "start "+action.Container, func() { w.startContainer(ctx, pod, action) })
	case life.RunHook:
		if _, known := w.observed.Hooks[action.Hook]; !known {
			w.observed.Hooks[action.Hook] = life.HookResult{}
			w.do(ctx, fmt.Sprint("hook ", action.Hook), func() { w.runHook(ctx, pod, action) })
		}
	case life.Signal:
		w.signal(ctx, action)
	}
}

// signal signals a run. It is asked to end only once.
func (w *worker) signal(ctx context.Context, action life.Signal) {
	sig := syscall.SIGTERM
	if s := w.statuses[action.Run]; s != nil {
		var meta runMeta
		if json.Unmarshal(s.Meta, &meta) == nil {
			sig = signalNamed(meta.StopSignal)
		}
	}
	if action.Kill {
		sig = syscall.SIGKILL
	}
	if !action.Kill && w.signals[action.Run] != 0 || w.sandbox == nil {
		return
	}
	w.signals[action.Run] = sig
	sandbox := w.sandbox
	w.do(ctx, fmt.Sprint("signal ", action.Run, sig), func() {
		limited, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		sent := false
		defer func() {
			if !sent {
				w.locked(func() { delete(w.signals, action.Run) })
			}
		}()
		if err := sandbox.Signal(limited, action.Run, sig); err != nil {
			w.retry(ctx, "container "+action.Container+" could not be sent "+sig.String(), err)
			return
		}
		sent = true
	})
}

// forget removes all that is left of the Pod here, and then from the API.
func (w *worker) forget(ctx context.Context, pod *corev1.Pod) {
	w.mu.Lock()
	deleted := w.deleted
	w.mu.Unlock()
	// Also what was made in part, before something failed.
	if sandbox := w.agent.runtime.Lookup(string(pod.UID)); sandbox != nil {
		if err := sandbox.Remove(ctx); err != nil {
			w.retry(ctx, "the Pod could not be removed", err)
			return
		}
	}
	if err := rmtree.Remove(w.agent.volumesDir(pod.UID)); err != nil {
		w.retry(ctx, "the Pod's volumes could not be removed", err)
		return
	}
	if err := w.agent.detach(ctx, string(pod.UID)); err != nil {
		w.retry(ctx, "the Pod's addresses could not be given back", err)
		return
	}
	if !deleted {
		err := w.agent.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &pod.UID},
		})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			w.retry(ctx, "the Pod could not be deleted from the API", err)
			return
		}
	}
	w.mu.Lock()
	w.forgot = true
	w.mu.Unlock()
}

// retry waits a moment before something that failed is tried again.
func (w *worker) retry(ctx context.Context, what string, err error) {
	if ctx.Err() != nil {
		return
	}
	w.locked(func() {
		w.agent.Log.Warn(what+", retrying", "pod", w.pod.Name, "namespace", w.pod.Namespace, "err", err)
	})
	pause(ctx, retryDelay)
}
