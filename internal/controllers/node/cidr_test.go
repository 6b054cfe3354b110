package node

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func TestPartsAreHandedOutInTurn(t *testing.T) {
	p := newPool(Range{prefix("10.244.0.0/22"), 24})
	p.occupy(prefix("10.244.1.0/24"), "b")
	for _, want := range []string{"10.244.0.0/24", "10.244.2.0/24", "10.244.3.0/24"} {
		if got, err := p.allocate("n"); err != nil || got != prefix(want) {
			t.Fatalf("got %s, %v; want %s", got, err, want)
		}
	}
	if _, err := p.allocate("n"); err == nil || !strings.Contains(err.Error(), "10.244.0.0/22") {
		t.Errorf("a full range: %v", err)
	}
	p.release(prefix("10.244.1.0/24"), "somebody else")
	if _, err := p.allocate("n"); err == nil {
		t.Error("a part was taken from its owner")
	}
	p.release(prefix("10.244.1.0/24"), "b")
	if got, err := p.allocate("n"); err != nil || got != prefix("10.244.1.0/24") {
		t.Errorf("got %s, %v", got, err)
	}
}

func TestWhatOverlapsIsNotHandedOut(t *testing.T) {
	p := newPool(Range{prefix("10.244.0.0/22"), 24})
	p.occupy(prefix("10.244.0.0/23"), "Services")   // wider than a part
	p.occupy(prefix("10.244.2.128/25"), "by hand")  // narrower
	p.occupy(prefix("192.168.0.0/24"), "elsewhere") // no business of this range
	if got, err := p.allocate("n"); err != nil || got != prefix("10.244.3.0/24") {
		t.Errorf("got %s, %v", got, err)
	}
}

// TestWideOnesArePassedAtOnce: a Node that has much of a wide range, or all of it, does not have its parts tried one by one.
func TestWideOnesArePassedAtOnce(t *testing.T) {
	none := netip.Prefix{}.String()
	for _, c := range []struct{ taken, want string }{ // want is what a new pool gives
		{"fd00:10::/33", "fd00:10:8000::/64"}, {"fd00:10:8000::/33", "fd00:10::/64"}, {"fd00:10::/32", ""}, {"fd00::/8", ""},
	} {
		for _, next := range []string{"fd00:10::", "fd00:10:7fff::", "fd00:10:ffff::"} {
			p := newPool(Range{prefix("fd00:10::/32"), 64})
			p.next = netip.MustParseAddr(next)
			p.occupy(prefix(c.taken), "wide")
			ended := make(chan string, 1)
			go func() {
				got, _ := p.allocate("n")
				ended <- got.String()
			}()
			select {
			case got := <-ended:
				if (c.want == "") != (got == none) || got != none && prefix(got).Overlaps(prefix(c.taken)) || next == "fd00:10::" && got != c.want && c.want != "" {
					t.Errorf("%s is taken, from %s on: got %s, want %s", c.taken, next, got, c.want)
				}
			case <-time.After(5 * time.Second):
				t.Fatalf("%s is taken, from %s on: a free part is still looked for after 5 s", c.taken, next)
			}
		}
	}
}

// TestTwoWithTheSamePart: the part stays in use until both are gone, and the second of them gets an Event, once.
func TestTwoWithTheSamePart(t *testing.T) {
	r := Range{prefix("10.244.0.0/23"), 24}
	for _, second := range []string{"10.244.0.0/24", "10.244.0.128/25", "10.244.0.0/16"} {
		p := newPool(r)
		if rival := p.occupy(prefix("10.244.0.0/24"), "a"); rival != "" {
			t.Fatalf("the first of all has the rival %s", rival)
		}
		if rival := p.occupy(prefix(second), "b"); rival != "a" {
			t.Errorf("%s: the rival is %q", second, rival)
		}
		if rival := p.occupy(prefix(second), "b"); rival != "" {
			t.Errorf("%s: a second Event about %s", second, rival)
		}
		p.release(prefix("10.244.0.0/24"), "a")
		for range 2 {
			if got, err := p.allocate("c"); err == nil && got.Overlaps(prefix(second)) {
				t.Errorf("%s: %s was handed out while b has it", second, got)
			}
		}
		p.release(prefix(second), "b")
		if got, err := p.allocate("d"); err != nil || got != prefix("10.244.0.0/24") {
			t.Errorf("%s: later %s, %v", second, got, err)
		}
	}
}

func TestNoPartHasTwoOwners(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rapid.SampledFrom([]Range{{prefix("10.0.0.0/20"), 24}, {prefix("fd00::/60"), 64}, {prefix("10.0.0.0/24"), 24}}).Draw(t, "range")
		p := newPool(r)
		owned := map[netip.Prefix]bool{}
		parts := 1 << (r.Bits - r.Prefix.Bits())
		t.Repeat(map[string]func(*rapid.T){
			"allocate": func(t *rapid.T) {
				part, err := p.allocate("n")
				if (err != nil) != (len(owned) == parts) {
					t.Fatalf("%d of %d parts are out: %v", len(owned), parts, err)
				}
				if err == nil && (owned[part] || part.Bits() != r.Bits || !r.Prefix.Contains(part.Addr()) || part.Masked() != part) {
					t.Fatalf("handed out %s", part)
				}
				if err == nil {
					owned[part] = true
				}
			},
			"release": func(t *rapid.T) {
				for part := range owned {
					p.release(part, "n")
					delete(owned, part)
					return
				}
			},
		})
	})
}

func TestRanges(t *testing.T) {
	for _, c := range []struct {
		cidrs []netip.Prefix
		wrong string
	}{
		{nil, ""},
		{[]netip.Prefix{prefix("10.244.0.0/16")}, ""},
		{[]netip.Prefix{prefix("fd00:244::/48"), prefix("10.244.0.0/16")}, ""},
		{[]netip.Prefix{prefix("10.244.0.0/16"), prefix("10.245.0.0/16")}, "same family"},
		{[]netip.Prefix{prefix("10.244.0.0/25")}, "from 25 to 32"},
		{[]netip.Prefix{prefix("fd00::/80")}, "from 80 to 128"},
	} {
		got, err := Ranges(c.cidrs, 24, 64)
		if c.wrong == "" && (err != nil || len(got) != len(c.cidrs)) {
			t.Errorf("%v: %v, %v", c.cidrs, got, err)
		}
		if c.wrong != "" && (err == nil || !strings.Contains(err.Error(), c.wrong)) {
			t.Errorf("%v: %v, want %q", c.cidrs, err, c.wrong)
		}
	}
}
