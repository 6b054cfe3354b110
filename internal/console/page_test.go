package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// openPage is a Service's page with all that looks at a feed for it. What it was sent can be read while nothing runs.
type openPage struct {
	*page
	sent *httptest.ResponseRecorder
	// reasons counts how often there was a reason to look for findings again.
	reasons int
}

func open(ctx context.Context, group *sync.WaitGroup, f *feed, k key) *openPage {
	o := &openPage{page: newPage(), sent: httptest.NewRecorder()}
	to := newEvents(o.sent, httptest.NewRequest(http.MethodGet, "/", nil))
	group.Go(func() { _ = o.show(ctx, to, f, k) })
	group.Go(func() { f.followSelector(ctx, k, func(string) {}) })
	o.reasons = -1 // the first look needs none
	group.Go(func() { o.awaitReasons(ctx, f, k, func() { o.reasons++ }) })
	return o
}

// last is the newest detail that the page was sent.
func (o *openPage) last(t *testing.T) (out Detail) {
	t.Helper()
	for _, event := range strings.Split(o.sent.Body.String(), "\n\n") {
		if data, ok := strings.CutPrefix(event, "event: detail\ndata: "); ok {
			out = Detail{}
			if err := json.Unmarshal([]byte(data), &out); err != nil {
				t.Fatal(err)
			}
		}
	}
	return out
}

// TestPagesUnderChurn: 20 pages over 10,000 Services are neither woken nor built for changes of other Services, and only every now and then
// when their own changes all the time. The clock is the test's.
func TestPagesUnderChurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const all, pages = 10_000, 20
		ctx, stop := context.WithCancel(t.Context())
		var group sync.WaitGroup
		defer group.Wait()
		defer stop()

		node := func(ready corev1.ConditionStatus) *corev1.Node {
			return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}}}
		}
		endpoints := func(i int, words ...string) *discoveryv1.EndpointSlice {
			slice := endpointSlice(fmt.Sprint("s", i), "", words...)
			slice.Labels[discoveryv1.LabelServiceName] = fmt.Sprint("s", i)
			return slice
		}
		f := testFeed()
		f.status.Synced = true
		f.putNode(node(corev1.ConditionTrue))
		named := func(i int) *corev1.Service {
			svc := service(corev1.ServiceSpec{})
			svc.Name = fmt.Sprint("s", i)
			return svc
		}
		for i := range all {
			f.putService(named(i))
			f.putSlice(endpoints(i, "ready@n", "ready@n"))
		}
		var opened [pages]*openPage
		for i := range opened {
			opened[i] = open(ctx, &group, f, key{"shop", fmt.Sprint("s", i)})
		}
		var woken int
		built := func() int {
			time.Sleep(10 * coalesce)
			synctest.Wait()
			f.mu.Lock()
			defer f.mu.Unlock()
			woken = f.versions
			return f.details
		}
		before, asleep := built(), woken
		for i := range all {
			other := pages + i%(all-pages)
			f.putSlice(endpoints(other, "ready@n", []string{"ready@n", "not@n"}[i%2]))
			f.putService(named(other))
			opened[i%pages].putEvent(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i)}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "another"}})
			f.putNode(node(corev1.ConditionTrue)) // a heartbeat
			time.Sleep(time.Millisecond)
		}
		after := built()
		if after != before {
			t.Errorf("pages were built %d times for changes of others", after-before)
		}
		if woken != asleep {
			t.Errorf("pages were woken %d times by changes of others", woken-asleep)
		}

		const changes = 2000 // one every millisecond
		for i := range changes {
			f.putSlice(endpoints(0, "ready@n", []string{"ready@n", "not@n"}[i%2]))
			time.Sleep(time.Millisecond)
		}
		own := built() - after
		// It is built to be sent and, in the same intervals, for whether to look again, twice if so.
		if most := 3 * (int(changes*time.Millisecond/coalesce) + 2); own == 0 || own > most {
			t.Errorf("a page was built %d times for %d changes of its Service; want at least once and at most %d times", own, changes, most)
		}
		if got := opened[0].last(t); got.Row.Ready != 1 || len(got.Endpoints) != 2 || opened[0].reasons == 0 {
			t.Errorf("after its Service changed, a page shows %+v, and found %d reasons to look again", got.Row, opened[0].reasons)
		}
		if opened[1].reasons != 0 {
			t.Error("changes of others are a reason to look for findings again")
		}

		f.putNode(node(corev1.ConditionUnknown))
		f.dropService(named(1))
		opened[2].putEvent(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: "its own"}, Message: "its own Event", InvolvedObject: corev1.ObjectReference{Kind: "Service", Name: "s2"}})
		f.setStatus(func(s *Status) bool { s.Away = "for a test"; return true })
		built()
		for i, one := range opened {
			got := one.last(t)
			if i == 1 && (got.Found || got.Status.Away == "") || i != 1 && (len(got.Nodes) != 1 || got.Nodes[0].Ready || got.Status.Away == "") {
				t.Errorf("page %d was not built when the node was lost or its Service deleted: %+v", i, got)
			}
		}
		if got := opened[2].last(t); !strings.Contains(texts(got.Timeline), "its own Event") {
			t.Errorf("an Event about the Service does not show: %s", texts(got.Timeline))
		}
	})
}
