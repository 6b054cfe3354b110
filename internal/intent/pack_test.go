package intent

import (
	"net/netip"
	"reflect"
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
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
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
