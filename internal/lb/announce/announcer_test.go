package announce

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// announcer is one whose writes of its Lease are watched.
func announcer(written func()) *Announcer {
	client := fake.NewClientset()
	client.PrependReactor("*", "leases", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetVerb() != "get" {
			written()
		}
		return false, nil, nil
	})
	return New(Options{
		Node: "self", Identity: "me", Client: client, Namespace: metav1.NamespaceSystem, Times: DefaultTimes,
		Leases: func() []*coordinationv1.Lease { return nil }, Owners: func() []metav1.OwnerReference { return nil }, Log: slog.New(slog.DiscardHandler),
	})
}

// TestInsistUntilRelease: a node insists on what it announces until its Lease may be released; from then on others may be right.
func TestInsistUntilRelease(t *testing.T) {
	addr := netip.MustParseAddr("192.0.2.1")
	var during []bool
	var a *Announcer
	a = announcer(func() { during = append(during, a.Insist(addr)) })
	a.Times.Lease, a.Times.IdleLease = time.Hour, time.Hour
	for range 2 {
		if err := a.renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		a.own = []netip.Addr{addr}
	}
	if !a.Insist(addr) {
		t.Error("a node whose Lease runs does not insist")
	}
	a.release()
	if len(during) != 3 || !during[1] || during[2] || a.Insist(addr) {
		t.Errorf("insisted while writing: %v, want only the second; after: %v", during, a.Insist(addr))
	}
}

// TestRenewedBefore: the Lease runs from before the request. Others see it at some time before its answer is here, and count from then.
func TestRenewedBefore(t *testing.T) {
	var served time.Time
	a := announcer(func() {
		for served = time.Now(); !time.Now().After(served); { // the clock may be coarse
		}
	})
	for _, what := range []string{"created", "updated"} {
		if err := a.renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		if a.renewed.After(served) {
			t.Errorf("%s at %s, counts from %s", what, served, a.renewed)
		}
		if !a.stale(served.Add(a.lasting)) {
			t.Errorf("%s: others see it end, this node does not", what)
		}
	}
}
