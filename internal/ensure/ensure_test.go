package ensure

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"
)

// TestFailuresAreRetriedAndHoldNobodyUp: the second object is checked although the first fails, and the first is retried
// until it succeeds.
func TestFailuresAreRetriedAndHoldNobodyUp(t *testing.T) {
	t.Parallel()
	var first, second atomic.Int32
	reports := make(chan error, 100)
	loop := New(func(name string, err error) {
		if name == "first" {
			reports <- err
		}
	}, Object{Name: "first", Ensure: func(context.Context) error {
		if first.Add(1) < 3 {
			return errors.New("not yet")
		}
		return nil
	}}, Object{Name: "second", Ensure: func(context.Context) error { second.Add(1); return nil }})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { loop.Run(ctx); close(ended) }()
	for range 2 {
		if err := <-reports; err == nil {
			t.Fatal("a failure was not reported")
		}
	}
	select {
	case err := <-reports:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("what failed was not retried")
	}
	if second.Load() < 2 {
		t.Errorf("the second object was checked %d times", second.Load())
	}
	stop()
	<-ended
}

// TestEventsCauseChecks: an event makes the loop check long before the resync, and a watch that ended is opened again.
func TestEventsCauseChecks(t *testing.T) {
	t.Parallel()
	checks := make(chan struct{}, 100)
	watches := make(chan *watch.FakeWatcher, 10)
	loop := New(func(string, error) {}, Object{
		Name:   "x",
		Ensure: func(context.Context) error { checks <- struct{}{}; return nil },
		Watch: func(context.Context) (watch.Interface, error) {
			w := watch.NewFakeWithChanSize(10, false)
			watches <- w
			return w, nil
		},
	})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { loop.Run(ctx); close(ended) }()
	<-checks
	for range 2 {
		w := <-watches
		w.Delete(nil)
		select {
		case <-checks:
		case <-time.After(resyncInterval / 2):
			t.Fatal("an event caused no check")
		}
		w.Stop()
	}
	stop()
	for {
		select {
		case w := <-watches:
			w.Stop()
		case <-ended:
			return
		}
	}
}
