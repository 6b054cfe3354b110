package intent

import (
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
)

// full sets every field that a type has, however deep, so that one that packing forgets is seen.
func full(t *testing.T, v reflect.Value, n *int) {
	*n++
	switch x := v.Addr().Interface().(type) {
	case *netip.Addr:
		*x = netip.AddrFrom4([4]byte{10, 0, 0, byte(*n)})
		if *n%2 == 0 {
			*x = netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(*n)})
		}
		return
	case *netip.Prefix:
		*x = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(*n), 0, 0}), 16)
		return
	case *time.Time:
		*x = time.Unix(1700000000+int64(*n), 12345).UTC()
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("text-" + string(rune('a'+*n%26)))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n%200) + 1)
	case reflect.Int64:
		v.SetInt(int64(*n) * -1e9)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		full(t, v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			full(t, v.Index(i), n)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			full(t, v.Field(i), n)
		}
	default:
		t.Fatalf("a field of type %v: packing does not know it", v.Type())
	}
}

func TestPacked(t *testing.T) {
	var everything Entry
	full(t, reflect.ValueOf(&everything).Elem(), new(int))
	for name, e := range map[string]*Entry{
		"everything": &everything, "nothing": {}, "a bare Service": {Service: &Service{Key: Key{"n", "s"}}},
		"slices alone": {Slices: []*Slice{{Key: Key{"n", "s-1"}, Endpoints: []Endpoint{}}}},
		"local time":   {Service: &Service{Created: time.Unix(1700000000, 0)}},
	} {
		got := unpackEntry(packEntry(e))
		if !reflect.DeepEqual(got, e) {
			t.Errorf("%s: came back as %+v %+v", name, got.Service, got.Slices)
		}
		if hasService(packEntry(e)) != (e.Service != nil) {
			t.Errorf("%s: the Service is not seen", name)
		}
	}
}

// A packed cluster shows what another shows.
func TestPackedCluster(t *testing.T) {
	clusters := []*Cluster{NewCluster(Services), NewPackedCluster(Services)}
	k := Key{"shop", "web"}
	for _, c := range clusters {
		c.SetService(&Service{Key: k, UID: "1", ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}})
		c.SetSlice(&Slice{Key: Key{"shop", "web-b"}, Service: "web", Family: IPv4, Endpoints: []Endpoint{{NodeName: "n"}}})
		c.SetSlice(&Slice{Key: Key{"shop", "web-a"}, Service: "web", Family: IPv4})
		c.SetSlice(&Slice{Key: Key{"shop", "other-a"}, Service: "other", Family: IPv4})
		c.SetService(&Service{Key: Key{"shop", "gone"}})
		c.DeleteService(Key{"shop", "gone"})
		c.DeleteSlice(Key{"shop", "web-b"})
	}
	a, b := clusters[0], clusters[1]
	if !reflect.DeepEqual(a.Snapshot(), b.Snapshot()) || !reflect.DeepEqual(a.Entry(k), b.Entry(k)) {
		t.Errorf("not the same:\n%+v\n%+v", a.Snapshot(), b.Snapshot())
	}
	if s := b.Slice(Key{"shop", "web-a"}); s == nil || s.Service != "web" {
		t.Errorf("the slice: %+v", s)
	}
	if got := b.Keys(Services); len(got) != 1 || got[0] != k {
		t.Errorf("Services: %v", got)
	}
	if d := b.Follow().Take(); len(d.Services) != 2 {
		t.Errorf("a feed begins with %v", d.Services)
	}
}

