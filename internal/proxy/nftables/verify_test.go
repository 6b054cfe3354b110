package nftables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// dump lists a set's elements: data by key.
func dump(t testing.TB, s *socket, in *set) map[string]string {
	t.Helper()
	out := map[string]string{}
	body := nf.AppendString(nf.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, in.table), unix.NFTA_SET_ELEM_LIST_SET, in.name)
	err := s.Ask(in.family, unix.NFT_MSG_GETSETELEM, true, body, func(m []byte) {
		for typ, list := range nf.Attributes(m) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				continue
			}
			for _, elem := range nf.Attributes(list) {
				var key, end, data string
				for typ, v := range nf.Attributes(elem) {
					value := ""
					for _, x := range nf.Attributes(v) {
						value = string(x)
						break
					}
					switch typ {
					case unix.NFTA_SET_ELEM_KEY:
						key = value
					case elemKeyEnd:
						end = value
					case unix.NFTA_SET_ELEM_DATA:
						data = value
					}
				}
				out[key+end] = data
			}
		}
	})
	if err != nil {
		t.Fatalf("listing %s: %v", in.name, err)
	}
	return out
}

// verify reads the kernel's maps and compares what they mean with the snapshot; nothing may be left over. The Services in
// except aren't there.
func verify(t testing.TB, be *tables, s *plan.Snapshot, except ...int) {
	t.Helper()
	absent := map[intent.Key]bool{}
	for _, i := range except {
		absent[service(i).Service.Key] = true
	}
	for family, one := range be.byFamily {
		w := newWanted(one)
		for k, f := range s.Frontends {
			if k.Family == family && !absent[f.ID.Service] {
				w.frontend(t, f)
			}
		}
		for a := range s.ClusterIPs {
			if intent.FamilyOf(a) == family {
				w.want(one.clusterIPs, one.addr(nil, a), nil)
			}
		}
		for _, a := range s.Facts.NodePorts.Addrs {
			if intent.FamilyOf(a) == family {
				w.want(one.nodeIPs, one.addr(nil, a), nil)
			}
		}
		for _, key := range nibbles() {
			w.want(one.same, key, nil)
		}
		for _, c := range one.canaryKeys() {
			key := c.key
			if c.set == one.sources {
				key = append(key, key...)
			}
			w.want(c.set, key, make([]byte, c.set.dataLen))
		}
		sets := []*set{one.services, one.backends, one.clusterIPs, one.nodeIPs, one.same, one.sources}
		if one.sticky {
			sets = append(sets, one.members, one.choices)
		}
		for _, in := range sets {
			got, want := dump(t, be.socket, in), w.elements[in.name]
			if want == nil {
				want = map[string]string{}
			}
			if !maps.Equal(got, want) {
				t.Fatalf("IPv%d %s has\n%s, expected\n%s", family, in.name, show(got), show(want))
			}
		}
	}
}

func show(m map[string]string) (out string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out += fmt.Sprintf("  %x: %x\n", k, m[k])
	}
	return out
}

// wanted are the elements that there must be. Numbers of pools and shapes are taken from the table: which they are is
// free, but what they lead to is not.
type wanted struct {
	*table
	elements map[string]map[string]string
}

func newWanted(t *table) *wanted { return &wanted{t, map[string]map[string]string{}} }

func (w *wanted) want(in *set, key, data []byte) {
	if w.elements[in.name] == nil {
		w.elements[in.name] = map[string]string{}
	}
	w.elements[in.name][string(key)] = string(data)
}

func (w *wanted) frontend(t testing.TB, f *plan.Frontend) {
	t.Helper()
	s, n := w.shapeOf(f)
	use := w.shapes[s]
	if use == nil {
		t.Fatalf("the shape %s of %v is unknown", s.chain(), f.FrontendKey)
	}
	data := portID(number(number(nil, 0), use.id), n)
	w.want(w.services, w.frontendKey(nil, f.FrontendKey), data)
	for _, p := range rangesOf(f) {
		key := w.frontendKey(nil, f.FrontendKey)
		w.want(w.sources, slices.Concat(key, w.addr(nil, p.Addr()), key, w.addr(nil, last(p))), nil)
	}
	for o, r := range f.Routes {
		if r.Pool == nil {
			continue
		}
		for i, e := range r.Pool.Endpoints {
			slot := number(portID(nil, n), s.routes[o].pool<<poolShift+uint32(i))
			w.want(w.backends, slot, w.endpoint(nil, e.Addr))
			if f.Affinity > 0 {
				w.want(w.choices, slot, w.endpoint(number(nil, 0), e.Addr))
				w.want(w.members, w.endpoint(number(portID(nil, n), s.routes[o].pool), e.Addr), nil)
			}
		}
	}
}

