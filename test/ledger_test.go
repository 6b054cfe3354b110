package test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// ledger keeps what the server acknowledged: after whatever happened to it, that is what must be there. A request that
// got no answer may or may not have happened; its object is not touched again until somebody has looked.
type ledger struct {
	mu      sync.Mutex
	entries map[string]*entry
	counts  map[string]int
	// history is every acknowledged write, in the order of the answers.
	history []ack
}

// ack is an acknowledged write: a version of an object, or its end.
type ack struct {
	at      time.Time
	name    string
	uid     types.UID
	version string // empty: deleted
}

// entry is what is known of one name. Only one worker writes to it.
type entry struct {
	// acked is the object as the last answer had it; nil if it does not exist.
	acked *corev1.Service
	// open says that a request got no answer, and what the object would be if it was carried out.
	open *possible
}

type possible struct {
	what string
	fits func(found *corev1.Service) bool
}

func newLedger() *ledger { return &ledger{entries: map[string]*entry{}, counts: map[string]int{}} }

// see returns what a worker may build its next request on; false for an object whose state nobody knows.
func (l *ledger) see(name string) (*corev1.Service, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[name]
	if e == nil {
		return nil, true
	}
	return e.acked, e.open == nil
}

// write notes the outcome of a request that would make name into what fits describes.
func (l *ledger) write(name, what string, now *corev1.Service, err error, fits func(*corev1.Service) bool) outcome {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[name]
	if e == nil {
		e = &entry{}
		l.entries[name] = e
	}
	result := judge(err)
	l.counts[what+" "+result.String()]++
	switch result {
	case acknowledged:
		if now != nil {
			l.history = append(l.history, ack{time.Now(), name, now.UID, now.ResourceVersion})
		} else if e.acked != nil {
			l.history = append(l.history, ack{time.Now(), name, e.acked.UID, ""})
		}
		e.acked = now
	case unanswered:
		e.open = &possible{what: what, fits: fits}
	}
	return result
}

// mayBeGone notes that objects of unknown state were within reach of a deletion.
func (l *ledger) mayBeGone(prefix string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, e := range l.entries {
		if e.open != nil && strings.HasPrefix(name, prefix) {
			before := e.open.fits
			e.open.fits = func(found *corev1.Service) bool { return found == nil || before(found) }
		}
	}
}

type outcome int

const (
	acknowledged outcome = iota
	refused              // the server said no: nothing was written
	unanswered           // it may have happened
)

func (o outcome) String() string { return [...]string{"acknowledged", "refused", "unanswered"}[o] }

func judge(err error) outcome {
	if err == nil {
		return acknowledged
	}
	if status := apierrors.APIStatus(nil); asStatus(err, &status) {
		if code := status.Status().Code; code >= 400 && code < 500 && code != http.StatusRequestTimeout {
			return refused
		}
	}
	return unanswered
}

func asStatus(err error, out *apierrors.APIStatus) bool {
	status, ok := err.(apierrors.APIStatus) //nolint:errorlint // the client returns it unwrapped
	*out = status
	return ok
}

// longestSilence is the longest time between two acknowledgements from a moment on, and from the last one until now.
func (l *ledger) longestSilence(since time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, longest := since, time.Duration(0)
	for _, a := range l.history {
		if a.at.Before(since) {
			continue
		}
		longest, last = max(longest, a.at.Sub(last)), a.at
	}
	return max(longest, time.Since(last))
}

// check compares what is stored with what was acknowledged, and goes on from what is stored.
func (l *ledger) check(t *testing.T, stored []corev1.Service) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	found := map[string]*corev1.Service{}
	for i := range stored {
		found[stored[i].Name] = &stored[i]
		if l.entries[stored[i].Name] == nil {
			t.Errorf("%s is there, and nobody made it", stored[i].Name)
		}
	}
	for name, e := range l.entries {
		now := found[name]
		if !same(e.acked, now) && (e.open == nil || !e.open.fits(now)) {
			last := "every request was answered"
			if e.open != nil {
				last = "its last request got no answer: " + e.open.what
			}
			t.Errorf("%s: acknowledged %s, but there is %s; %s", name, describe(e.acked), describe(now), last)
		}
		e.acked, e.open = now, nil
	}
}

// same says that what is stored is the very version that was acknowledged.
func same(acked, stored *corev1.Service) bool {
	if acked == nil || stored == nil {
		return acked == nil && stored == nil
	}
	return acked.UID == stored.UID && acked.ResourceVersion == stored.ResourceVersion
}

func describe(svc *corev1.Service) string {
	if svc == nil {
		return "nothing"
	}
	return fmt.Sprintf("version %s of %s (%s, deleted %v, by %s)", svc.ResourceVersion, svc.UID, svc.Spec.Type,
		svc.DeletionTimestamp, svc.Annotations[opAnnotation])
}

// demand fails the test if the load did not do what it is for.
func (l *ledger) demand(t *testing.T, what ...string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(l.counts)) {
		t.Logf("%6d %s", l.counts[key], key)
	}
	for _, key := range what {
		if l.counts[key] == 0 {
			t.Errorf("the load had no %q: it proves nothing", key)
		}
	}
}
