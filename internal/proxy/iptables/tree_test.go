package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"portal/internal/intent"
)

// kernel holds a tree's chains and walks through them as packets do.
type kernel map[string][]rule

func (k kernel) take(t *tree, f intent.Family) {
	changed := newSection()
	t.changes(f, func(s spot) []rule { return []rule{{in: fmt.Sprint(s)}} }, &changed)
	maps.Copy(k, changed.whole)
	for chain, rules := range changed.more {
		k[chain] = append(k[chain], rules...)
	}
	for chain := range changed.gone {
		delete(k, chain)
	}
}

type fataler interface{ Fatalf(string, ...any) }

// walk returns the leaf's rule that a packet meets, and how many rules were looked at.
func (k kernel) walk(t fataler, chain string, s spot) (rule string, looked int) {
	for depth := 0; depth <= maxDepth; depth++ {
		rules, ok := k[chain]
		if !ok {
			t.Fatalf("a jump to %s, which is not there", chain)
		}
		next := ""
		for _, r := range rules {
			looked++
			if r.to.kind != goTo {
				if r.in == fmt.Sprint(s) {
					return r.in, looked
				}
				continue
			}
			if fits(r, s) {
				next = r.to.chain
				break
			}
		}
		if next == "" {
			return "", looked
		}
		chain = next
	}
	t.Fatalf("more than %d chains to %v", maxDepth, s)
	return "", 0
}

func fits(r rule, s spot) bool {
	if r.dst.addr.IsValid() {
		v, m, a := r.dst.addr.AsSlice(), r.dst.mask.AsSlice(), s.addr.AsSlice()
		for i := range a {
			if a[i]&m[i] != v[i] {
				return false
			}
		}
		return true
	}
	return r.proto == s.proto && r.ports.first <= s.port && s.port <= r.ports.last
}

// reachable counts the chains that a packet can come to.
func (k kernel) reachable(chain string) int {
	n := 1
	for _, r := range k[chain] {
		if r.to.kind == goTo {
			n += k.reachable(r.to.chain)
		}
	}
	return n
}

// TestTree: whatever comes and goes, every spot is found, nothing else is, and no chain is left over.
func TestTree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom([]intent.Family{intent.IPv4, intent.IPv6}).Draw(t, "family")
		anySpot := rapid.Custom(func(t *rapid.T) spot {
			s := spot{
				proto: rapid.SampledFrom([]intent.Protocol{intent.TCP, intent.UDP}).Draw(t, "protocol"),
				port:  rapid.Uint16Range(1, 200).Draw(t, "port"),
			}
			b := []byte{10, 96, rapid.Byte().Draw(t, "third"), rapid.Byte().Draw(t, "fourth")}
			if f == intent.IPv6 {
				b = append([]byte{0xfd, 0, rapid.Byte().Draw(t, "first"), 11: 0}, b...)
			}
			s.addr, _ = netip.AddrFromSlice(b)
			return s
		})
		tr, chains, want := newTree("T"), kernel{}, map[spot]bool{}
		for _, s := range rapid.SliceOfN(anySpot, 0, 120).Draw(t, "first") {
			want[s] = true
		}
		tr.fill(slices.Collect(maps.Keys(want)), leafSize)
		chains.take(tr, f)
		for range rapid.IntRange(0, 80).Draw(t, "changes") {
			known := slices.SortedFunc(maps.Keys(want), spot.compare)
			if len(known) > 0 && rapid.Bool().Draw(t, "remove") {
				s := rapid.SampledFrom(known).Draw(t, "which")
				delete(want, s)
				tr.remove(s)
			} else {
				s := anySpot.Draw(t, "spot")
				want[s] = true
				tr.set(s)
			}
			if rapid.Bool().Draw(t, "write") {
				chains.take(tr, f)
			}
		}
		chains.take(tr, f)
		for s := range want {
			if got, _ := chains.walk(t, "T", s); got == "" {
				t.Fatalf("%v is not found", s)
			}
		}
		for range 20 {
			s := anySpot.Draw(t, "other")
			if got, _ := chains.walk(t, "T", s); (got != "") != want[s] {
				t.Fatalf("%v led to %q", s, got)
			}
		}
		if n := chains.reachable("T"); n != len(chains) {
			t.Fatalf("%d chains, of which %d can be reached", len(chains), n)
		}
	})
}

// TestTreeIsShallow: looking up does not grow with the number of Services.
func TestTreeIsShallow(t *testing.T) {
	for name, at := range map[string]func(int) spot{
		"dense IPv4": func(i int) spot { return spot{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), intent.TCP, 80} },
		"sparse IPv4": func(i int) spot {
			return spot{netip.AddrFrom4([4]byte{10, byte(i * 7 >> 8), byte(i * 131), byte(i * 31)}), intent.TCP, 80}
		},
		"IPv6": func(i int) spot {
			return spot{netip.AddrFrom16([16]byte{0xfd, 5: byte(i >> 8), 6: byte(i), 15: 1}), intent.TCP, 80}
		},
		"node ports": func(i int) spot { return spot{proto: intent.TCP, port: uint16(20000 + i)} },
	} {
		t.Run(name, func(t *testing.T) {
			const n = 20000
			var all []spot
			for i := range n {
				all = append(all, at(i))
			}
			tr, chains := newTree("T"), kernel{}
			tr.fill(all, leafSize)
			f := intent.IPv4
			if name == "IPv6" {
				f = intent.IPv6
			}
			chains.take(tr, f)
			sum, most := 0, 0
			for i := 0; i < n; i += 37 {
				got, looked := chains.walk(t, "T", at(i))
				if got == "" {
					t.Fatalf("%v is not found", at(i))
				}
				sum, most = sum+looked, max(most, looked)
			}
			if mean := sum / (n / 37); mean > 45 || most > 90 {
				t.Errorf("%d rules are looked at on the average, %d at most", mean, most)
			}
		})
	}
}
