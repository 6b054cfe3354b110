package test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// watcher follows the load's Services from one server to the next, always from where it was, and finds fault with what
// it is told: an event out of order or for an object that it can't know is a gap or a repeat.
type watcher struct {
	name    string
	servers []kubernetes.Interface

	mu       sync.Mutex
	last     uint64
	alive    map[types.UID]bool
	seen     map[ack]bool // by uid and version
	faults   []string
	sessions int
}

func newWatcher(name string, servers ...kubernetes.Interface) *watcher {
	return &watcher{name: name, servers: servers, alive: map[types.UID]bool{}, seen: map[ack]bool{}}
}

// begin notes where to watch from. The namespace must be empty.
func (w *watcher) begin(t *testing.T) {
	list, err := w.servers[0].CoreV1().Services(loadNamespace).List(context.Background(), metav1.ListOptions{})
	if err != nil || len(list.Items) > 0 {
		t.Fatalf("%s: %v, %d Services at the start", w.name, err, len(list.Items))
	}
	w.last, _ = strconv.ParseUint(list.ResourceVersion, 10, 64)
}

// run watches until ctx ends.
func (w *watcher) run(ctx context.Context) {
	for turn := 0; ctx.Err() == nil; turn++ {
		session, err := w.servers[turn%len(w.servers)].CoreV1().Services(loadNamespace).Watch(ctx,
			metav1.ListOptions{ResourceVersion: strconv.FormatUint(w.last, 10), AllowWatchBookmarks: true})
		if err != nil {
			time.Sleep(50 * time.Millisecond)
			continue
		}
		w.sessions++
		for event := range session.ResultChan() {
			if !w.take(event) {
				break
			}
		}
		session.Stop()
	}
}

// take notes an event; false ends the session.
func (w *watcher) take(event watch.Event) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	svc, ok := event.Object.(*corev1.Service)
	if !ok {
		if status, is := event.Object.(*metav1.Status); is && status.Code == 410 {
			w.fault("the server no longer knows version %d: %s", w.last, status.Message)
		}
		return false
	}
	version, err := strconv.ParseUint(svc.ResourceVersion, 10, 64)
	if err != nil {
		w.fault("version %q", svc.ResourceVersion)
		return true
	}
	if event.Type == watch.Bookmark {
		w.last = max(w.last, version)
		return true
	}
	if version <= w.last {
		w.fault("%s %s has version %d after %d", event.Type, svc.Name, version, w.last)
	}
	w.last = max(w.last, version)
	if known := w.alive[svc.UID]; known == (event.Type == watch.Added) {
		w.fault("%s %s of version %d, but known: %v", event.Type, svc.Name, version, known)
	}
	seen := ack{uid: svc.UID, version: svc.ResourceVersion}
	w.alive[svc.UID] = true
	if event.Type == watch.Deleted {
		delete(w.alive, svc.UID)
		seen.version = ""
	}
	w.seen[seen] = true
	return true
}

func (w *watcher) fault(format string, args ...any) {
	w.faults = append(w.faults, fmt.Sprintf(format, args...))
}

// check waits for what was acknowledged to come, and reports what did not and what was wrong.
func (w *watcher) check(t *testing.T, history []ack) {
	t.Helper()
	var missing []ack
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		missing = w.missing(history)
		if len(missing) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for i, a := range missing {
		if i == 10 {
			t.Errorf("%s: ... %d altogether", w.name, len(missing))
			break
		}
		t.Errorf("%s: acknowledged and never seen: %s version %q of %s", w.name, a.name, a.version, a.uid)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.faults {
		t.Errorf("%s: %s", w.name, f)
	}
	t.Logf("%s: %d events in %d sessions", w.name, len(w.seen), w.sessions)
}

func (w *watcher) missing(history []ack) (out []ack) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range history {
		if !w.seen[ack{uid: a.uid, version: a.version}] {
			out = append(out, a)
		}
	}
	return out
}
