package servicecidr

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clocktesting "k8s.io/utils/clock/testing"

	"portal/internal/controllers/queue"
)

var now = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// cidr is a ServiceCIDR as it is when the controller has seen it.
func cidr(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), Finalizers: []string{Finalizer}},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: cidrs},
	}
}

func deleted(c *networkingv1.ServiceCIDR, ago time.Duration) *networkingv1.ServiceCIDR {
	c.DeletionTimestamp = &metav1.Time{Time: now.Add(-ago)}
	return c
}

func with(c *networkingv1.ServiceCIDR, finalizers ...string) *networkingv1.ServiceCIDR {
	c.Finalizers = finalizers
	return c
}

func address(name string) *networkingv1.IPAddress {
	return &networkingv1.IPAddress{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{networkingv1.LabelManagedBy: "ipallocator.k8s.io"},
	}}
}

func usersOwn(a *networkingv1.IPAddress) *networkingv1.IPAddress {
	a.Labels = nil
	return a
}

func TestSync(t *testing.T) {
	long := 2 * grace
	for _, c := range []struct {
		name       string
		subject    *networkingv1.ServiceCIDR
		others     []*networkingv1.ServiceCIDR
		addresses  []*networkingv1.IPAddress
		finalizers []string
		ready      metav1.ConditionStatus // "": not set
		reason     string
		again      time.Duration
	}{
		{name: "a new one gets the finalizer and is ready",
			subject: with(cidr("a", "10.1.0.0/24")), finalizers: []string{Finalizer}, ready: metav1.ConditionTrue},
		{name: "the finalizers of others stay",
			subject: with(cidr("a", "10.1.0.0/24"), "example.com/mine"), finalizers: []string{"example.com/mine", Finalizer}, ready: metav1.ConditionTrue},
		{name: "deleted and unused it stays for the grace period",
			subject: deleted(cidr("a", "10.1.0.0/24"), 3*time.Second), finalizers: []string{Finalizer}, again: grace - 3*time.Second},
		{name: "after which it goes",
			subject: deleted(cidr("a", "10.1.0.0/24"), long)},
		{name: "as far as this controller is concerned",
			subject: deleted(with(cidr("a", "10.1.0.0/24"), "example.com/mine", Finalizer), long), finalizers: []string{"example.com/mine"}},
		{name: "an address in use holds it back",
			subject: deleted(cidr("a", "10.1.0.0/24"), long), addresses: []*networkingv1.IPAddress{address("10.1.0.7")},
			finalizers: []string{Finalizer}, ready: metav1.ConditionFalse, reason: "Terminating"},
		{name: "also one of the second family",
			subject: deleted(cidr("a", "10.1.0.0/24", "fd00:1::/112"), long), addresses: []*networkingv1.IPAddress{address("fd00:1::ffff")},
			finalizers: []string{Finalizer}, ready: metav1.ConditionFalse, reason: "Terminating"},
		{name: "an address of another range does not",
			subject: deleted(cidr("a", "10.1.0.0/24"), long), others: []*networkingv1.ServiceCIDR{cidr("b", "10.2.0.0/24")},
			addresses: []*networkingv1.IPAddress{address("10.2.0.7")}},
		{name: "nor one that was not allocated to a Service",
			subject: deleted(cidr("a", "10.1.0.0/24"), long), addresses: []*networkingv1.IPAddress{usersOwn(address("10.1.0.7"))}},
		{name: "a wider range covers it",
			subject: deleted(cidr("a", "10.1.0.0/24"), long), others: []*networkingv1.ServiceCIDR{cidr("b", "10.1.0.0/16")},
			addresses: []*networkingv1.IPAddress{address("10.1.0.1"), address("10.1.0.254")}},
		{name: "so does a twin",
			subject: deleted(cidr("a", "10.1.0.0/24"), long), others: []*networkingv1.ServiceCIDR{cidr("b", "10.1.0.0/24")},
			addresses: []*networkingv1.IPAddress{address("10.1.0.7")}},
		{name: "a narrower one covers its own addresses",
			subject: deleted(cidr("a", "10.1.0.0/16"), long), others: []*networkingv1.ServiceCIDR{cidr("b", "10.1.0.0/24")},
			addresses: []*networkingv1.IPAddress{address("10.1.0.7")}},
		{name: "and no more, its broadcast address among them",
			subject: deleted(cidr("a", "10.1.0.0/16"), long), others: []*networkingv1.ServiceCIDR{cidr("b", "10.1.0.0/24")},
			addresses:  []*networkingv1.IPAddress{address("10.1.0.255")},
			finalizers: []string{Finalizer}, ready: metav1.ConditionFalse, reason: "Terminating"},
		{name: "one that is going itself covers nothing",
			subject: deleted(cidr("a", "10.1.0.0/24"), long), others: []*networkingv1.ServiceCIDR{deleted(cidr("b", "10.1.0.0/16"), 0)},
			addresses:  []*networkingv1.IPAddress{address("10.1.0.7")},
			finalizers: []string{Finalizer}, ready: metav1.ConditionFalse, reason: "Terminating"},
		{name: "without our finalizer there is nothing to do",
			subject: deleted(with(cidr("a", "10.1.0.0/24"), "example.com/mine"), long), addresses: []*networkingv1.IPAddress{address("10.1.0.7")},
			finalizers: []string{"example.com/mine"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := fake.NewClientset(c.subject)
			factory := informers.NewSharedInformerFactory(client, 0)
			controller := newController(client, factory, clocktesting.NewFakeClock(now))
			for _, object := range append(c.others, c.subject) {
				must(t, factory.Networking().V1().ServiceCIDRs().Informer().GetStore().Add(object))
			}
			for _, object := range c.addresses {
				must(t, factory.Networking().V1().IPAddresses().Informer().GetStore().Add(object))
			}
			result, err := controller.sync(t.Context(), queue.Key{Name: c.subject.Name})
			must(t, err)
			if result.Again != c.again {
				t.Errorf("comes again after %v, want %v", result.Again, c.again)
			}
			got, err := client.NetworkingV1().ServiceCIDRs().Get(t.Context(), c.subject.Name, metav1.GetOptions{})
			must(t, err)
			slices.Sort(got.Finalizers)
			if !slices.Equal(got.Finalizers, c.finalizers) {
				t.Errorf("finalizers %q, want %q", got.Finalizers, c.finalizers)
			}
			var status metav1.ConditionStatus
			var reason string
			if ready := meta.FindStatusCondition(got.Status.Conditions, networkingv1.ServiceCIDRConditionReady); ready != nil {
				status, reason = ready.Status, ready.Reason
			}
			if status != c.ready || reason != c.reason {
				t.Errorf("ready %q %q, want %q %q", status, reason, c.ready, c.reason)
			}
		})
	}
}