// Random Services changing at random: after each change, which is sometimes refused, the kernel has what the snapshot
// says, no more and no less.
func TestKernelFollowsSnapshot(t *testing.T) {
	inNamespace(t)
	be := opened(t)
	rapid.Check(t, func(rt *rapid.T) {
		s := plan.NewSnapshot(facts)
		fail := &refuser{be: be, addrs: map[string]bool{}}
		be.transact = fail.transact
		defer func() { be.transact = be.socket.Transact }()
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			for range rapid.IntRange(1, 4).Draw(rt, "changes") {
				i := rapid.IntRange(0, 4).Draw(rt, "service")
				if rapid.IntRange(0, 4).Draw(rt, "delete") == 0 {
					s.Delete(service(i).Service.Key)
					continue
				}
				plans(s, drawn(rt, i))
			}
			switch rapid.IntRange(0, 9).Draw(rt, "restart") {
			case 0:
				s.Forget()
			case 1:
				// The transaction is refused as a whole, once; the loop tries again.
				be.transact = func([]byte) error { return nf.Refusal{1: unix.ENOMEM} }
				if apply(be, s) == nil && !s.Delta().Empty() {
					rt.Fatal("a nf.Refusal went unnoticed")
				}
				be.transact = fail.transact
			}
			if err := apply(be, s); err != nil {
				rt.Fatal(err)
			}
			verify(t, be, s)
		}
	})
}

func drawn(t *rapid.T, i int) *intent.Entry {
	e := service(i)
	v := e.Service
	coin := rapid.Bool()
	v.ClusterIPs = append(v.ClusterIPs, netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", i+1)))
	v.InternalLocal, v.ExternalLocal = coin.Draw(t, "internal"), coin.Draw(t, "external")
	if coin.Draw(t, "affinity") {
		v.Affinity = time.Duration(rapid.IntRange(1, 2).Draw(t, "seconds")) * time.Second
	}
	if coin.Draw(t, "node port") {
		v.Type, v.Ports[0].NodePort = intent.NodePort, uint16(30000+i)
	}
	if coin.Draw(t, "external IP") {
		// Shared by all who want it.
		v.ExternalIPs = []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("fd00:198::1")}
	}
	if coin.Draw(t, "balancer") {
		v.Type = intent.LoadBalancer
		v.Ingress = []intent.Ingress{{Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})}}
		ranges := []string{"10.0.0.0/8", "10.1.0.0/16", "192.0.2.1/32", "10.1.0.0/16"}
		for _, r := range ranges[:rapid.IntRange(0, len(ranges)).Draw(t, "ranges")] {
			v.SourceRanges = append(v.SourceRanges, netip.MustParsePrefix(r))
		}
	}
	six := &intent.Slice{Key: intent.Key{Namespace: "default", Name: v.Name + "-6"}, Service: v.Name, Family: intent.IPv6, Ports: e.Slices[0].Ports}
	for n := range 5 {
		node := rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "node")
		if node == "" {
			continue
		}
		end := intent.Endpoint{NodeName: node, Condition: intent.Ready | intent.Serving}
		end.Addr = netip.AddrFrom4([4]byte{10, 244, 1, byte(n)})
		e.Slices[0].Endpoints = append(e.Slices[0].Endpoints, end)
		end.Addr = netip.MustParseAddr(fmt.Sprintf("fd00:244::%d", n+1))
		six.Endpoints = append(six.Endpoints, end)
	}
	e.Slices = append(e.Slices, six)
	return e
}

