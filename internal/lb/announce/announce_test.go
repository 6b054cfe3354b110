package announce

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func anybody(string) bool { return true }

// TestRank: all nodes come to the same order, addresses are spread, only those of a lost node move, and who announces an address stays.
func TestRank(t *testing.T) {
	var all []Member
	for i := range 5 {
		all = append(all, Member{Name: fmt.Sprint("node", i)})
	}
	count := map[string]int{}
	for i := range 200 {
		a := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
		order := rank(a, all, anybody)
		backwards := slices.Clone(all)
		slices.Reverse(backwards)
		if again := rank(a, backwards, anybody); !slices.Equal(order, again) {
			t.Fatalf("%s: %v and %v", a, order, again)
		}
		count[order[0]]++
		without := slices.DeleteFunc(slices.Clone(all), func(m Member) bool { return m.Name == "node3" })
		left := rank(a, without, anybody)
		if order[0] != "node3" && left[0] != order[0] || order[0] == "node3" && left[0] != order[1] {
			t.Errorf("%s: without node3 it moves from %v to %v", a, order, left)
		}
		// The last in the order announces it, and keeps it.
		held := slices.Clone(all)
		last := slices.IndexFunc(held, func(m Member) bool { return m.Name == order[4] })
		held[last].Holds = map[netip.Addr]bool{a: true}
		if got := rank(a, held, anybody); got[0] != order[4] || !slices.Equal(got[1:], order[:4]) {
			t.Errorf("%s: %v holds it, and the order is %v", a, order[4], got)
		}
		// It does so while its process is restarted, but who is restarted gets nothing that it had not.
		held[last].Leaving = true
		if got := rank(a, held, anybody); got[0] != order[4] {
			t.Errorf("%s: %v holds it and is restarted, and the order is %v", a, order[4], got)
		}
		first := slices.IndexFunc(held, func(m Member) bool { return m.Name == order[0] })
		held[first].Leaving, held[last].Holds, held[last].Leaving = true, nil, false
		if got := rank(a, held, anybody); !slices.Equal(got, order[1:]) {
			t.Errorf("%s: %v is restarted, and the order is %v", a, order[0], got)
		}
		held[first].Leaving, held[last].Holds = false, map[netip.Addr]bool{a: true}
		// But not if it may not.
		if got := rank(a, held, func(n string) bool { return n != order[4] }); !slices.Equal(got, order[:4]) {
			t.Errorf("%s: %v must not have it, and the order is %v", a, order[4], got)
		}
	}
	for name, n := range count {
		if n < 20 || n > 60 {
			t.Errorf("%s has %d of 200 addresses", name, n)
		}
	}
	if got := rank(netip.MustParseAddr("192.0.2.1"), all, func(string) bool { return false }); len(got) > 0 {
		t.Errorf("nobody may, and %v do", got)
	}
}

func lease(node, identity string, renewed time.Time, seconds int32, holds string) *coordinationv1.Lease {
	at := metav1.NewMicroTime(renewed)
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: LeasePrefix + node, Annotations: map[string]string{holdsAnnotation: holds}},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &identity, RenewTime: &at, LeaseDurationSeconds: &seconds},
	}
}

