package findings

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	clocktesting "k8s.io/utils/clock/testing"

	"portal/internal/controllers/controllerstest"
	"portal/internal/explain"
)

func TestMain(m *testing.M) { controllerstest.Main(m) }

// TestEvents: what is wrong with a Service is written once, whichever process leads; an API server without anything
// in it has no Events.
func TestEvents(t *testing.T) {
	client, err := kubernetes.NewForConfig(controllerstest.APIServer(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	clock := clocktesting.NewFakeClock(time.Now())
	looks := func(c *Controller, n int) {
		t.Helper()
		for range n {
			if _, err := c.step(ctx); err != nil {
				t.Fatal(err)
			}
			clock.Step(lasting)
		}
	}
	another := func() *Controller {
		c, err := New(Deps{Client: client, Clock: clock})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := another()
	looks(first, 3)
	if got := events(t, client, ""); len(got) != 0 {
		t.Errorf("a cluster in order has Events: %+v", got)
	}
	// A name that can only be an address is wrong from the first moment.
	_, err = client.CoreV1().Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "db"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "192.0.2.1"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	looks(first, 1)
	if got := events(t, client, "db"); len(got) != 0 {
		t.Errorf("written at once: %+v", got)
	}
	looks(first, 5)
	got := events(t, client, "db")
	if len(got) != 1 || got[0].Type != "Warning" || got[0].InvolvedObject.UID == "" || got[0].Source.Component != component {
		t.Fatalf("%+v", got)
	}
	// Another process takes over.
	looks(another(), 5)
	if got := events(t, client, "db"); len(got) != 1 {
		t.Errorf("%d Events after another process took over", len(got))
	}
}

// TestUnwritten: while Events can't be written, nothing that was found is lost.
func TestUnwritten(t *testing.T) {
	var found []Found
	for _, name := range []string{"first", "second", "third"} {
		found = append(found, Found{
			Finding: explain.Finding{Object: explain.Ref{Kind: "Service", Namespace: "default", Name: name}, Code: "x", Severity: explain.Broken, Sure: explain.Certain},
			About:   corev1.ObjectReference{Kind: "Service", Namespace: "default", Name: name},
		})
	}
	var broken atomic.Bool
	config := controllerstest.APIServer(t)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if broken.Load() && r.Method == http.MethodPost {
				return nil, errors.New("away")
			}
			return next.RoundTrip(r)
		})
	})
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	broken.Store(true)
	clock := clocktesting.NewFakeClock(start)
	c, err := New(Deps{Client: client, Clock: clock, Look: func(context.Context) ([]Found, error) { return found, nil }})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		_, _ = c.step(t.Context())
		clock.Step(lasting)
	}
	broken.Store(false)
	if _, err := c.step(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		if got := events(t, client, f.Object.Name); len(got) != 1 {
			t.Errorf("%s: %d Events, want one", f.Object, len(got))
		}
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func events(t *testing.T, client kubernetes.Interface, service string) (out []corev1.Event) {
	t.Helper()
	list, err := client.CoreV1().Events("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Items {
		if e.Source.Component == component && (service == "" || e.InvolvedObject.Name == service) {
			out = append(out, e)
		}
	}
	return out
}

// TestRun: it looks when something has changed, or when something is pending, and otherwise seldom.
func TestRun(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	looked := make(chan time.Duration, 100)
	c, err := New(Deps{Clock: clock, Look: func(context.Context) ([]Found, error) {
		looked <- clock.Since(start)
		return nil, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = c.Run(ctx) }()
	var got []time.Duration
	for range 24 { // twelve minutes
		for end := time.Now().Add(time.Minute); !clock.HasWaiters(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("it does not wait")
			}
		}
		clock.Step(interval)
	}
	for end := time.Now().Add(time.Minute); !clock.HasWaiters() && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	cancel()
	<-ended
	close(looked)
	for d := range looked {
		got = append(got, d)
	}
	if want := "[30s 5m30s 10m30s]"; fmt.Sprint(got) != want {
		t.Errorf("looked after %v, want %s", got, want)
	}
}
