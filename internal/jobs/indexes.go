// Package jobs holds what the API and the controllers of Jobs and CronJobs must agree on: sets of indexes as they are written
// in a Job's status, when a Job is finished, and when a CronJob's schedule is due. It is pure.
package jobs

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// Indexes are a set of indexes: ranges in order that neither overlap nor touch.
type Indexes []Range

// Range is the indexes from First to Last.
type Range struct{ First, Last int }

// ParseIndexes reads a set such as "1,3-5,7". Each index must be less than limit. It is strict: what was written by Kubernetes
// can be read, and little else.
func ParseIndexes(text string, limit int) (Indexes, error) {
	if text == "" {
		return nil, nil
	}
	var out Indexes
	last := -1
	for part := range strings.SplitSeq(text, ",") {
		r, err := parseRange(part, limit)
		if err != nil {
			return nil, err
		}
		if r.First <= last {
			return nil, fmt.Errorf("%q must come in order, and only once", part)
		}
		out, last = out.with(r), r.Last
	}
	return out, nil
}

func parseRange(text string, limit int) (Range, error) {
	from, to, isRange := strings.Cut(text, "-")
	first, err := parseIndex(from, limit)
	if err != nil || !isRange {
		return Range{first, first}, err
	}
	last, err := parseIndex(to, limit)
	if err == nil && last <= first {
		err = fmt.Errorf("%q must begin with the smaller index", text)
	}
	return Range{first, last}, err
}

func parseIndex(text string, limit int) (int, error) {
	i, err := strconv.Atoi(text)
	switch {
	case err != nil || i < 0:
		return 0, fmt.Errorf("%q is no index", text)
	case i >= limit:
		return 0, fmt.Errorf("%q must be less than %d", text, limit)
	}
	return i, nil
}

// ReadIndexes reads as much of a set as can be read, and drops indexes that are not less than limit: a Job may have fewer now.
func ReadIndexes(text string, limit int) Indexes {
	var out Indexes
	if text == "" {
		return nil
	}
	const huge = int(^uint(0) >> 1)
	for part := range strings.SplitSeq(text, ",") {
		r, err := parseRange(part, huge)
		if err != nil || r.First >= limit {
			continue
		}
		r.Last = min(r.Last, limit-1)
		out = append(out, r)
	}
	return out.Union(nil) // sorted and merged once
}

// IndexesOf is the set of some indexes.
func IndexesOf(indexes ...int) Indexes {
	var out Indexes
	for _, i := range slices.Sorted(slices.Values(indexes)) {
		out = out.with(Range{i, i})
	}
	return out
}

// with appends a range that does not begin before the last one.
func (s Indexes) with(r Range) Indexes {
	if n := len(s); n > 0 && r.First <= s[n-1].Last+1 {
		s[n-1].Last = max(s[n-1].Last, r.Last)
		return s
	}
	return append(s, r)
}

// Union is what is in one set or the other.
func (s Indexes) Union(other Indexes) Indexes {
	all := slices.Concat(s, other)
	slices.SortFunc(all, func(a, b Range) int { return a.First - b.First })
	var out Indexes
	for _, r := range all {
		out = out.with(r)
	}
	return out
}

// Common is how many indexes are in both sets.
func (s Indexes) Common(other Indexes) (n int) {
	for i, j := 0, 0; i < len(s) && j < len(other); {
		n += max(min(s[i].Last, other[j].Last)-max(s[i].First, other[j].First)+1, 0)
		if s[i].Last < other[j].Last {
			i++
		} else {
			j++
		}
	}
	return n
}

// Len is how many there are.
func (s Indexes) Len() (n int) {
	for _, r := range s {
		n += r.Last - r.First + 1
	}
	return n
}

// Has says whether an index is in the set.
func (s Indexes) Has(index int) bool {
	i, _ := slices.BinarySearchFunc(s, index, func(r Range, index int) int { return r.Last - index })
	return i < len(s) && s[i].First <= index
}

// Missing are the first n indexes below limit that are not in the set.
func (s Indexes) Missing(n, limit int) (out []int) {
	next := 0
	for _, r := range append(slices.Clone(s), Range{limit, limit}) {
		for ; next < min(r.First, limit) && len(out) < n; next++ {
			out = append(out, next)
		}
		next = max(next, r.Last+1)
	}
	return out
}

// String writes the set as ParseIndexes reads it.
func (s Indexes) String() string {
	var parts []string
	for _, r := range s {
		switch r.Last {
		case r.First:
			parts = append(parts, strconv.Itoa(r.First))
		case r.First + 1: // two are no range
			parts = append(parts, strconv.Itoa(r.First), strconv.Itoa(r.Last))
		default:
			parts = append(parts, fmt.Sprintf("%d-%d", r.First, r.Last))
		}
	}
	return strings.Join(parts, ",")
}

// Condition is the condition of a type if it is true.
func Condition(status *batchv1.JobStatus, kind batchv1.JobConditionType) *batchv1.JobCondition {
	for i := range status.Conditions {
		if c := &status.Conditions[i]; c.Type == kind && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

// Finished is the condition with which a Job ended: Complete or Failed. It is nil as long as it has not.
func Finished(status *batchv1.JobStatus) *batchv1.JobCondition {
	if c := Condition(status, batchv1.JobComplete); c != nil {
		return c
	}
	return Condition(status, batchv1.JobFailed)
}

// Indexed says whether each of a Job's Pods has an index.
func Indexed(spec *batchv1.JobSpec) bool {
	return spec.CompletionMode != nil && *spec.CompletionMode == batchv1.IndexedCompletion
}
