package findings

import (
	"slices"
	"time"

	"portal/internal/explain"
)

const (
	// lasting is how long something must be wrong: Pods start, nodes restart, rollouts go on.
	lasting = time.Minute
	// again is how long after an Event the same finding is no news, even if it was gone in between.
	again = 10 * time.Minute
	// burst and perMinute bound how many Events are written, whatever goes wrong.
	burst, perMinute = 20, 10
)

// key tells findings apart.
type key struct {
	object explain.Ref
	code   string
	node   string
}

// record is what is known of a finding.
type record struct {
	first   time.Time // when it was first seen, without a break since
	present bool
	written time.Time // zero: not yet
}

// Known remembers what was found, and decides what is news. The zero value knows nothing.
type Known struct {
	records map[key]*record
	tokens  float64
	filled  time.Time
}

func keyOf(f *Found) key { return key{f.Object, f.Code, f.Node} }

// News says whether a finding is worth an Event: it costs those who use the object something, and is no guess.
func News(f *explain.Finding) bool {
	if f.Severity < explain.Degraded || f.Sure == explain.Possible {
		return false
	}
	switch f.Object.Kind {
	case "Service", "Ingress":
		return true
	case "Node":
		return f.Code != "node-not-ready" // the node controller says so
	}
	return false
}

// Update takes what was found now, and returns what has become news, the worst first.
func (k *Known) Update(now time.Time, found []Found) (out []Found) {
	k.fill(now)
	if k.records == nil {
		k.records = map[key]*record{}
	}
	for _, r := range k.records {
		r.present = false
	}
	found = slices.Clone(found)
	slices.SortStableFunc(found, func(a, b Found) int { return int(b.Severity) - int(a.Severity) })
	for i := range found {
		f := &found[i]
		if !News(&f.Finding) {
			continue
		}
		r := k.records[keyOf(f)]
		if r == nil {
			r = &record{}
			k.records[keyOf(f)] = r
		}
		if r.first.IsZero() {
			r.first = now
		}
		r.present = true
		if now.Sub(r.first) >= lasting && r.written.IsZero() && k.tokens >= 1 {
			k.tokens--
			r.written = now
			out = append(out, *f)
		}
	}
	for id, r := range k.records {
		if r.present {
			continue
		}
		r.first = time.Time{}
		if now.Sub(r.written) >= again {
			delete(k.records, id)
		}
	}
	return out
}

// Forget has a finding written the next time: it could not be.
func (k *Known) Forget(f Found) {
	if r := k.records[keyOf(&f)]; r != nil {
		r.written = time.Time{}
	}
}

// Pending says whether something was found that is not written yet.
func (k *Known) Pending() bool {
	for _, r := range k.records {
		if r.present && r.written.IsZero() {
			return true
		}
	}
	return false
}

func (k *Known) fill(now time.Time) {
	if k.filled.IsZero() {
		k.tokens = burst
	} else {
		k.tokens = min(burst, k.tokens+now.Sub(k.filled).Minutes()*perMinute)
	}
	k.filled = now
}
