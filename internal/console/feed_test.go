package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"pgregory.net/rapid"
)

func testFeed() *feed {
	f := newFeed(&rest.Config{}, nil, "")
	clear(f.waiting)
	return f
}

// TestSince: a page gets what changed after what it has, deletions too, and everything if its revision is too old.
func TestSince(t *testing.T) {
	f := testFeed()
	f.replaceServices("", []*corev1.Service{service(corev1.ServiceSpec{})})
	first, _ := f.since(0)
	if !first.Reset || len(first.Services) != 1 || first.Status == nil || first.Services[0].Health != broken {
		t.Fatalf("the first change is %+v", first)
	}
	f.putSlice(endpointSlice("one", "", "ready"))
	second, changed := f.since(first.Revision)
	if second.Reset || len(second.Services) != 1 || second.Services[0].Health != healthy || second.Status != nil {
		t.Fatalf("after the endpoints came: %+v", second)
	}
	select {
	case <-changed:
		t.Fatal("nothing changed, and the page is woken")
	default:
	}
	f.dropService(service(corev1.ServiceSpec{}))
	<-changed
	third, _ := f.since(second.Revision)
	if len(third.Services) != 0 || len(third.GoneServices) != 1 || third.GoneServices[0] != "shop/web" {
		t.Fatalf("after it was deleted: %+v", third)
	}
	f.putService(service(corev1.ServiceSpec{}))
	if fourth, _ := f.since(second.Revision); len(fourth.GoneServices) != 0 || len(fourth.Services) != 1 || fourth.Services[0].Ready != 1 {
		t.Fatalf("after it came back: %+v", fourth)
	}
	if future, _ := f.since(1 << 60); !future.Reset {
		t.Error("a revision that never was is answered as if it had been")
	}
	for i := range maxGone + 1 {
		svc := service(corev1.ServiceSpec{})
		svc.Name = fmt.Sprint("s", i)
		f.putService(svc)
		f.dropService(svc)
	}
	if late, _ := f.since(third.Revision); !late.Reset {
		t.Error("deletions were forgotten, and a page that missed them does not start over")
	}
}

// TestChangedSince: what changed since any revision is what a look at every Service finds, whatever came, changed and went.
func TestChangedSince(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := testFeed()
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			svc := service(corev1.ServiceSpec{})
			svc.Name = fmt.Sprint("s", rapid.IntRange(0, 5).Draw(t, "service"))
			slice := endpointSlice(svc.Name, "", rapid.SampledFrom([]string{"ready", "not"}).Draw(t, "endpoint"))
			slice.Labels[discoveryv1.LabelServiceName] = svc.Name
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0, 1:
				f.putService(svc)
			case 2:
				f.putSlice(slice)
			case 3:
				f.dropSlice(slice)
			case 4:
				f.dropService(svc)
			}
			revision := rapid.Uint64Range(0, f.revision).Draw(t, "revision")
			got, _ := f.since(revision)
			var want []string
			for k, e := range f.services {
				if e.svc != nil && e.revision > revision {
					want = append(want, k.name)
				}
			}
			slices.Sort(want)
			var names []string
			for _, row := range got.Services {
				names = append(names, row.Name)
			}
			if !slices.Equal(names, want) {
				t.Fatalf("since %d: %v, want %v", revision, names, want)
			}
		}
	})
}

// TestSliceChangesItsService: endpoints are shown with the Service that their slice belongs to now, and with no other.
func TestSliceChangesItsService(t *testing.T) {
	f := testFeed()
	other := service(corev1.ServiceSpec{})
	other.Name = "other"
	f.replaceServices("", []*corev1.Service{service(corev1.ServiceSpec{}), other})
	ready := func(name string) int { return f.services[key{"shop", name}].row.Ready }
	slice := endpointSlice("one", "", "ready")
	f.putSlice(slice)
	if ready("web") != 1 || ready("other") != 0 {
		t.Fatalf("%d and %d endpoints; want 1 and 0", ready("web"), ready("other"))
	}
	for _, step := range []struct {
		label      string
		web, other int
	}{{"other", 0, 1}, {"", 0, 0}, {"web", 1, 0}} {
		slice = slice.DeepCopy()
		slice.Labels = map[string]string{discoveryv1.LabelServiceName: step.label}
		f.putSlice(slice)
		if ready("web") != step.web || ready("other") != step.other {
			t.Errorf("with the label %q: %d and %d endpoints; want %d and %d", step.label, ready("web"), ready("other"), step.web, step.other)
		}
	}
	f.dropSlice(slice)
	if len(f.owners) != 0 || ready("web") != 0 {
		t.Errorf("after it was deleted: %v, %d endpoints", f.owners, ready("web"))
	}
}

