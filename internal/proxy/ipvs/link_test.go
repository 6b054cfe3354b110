package ipvs

import (
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"portal/internal/intent"
	"portal/internal/nettest"
)

// withLink runs a test in a network namespace of its own, where loopback stands for our device: this kernel may have no dummies.
func withLink(t *testing.T, f func(*link)) {
	t.Helper()
	nettest.InNamespace(t, func() {
		l, err := openLink()
		if err != nil {
			t.Error(err)
			return
		}
		defer l.close()
		lo, err := l.LinkByName("lo")
		if err == nil {
			err = l.LinkSetUp(lo)
		}
		if err != nil {
			t.Error(err)
			return
		}
		l.index = lo.Attrs().Index
		f(l)
	})
}

func turnIPv6Off(t *testing.T) {
	t.Helper()
	for _, of := range []string{"all", "default"} {
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+of+"/disable_ipv6", []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// ours counts our rules and routes of a family.
func ours(t *testing.T, l *link, family int) (n int) {
	t.Helper()
	rules, err := l.RuleList(family)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rules {
		if r.Mark == markBase {
			n++
		}
	}
	routes, err := l.RouteListFiltered(family, &netlink.Route{Table: routeTable}, netlink.RT_FILTER_TABLE)
	if err != nil {
		t.Fatal(err)
	}
	return n + len(routes)
}

// TestRoutesOfFamilies: where IPv6 is turned off, only what is for IPv4 is made and expected.
func TestRoutesOfFamilies(t *testing.T) {
	both, one := []intent.Family{intent.IPv4, intent.IPv6}, []intent.Family{intent.IPv4}
	for _, c := range []struct {
		name     string
		off      bool
		families []intent.Family
		six      int
	}{
		{"both", false, both, 3},
		{"IPv6 turned off", true, one, 0},
		{"IPv6 not in use", false, one, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			withLink(t, func(l *link) {
				if c.off {
					turnIPv6Off(t)
				}
				for range 2 { // the second time finds what the first has made
					if err := l.installRoutes(c.families); err != nil {
						t.Fatal(err)
					}
				}
				if err := l.routed(c.families); err != nil {
					t.Error(err)
				}
				if four, six := ours(t, l, netlink.FAMILY_V4), ours(t, l, netlink.FAMILY_V6); four != 3 || six != c.six {
					t.Errorf("%d rules and routes of IPv4 and %d of IPv6, want 3 and %d", four, six, c.six)
				}
				for range 2 { // the second time finds nothing
					if err := l.removeRoutes(); err != nil {
						t.Error(err)
					}
				}
				if four, six := ours(t, l, netlink.FAMILY_V4), ours(t, l, netlink.FAMILY_V6); four+six != 0 {
					t.Errorf("%d rules and routes of IPv4 and %d of IPv6 are left", four, six)
				}
			})
		})
	}
}

// TestRemovesRulesOfIPv6 that are from before it was turned off.
func TestRemovesRulesOfIPv6(t *testing.T) {
	withLink(t, func(l *link) {
		if err := l.installRoutes([]intent.Family{intent.IPv4, intent.IPv6}); err != nil {
			t.Fatal(err)
		}
		turnIPv6Off(t)
		if err := l.installRoutes([]intent.Family{intent.IPv4}); err != nil {
			t.Error(err)
		}
		if err := l.removeRoutes(); err != nil {
			t.Error(err)
		}
		if four, six := ours(t, l, netlink.FAMILY_V4), ours(t, l, netlink.FAMILY_V6); four+six != 0 {
			t.Errorf("%d rules and routes of IPv4 and %d of IPv6 are left", four, six)
		}
	})
}
