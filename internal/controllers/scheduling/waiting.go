package scheduling

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/scheduler"
)

// waiting are the Pods without a node: those that are to be tried, and those that fitted nowhere and wait for a change.
type waiting struct {
	pods   map[types.NamespacedName]*entry
	parked map[types.NamespacedName]*entry // not tried before something changes, or retryInterval is over
	ready  byImportance
	later  byTime
}

type entry struct {
	key      types.NamespacedName
	priority int32
	created  time.Time
	failures int
	after    time.Time // not tried before
	// turn counts how often the entry was put into a heap. What a heap holds of earlier turns is void.
	turn int
}

// item is an entry in a heap.
type item struct {
	*entry
	turn int
	due  time.Time
}

func (w *waiting) valid(i item) bool { return w.pods[i.key] == i.entry && i.turn == i.entry.turn }

func newWaiting() *waiting {
	return &waiting{pods: map[types.NamespacedName]*entry{}, parked: map[types.NamespacedName]*entry{}}
}

// add adds a Pod that is not known yet.
func (w *waiting) add(key types.NamespacedName, priority int32, created time.Time) bool {
	if w.pods[key] != nil {
		return false
	}
	e := &entry{key: key, priority: priority, created: created}
	w.pods[key] = e
	heap.Push(&w.ready, w.next(e, time.Time{}))
	if len(w.ready) > 2*len(w.pods)+64 {
		// Nobody takes any: another process schedules. What is void must not pile up until it is this one's turn.
		w.ready = slices.DeleteFunc(w.ready, func(i item) bool { return !w.valid(i) })
		heap.Init(&w.ready)
	}
	return true
}

func (w *waiting) next(e *entry, due time.Time) item {
	e.turn++
	return item{e, e.turn, due}
}

func (w *waiting) drop(key types.NamespacedName) {
	delete(w.pods, key)
	delete(w.parked, key)
}

// park puts a Pod aside that fitted nowhere.
func (w *waiting) park(key types.NamespacedName, now time.Time) {
	e := w.pods[key]
	if e == nil {
		return
	}
	e.after = now.Add(min(minBackoff<<min(e.failures, 10), maxBackoff))
	e.failures++
	w.parked[key] = e
	heap.Push(&w.later, w.next(e, now.Add(retryInterval)))
}

// retryAll has everything tried again, each Pod when its backoff is over.
func (w *waiting) retryAll() (some bool) {
	some = len(w.parked) > 0
	for key := range w.parked {
		w.unpark(key)
	}
	return some
}

// unpark has one Pod tried again when its backoff is over, if it is parked.
func (w *waiting) unpark(key types.NamespacedName) bool {
	e := w.parked[key]
	if e == nil {
		return false
	}
	delete(w.parked, key)
	heap.Push(&w.later, w.next(e, e.after))
	return true
}

// failures is how often a Pod could not be scheduled.
func (w *waiting) failures(key types.NamespacedName) int {
	if e := w.pods[key]; e != nil {
		return e.failures
	}
	return 0
}

// back adds a Pod again that was dropped too early, and parks it. It has failed that often before.
func (w *waiting) back(key types.NamespacedName, priority int32, created time.Time, failures int, now time.Time) {
	w.add(key, priority, created)
	w.pods[key].failures = failures
	w.park(key, now)
}

// take gives the Pod to try next, which is then to be dropped or parked: the most important one, of those the oldest. If there
// is none, it gives the time until there may be one.
func (w *waiting) take(now time.Time) (types.NamespacedName, time.Duration) {
	wait := retryInterval
	for len(w.later) > 0 {
		first := w.later[0]
		if left := first.due.Sub(now); w.valid(first) && left > 0 {
			wait = min(wait, left)
			break
		}
		heap.Pop(&w.later)
		if w.valid(first) {
			delete(w.parked, first.key)
			heap.Push(&w.ready, w.next(first.entry, time.Time{}))
		}
	}
	for len(w.ready) > 0 {
		if best := heap.Pop(&w.ready).(item); w.valid(best) {
			return best.key, 0
		}
	}
	return types.NamespacedName{}, wait
}

// byImportance is a heap with the most important Pod first, of those the oldest.
type byImportance []item

func (h byImportance) Len() int      { return len(h) }
func (h byImportance) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h byImportance) Less(i, j int) bool {
	a, b := h[i], h[j]
	return cmp.Or(cmp.Compare(b.priority, a.priority), a.created.Compare(b.created), cmp.Compare(a.key.String(), b.key.String())) < 0
}
func (h *byImportance) Push(x any) { *h = append(*h, x.(item)) }
func (h *byImportance) Pop() any   { return pop((*[]item)(h)) }

// byTime is a heap with the Pod first that is due first.
type byTime []item

func (h byTime) Len() int           { return len(h) }
func (h byTime) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h byTime) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h *byTime) Push(x any)        { *h = append(*h, x.(item)) }
func (h *byTime) Pop() any          { return pop((*[]item)(h)) }

func pop(list *[]item) item {
	last := len(*list) - 1
	out := (*list)[last]
	(*list)[last] = item{}
	*list = (*list)[:last]
	return out
}

// sameForPods says that a change of a node changes nothing for Pods.
func sameForPods(a, b *corev1.Node) bool {
	return slices.Equal(taintTexts(a), taintTexts(b)) &&
		equality.Semantic.DeepEqual(a.Labels, b.Labels) && equality.Semantic.DeepEqual(a.Status.Allocatable, b.Status.Allocatable)
}

func taintTexts(n *corev1.Node) []string {
	var out []string
	for _, t := range scheduler.Taints(n) {
		out = append(out, t.ToString())
	}
	return out
}
