package workload

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/controllers/queue"
)

// keeper has a number of Pods, and replaces those that fail when it may.
type keeper struct {
	failures Failures
	owner    metav1.ObjectMeta
	start    time.Time
	now      time.Time
	made     int
	pods     []*corev1.Pod
}

func newKeeper() *keeper {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return &keeper{owner: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "web"}, start: start, now: start}
}

func (k *keeper) key() queue.Key { return queue.KeyOf(&k.owner) }

func (k *keeper) create() *corev1.Pod {
	k.made++
	name := fmt.Sprint("p", k.made)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(k.now.Truncate(time.Second))}}
	k.pods = append(k.pods, pod)
	return pod
}

func (k *keeper) wait() Wait { return k.failures.Wait(k.key(), &k.owner, k.pods, k.now) }

// keep brings the number of Pods that have not failed to what is wanted, as far as it may, and says how long the rest has to wait.
func (k *keeper) keep(wanted int) Wait {
	wait := k.wait()
	for _, pod := range k.pods {
		if !Finished(pod) {
			wanted--
		}
	}
	for range wanted - len(wait.Held) {
		k.create()
	}
	return wait
}

func fail(pods ...*corev1.Pod) {
	for _, pod := range pods {
		pod.Status.Phase, pod.Status.Reason = corev1.PodFailed, "Evicted"
	}
}

// TestFailingAtOnce: 3 Pods that fail at once, for ever, cost few Pods, however long that lasts.
func TestFailingAtOnce(t *testing.T) {
	k := newKeeper()
	var waits []string
	for k.now.Sub(k.start) < 17*time.Minute {
		wait := k.keep(3)
		if wait.Cause != nil {
			waits = append(waits, wait.delay.String())
		}
		if wait.Left > 0 {
			k.now = k.now.Add(wait.Left)
			continue
		}
		k.now = k.now.Add(200 * time.Millisecond)
		fail(k.pods...)
	}
	if got, want := strings.Join(waits, " "), "1s 2s 4s 8s 16s 32s 1m4s 2m8s 4m16s 5m0s 5m0s"; got != want {
		t.Errorf("waits %s\nwant %s", got, want)
	}
	if k.made > 33 {
		t.Errorf("%d Pods", k.made)
	}
}

// TestFailingOneAfterTheOther: Pods that were created together are one failure, however they spread over time.
func TestFailingOneAfterTheOther(t *testing.T) {
	k := newKeeper()
	k.keep(10)
	for _, pod := range k.pods[:10] {
		k.now = k.now.Add(700 * time.Millisecond)
		fail(pod)
		if k.wait(); k.failures.backoffs[k.key()].delay != firstWait {
			t.Fatalf("%s after the start the wait is %s", k.now.Sub(k.start), k.failures.backoffs[k.key()].delay)
		}
	}
}

// TestOnlyFailuresWait: what is created for other reasons than a failure is created at once.
func TestOnlyFailuresWait(t *testing.T) {
	k := newKeeper()
	k.keep(3)
	fail(k.pods[0])
	wait := k.keep(3)
	if len(wait.Held) != 1 || !wait.Held[k.pods[0].UID] || wait.Left != firstWait || k.made != 3 {
		t.Fatalf("%+v, %d Pods", wait, k.made)
	}
	if m := wait.Message(); !strings.Contains(m, "p1") || !strings.Contains(m, "Evicted") || !strings.Contains(m, "1s") {
		t.Error(m)
	}
	if again := k.keep(3); again.Cause != nil || len(again.Held) != 1 {
		t.Errorf("the same failure once more: %+v", again)
	}
	k.keep(10) // scaled
	if k.made != 10 {
		t.Errorf("%d Pods after scaling, want 10", k.made)
	}
	k.pods = append(k.pods[:1:1], k.pods[2:]...) // somebody deletes one that runs
	if k.keep(10); k.made != 11 {
		t.Errorf("%d Pods after one was deleted, want 11", k.made)
	}
	k.pods[0].DeletionTimestamp = &metav1.Time{Time: k.now} // and the one that failed
	if k.keep(10); k.made != 12 {
		t.Errorf("%d Pods after the failed one was deleted, want 12", k.made)
	}
	// Another workload of the name knows nothing of it.
	k.owner.UID, k.pods[0].DeletionTimestamp, k.pods[0].CreationTimestamp = "other", nil, metav1.NewTime(k.now.Add(-time.Hour))
	if wait := k.wait(); len(wait.Held) != 0 {
		t.Errorf("%+v", wait)
	}
}

// TestReplacementLives: after a replacement has run for a while the next failure is the first. Pods that ran for a while are replaced at once.
func TestReplacementLives(t *testing.T) {
	k := newKeeper()
	for range 5 {
		k.keep(1)
		fail(k.pods...)
		k.now = k.now.Add(k.keep(1).Left)
	}
	k.keep(1)
	k.now = k.now.Add(quietTime + time.Second)
	fail(k.pods...)
	if wait := k.keep(1); len(wait.Held) != 0 || k.made != 7 {
		t.Errorf("the replacement of an old Pod: %+v, %d Pods", wait, k.made)
	}
	if len(k.failures.backoffs) != 0 {
		t.Error("what is over is remembered")
	}
	fail(k.pods...)
	if wait := k.keep(1); wait.Left != firstWait {
		t.Errorf("waits %s, want %s", wait.Left, firstWait)
	}
	k.failures.Forget(k.key())
	if len(k.failures.backoffs) != 0 {
		t.Error("what is gone is remembered")
	}
}
