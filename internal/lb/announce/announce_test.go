package announce

import (
	"fmt"
	"net/netip"
	"slices"
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

// TestMembers turns the clock: a Lease runs from when its renewal was seen, whatever the other machine's clock says.
func TestMembers(t *testing.T) {
	start := time.Now()
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	m := members{map[string]*sighting{}}
	answered := at(0)
	names := func(now, since time.Time) string {
		list, _, _ := m.alive(now, since, answered)
		var out []string
		for _, x := range list {
			out = append(out, x.Name)
		}
		return fmt.Sprint(out)
	}
	expect := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	wrong := start.Add(-24 * time.Hour) // a clock that is a day behind
	a, b := lease("a", "x", wrong, 2, "192.0.2.1,fd00::1"), lease("b", "y", start, 15, "")
	m.observe([]*coordinationv1.Lease{a, b}, at(0))
	expect("at the beginning", names(at(1), at(0)), "[a b]")
	if list, next, doubt := m.alive(at(1), at(0), at(0)); doubt || !list[0].Holds[netip.MustParseAddr("fd00::1")] || !next.Equal(at(2)) {
		t.Errorf("%+v, next at %s", list[0], next)
	}
	m.observe([]*coordinationv1.Lease{a, b}, at(1.5)) // seen again, and not renewed
	expect("not renewed, but perhaps nobody could", names(at(2.1), at(0)), "[a b]")
	if _, _, doubt := m.alive(at(2.1), at(0), at(0)); !doubt {
		t.Error("there is no doubt")
	}
	answered = at(1.2)
	expect("not renewed, though the API was there", names(at(2.1), at(0)), "[b]")
	expect("while the API had been away", names(at(2.1), at(1)), "[a b]")
	m.observe([]*coordinationv1.Lease{lease("a", "x", wrong.Add(time.Second), 2, ""), b}, at(2.5))
	answered = at(100)
	expect("renewed", names(at(4), at(0)), "[a b]")
	m.observe([]*coordinationv1.Lease{lease("a", "", wrong.Add(time.Second), 2, ""), b}, at(4))
	expect("released", names(at(4), at(0)), "[b]")
	m.observe(nil, at(4))
	expect("deleted", names(at(4), at(0)), "[]")
}
