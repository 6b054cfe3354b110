package announce

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
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
	a.leave()
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

// follower is the announcer of the next process of the node, with the same API, that has found out what is its own.
func follower(t *testing.T, a *Announcer, addrs ...netip.Addr) (*Announcer, *recorder) {
	t.Helper()
	o, out := a.Options, &recorder{}
	o.Identity, o.Out = "next", out
	o.Addresses = func() (list []Address) {
		for _, x := range addrs {
			list = append(list, Address{x, anybody})
		}
		return list
	}
	next := New(o)
	if err := next.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	return next, out
}

// recorder is what is announced.
type recorder struct{ addrs []netip.Addr }

func (r *recorder) Set(addrs []netip.Addr) { r.addrs = slices.Clone(addrs) }

// holding finds an address that another node of that name would have if nobody held it.
func holding(other string) netip.Addr {
	a := netip.MustParseAddr("192.0.2.1")
	for rank(a, []Member{{Name: "self"}, {Name: other}}, anybody)[0] != other {
		a = a.Next()
	}
	return a
}

// TestFollowing: a process that ends leaves its addresses to the one that follows on its node, for as long as it says; somebody stands in meanwhile.
// Without a grace, or after it, other nodes have them.
func TestFollowing(t *testing.T) {
	addr := holding("other")
	for _, c := range []struct {
		what  string
		grace time.Duration
		later time.Duration
		stale bool
		want  bool
	}{
		{"within the grace", 10 * time.Second, 0, false, true},
		{"longer than a Lease may be", time.Hour, 0, false, true},
		{"after the grace", 10 * time.Second, 11 * time.Second, false, false},
		{"after the longest Lease", time.Hour, DefaultTimes.IdleLease + time.Second, false, false},
		{"a clock that was turned back", 10 * time.Second, -time.Hour, false, false},
		{"without a grace", 0, 0, false, false},
		{"while the API was away", 10 * time.Second, 0, true, false},
		{"a renewal was broken off", 10 * time.Second, 0, false, true},
	} {
		t.Run(c.what, func(t *testing.T) {
			a := announcer(func() {})
			var stoodIn []netip.Addr
			a.Grace = func() time.Duration { return c.grace }
			a.StandIn = func(addrs []netip.Addr, until time.Time) error {
				stoodIn = addrs
				if left := time.Until(until); left < min(c.grace, DefaultTimes.IdleLease)-time.Second || left > DefaultTimes.IdleLease+handOverDelay {
					t.Errorf("somebody stands in for %v", left)
				}
				return errors.New("it could not be started") // which is logged, and all goes on
			}
			if err := a.renew(t.Context()); err != nil {
				t.Fatal(err)
			}
			a.own, a.settled = []netip.Addr{addr}, true
			if c.what == "a renewal was broken off" { // it is not known whether it was carried out
				a.lease = nil
			}
			if c.stale {
				a.renewed = a.renewed.Add(-time.Hour)
			}
			a.leave()
			if (len(stoodIn) > 0) != (c.grace > 0 && !c.stale) {
				t.Errorf("somebody stands in for %v", stoodIn)
			}
			lease, err := a.Client.CoordinationV1().Leases(a.Namespace).Get(t.Context(), LeasePrefix+a.Node, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			released := *lease.Spec.HolderIdentity == ""
			if released != (c.grace == 0 || c.stale) {
				t.Errorf("released: %v", released)
			}
			if got := a.inherit(lease, time.Now().Add(c.later)); slices.Contains(got, addr) != c.want {
				t.Errorf("inherited: %v, want %v", got, c.want)
			}
		})
	}
}

// TestInherited: the process that follows says from its first renewal on that it holds what its predecessor did, so that nobody takes it, answers for it, and
// gives up what is no Service's any more.
func TestInherited(t *testing.T) {
	kept, gone := holding("other"), netip.MustParseAddr("198.51.100.9")
	a := announcer(func() {})
	other := lease("other", "x", time.Now(), 15, "")
	leases := func() []*coordinationv1.Lease { return []*coordinationv1.Lease{other} }
	a.Leases, a.Grace = leases, func() time.Duration { return 10 * time.Second }
	if err := a.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.own, a.settled = []netip.Addr{kept, gone}, true
	a.leave()
	seen := members{seen: map[string]*sighting{}, longest: a.members.longest}
	if l, err := a.Client.CoordinationV1().Leases(a.Namespace).Get(t.Context(), LeasePrefix+a.Node, metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	} else if seen.observe([]*coordinationv1.Lease{l}, "other", time.Now()); !seen.seen["self"].leaving {
		t.Error("others don't see that it is restarted")
	}
	next, out := follower(t, a, kept)
	holds := func() string {
		t.Helper()
		l, err := a.Client.CoordinationV1().Leases(a.Namespace).Get(t.Context(), LeasePrefix+a.Node, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return l.Annotations[holdsAnnotation]
	}
	if want := writeHolds([]netip.Addr{kept, gone}); holds() != want {
		t.Errorf("after its first renewal it holds %q, want %q", holds(), want)
	}
	if _, leaving := next.lease.Annotations[leavingAnnotation]; leaving {
		t.Error("it is there, and its Lease says that it leaves")
	}
	next.decide(time.Now())
	if !slices.Equal(out.addrs, []netip.Addr{kept}) || !next.hasSettled() {
		t.Errorf("it answers for %v, want %v; settled: %v", out.addrs, kept, next.hasSettled())
	}
	if err := next.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if holds() != kept.String() {
		t.Errorf("then it holds %q, want %s", holds(), kept)
	}
}
