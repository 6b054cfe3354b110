package tainteviction

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func taint(key string) corev1.Taint {
	return corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute}
}

func forSeconds(key string, seconds int64) corev1.Toleration {
	return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &seconds}
}

func TestDue(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	const never = time.Duration(-1)
	type taints = []corev1.Taint
	type tolerations = []corev1.Toleration
	forever := corev1.Toleration{Key: "a", Operator: corev1.TolerationOpExists}
	for _, c := range []struct {
		name        string
		taints      taints
		tolerations tolerations
		before      seen
		want        time.Duration // from now; never
	}{
		{"no taint", nil, nil, nil, never},
		{"a taint that evicts nobody", taints{{Key: "a", Effect: corev1.TaintEffectNoSchedule}, {Key: "a", Effect: corev1.TaintEffectPreferNoSchedule}}, nil, nil, never},
		{"not tolerated", taints{taint("a")}, nil, nil, 0},
		{"another is tolerated", taints{taint("a")}, tolerations{forSeconds("b", 5)}, nil, 0},
		{"another value is tolerated", taints{{Key: "a", Value: "x", Effect: corev1.TaintEffectNoExecute}}, tolerations{{Key: "a", Value: "y"}}, nil, 0},
		{"another effect is tolerated", taints{taint("a")}, tolerations{{Key: "a", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}, nil, 0},
		{"tolerated for ever", taints{taint("a")}, tolerations{forever}, nil, never},
		{"all are tolerated for ever", taints{taint("a"), taint("b")}, tolerations{{Operator: corev1.TolerationOpExists}}, nil, never},
		{"one of two is tolerated", taints{taint("a"), taint("b")}, tolerations{forever}, nil, 0},
		{"for a while", taints{taint("a")}, tolerations{forSeconds("a", 5)}, nil, 5 * time.Second},
		{"for no time", taints{taint("a")}, tolerations{forSeconds("a", 0)}, nil, 0},
		{"for less than no time", taints{taint("a")}, tolerations{forSeconds("a", -7)}, nil, 0},
		{"for longer than clocks go", taints{taint("a")}, tolerations{forSeconds("a", 1<<62)}, nil, maxSeconds * time.Second},
		{"the shortest of two taints", taints{taint("a"), taint("b")}, tolerations{forSeconds("a", 50), forSeconds("b", 20)}, nil, 20 * time.Second},
		{"the first of two tolerations", taints{taint("a")}, tolerations{forSeconds("a", 50), forSeconds("a", 20)}, nil, 50 * time.Second},
		{"a while ago", taints{taint("a")}, tolerations{forSeconds("a", 50)}, seen{"a=": now.Add(-20 * time.Second)}, 30 * time.Second},
		{"long ago", taints{taint("a")}, tolerations{forSeconds("a", 50)}, seen{"a=": now.Add(-time.Minute)}, -10 * time.Second},
		{"a new taint has its own time", taints{taint("a"), taint("b")}, tolerations{forSeconds("a", 300), forSeconds("b", 5)}, seen{"a=": now.Add(-time.Minute)}, 5 * time.Second},
		{"silent after it was not ready", taints{taint(corev1.TaintNodeUnreachable)}, tolerations{forSeconds(corev1.TaintNodeUnreachable, 50)},
			seen{health: now.Add(-20 * time.Second)}, 30 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			due, after := Due(c.taints, c.tolerations, c.before, now)
			got := due.Sub(now)
			if due.IsZero() {
				got = never
			}
			if got != c.want {
				t.Errorf("due in %v, want %v", got, c.want)
			}
			// Asked again later, with what it has seen, it says the same.
			if again, _ := Due(c.taints, c.tolerations, after, now.Add(time.Second)); !again.Equal(due) {
				t.Errorf("a second later it is due at %v, not at %v", again, due)
			}
		})
	}
}

func TestATaintThatCameBackHasItsTimeAgain(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	tolerations := []corev1.Toleration{{Key: "a", TolerationSeconds: ptr.To[int64](10), Operator: corev1.TolerationOpExists}}
	_, seen := Due([]corev1.Taint{taint("a")}, tolerations, nil, now)
	_, seen = Due(nil, tolerations, seen, now.Add(5*time.Second))
	if due, _ := Due([]corev1.Taint{taint("a")}, tolerations, seen, now.Add(8*time.Second)); !due.Equal(now.Add(18 * time.Second)) {
		t.Errorf("due at %v", due)
	}
}
