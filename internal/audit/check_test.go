package audit

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	utilnet "k8s.io/apimachinery/pkg/util/net"

	"portal/internal/alloc"
	"portal/internal/apiserver/registry/service"
)

var (
	testRanges    = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}
	testNodePorts = *utilnet.ParsePortRangeOrDie("30000-32767")
)

func addr(text string) alloc.Claim { return alloc.Claim{Addr: netip.MustParseAddr(text)} }

func port(number uint16) alloc.Claim { return alloc.Claim{Port: number} }

// holding is a Service as a snapshot has it. Revisions grow in the order in which Services are made.
func holding(name string, revision int64, held ...alloc.Claim) Service {
	namespace, short, _ := strings.Cut(name, "/")
	svc := Service{
		Key: servicePrefix + name, Created: revision, Modified: revision + 1,
		Owner: service.Owner{Namespace: namespace, Name: short, UID: "uid-" + name},
	}
	for _, on := range held {
		if on.Addr.IsValid() {
			svc.Held.Addresses = append(svc.Held.Addresses, on.Addr)
		} else {
			svc.Held.NodePorts = append(svc.Held.NodePorts, int32(on.Port))
		}
	}
	return svc
}

// claimed is a claim as the API server writes it.
func claimed(on alloc.Claim, owner service.Owner) Claim {
	claim := Claim{On: on, Key: keyOf(on), Modified: 7, Owner: owner, Managed: true, Labelled: true}
	if !claim.isPort() {
		claim.Owner.UID = ""
	}
	return claim
}

// sound is a snapshot without a fault: shop/web, shop/api and ops/log.
func sound() Snapshot {
	web := holding("shop/web", 10, addr("10.96.0.10"), port(30010))
	api := holding("shop/api", 20, addr("10.96.0.20"), addr("fd00:96::20"))
	log := holding("ops/log", 30, addr("10.96.0.30"), port(30030))
	log.Held.HealthPort = 30031
	return Snapshot{
		Ranges: testRanges, NodePorts: testNodePorts,
		Services: []Service{log, api, web, holding("shop/headless", 40)},
		Claims: []Claim{
			claimed(addr("10.96.0.10"), web.Owner), claimed(port(30010), web.Owner),
			claimed(addr("10.96.0.20"), api.Owner), claimed(addr("fd00:96::20"), api.Owner),
			claimed(addr("10.96.0.30"), log.Owner), claimed(port(30030), log.Owner), claimed(port(30031), log.Owner),
		},
	}
}

func (s *Snapshot) service(name string) *Service {
	i := slices.IndexFunc(s.Services, func(svc Service) bool { return nameOf(svc.Owner).String() == name })
	return &s.Services[i]
}

func (s *Snapshot) claim(on alloc.Claim) *Claim {
	i := slices.IndexFunc(s.Claims, func(c Claim) bool { return c.On == on })
	return &s.Claims[i]
}

func (s *Snapshot) drop(on alloc.Claim) {
	s.Claims = slices.DeleteFunc(s.Claims, func(c Claim) bool { return c.On == on })
}

// lines are findings in short: what, on whom, and who has to act.
func lines(findings []Finding) []string {
	out := []string{}
	for _, f := range findings {
		who := "by hand"
		if f.Repairable {
			who = "repairable"
		}
		out = append(out, fmt.Sprintf("%s %s %s %s", f.Problem, f.Service, f.Claim, who))
	}
	return out
}

