package endpoints

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"portal/internal/controllers/queue"
)

// ledger holds what was written last for each key until the informer has seen it, so that the next decision is made
// on what is there and not on what was there a moment ago.
//
// What the informer hasn't seen after a while it may never see: somebody deleted it in between. Then nothing is known.
type ledger struct {
	mu      sync.Mutex
	written map[queue.Key]entry
}

type entry struct {
	*corev1.Endpoints
	at time.Time
}

const patience = 3 * time.Second

func (l *ledger) note(key queue.Key, written *corev1.Endpoints) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.written == nil {
		l.written = map[queue.Key]entry{}
	}
	l.written[key] = entry{written, time.Now()}
}

func (l *ledger) forget(key queue.Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.written, key)
}

// newest is the later one of what was seen (nil: nothing) and what was written.
func (l *ledger) newest(key queue.Key, seen *corev1.Endpoints) *corev1.Endpoints {
	l.mu.Lock()
	defer l.mu.Unlock()
	written := l.written[key].Endpoints
	if written == nil {
		return seen
	}
	if seen == nil || older(seen, written) {
		return written
	}
	delete(l.written, key)
	return seen
}

// see takes note that the informer has come to a state, and tells whether that was written here, or is from before.
func (l *ledger) see(seen *corev1.Endpoints) (ours bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := keyOf(seen)
	written := l.written[key].Endpoints
	if written == nil {
		return false
	}
	if older(seen, written) {
		return true
	}
	delete(l.written, key)
	return seen.ResourceVersion == written.ResourceVersion
}

// overdue forgets what should have been seen by now, and says what that was.
func (l *ledger) overdue() []queue.Key {
	l.mu.Lock()
	defer l.mu.Unlock()
	var keys []queue.Key
	for key, e := range l.written {
		if time.Since(e.at) >= patience {
			delete(l.written, key)
			keys = append(keys, key)
		}
	}
	return keys
}

func older(a, b *corev1.Endpoints) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}
