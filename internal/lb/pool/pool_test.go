package pool

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func pools(t testing.TB, flags ...string) (out Set) {
	t.Helper()
	for _, f := range flags {
		p, err := ParseFlag(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
	if err := out.Validate(); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestParse(t *testing.T) {
	p := pools(t, "office=10.1.0.0/30,fd00::10-fd00::1f,10.2.0.7;internal;manual;namespaces=a,b;namespace-selector=team=web;service-selector=app in (x,y)")[0]
	if fmt.Sprint(p.Ranges) != "[10.1.0.0-10.1.0.3 fd00::10-fd00::1f 10.2.0.7]" || p.Name != "office" || !p.Internal || !p.Manual || p.Size().Int64() != 4+16+1 {
		t.Errorf("%+v, %s addresses", p, p.Size())
	}
	if p := pools(t, "192.0.2.1")[0]; p.Name != DefaultName {
		t.Errorf("%+v", p)
	}
	for text, want := range map[string]string{
		"":                             `"" is not an address`,
		"a=":                           `"" is not an address`,
		"Big Pool=192.0.2.1":           `name: "Big Pool"`,
		"192.0.2.9-192.0.2.1":          "ends before it begins",
		"192.0.2.9-2001:db8::1":        "two families",
		"192.0.2.1/24":                 "perhaps 192.0.2.0/24 is meant",
		"127.0.0.1":                    "clients could reach",
		"ff02::1-ff02::2":              "clients could reach",
		"192.0.2.1;public":             `option "public": it must be internal, manual`,
		"192.0.2.1;namespaces=A":       `namespaces: "A"`,
		"192.0.2.1;service-selector==": "option",
	} {
		if _, err := ParseFlag(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	for _, c := range [][]string{
		{"192.0.2.1", "192.0.2.2"}, {"a=192.0.2.0/24", "b=192.0.2.7"}, {"a=192.0.2.7,192.0.2.0/24"}, {"a=2001:db8::/64", "b=2001:db8::5-2001:db8::6"},
	} {
		var s Set
		for _, f := range c {
			p, err := ParseFlag(f)
			if err != nil {
				t.Fatal(err)
			}
			s = append(s, p)
		}
		if s.Validate() == nil {
			t.Errorf("%v may be used together", c)
		}
	}
}

func TestParseYAML(t *testing.T) {
	list, err := ParseYAML("ConfigMap x", []byte(`
- name: public
  addresses: [192.0.2.0/28, 2001:db8::1]
- name: office
  addresses: [10.0.0.1]
  internal: true
  manual: true
  namespaceSelector: {matchLabels: {team: web}}
  serviceSelector: {matchExpressions: [{key: app, operator: Exists}]}
`))
	if err != nil || len(list) != 2 || !list[1].Internal || list[1].NamespaceSelector.String() != "team=web" || list[1].ServiceSelector.String() != "app" {
		t.Errorf("%+v, %v", list, err)
	}
	for text, want := range map[string]string{
		"- name: a\n  addresses: [x]":        "pools[0].addresses[0]: \"x\"",
		"- name: a\n  adresses: [192.0.2.1]": "adresses",
		"- name: a":                          "pools[0].addresses: there must be at least one",
		"- {addresses: [192.0.2.1]}":         "pools[0].name",
		"- name: a\n  addresses: [192.0.2.1]\n  serviceSelector: {matchExpressions: [{key: a, operator: Maybe}]}": "pools[0].serviceSelector",
		"public": "ConfigMap x",
	} {
		if _, err := ParseYAML("ConfigMap x", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func request(name string, change ...func(*Request)) *Request {
	r := &Request{Owner: Owner{Namespace: "default", Name: name, UID: name, Ports: []Port{{"TCP", 80}}}, IPv4: true, AddressesFrom: "spec.loadBalancerIP", PoolFrom: "annotation"}
	for _, f := range change {
		f(r)
	}
	return r
}

func asks(addrs ...string) func(*Request) {
	return func(r *Request) {
		for _, a := range addrs {
			r.Addresses = append(r.Addresses, netip.MustParseAddr(a))
		}
	}
}

// TestAssign reads like a story: each row is one more Service, in the same table.
func TestAssign(t *testing.T) {
	set := pools(t, "public=192.0.2.1-192.0.2.3,2001:db8::1", "static=192.0.2.100-192.0.2.101;manual", "office=10.0.0.1-10.0.0.2;internal", "web=10.1.0.1;namespaces=web;service-selector=app=web")
	table := NewTable()
	internal := func(r *Request) { r.Internal = true }
	share := func(key, protocol string, port uint16) func(*Request) {
		return func(r *Request) { r.Share, r.Ports = key, []Port{{protocol, port}} }
	}
	for _, c := range []struct {
		r       *Request
		want    string
		note    string
		refusal string
	}{
		{r: request("first"), want: "[192.0.2.1]"},
		{r: request("again"), want: "[192.0.2.2]"},
		{r: request("first"), want: "[192.0.2.1]"}, // what it has, it keeps
		{r: request("dual", func(r *Request) { r.IPv6 = true }), want: "[192.0.2.3 2001:db8::1]"},
		{r: request("full"), refusal: "no IPv4 address: all addresses of pool public are in use"},
		{r: request("asks", asks("192.0.2.101")), want: "[192.0.2.101]"},
		{r: request("asks"), want: "[192.0.2.101]"},
		{r: request("taken", asks("192.0.2.2")), refusal: "spec.loadBalancerIP: 192.0.2.2 is in use by Service default/again"},
		{r: request("nowhere", asks("78.11.24.19"), internal), want: "[10.0.0.1]", note: "78.11.24.19 is ignored, and another address given: it is in no pool"},
		{r: request("office", asks("10.0.0.2")), want: "[10.0.0.2]"},
		{r: request("outside", asks("192.0.2.100"), internal), refusal: "all addresses of pool office are in use", note: "pool static is not internal"},
		{r: request("pool", func(r *Request) { r.Pool = "static" }), want: "[192.0.2.100]"},
		{r: request("nopool", func(r *Request) { r.Pool = "subnet-xxxxx" }), refusal: `annotation: there is no pool "subnet-xxxxx": the pools are public (external), static (external), office (internal)`},
		{r: request("stranger", func(r *Request) { r.Pool = "web" }), refusal: "pool web is not for the namespace default"},
		{r: request("labels", func(r *Request) { r.Pool, r.Namespace = "web", "web" }), refusal: "pool web is for Services with other labels (app=web)"},
		{r: request("web", func(r *Request) { r.Namespace, r.Labels = "web", map[string]string{"app": "web"} }), want: "[10.1.0.1]"},
		{r: request("both", func(r *Request) { r.IPv6, r.All = true, true }), refusal: "no IPv4 address"},
		{r: request("v6", func(r *Request) { r.IPv4, r.IPv6, r.Internal = false, true, true }), refusal: "no IPv6 address: no internal pool with such addresses is for this Service"},
		{r: request("family", asks("2001:db8::1"), internal), refusal: "no IPv4 address", note: "2001:db8::1 is ignored: the Service has no address of that family"},
		{r: request("none", func(r *Request) { r.IPv4 = false }), refusal: "no IP family"},
		// "again" is now ready to share, and others come.
		{r: request("again", share("key", "TCP", 53)), want: "[192.0.2.2]"},
		{r: request("udp", share("key", "UDP", 53)), want: "[192.0.2.2]"},
		{r: request("clash", share("key", "UDP", 53)), refusal: "all addresses of pool public are in use"},
		{r: request("clash", share("key", "UDP", 53), asks("192.0.2.2")), refusal: "Service default/udp, which has the port UDP/53 too"},
		{r: request("thief", share("key", "TCP", 99), func(r *Request) { r.Namespace = "other" }), refusal: "all addresses of pool public are in use"},
		{r: request("thief", share("key", "TCP", 99), asks("192.0.2.2"), func(r *Request) { r.Namespace = "other" }), refusal: "192.0.2.2 is in use by a Service of another namespace"},
		{r: request("wrong", share("other", "TCP", 99), asks("192.0.2.2")), refusal: "give both the same key"},
		{r: request("local", share("key", "TCP", 99), asks("192.0.2.2"), func(r *Request) { r.Backends = "app=x" }), refusal: "must select the same Pods"},
	} {
		got, refusal := table.Assign(set, c.r)
		if refusal != nil {
			if c.refusal == "" || !strings.Contains(refusal.Message, c.refusal) {
				t.Errorf("%s: %s, want %q", c.r.Name, refusal, c.refusal)
			}
			if have := table.Of(c.r.UID); len(have) > 0 {
				t.Errorf("%s: refused and has %v", c.r.Name, have)
			}
		} else if fmt.Sprint(got.Addresses) != c.want || c.refusal != "" {
			t.Errorf("%s: %v, want %s%s", c.r.Name, got.Addresses, c.want, c.refusal)
		}
		if c.note == "" && len(got.Notes) > 0 || !strings.Contains(strings.Join(got.Notes, ";"), c.note) {
			t.Errorf("%s: notes %q, want %q", c.r.Name, got.Notes, c.note)
		}
	}
	// Who had an address that the record does not know keeps it, if it is free.
	table.Release("first")
	if got, _ := table.Assign(set, request("known", func(r *Request) { r.Current = []netip.Addr{netip.MustParseAddr("192.0.2.1")} })); fmt.Sprint(got.Addresses) != "[192.0.2.1]" {
		t.Errorf("%v", got)
	}
	// A pool that is gone gives nobody an address to keep.
	if got, refusal := table.Assign(set[1:], request("known")); refusal == nil {
		t.Errorf("%v", got)
	}
}

// TestTableProperties: whatever Services come and go, no address has two owners that don't share it, addresses are of pools that
// allow them, who has one keeps it, and the written table reads as the same.
func TestTableProperties(t *testing.T) {
	set := pools(t, "a=192.0.2.1-192.0.2.4,2001:db8::1-2001:db8::3", "b=10.0.0.1-10.0.0.2;internal")
	rapid.Check(t, func(t *rapid.T) {
		table := NewTable()
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			uid := rapid.SampledFrom([]string{"s1", "s2", "s3", "s4", "s5", "s6", "s7"}).Draw(t, "service")
			if rapid.IntRange(0, 3).Draw(t, "what") == 0 {
				table.Release(uid)
				continue
			}
			r := request(uid)
			r.Namespace = rapid.SampledFrom([]string{"a", "b"}).Draw(t, "namespace")
			r.IPv6, r.IPv6First, r.All = rapid.Bool().Draw(t, "v6"), rapid.Bool().Draw(t, "first"), rapid.Bool().Draw(t, "all")
			r.Internal = rapid.Bool().Draw(t, "internal")
			r.Share = rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "share")
			r.Ports = []Port{{"TCP", uint16(rapid.IntRange(1, 3).Draw(t, "port"))}}
			if rapid.Bool().Draw(t, "asks") {
				asks(rapid.SampledFrom([]string{"192.0.2.2", "2001:db8::2", "10.0.0.1", "198.51.100.1"}).Draw(t, "address"))(r)
			}
			first := table.Clone()
			got, refusal := table.Assign(set, r)
			if again, _ := first.Assign(set, r); !slices.Equal(got.Addresses, again.Addresses) {
				t.Fatalf("the same request got %v and %v", got.Addresses, again.Addresses)
			}
			if refusal == nil {
				if again, _ := table.Assign(set, r); !slices.Equal(got.Addresses, again.Addresses) {
					t.Fatalf("%v was not kept: %v", got.Addresses, again.Addresses)
				}
			}
		}
		by := map[string][]netip.Addr{}
		for _, c := range table.Claims() {
			for _, o := range c.Owners {
				by[o.UID] = append(by[o.UID], c.Address)
			}
			if set.Of(c.Address) == nil {
				t.Fatalf("%s is in no pool", c.Address)
			}
			ports := map[Port]bool{}
			for i, o := range c.Owners {
				if len(c.Owners) > 1 && (o.Share == "" || o.Share != c.Owners[0].Share || o.Namespace != c.Owners[0].Namespace) {
					t.Fatalf("%s is shared without a key: %v", c.Address, c.Owners)
				}
				for _, p := range o.Ports {
					if ports[p] {
						t.Fatalf("%s: %s twice", c.Address, p)
					}
					ports[p] = true
				}
				if slices.ContainsFunc(c.Owners[:i], func(x Owner) bool { return x.UID == o.UID }) {
					t.Fatalf("%s: %s is there twice", c.Address, o.UID)
				}
			}
		}
		read, err := Read(table.Write())
		for _, x := range []*Table{table, table.Clone(), read} {
			if err == nil && !maps.EqualFunc(x.byUID, by, slices.Equal) {
				t.Fatalf("the index has %v, and claims are %v", x.byUID, by)
			}
		}
		if err != nil || !bytes.Equal(read.Write(), table.Write()) {
			t.Fatalf("written and read: %v\n%s\n%s", err, table.Write(), read.Write())
		}
	})
}

// BenchmarkAssign is what a pass over many Services that keep their addresses costs.
func BenchmarkAssign(b *testing.B) {
	set := pools(b, "10.0.0.0/16")
	for _, n := range []int{1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			table := NewTable()
			var all []*Request
			for i := range n {
				all = append(all, request(fmt.Sprint("s", i)))
				table.Assign(set, all[i])
			}
			for b.Loop() {
				for _, r := range all {
					if _, refusal := table.Assign(set, r); refusal != nil {
						b.Fatal(refusal)
					}
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/service")
		})
	}
}

// FuzzParse: no text makes a parser panic, and what it accepts is in order.
func FuzzParse(f *testing.F) {
	f.Add("a=192.0.2.0/28;internal")
	f.Add("::1-::2,1.1.1.1;namespaces=a")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseFlag(text)
		if err == nil {
			for _, r := range p.Ranges {
				if r.Last.Less(r.First) || r.First.Is4() != r.Last.Is4() {
					t.Errorf("%q: %v", text, r)
				}
			}
		}
		if table, err := Read([]byte(text)); err == nil {
			_ = table.Write()
		}
	})
}

// TestReserved: addresses of machines are not given, whether or not somebody asks for one; who has one keeps it.
func TestReserved(t *testing.T) {
	p, err := ParseFlag("192.0.2.1-192.0.2.3")
	if err != nil {
		t.Fatal(err)
	}
	first, second, third := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")
	table := NewTable()
	give := func(uid string, asked ...netip.Addr) (Result, *Refusal) {
		return table.Assign(Set{p}, &Request{Owner: Owner{Namespace: "a", Name: uid, UID: uid}, IPv4: true, Addresses: asked, AddressesFrom: "spec.loadBalancerIP"})
	}
	if got, why := give("old"); why != nil || got.Addresses[0] != first {
		t.Fatalf("%v %v", got, why)
	}
	table.Reserved = map[netip.Addr]string{first: "an address of Node n1", second: "an address of Node n2"}
	table = table.Clone()
	if got, why := give("old"); why != nil || got.Addresses[0] != first {
		t.Errorf("who has one: %v %v", got, why)
	}
	got, why := give("new", second)
	if why != nil || got.Addresses[0] != third || len(got.Notes) != 1 || !strings.Contains(got.Notes[0], "192.0.2.2 is ignored, and another address given: it is an address of Node n2") {
		t.Errorf("who asks for one: %v %v", got, why)
	}
	if got, why := give("late"); why == nil {
		t.Errorf("the rest is reserved: %v", got)
	}
}