func TestCheck(t *testing.T) {
	ghost := service.Owner{Namespace: "shop", Name: "ghost", UID: "uid-ghost"}
	for _, c := range []struct {
		name  string
		spoil func(*Snapshot)
		want  []string
	}{
		{"all sound", func(*Snapshot) {}, nil},
		{"nothing stored", func(s *Snapshot) { *s = Snapshot{} }, nil},
		{"an address without a claim", func(s *Snapshot) { s.drop(addr("fd00:96::20")) },
			[]string{"ClusterIPNotAllocated shop/api fd00:96::20 repairable"}},
		{"a port without a claim", func(s *Snapshot) { s.drop(port(30010)) },
			[]string{"PortNotAllocated shop/web port 30010 repairable"}},
		{"a health-check port without a claim", func(s *Snapshot) { s.drop(port(30031)) },
			[]string{"PortNotAllocated ops/log port 30031 repairable"}},
		{"a claim to an address for a Service that is gone", func(s *Snapshot) { s.Claims = append(s.Claims, claimed(addr("10.96.9.9"), ghost)) },
			[]string{"IPAddressNotAllocated shop/ghost 10.96.9.9 repairable"}},
		{"a claim to an address for a Service that has another", func(s *Snapshot) {
			s.Claims = append(s.Claims, claimed(addr("10.96.9.9"), s.service("shop/web").Owner))
		}, []string{"IPAddressNotAllocated shop/web 10.96.9.9 repairable"}},
		{"the same, made by a user", func(s *Snapshot) {
			claim := claimed(addr("10.96.9.9"), ghost)
			claim.Managed, claim.Labelled = false, false
			s.Claims = append(s.Claims, claim)
		}, []string{"IPAddressNotAllocated shop/ghost 10.96.9.9 by hand"}},
		{"a user's address for something else", func(s *Snapshot) {
			s.Claims = append(s.Claims, Claim{On: addr("10.96.9.9"), Key: keyOf(addr("10.96.9.9")), Parent: "gateways shop/edge"})
		}, nil},
		{"a claim to a port for a Service that is gone", func(s *Snapshot) { s.Claims = append(s.Claims, claimed(port(30999), ghost)) },
			[]string{"PortClaimOrphaned shop/ghost port 30999 repairable"}},
		{"a Service that is gone leaves all its claims", func(s *Snapshot) {
			s.Services = slices.DeleteFunc(s.Services, func(svc Service) bool { return svc.Owner.Name == "log" })
		}, []string{
			"IPAddressNotAllocated ops/log 10.96.0.30 repairable",
			"PortClaimOrphaned ops/log port 30030 repairable",
			"PortClaimOrphaned ops/log port 30031 repairable",
		}},
		{"an address claimed for another", func(s *Snapshot) { s.claim(addr("10.96.0.10")).Owner = ghost },
			[]string{"IPAddressWrongReference shop/web 10.96.0.10 repairable"}},
		{"an address claimed for another that exists and lacks it", func(s *Snapshot) {
			s.claim(addr("10.96.0.10")).Owner = s.service("shop/api").Owner
		}, []string{"IPAddressWrongReference shop/web 10.96.0.10 repairable"}},
		{"a port claimed for another", func(s *Snapshot) { s.claim(port(30010)).Owner = ghost },
			[]string{"PortClaimWrongReference shop/web port 30010 repairable"}},
		{"a port claimed for an earlier Service of the name", func(s *Snapshot) { s.claim(port(30010)).Owner.UID = "uid-before" },
			[]string{"PortClaimWrongReference shop/web port 30010 repairable"}},
		{"an address whose labels were taken off", func(s *Snapshot) {
			s.claim(addr("10.96.0.10")).Managed, s.claim(addr("10.96.0.10")).Labelled = false, false
		}, []string{"IPAddressWrongReference shop/web 10.96.0.10 repairable"}},
		{"an allocated address whose parent was changed", func(s *Snapshot) { s.claim(addr("10.96.0.10")).Parent = "gateways shop/edge" },
			[]string{"IPAddressWrongReference shop/web 10.96.0.10 repairable"}},
		{"an address that a user has for something else", func(s *Snapshot) {
			claim := s.claim(addr("10.96.0.10"))
			claim.Parent, claim.Managed = "gateways shop/edge", false
		}, []string{"ClusterIPAlreadyAllocated shop/web 10.96.0.10 by hand"}},
		{"two Services with one address", func(s *Snapshot) {
			s.Services = append(s.Services, holding("a/older", 5, addr("10.96.0.10")))
		}, []string{"ClusterIPAlreadyAllocated a/older 10.96.0.10 by hand"}},
		{"two Services with one port", func(s *Snapshot) {
			s.Services = append(s.Services, holding("z/newer", 50, port(30031)))
		}, []string{"PortAlreadyAllocated z/newer port 30031 by hand"}},
		{"two with one address that is claimed for neither: the older keeps it", func(s *Snapshot) {
			s.Services = append(s.Services, holding("a/older", 5, addr("10.96.0.10")))
			s.claim(addr("10.96.0.10")).Owner = ghost
		}, []string{
			"IPAddressWrongReference a/older 10.96.0.10 repairable",
			"ClusterIPAlreadyAllocated shop/web 10.96.0.10 by hand",
		}},
		{"two with one address that is not claimed", func(s *Snapshot) {
			s.Services = append(s.Services, holding("z/newer", 50, addr("10.96.0.10")))
			s.drop(addr("10.96.0.10"))
		}, []string{
			"ClusterIPNotAllocated shop/web 10.96.0.10 repairable",
			"ClusterIPAlreadyAllocated z/newer 10.96.0.10 by hand",
		}},
		{"an address of no range", func(s *Snapshot) { s.Ranges = s.Ranges[:1] },
			[]string{"ClusterIPOutOfRange shop/api fd00:96::20 by hand"}},
		{"the last address of a range", func(s *Snapshot) {
			last := holding("shop/last", 50, addr("10.96.255.255"))
			s.Services, s.Claims = append(s.Services, last), append(s.Claims, claimed(addr("10.96.255.255"), last.Owner))
		}, []string{"ClusterIPOutOfRange shop/last 10.96.255.255 by hand"}},
		{"no range at all", func(s *Snapshot) { s.Ranges = nil }, []string{
			"ClusterIPOutOfRange ops/log 10.96.0.30 by hand", "ClusterIPOutOfRange shop/api 10.96.0.20 by hand",
			"ClusterIPOutOfRange shop/api fd00:96::20 by hand", "ClusterIPOutOfRange shop/web 10.96.0.10 by hand",
		}},
		{"a range that can't be read leaves open which addresses are in one", func(s *Snapshot) {
			s.Ranges, s.LostRanges = nil, []Unreadable{{Key: rangePrefix + "kubernetes", Flaw: "garbage"}}
		}, []string{"ServiceCIDRUnreadable  /registry/servicecidrs/kubernetes by hand"}},
		{"a port of no range", func(s *Snapshot) { s.NodePorts = *utilnet.ParsePortRangeOrDie("30000-30030") },
			[]string{"PortOutOfRange ops/log port 30031 by hand"}},
		{"a port that is none", func(s *Snapshot) { s.service("shop/web").Held.NodePorts = []int32{30010, 95546} },
			[]string{"PortOutOfRange shop/web port 95546 by hand"}},
		{"a cluster IP that is none", func(s *Snapshot) { s.service("shop/web").Invalid = []string{"10.96.0"} },
			[]string{"ClusterIPNotValid shop/web 10.96.0 by hand"}},
		{"an unreadable claim to an address that a Service has", func(s *Snapshot) { s.claim(addr("10.96.0.10")).Flaw = "garbage" },
			[]string{"IPAddressUnreadable shop/web 10.96.0.10 repairable"}},
		{"an unreadable claim to an address that no Service has", func(s *Snapshot) {
			s.Claims = append(s.Claims, Claim{On: addr("10.96.9.9"), Key: keyOf(addr("10.96.9.9")), Flaw: "garbage"})
		}, []string{"IPAddressUnreadable  10.96.9.9 by hand"}},
		{"an IPAddress with a name that is none", func(s *Snapshot) {
			s.Claims = append(s.Claims, Claim{Key: addressPrefix + "010.96.9.9", Flaw: "garbage"})
		}, []string{"IPAddressUnreadable  /registry/ipaddresses/010.96.9.9 by hand"}},
		{"an unreadable claim to a port that a Service has", func(s *Snapshot) { s.claim(port(30010)).Flaw = "garbage" },
			[]string{"PortClaimUnreadable shop/web port 30010 repairable"}},
		{"an unreadable claim to a port that no Service has", func(s *Snapshot) {
			s.Claims = append(s.Claims, Claim{On: port(30999), Key: keyOf(port(30999)), Flaw: "garbage", Managed: true})
		}, []string{"PortClaimUnreadable  port 30999 repairable"}},
		{"a claim to a port that is none", func(s *Snapshot) {
			s.Claims = append(s.Claims, Claim{Key: portPrefix + "http", Flaw: "garbage", Managed: true})
		}, []string{"PortClaimUnreadable  /registry/nodeports/http repairable"}},
		{"a Service that can't be read keeps what is claimed for it", func(s *Snapshot) {
			svc := s.service("shop/web")
			svc.Held, svc.Flaw = service.Held{}, "garbage"
		}, []string{"ServiceUnreadable shop/web  by hand"}},
		{"and what it may hold is not given to another", func(s *Snapshot) {
			svc := s.service("shop/web")
			svc.Held, svc.Flaw = service.Held{}, "garbage"
			s.Services = append(s.Services, holding("z/newer", 50, addr("10.96.0.10")))
		}, []string{"ServiceUnreadable shop/web  by hand", "IPAddressWrongReference z/newer 10.96.0.10 by hand"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := sound()
			c.spoil(&s)
			got := Check(s)
			if !slices.Equal(lines(got), c.want) {
				t.Errorf("found\n\t%s\nwant\n\t%s", strings.Join(lines(got), "\n\t"), strings.Join(c.want, "\n\t"))
			}
			for _, f := range got {
				if f.Message == "" || f.Remedy == "" || f.about.Kind == "" || f.about.Name == "" {
					t.Errorf("a finding that does not say what, how to repair it and about whom: %+v", f)
				}
				if !slices.Contains(Problems, f.Problem) {
					t.Errorf("%s is missing in Problems", f.Problem)
				}
			}
		})
	}
}

func BenchmarkCheck(b *testing.B) {
	s := large(50_000)
	for b.Loop() {
		if found := Check(s); len(found) > 0 {
			b.Fatal(found[0])
		}
	}
}

// large is a sound snapshot of n Services.
func large(n int) Snapshot {
	s := Snapshot{Ranges: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, NodePorts: testNodePorts}
	next := netip.MustParseAddr("10.0.0.1")
	for i := range n {
		held := []alloc.Claim{{Addr: next}}
		if i < testNodePorts.Size {
			held = append(held, port(uint16(testNodePorts.Base+i)))
		}
		svc := holding(fmt.Sprintf("ns/s%06d", i), int64(i+1), held...)
		s.Services = append(s.Services, svc)
		for _, on := range held {
			s.Claims = append(s.Claims, claimed(on, svc.Owner))
		}
		next = next.Next()
	}
	return s
}
