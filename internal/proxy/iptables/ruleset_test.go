package iptables

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"portal/internal/intent"
	"portal/internal/plan"
)

// written are the tables' chains as changes leave them.
type written map[string][]string

func (w written) take(table string, s *section) {
	for name := range s.whole {
		w[table+" "+name] = nil
	}
	s.rules(func(name string, r *rule) { w[table+" "+name] = append(w[table+" "+name], r.String()) })
	for name := range s.gone {
		delete(w, table+" "+name)
	}
	*s = newSection()
}

func (w written) takeAll(r *ruleset) {
	w.take("nat", &r.nat)
	w.take("filter", &r.filter)
}

// essence is what the chains hold, however the trees have grown.
func (w written) essence() []string {
	var out []string
	for name, rules := range w {
		for _, rule := range rules {
			signpost := slices.ContainsFunc(treeChains[:], func(t string) bool { return strings.Contains(rule, "-g "+t+"-") })
			inTree := slices.ContainsFunc(treeChains[:], func(t string) bool { return strings.HasSuffix(name, t) || strings.Contains(name, t+"-") })
			switch {
			case signpost:
			case inTree:
				out = append(out, "tree: "+rule)
			default:
				out = append(out, name+": "+rule)
			}
		}
	}
	slices.Sort(out)
	return out
}

// TestChangesLeadToTheSame: rules are not kept but made again, and after any changes they are those of a full sync.
func TestChangesLeadToTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := plan.NewSnapshot(facts)
		services := rapid.IntRange(1, 40).Draw(t, "services")
		fill := func() {
			for n := range services {
				put(t, s, n)
			}
		}
		prepared := rapid.Bool().Draw(t, "prepared")
		if !prepared {
			fill()
		}
		r, w := newRuleset(intent.IPv4, 1<<14, s, true), written{}
		w.takeAll(r)
		s.Acknowledge()
		if prepared {
			fill() // all of them come to an empty tree
		}
		for range rapid.IntRange(1, 8).Draw(t, "rounds") {
			for range rapid.IntRange(1, 4).Draw(t, "changes") {
				n := rapid.IntRange(0, services).Draw(t, "which")
				if rapid.IntRange(0, 3).Draw(t, "delete") == 0 {
					s.Delete(cluster(n, 0).Service.Key)
					continue
				}
				put(t, s, n)
			}
			r.update(s, s.Delta())
			w.takeAll(r)
			s.Acknowledge()
			fresh := written{}
			fresh.takeAll(newRuleset(intent.IPv4, 1<<14, s, true))
			if got, want := w.essence(), fresh.essence(); !slices.Equal(got, want) {
				t.Fatalf("changes led to\n%s\na full sync to\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
			for name := range maps.Keys(w) {
				if len(w[name]) == 0 && strings.HasPrefix(name, "nat PORTAL-VIPS-") {
					t.Fatalf("the chain %s is empty and still there", name)
				}
			}
		}
	})
}

// put plans the nth Service in one of its forms. Some want the same addresses.
func put(t *rapid.T, s *plan.Snapshot, n int) {
	e := cluster(n, rapid.IntRange(0, 6).Draw(t, "endpoints"))
	v, coin := e.Service, rapid.Bool()
	if coin.Draw(t, "affinity") {
		v.Affinity = time.Minute
	}
	if coin.Draw(t, "ports") {
		v.Type, v.Ports[0].NodePort = intent.NodePort, uint16(30000+n)
		v.ExternalLocal = coin.Draw(t, "local")
	}
	if coin.Draw(t, "external") {
		v.ExternalIPs = []netip.Addr{netip.AddrFrom4([4]byte{198, 51, 100, byte(n % 7)})}
	}
	if coin.Draw(t, "balanced") {
		v.Type, v.Ports[0].NodePort = intent.LoadBalancer, uint16(30000+n)
		v.Ingress = []intent.Ingress{{Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(n)})}}
		v.SourceRanges = []netip.Prefix{netip.MustParsePrefix("172.31.0.0/16")}
	}
	s.Set(v.Key, plan.For(e, facts))
}
