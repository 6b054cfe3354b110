package resourcequota

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clocktesting "k8s.io/utils/clock/testing"

	"portal/internal/controllers/queue"
)

// Less is written down when nothing was admitted for a moment, or at the latest after a few seconds of admissions.
func TestSettled(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(0, 0))
	c := &Controller{clock: clock, waiting: map[queue.Key]wait{}}
	key := queue.Key{Namespace: "ns", Name: "q"}
	if c.settled(key, "1", true) {
		t.Error("settled at once")
	}
	clock.Step(settle)
	if c.settled(key, "2", true) {
		t.Error("settled though something was admitted")
	}
	clock.Step(settle)
	if !c.settled(key, "2", true) {
		t.Error("not settled though nothing was admitted")
	}
	for i := range int(settleLimit/settle) + 1 {
		if c.settled(key, string(rune('a'+i)), true) {
			if waited := time.Duration(i) * settle; waited < settleLimit {
				t.Errorf("settled after %s of admissions", waited)
			}
			break
		} else if i == int(settleLimit/settle) {
			t.Error("never settled")
		}
		clock.Step(settle)
	}
	// Long ago it was too high for a moment.
	_ = c.settled(key, "x", true)
	if !c.settled(key, "x", false) {
		t.Error("more is not written at once")
	}
	clock.Step(settleLimit)
	if c.settled(key, "x", true) {
		t.Error("settled at once, though something may have been admitted a moment ago")
	}
}

func TestLess(t *testing.T) {
	list := func(pods, secrets string) corev1.ResourceList {
		return corev1.ResourceList{"pods": resource.MustParse(pods), "secrets": resource.MustParse(secrets)}
	}
	for _, c := range []struct {
		now, before corev1.ResourceList
		want        bool
	}{
		{list("1", "1"), list("1", "1"), false}, {list("1", "2"), list("1", "1"), false}, {list("0", "2"), list("1", "1"), true}, {list("0", "0"), nil, false},
	} {
		if got := less(c.now, c.before); got != c.want {
			t.Errorf("%v, before %v: %v", c.now, c.before, got)
		}
	}
}