// TestMembers turns the clock: a Lease runs from when its renewal was seen, whatever the other machine's clock says, and ends only for
// who sees anything at all.
func TestMembers(t *testing.T) {
	start := time.Now()
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	m := members{seen: map[string]*sighting{}, longest: 15 * time.Second}
	// own is this node's Lease, renewed at a time.
	own := func(seconds float64) *coordinationv1.Lease { return lease("self", "me", at(seconds), 2, "") }
	expect := func(what string, now float64, want string, doubted bool) {
		t.Helper()
		list, _, doubt := m.alive(at(now))
		var names []string
		for _, x := range list {
			if x.Name != "self" {
				names = append(names, x.Name)
			}
		}
		if got := fmt.Sprint(names); got != want || doubt != doubted {
			t.Errorf("%s: %s, want %s; doubt: %v", what, got, want, doubt)
		}
	}
	see := func(now float64, leases ...*coordinationv1.Lease) { m.observe(leases, "self", at(now)) }
	wrong := start.Add(-24 * time.Hour) // a clock that is a day behind
	a, b := lease("a", "x", wrong, 2, "192.0.2.1,fd00::1"), lease("b", "y", start, 15, "")
	see(0, own(0), a, b)
	expect("at the beginning", 1, "[a b]", false)
	if list, next, _ := m.alive(at(1)); !list[0].Holds[netip.MustParseAddr("fd00::1")] || !next.Equal(at(2)) {
		t.Errorf("%+v, next at %s", list[0], next)
	}
	see(0.5, own(0), a, b) // nobody's renewals are seen
	expect("nothing is seen", 2.1, "[a b]", true)
	see(1.5, own(1.5), a, b)
	expect("not renewed, as others were", 2.1, "[b]", false)
	a = lease("a", "x", wrong.Add(time.Second), 2, "")
	see(3, own(3), a, b)
	expect("renewed", 4, "[a b]", false)
	// For four seconds nothing is seen; when this node's renewals are, those of others may still be on their way.
	see(7, own(7), a, b)
	expect("after a gap", 8.9, "[a b]", false)
	see(8.9, own(8.9), a, b)
	expect("long after a gap", 9.1, "[b]", false)
	see(9.2, own(9.2), lease("a", "", wrong.Add(2*time.Second), 2, ""), b)
	expect("released", 9.2, "[b]", false)
	see(9.3, own(9.3))
	expect("deleted", 9.3, "[]", false)
}

// TestMembersBounds: a Lease that says it runs for years, or for less than no time, keeps no member alive for longer than members' Leases
// run. What it holds is read when it changes, and no more of it than the API lets annotations have.
func TestMembersBounds(t *testing.T) {
	start := time.Now()
	m := New(Options{Times: DefaultTimes}).members
	years, negative := lease("years", "x", start, math.MaxInt32, "192.0.2.1"), lease("negative", "y", start, math.MinInt32, "")
	own := func(at time.Time) *coordinationv1.Lease { return lease("self", "me", at, 2, "") }
	names := func(now time.Time) (out []string) {
		m.observe([]*coordinationv1.Lease{own(now), years, negative}, "self", now)
		list, _, _ := m.alive(now)
		for _, x := range list {
			out = append(out, x.Name)
		}
		return out
	}
	// This node sees renewals all the while.
	for at := start; at.Before(start.Add(DefaultTimes.IdleLease)); at = at.Add(time.Second) {
		if got := fmt.Sprint(names(at)); got != "[self years]" {
			t.Fatalf("after %s: %s", at.Sub(start), got)
		}
	}
	if got := fmt.Sprint(names(start.Add(DefaultTimes.IdleLease))); got != "[self]" {
		t.Errorf("after the longest Lease: %s", got)
	}

	marker, first := netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("192.0.2.1")
	m.seen["years"].holds[marker] = true
	names(start)
	if !m.seen["years"].holds[marker] {
		t.Error("what did not change was read again")
	}
	years = lease("years", "x", start, 2, "192.0.2.2")
	names(start)
	if h := m.seen["years"].holds; h[marker] || h[first] || !h[netip.MustParseAddr("192.0.2.2")] {
		t.Errorf("after a change it holds %v", h)
	}
	for _, c := range []struct {
		end, want string
	}{{"192.0.2.1", "map[192.0.2.1:true]"}, {"192.0.2.1,192.0.2.2", "map[192.0.2.1:true]"}, {"192.0.2.123", "map[]"}} {
		text := strings.Repeat("x", maxHolds-len(",192.0.2.1")) + "," + c.end
		if got := fmt.Sprint(parseHolds(text)); got != c.want {
			t.Errorf("a long text that ends in %s holds %s, want %s", c.end, got, c.want)
		}
	}
}
