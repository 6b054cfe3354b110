package nftables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
	"portal/internal/proxy/nf/nftest"
)

// dump lists a set's elements: data by key.
func dump(t testing.TB, s *nf.Socket, in *nf.Set) (out map[string]string) {
	t.Helper()
	err := s.Elements(in, func() { out = map[string]string{} }, func(e nf.Element) { out[string(e.Key)+string(e.End)] = string(e.Data) })
	if err != nil {
		t.Fatal(err)
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
				w.want(one.clusterIPs, one.AppendAddr(nil, a), nil)
			}
		}
		for _, a := range s.Facts.NodePorts.Addrs {
			if intent.FamilyOf(a) == family {
				w.want(one.nodeIPs, one.AppendAddr(nil, a), nil)
			}
		}
		for _, key := range nibbles() {
			w.want(one.same, key, nil)
		}
		sets := []*nf.Set{one.services, one.backends, one.clusterIPs, one.nodeIPs, one.same, one.sources}
		if one.sticky {
			sets = append(sets, one.members, one.choices)
		}
		for _, in := range sets {
			got, want := dump(t, be.socket, in), w.elements[in.Name]
			if want == nil {
				want = map[string]string{}
			}
			if !maps.Equal(got, want) {
				t.Fatalf("IPv%d %s has\n%s, expected\n%s", family, in.Name, show(got), show(want))
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

func (w *wanted) want(in *nf.Set, key, data []byte) {
	if w.elements[in.Name] == nil {
		w.elements[in.Name] = map[string]string{}
	}
	w.elements[in.Name][string(key)] = string(data)
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
		w.want(w.sources, slices.Concat(key, w.AppendAddr(nil, p.Addr()), key, w.AppendAddr(nil, nf.Last(p))), nil)
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
	faults := nftest.On(be.socket)
	rapid.Check(t, func(rt *rapid.T) {
		s := plan.NewSnapshot(facts)
		defer func() { faults.Refuse = nil }()
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
				faults.Refuse = func(nf.Message) unix.Errno { return unix.ENOMEM }
				if sent := faults.Transactions; apply(be, s) == nil && faults.Transactions > sent {
					rt.Fatal("a refusal went unnoticed")
				}
				faults.Refuse = nil
			}
			if err := apply(be, s); err != nil {
				rt.Fatal(err)
			}
			verify(t, be, s)
			be.checkAll(rt)
		}
	})
}

// checkAll compares every element, though nobody else has changed anything.
func (t *tables) checkAll(rt interface{ Fatal(...any) }) {
	if out, err := exec.Command("nft", "add table ip another").CombinedOutput(); err != nil {
		rt.Fatal(string(out))
	}
	if err := t.Check(context.Background()); err != nil {
		rt.Fatal(err)
	}
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
		present, err := be.socket.Read(be.byFamily[intent.IPv4].at)
		if err != nil {
			t.Fatal(err)
		}
		return present.Sets()
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
	grow(small)
	if got := be.byFamily[intent.IPv4].services; got.Name != "services" || int(got.Size) != small {
		t.Errorf("with %d Services there is %s of %d", small, got.Name, got.Size)
	}
	grow(small + 100)
	for _, in := range []*nf.Set{be.byFamily[intent.IPv4].services, be.byFamily[intent.IPv4].backends, be.byFamily[intent.IPv4].clusterIPs} {
		if !strings.HasSuffix(in.Name, "-2") || int(in.Size) < 2*small {
			t.Errorf("with %d Services there is %s of %d", small+100, in.Name, in.Size)
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
	one := be.byFamily[intent.IPv4]
	present, err := be.socket.Read(one.at)
	if err != nil || len(present.Chains()) != len(one.shapes)+len(one.baseChains(facts)) {
		t.Errorf("chains %v for %d shapes (%v)", present.Chains(), len(one.shapes), err)
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
