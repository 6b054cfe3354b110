package console

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"portal/internal/explain"
)

func named(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
}

// TestKept: objects are counted as they come and go, and not any more when their account has no page.
func TestKept(t *testing.T) {
	var all atomic.Int64
	o, err := newObjects(&rest.Config{Host: "http://127.0.0.1:1"}, &all)
	if err != nil {
		t.Fatal(err)
	}
	o.ended, o.stop = context.WithCancel(t.Context())
	s := newStore("services", core, func(e *explain.Evidence, l []corev1.Service) { e.Services = l })(o).(*storeOf[corev1.Service, *corev1.Service])
	for _, step := range []struct {
		do   func()
		want int64
	}{
		{func() { s.replace("", []*corev1.Service{named("web"), named("cart"), named("search")}) }, 3},
		{func() { s.put(named("web")) }, 3},
		{func() { s.put(named("orders")) }, 4},
		{func() { s.drop(named("cart")) }, 3},
		{func() { s.drop(named("cart")) }, 3},
		{func() { s.replace("", []*corev1.Service{named("web")}) }, 1},
		{func() { o.stop(); o.run() }, 0},
	} {
		step.do()
		if got := all.Load(); got != step.want {
			t.Fatalf("%d objects are counted, want %d", got, step.want)
		}
	}
}

// TestOrder: evidence has objects in the order of their names, and as they are now, whatever came, changed and went.
func TestOrder(t *testing.T) {
	var all atomic.Int64
	o, err := newObjects(&rest.Config{Host: "http://127.0.0.1:1"}, &all)
	if err != nil {
		t.Fatal(err)
	}
	s := newStore("services", core, func(e *explain.Evidence, l []corev1.Service) { e.Services = l })(o).(*storeOf[corev1.Service, *corev1.Service])
	for _, step := range []struct {
		do   func()
		want string
	}{
		{func() { s.replace("", []*corev1.Service{named("web"), named("cart")}) }, "cart: web: "},
		{func() { s.put(typed("web", "NodePort")) }, "cart: web:NodePort "},
		{func() { s.put(named("orders")) }, "cart: orders: web:NodePort "},
		{func() { s.drop(named("cart")) }, "orders: web:NodePort "},
		{func() { s.put(typed("orders", "ExternalName")) }, "orders:ExternalName web:NodePort "},
		{func() { s.replace("", []*corev1.Service{named("web"), named("a")}) }, "a: web: "},
	} {
		var e explain.Evidence
		step.do()
		s.fill(&e)
		got := ""
		for i := range e.Services {
			got += e.Services[i].Name + ":" + string(e.Services[i].Spec.Type) + " "
		}
		if got != step.want {
			t.Errorf("%s; want %s", got, step.want)
		}
	}
}

func typed(name string, of corev1.ServiceType) *corev1.Service {
	svc := named(name)
	svc.Spec.Type = of
	return svc
}

// TestTooManyObjects: an account gets no copy while the others' are too large, and gets one afterwards.
func TestTooManyObjects(t *testing.T) {
	c := testConsole(t, Options{})
	ctx, stop := context.WithCancel(t.Context())
	c.running = ctx
	defer func() { stop(); c.feeds.Wait() }()
	a := c.accounts.get(c, credentials{Token: "alice"}.key(), &rest.Config{Host: "http://127.0.0.1:1"})
	c.kept.Store(maxObjects + 1)
	if _, _, err := a.hold(); !errors.Is(err, errTooManyFeeds) {
		t.Fatalf("%v", err)
	}
	c.kept.Store(maxObjects)
	for range 2 { // the second shares the first's
		_, release, err := a.hold()
		if err != nil {
			t.Fatal(err)
		}
		release()
	}
	if n := c.copies.Load(); n != 1 {
		t.Errorf("%d copies", n)
	}
}
