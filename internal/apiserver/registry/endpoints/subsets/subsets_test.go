package subsets

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func addresses(ips ...string) []corev1.EndpointAddress {
	var out []corev1.EndpointAddress
	for _, ip := range ips {
		out = append(out, corev1.EndpointAddress{IP: ip})
	}
	return out
}

func port(name string, number int32) corev1.EndpointPort {
	return corev1.EndpointPort{Name: name, Port: number, Protocol: corev1.ProtocolTCP}
}

func TestRepack(t *testing.T) {
	ref := func(ip string, uid types.UID) corev1.EndpointAddress {
		return corev1.EndpointAddress{IP: ip, TargetRef: &corev1.ObjectReference{UID: uid}}
	}
	app := func(name string) corev1.EndpointPort {
		p := port("a", 80)
		p.AppProtocol = &name
		return p
	}
	for name, c := range map[string]struct{ in, want []corev1.EndpointSubset }{
		"nothing":           {nil, nil},
		"nobody":            {[]corev1.EndpointSubset{{Ports: []corev1.EndpointPort{port("a", 80)}}}, nil},
		"sorted and unique": {[]corev1.EndpointSubset{{Addresses: addresses("10.0.0.9", "10.0.0.10", "10.0.0.9")}}, []corev1.EndpointSubset{{Addresses: addresses("10.0.0.10", "10.0.0.9")}}},
		"ports together": {
			[]corev1.EndpointSubset{
				{Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("a", 80)}},
				{Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("b", 81)}},
			},
			[]corev1.EndpointSubset{{Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("b", 81), port("a", 80)}}}, // by digest
		},
		"addresses together": {
			[]corev1.EndpointSubset{
				{Addresses: addresses("10.0.0.2"), Ports: []corev1.EndpointPort{port("a", 80)}},
				{Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("a", 80)}},
			},
			[]corev1.EndpointSubset{{Addresses: addresses("10.0.0.1", "10.0.0.2"), Ports: []corev1.EndpointPort{port("a", 80)}}},
		},
		"not ready wins": {
			[]corev1.EndpointSubset{
				{NotReadyAddresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("a", 80)}},
				{Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("a", 80)}},
			},
			[]corev1.EndpointSubset{{NotReadyAddresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("a", 80)}}},
		},
		"one address, two Pods": {
			[]corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{ref("10.0.0.1", "b"), ref("10.0.0.1", "a"), ref("10.0.0.1", "b")}}},
			[]corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{ref("10.0.0.1", "a"), ref("10.0.0.1", "b")}}},
		},
		"no ports and ports": {
			[]corev1.EndpointSubset{{Addresses: addresses("10.0.0.1")}, {Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("a", 80)}}},
			[]corev1.EndpointSubset{{Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{port("a", 80)}}},
		},
		"application protocol by value": {
			[]corev1.EndpointSubset{
				{Addresses: addresses("10.0.0.1"), Ports: []corev1.EndpointPort{app("h2c")}},
				{Addresses: addresses("10.0.0.2"), Ports: []corev1.EndpointPort{app("h2c")}},
			},
			[]corev1.EndpointSubset{{Addresses: addresses("10.0.0.1", "10.0.0.2"), Ports: []corev1.EndpointPort{app("h2c")}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			before, _ := json.Marshal(c.in)
			got := Repack(c.in)
			if len(got) != len(c.want) || len(got) > 0 && !reflect.DeepEqual(got, c.want) {
				t.Errorf("repacked to\n%+v\nwant\n%+v", got, c.want)
			}
			if after, _ := json.Marshal(c.in); string(before) != string(after) {
				t.Errorf("the input became %s", after)
			}
		})
	}
}

// The order of subsets and of ports follows digests, and this one was written by kube-controller-manager.
func TestOrder(t *testing.T) {
	for in, want := range order {
		var subsets []corev1.EndpointSubset
		if err := json.Unmarshal([]byte(in), &subsets); err != nil {
			t.Fatal(err)
		}
		if got, _ := json.Marshal(Repack(subsets)); string(got) != want {
			t.Errorf("repacked to\n%s\nwant\n%s", got, want)
		}
	}
}

// random makes subsets of few addresses and ports, so that they overlap.
func random(r *rand.Rand) []corev1.EndpointSubset {
	address := func() corev1.EndpointAddress {
		a := corev1.EndpointAddress{IP: fmt.Sprintf("10.0.0.%d", r.Intn(6))}
		if r.Intn(2) == 0 {
			a.TargetRef = &corev1.ObjectReference{UID: types.UID(fmt.Sprint(r.Intn(3)))}
		}
		if r.Intn(3) == 0 {
			a.NodeName = ptr.To("n")
		}
		return a
	}
	out := make([]corev1.EndpointSubset, r.Intn(5))
	for i := range out {
		for range r.Intn(4) {
			out[i].Addresses = append(out[i].Addresses, address())
		}
		for range r.Intn(3) {
			out[i].NotReadyAddresses = append(out[i].NotReadyAddresses, address())
		}
		for range r.Intn(4) {
			out[i].Ports = append(out[i].Ports, port(fmt.Sprint("p", r.Intn(4)), int32(80+r.Intn(3))))
		}
	}
	return out
}

// FuzzRepack wants what is canonical to stay as it is, whatever order it comes in.
func FuzzRepack(f *testing.F) {
	for seed := range int64(50) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed int64) {
		r := rand.New(rand.NewSource(seed))
		once := Repack(random(r))
		again := Repack(once)
		if !reflect.DeepEqual(once, again) {
			t.Errorf("repacked once\n%+v\nand again\n%+v", once, again)
		}
		mixed := append([]corev1.EndpointSubset(nil), once...)
		r.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
		if got := Repack(mixed); !reflect.DeepEqual(once, got) {
			t.Errorf("in another order it becomes\n%+v\nnot\n%+v", got, once)
		}
	})
}