// TestRelist: what a list brings again is not sent again; what it lacks is gone; other namespaces are left alone.
func TestRelist(t *testing.T) {
	f := testFeed()
	other := service(corev1.ServiceSpec{})
	other.Namespace = "billing"
	f.replaceServices("billing", []*corev1.Service{other})
	list := func() []*corev1.Service { return []*corev1.Service{service(corev1.ServiceSpec{})} }
	f.replaceServices("shop", list())
	f.replaceSlices("shop", []*discoveryv1.EndpointSlice{endpointSlice("one", "", "ready")})
	before, _ := f.since(0)
	f.replaceServices("shop", list())
	f.replaceSlices("shop", []*discoveryv1.EndpointSlice{endpointSlice("one", "", "ready")})
	if again, _ := f.since(before.Revision); len(again.Services)+len(again.GoneServices) != 0 {
		t.Errorf("an equal list changed %+v", again)
	}
	f.replaceSlices("shop", nil)
	f.replaceServices("shop", nil)
	after, _ := f.since(before.Revision)
	if len(after.GoneServices) != 1 || after.GoneServices[0] != "shop/web" || len(f.services) != 1 {
		t.Errorf("an empty list of one namespace: %+v, left %d", after, len(f.services))
	}
}

// TestNodes: endpoints are counted by node, whichever comes first, and a node that is lost breaks the Services on it.
func TestNodes(t *testing.T) {
	f := testFeed()
	node := func(ready corev1.ConditionStatus) *corev1.Node {
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n"},
			Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready, Message: "why"}}},
		}
	}
	f.putService(service(corev1.ServiceSpec{}))
	f.putSlice(endpointSlice("one", "", "ready@n", "not@n"))
	f.putNode(node(corev1.ConditionTrue))
	f.putSlice(endpointSlice("two", "", "ready@n"))
	if got := f.nodes["n"].Endpoints; got != 2 {
		t.Errorf("%d endpoints are counted, want 2", got)
	}
	f.dropSlice(endpointSlice("two", ""))
	before, _ := f.since(0)
	if got := before.Nodes[0].Endpoints; got != 1 || before.Services[0].Stage != atEndpoints {
		t.Errorf("%d endpoints are counted, want 1: %+v", got, before.Services)
	}
	f.putNode(node(corev1.ConditionTrue))
	if again, _ := f.since(before.Revision); len(again.Nodes) != 0 {
		t.Error("a heartbeat is sent to the page")
	}
	f.putNode(node(corev1.ConditionUnknown))
	lost, _ := f.since(before.Revision)
	if len(lost.Nodes) != 1 || lost.Nodes[0].Ready || len(lost.Services) != 1 || lost.Services[0].Stage != atNodes {
		t.Errorf("after the node was lost: %+v", lost)
	}
}

type answering int

func (a answering) RoundTrip(*http.Request) (*http.Response, error) {
	if a == 0 {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: int(a), Status: fmt.Sprint(int(a))}, nil
}

// TestObserver: the answers of the API server say whether it is away, whether the credentials still count, and whether rights
// were taken away.
func TestObserver(t *testing.T) {
	f := testFeed()
	f.ended, f.stop = context.WithCancel(t.Context())
	for _, c := range []struct {
		answer                 answering
		away, signedOut, ended bool
	}{
		{200, false, false, false}, {0, true, false, false}, {200, false, false, false}, {503, true, false, false}, {404, false, false, false},
		{401, false, true, false}, {403, false, true, true},
	} {
		response, err := (&observer{next: c.answer, feed: f}).RoundTrip(httptest.NewRequest(http.MethodGet, "/", nil))
		if err == nil && response.StatusCode != int(c.answer) {
			t.Error("the answer is another")
		}
		if away := f.status.AwaySince != nil; away != c.away || f.status.SignedOut != c.signedOut || (f.ended.Err() != nil) != c.ended {
			t.Errorf("after %d: %+v, ended %v", c.answer, f.status, f.ended.Err())
		}
	}
}
