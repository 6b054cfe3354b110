package tainteviction

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/scheduler"
)

// seen is since when this controller has known of a Pod's taints, by family. It counts from there, not from the taint's timeAdded: after the
// server was away, a node gets the whole time again to come back.
type seen map[string]time.Time

// health is the family of the two taints that follow a node's readiness: a node whose state changes from one to the other has been away
// all the time.
const health = "health"

func family(taint *corev1.Taint) string {
	if taint.Key == corev1.TaintNodeNotReady || taint.Key == corev1.TaintNodeUnreachable {
		return health
	}
	return taint.Key + "=" + taint.Value
}

// NoExecute are the taints that Pods are evicted for.
func NoExecute(taints []corev1.Taint) (out []corev1.Taint) {
	for i := range taints {
		if taints[i].Effect == corev1.TaintEffectNoExecute {
			out = append(out, taints[i])
		}
	}
	return out
}

// Due decides when a Pod has to leave a node with these taints: now or earlier, later, or (zero) never. For each taint the Pod's first toleration of it counts,
// from when the taint was seen; the earliest time decides. What has been seen comes from the last decision, and goes to the next.
func Due(taints []corev1.Taint, tolerations []corev1.Toleration, before seen, now time.Time) (due time.Time, after seen) {
	after = seen{}
	for i := range taints {
		taint := &taints[i]
		if taint.Effect != corev1.TaintEffectNoExecute {
			continue
		}
		since, known := before[family(taint)]
		if !known {
			since = now
		}
		after[family(taint)] = since
		leave := since
		if t := scheduler.Toleration(tolerations, *taint); t != nil {
			if t.TolerationSeconds == nil {
				continue
			}
			leave = later(since, *t.TolerationSeconds)
		}
		if due.IsZero() || leave.Before(due) {
			due = leave
		}
	}
	return due, after
}

// maxSeconds keeps what a person wrote within what a time.Duration holds: 200 years are for ever.
const maxSeconds = 200 * 365 * 24 * 60 * 60

func later(since time.Time, seconds int64) time.Time {
	return since.Add(time.Duration(min(max(seconds, 0), maxSeconds)) * time.Second)
}
