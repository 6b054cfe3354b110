package console

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func texts(all []Moment) string {
	var out []string
	for _, m := range all {
		out = append(out, m.Kind+": "+m.What)
	}
	return strings.Join(out, "\n")
}

// TestCompareEndpoints: what became of endpoints is said for each, or once for many.
func TestCompareEndpoints(t *testing.T) {
	ready := func(address, pod string) Endpoint {
		return Endpoint{Address: address, Pod: pod, Ready: true, Serving: true}
	}
	leaving := func(address string) Endpoint { return Endpoint{Address: address, Terminating: true, Serving: true} }
	var many []Endpoint
	for i := range 20 {
		many = append(many, ready(fmt.Sprintf("10.0.0.%d", i), ""))
	}
	for name, c := range map[string]struct {
		before, after []Endpoint
		want          string
	}{
		"nothing":  {[]Endpoint{ready("10.0.0.1", "a")}, []Endpoint{ready("10.0.0.1", "a")}, ""},
		"added":    {nil, []Endpoint{ready("10.0.0.1", "a")}, "good: 10.0.0.1 (a) was added, ready"},
		"unready":  {[]Endpoint{ready("10.0.0.1", "")}, []Endpoint{{Address: "10.0.0.1"}}, "bad: 10.0.0.1 is not ready (was ready)"},
		"removed":  {[]Endpoint{ready("10.0.0.1", ""), leaving("10.0.0.2")}, nil, "bad: 10.0.0.1 was removed (was ready)\nneutral: 10.0.0.2 was removed (was terminating)"},
		"together": {many, many[:3], "bad: 17 endpoints changed at once: 3 are ready now"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := texts(compareEndpoints(c.before, c.after)); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
		})
	}
}

// TestHistory: a session notes what happens while it watches, not what it finds, and keeps the end of it.
func TestHistory(t *testing.T) {
	f := testFeed()
	f.waiting["services/"] = true
	f.replaceServices("", []*corev1.Service{service(corev1.ServiceSpec{})})
	f.putSlice(endpointSlice("one", "", "ready"))
	k := key{"shop", "web"}
	found := f.detail(k)
	before := len(found.Timeline)
	f.dropSlice(endpointSlice("one", "", "ready"))
	now := f.detail(k)
	if got := texts(now.Timeline[before:]); !strings.Contains(got, "was removed (was ready)") || !strings.Contains(got, "bad: The Service is broken: has no endpoints") {
		t.Errorf("after its endpoint was removed:\n%s", got)
	}
	f.dropService(service(corev1.ServiceSpec{}))
	if gone := f.detail(k); gone.Found || !strings.Contains(texts(gone.Timeline), "The Service was deleted") {
		t.Errorf("after it was deleted:\n%s", texts(gone.Timeline))
	}
	for i := range 2 * maxHistory {
		f.history.add(k, time.Now(), Moment{What: fmt.Sprint(i)})
	}
	if list := f.history.of[k]; len(list) != maxHistory || list[maxHistory-1].What != fmt.Sprint(2*maxHistory-1) {
		t.Errorf("%d moments are kept, the last is %v", len(list), list[len(list)-1])
	}
	for i := range 2 * maxHistories {
		f.history.add(key{"many", fmt.Sprint(i)}, time.Now(), Moment{})
	}
	if len(f.history.of) > maxHistories {
		t.Errorf("%d Services have a history", len(f.history.of))
	}
}

// TestPodMoments: a Pod's status still says when it became ready, why a container ended, and when it was asked to end.
func TestPodMoments(t *testing.T) {
	at := func(minute int) metav1.Time { return metav1.NewTime(time.Date(2026, 1, 1, 12, minute, 0, 0, time.UTC)) }
	grace, deleted := int64(60), at(20)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1", CreationTimestamp: at(0), DeletionTimestamp: &deleted, DeletionGracePeriodSeconds: &grace},
		Status: corev1.PodStatus{
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: "ContainersNotReady", LastTransitionTime: at(9)}},
			ContainerStatuses: []corev1.ContainerStatus{{
				Name: "app", RestartCount: 3, LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled", FinishedAt: at(8)}},
			}},
		},
	}
	list := newestFirst(podMoments(pod))
	want := `neutral: Pod web-1 was asked to end
bad: Pod web-1 stopped being ready: ContainersNotReady
bad: Pod web-1 had container app end with exit code 137 (OOMKilled), restarted 3 times
neutral: Pod web-1 was created`
	if got := texts(list); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if list[0].Time != at(19).Time {
		t.Errorf("it was asked to end at %s", list[0].Time)
	}
}