// A settled ServiceCIDR costs no request, however often it is looked at.
func TestSyncWritesOnlyChanges(t *testing.T) {
	subject := with(cidr("a", "10.1.0.0/24"))
	client := fake.NewClientset(subject)
	factory := informers.NewSharedInformerFactory(client, 0)
	controller := newController(client, factory, clocktesting.NewFakeClock(now))
	store := factory.Networking().V1().ServiceCIDRs().Informer().GetStore()
	must(t, store.Add(subject))
	for range 2 {
		_, err := controller.sync(t.Context(), queue.Key{Name: "a"})
		must(t, err)
		got, err := client.NetworkingV1().ServiceCIDRs().Get(t.Context(), "a", metav1.GetOptions{})
		must(t, err)
		must(t, store.Update(got))
		client.ClearActions()
	}
	_, err := controller.sync(t.Context(), queue.Key{Name: "a"})
	must(t, err)
	if actions := client.Actions(); len(actions) > 0 {
		t.Errorf("a settled one was written: %v", actions)
	}
}

// From creation to end, through the informers: what changes around a ServiceCIDR being deleted is noticed.
func TestLife(t *testing.T) {
	client := fake.NewClientset()
	factory := informers.NewSharedInformerFactory(client, 0)
	clock := clocktesting.NewFakeClock(now)
	controller := newController(client, factory, clock)
	ctx, stop := context.WithCancel(t.Context())
	factory.Start(ctx.Done())
	var running sync.WaitGroup
	running.Go(func() {
		if err := controller.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer func() { stop(); running.Wait(); factory.Shutdown() }()
	ranges, addresses := client.NetworkingV1().ServiceCIDRs(), client.NetworkingV1().IPAddresses()
	ready := func() (metav1.ConditionStatus, []string) {
		got, err := ranges.Get(ctx, "a", metav1.GetOptions{})
		must(t, err)
		if c := meta.FindStatusCondition(got.Status.Conditions, networkingv1.ServiceCIDRConditionReady); c != nil {
			return c.Status, got.Finalizers
		}
		return "", got.Finalizers
	}
	eventually := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not %s", what)
			}
		}
	}

	_, err := ranges.Create(ctx, with(cidr("a", "10.1.0.0/24")), metav1.CreateOptions{})
	must(t, err)
	eventually("ready and held", func() bool {
		status, finalizers := ready()
		return status == metav1.ConditionTrue && slices.Contains(finalizers, Finalizer)
	})
	_, err = addresses.Create(ctx, address("10.1.0.7"), metav1.CreateOptions{})
	must(t, err)
	eventually("known to be used", func() bool { _, err := controller.addresses.Get("10.1.0.7"); return err == nil })
	// The fake server deletes at once, finalizers or not, so the mark is set by hand.
	current, err := ranges.Get(ctx, "a", metav1.GetOptions{})
	must(t, err)
	_, err = ranges.Update(ctx, deleted(current, 0), metav1.UpdateOptions{})
	must(t, err)
	eventually("held back", func() bool { status, _ := ready(); return status == metav1.ConditionFalse })

	// Within the grace period nothing goes, even when the last address has.
	must(t, addresses.Delete(ctx, "10.1.0.7", metav1.DeleteOptions{}))
	eventually("known to be unused", func() bool { _, err := controller.addresses.Get("10.1.0.7"); return err != nil })
	for range 10 {
		if _, finalizers := ready(); !slices.Contains(finalizers, Finalizer) {
			t.Fatal("it went before every server could have heard of it")
		}
		time.Sleep(5 * time.Millisecond)
	}
	eventually("let go", func() bool {
		clock.Step(grace) // again and again: the queue may start its timer after one
		_, finalizers := ready()
		return !slices.Contains(finalizers, Finalizer)
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