// Sets that become too small are replaced, once, by larger ones; nothing is lost, and the old ones go.
func TestSetsGrow(t *testing.T) {
	inNamespace(t)
	be, s := opened(t), plan.NewSnapshot(facts)
	names := func(be *tables) (out []string) {
		left, err := be.socket.inventory(be.byFamily[intent.IPv4].layout)
		if err != nil {
			t.Fatal(err)
		}
		return slices.Sorted(maps.Keys(left.sets))
	}
	grow := func(to int) {
		for i := len(s.Services); i < to; i++ {
			plans(s, service(i, endpoint(i, 0)))
			if i%100 == 0 || i == to-1 {
				if err := apply(be, s); err != nil {
					t.Fatal(err)
				}
			}
		}
		verify(t, be, s)
	}
	small := int(roomFor(0))
	grow(small - 1) // and the canary
	if got := be.byFamily[intent.IPv4].services; got.name != "services" || int(got.size) != small {
		t.Errorf("with %d Services there is %s of %d", small-1, got.name, got.size)
	}
	grow(small + 100)
	for _, in := range []*set{be.byFamily[intent.IPv4].services, be.byFamily[intent.IPv4].backends, be.byFamily[intent.IPv4].clusterIPs} {
		if !strings.HasSuffix(in.name, "-2") || int(in.size) < 2*small {
			t.Errorf("with %d Services there is %s of %d", small+100, in.name, in.size)
		}
	}
	if got := names(be); !slices.Contains(got, "services") || !slices.Contains(got, "services-2") {
		t.Errorf("packets may still be looking in services: there are %v", got)
	}
	if err := be.Check(context.Background()); err != nil {
		t.Error(err)
	}
	want := []string{"backends-2", "cluster-ips-2", "node-ips", "same", "services-2", "shapes", "sources"}
	if got := names(be); !slices.Equal(got, want) {
		t.Errorf("there are %v, expected %v", got, want)
	}

	// Another process keeps what is large enough.
	be = opened(t)
	s.Forget()
	if err := apply(be, s); err != nil {
		t.Fatal(err)
	}
	verify(t, be, s)
	if got := names(be); !slices.Equal(got, want) {
		t.Errorf("after a restart there are %v, expected %v", got, want)
	}
}

// Many shapes come and go, and their chains with them.
func TestIdleShapesGo(t *testing.T) {
	inNamespace(t)
	be, s := opened(t), plan.NewSnapshot(facts)
	var ips []string
	for n := range 3 * idleShapes {
		ips = append(ips, fmt.Sprintf("10.244.2.%d", n))
		plans(s, service(1, ips...))
		if err := apply(be, s); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(be.byFamily[intent.IPv4].shapes); n > idleShapes+1 {
		t.Errorf("%d shapes are kept", n)
	}
	verify(t, be, s)
	left, err := be.socket.inventory(be.byFamily[intent.IPv4].layout)
	if err != nil || len(left.chains) != len(be.byFamily[intent.IPv4].shapes)+len(baseChains) {
		t.Errorf("%d chains for %d shapes (%v)", len(left.chains), len(be.byFamily[intent.IPv4].shapes), err)
	}
}

// Affinity survives an update of the proxy only while a port keeps its number.
func TestNumbersAreStable(t *testing.T) {
	id := plan.PortID{Service: intent.Key{Namespace: "a", Name: "b"}, Port: "c", Protocol: intent.TCP, Family: intent.IPv4}
	if got := idOf(id, 0); got != 0xe6c79da69079a18a {
		t.Errorf("the number of %v is %#x", id, got)
	}
}

// A pool that several frontends share keeps its number when its endpoints change: only the endpoints are written.
func TestSharedPoolChangesInPlace(t *testing.T) {
	inNamespace(t)
	be, s := opened(t), plan.NewSnapshot(facts)
	for n := range 6 {
		e := service(1, "10.244.1.1", fmt.Sprintf("10.244.2.%d", n))
		e.Service.Type, e.Service.Ports[0].NodePort = intent.NodePort, 30001
		e.Service.ExternalIPs = []netip.Addr{netip.MustParseAddr("198.51.100.1")}
		plans(s, e)
		if err := apply(be, s); err != nil {
			t.Fatal(err)
		}
		verify(t, be, s)
	}
	one := be.byFamily[intent.IPv4]
	for shape := range one.shapes {
		for _, l := range shape.routes {
			if l.pool != 0 {
				t.Errorf("the shape %s uses a second pool", shape.chain())
			}
		}
	}
	if len(one.shapes) != 3 {
		t.Errorf("%d shapes for cluster IP, external IP and node port", len(one.shapes))
	}
}
