package subsets

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
)

func addr(ip string) corev1.EndpointAddress { return corev1.EndpointAddress{IP: ip} }

func addrs(ips ...string) []corev1.EndpointAddress {
	var out []corev1.EndpointAddress
	for _, ip := range ips {
		out = append(out, addr(ip))
	}
	return out
}

func ports(numbers ...int32) []corev1.EndpointPort {
	var out []corev1.EndpointPort
	for _, n := range numbers {
		out = append(out, corev1.EndpointPort{Port: n, Protocol: corev1.ProtocolTCP})
	}
	return out
}

func TestPack(t *testing.T) {
	h2c, h2c2 := "h2c", "h2c"
	pod := func(ip, uid string) corev1.EndpointAddress {
		return corev1.EndpointAddress{IP: ip, TargetRef: &corev1.ObjectReference{UID: types.UID(uid)}}
	}
	for _, c := range []struct {
		name     string
		in, want []corev1.EndpointSubset
	}{
		{"nothing", nil, []corev1.EndpointSubset{}},
		{"same ports, one subset",
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.2"), Ports: ports(80)}, {Addresses: addrs("10.0.0.1"), Ports: ports(80)}},
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1", "10.0.0.2"), Ports: ports(80)}}},
		{"same addresses, one subset",
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1"), Ports: ports(443)}, {Addresses: addrs("10.0.0.1"), Ports: ports(80)}},
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1"), Ports: ports(80, 443)}}},
		{"one of two has both ports",
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1"), Ports: ports(80, 443)}, {Addresses: addrs("10.0.0.2"), Ports: ports(80)}},
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1", "10.0.0.2"), Ports: ports(80)}, {Addresses: addrs("10.0.0.1"), Ports: ports(443)}}},
		{"not ready wins",
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1"), Ports: ports(80)}, {NotReadyAddresses: addrs("10.0.0.1"), Ports: ports(80)}},
			[]corev1.EndpointSubset{{NotReadyAddresses: addrs("10.0.0.1"), Ports: ports(80)}}},
		{"readiness differs between ports",
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1"), Ports: ports(80)}, {NotReadyAddresses: addrs("10.0.0.1"), Ports: ports(443)}},
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1"), Ports: ports(80)}, {NotReadyAddresses: addrs("10.0.0.1"), Ports: ports(443)}}},
		{"two Pods at one address",
			[]corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{pod("10.0.0.1", "b"), pod("10.0.0.1", "a")}, Ports: ports(80)}},
			[]corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{pod("10.0.0.1", "a"), pod("10.0.0.1", "b")}, Ports: ports(80)}}},
		{"without ports",
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.2")}, {Addresses: addrs("10.0.0.1")}},
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1", "10.0.0.2")}}},
		{"without ports, and the same with one",
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1")}, {Addresses: addrs("10.0.0.1"), Ports: ports(80)}},
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1"), Ports: ports(80)}}},
		{"application protocols are compared by what they say",
			[]corev1.EndpointSubset{
				{Addresses: addrs("10.0.0.1"), Ports: []corev1.EndpointPort{{Port: 80, AppProtocol: &h2c}}},
				{Addresses: addrs("10.0.0.2"), Ports: []corev1.EndpointPort{{Port: 80, AppProtocol: &h2c2}}}},
			[]corev1.EndpointSubset{{Addresses: addrs("10.0.0.1", "10.0.0.2"), Ports: []corev1.EndpointPort{{Port: 80, AppProtocol: &h2c}}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, Pack(c.in)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// offers is what subsets say: which address offers which port, and whether it is ready there.
func offers(in []corev1.EndpointSubset) map[string]bool {
	out := map[string]bool{}
	note := func(list []corev1.EndpointAddress, ports []corev1.EndpointPort, ready bool) {
		for _, a := range list {
			for _, p := range ports {
				key := fmt.Sprintf("%s %s:%d", a.IP, p.Name, p.Port)
				was, seen := out[key]
				out[key] = ready && (was || !seen)
			}
		}
	}
	for _, s := range in {
		note(s.Addresses, s.Ports, true)
		note(s.NotReadyAddresses, s.Ports, false)
	}
	return out
}

func TestPackKeepsTheMeaning(t *testing.T) {
	ips := rapid.SliceOfN(rapid.SampledFrom([]string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"}), 0, 4)
	numbers := rapid.SliceOfNDistinct(rapid.Int32Range(1, 4), 1, 3, rapid.ID[int32])
	rapid.Check(t, func(t *rapid.T) {
		var in []corev1.EndpointSubset
		for range rapid.IntRange(0, 5).Draw(t, "subsets") {
			in = append(in, corev1.EndpointSubset{
				Addresses: addrs(ips.Draw(t, "ready")...), NotReadyAddresses: addrs(ips.Draw(t, "not ready")...), Ports: ports(numbers.Draw(t, "ports")...),
			})
		}
		packed := Pack(in)
		if diff := cmp.Diff(offers(in), offers(packed)); diff != "" {
			t.Fatal(diff)
		}
		if diff := cmp.Diff(packed, Pack(packed)); diff != "" {
			t.Fatalf("packing again changes it: %s", diff)
		}
		shuffled := slices.Clone(in)
		slices.Reverse(shuffled)
		if diff := cmp.Diff(packed, Pack(shuffled)); diff != "" {
			t.Fatalf("the order of the input matters: %s", diff)
		}
	})
}

func TestTruncate(t *testing.T) {
	many := func(n int) []corev1.EndpointAddress {
		var out []corev1.EndpointAddress
		for i := range n {
			out = append(out, addr(fmt.Sprintf("10.0.%d.%d", i/250, i%250)))
		}
		return out
	}
	type sizes struct{ ready, notReady int }
	for _, c := range []struct {
		name     string
		in, want []sizes
		cut      bool
	}{
		{"exactly full", []sizes{{600, 400}}, []sizes{{600, 400}}, false},
		{"one too many", []sizes{{600, 401}}, []sizes{{600, 400}}, true},
		{"the ready ones alone are too many", []sizes{{1500, 20}}, []sizes{{1000, 0}}, true},
		{"shares", []sizes{{900, 0}, {600, 0}}, []sizes{{600, 0}, {400, 0}}, true},
		{"shares of the not ready", []sizes{{500, 750}, {300, 250}}, []sizes{{500, 150}, {300, 50}}, true},
		{"what rounding takes, the last lacks", []sizes{{667, 0}, {667, 0}, {667, 0}}, []sizes{{334, 0}, {334, 0}, {332, 0}}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var in []corev1.EndpointSubset
			for i, s := range c.in {
				in = append(in, corev1.EndpointSubset{Addresses: many(s.ready), NotReadyAddresses: many(s.notReady), Ports: ports(int32(i + 1))})
			}
			if cut := Truncate(in); cut != c.cut {
				t.Errorf("cut %t", cut)
			}
			for i, s := range in {
				if got := (sizes{len(s.Addresses), len(s.NotReadyAddresses)}); got != c.want[i] {
					t.Errorf("subset %d: %v, want %v", i, got, c.want[i])
				}
			}
		})
	}
}