// A cluster that is packed while it changes loses no change, whichever side of the packing it came on.
func TestPackWhileChanging(t *testing.T) {
	for range 20 {
		clusters := []*Cluster{NewCluster(Services), NewCluster(Services)}
		name := func(i int) Key { return Key{"shop", strconv.Itoa(i)} }
		const n = 300
		for _, c := range clusters {
			for i := range n {
				c.SetService(&Service{Key: name(i), UID: "1"})
				c.SetSlice(&Slice{Key: name(i), Service: name(i).Name, Family: IPv4})
			}
		}
		change := func(c *Cluster) {
			for i := range n {
				switch i % 4 {
				case 0:
					c.SetService(&Service{Key: name(i), UID: "2"})
				case 1:
					c.DeleteService(name(i))
					c.DeleteSlice(name(i))
				case 2:
					c.SetSlice(&Slice{Key: Key{"shop", "more-" + strconv.Itoa(i)}, Service: name(i).Name, Family: IPv6})
				case 3:
					c.SetService(&Service{Key: name(n + i)})
					c.SetSlice(&Slice{Key: name(i), Service: name(i).Name, Family: IPv4, Endpoints: make([]Endpoint, i%5)})
				}
			}
		}
		change(clusters[0])
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { clusters[1].Pack(2) })
		}
		change(clusters[1])
		wg.Wait()
		if p, ok := clusters[1].services.(packed); !ok || len(p.small) < n/2 || len(p.large) == 0 {
			t.Fatalf("it is not packed: %T", clusters[1].services)
		}
		if a, b := clusters[0].Snapshot(), clusters[1].Snapshot(); !reflect.DeepEqual(a, b) {
			t.Fatalf("not the same: %d entries and %d", len(a.Services), len(b.Services))
		}
	}
}

// An entry that grows is kept as it is, and packed again when it has shrunk.
func TestPackSmall(t *testing.T) {
	c := NewCluster(Services)
	c.Pack(2)
	k := Key{"shop", "web"}
	for _, n := range []int{0, 2, 3, 5, 1, 4} {
		c.SetSlice(&Slice{Key: k, Service: "web", Endpoints: make([]Endpoint, n)})
		p := c.services.(packed)
		if _, small := p.small[k]; small != (n <= 2) || len(p.small)+len(p.large) != 1 {
			t.Errorf("of %d endpoints: %d packed, %d not", n, len(p.small), len(p.large))
		}
		if e := c.Entry(k); e == nil || len(e.Slices[0].Endpoints) != n {
			t.Errorf("of %d endpoints: %+v", n, e)
		}
		if got := len(c.Snapshot().Services); got != 1 {
			t.Errorf("of %d endpoints: %d entries", n, got)
		}
	}
	c.DeleteSlice(k)
	if c.Entry(k) != nil || len(c.Follow().Take().Services) > 0 {
		t.Error("it is still there")
	}
}

// Who remembers the greatest version that it has seen of an entry can tell what is new in it.
func TestVersions(t *testing.T) {
	for _, c := range []*Cluster{NewCluster(Services), NewPackedCluster(Services)} {
		k, a, b := Key{"shop", "web"}, Key{"shop", "web-a"}, Key{"shop", "web-b"}
		var seen uint64
		expect := func(step string, service, first, second bool) {
			t.Helper()
			e := c.Entry(k)
			got := []bool{e.Version > seen, e.Versions[0] > seen, e.Versions[1] > seen}
			if want := []bool{service, first, second}; !slices.Equal(got, want) {
				t.Errorf("%s: new are %v, not %v", step, got, want)
			}
			seen = e.Newest()
		}
		c.SetSlice(&Slice{Key: b, Service: "web"})
		c.SetService(&Service{Key: k})
		c.SetSlice(&Slice{Key: a, Service: "web"})
		expect("all", true, true, true)
		expect("nothing", false, false, false)
		c.SetSlice(&Slice{Key: b, Service: "web", Family: IPv4})
		expect("one slice", false, false, true)
		c.SetService(&Service{Key: k, UID: "2"})
		expect("the Service", true, false, false)
		c.DeleteSlice(a)
		c.SetSlice(&Slice{Key: a, Service: "web"})
		expect("a slice that was away", false, true, false)
		c.DeleteService(k)
		c.DeleteSlice(a)
		c.DeleteSlice(b)
		for _, s := range []Key{a, b} {
			c.SetSlice(&Slice{Key: s, Service: "web"})
		}
		c.SetService(&Service{Key: k})
		expect("all of it was away", true, true, true)
	}
}
