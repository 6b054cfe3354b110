package endpointslice

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/recorded"
	"portal/internal/apiserver/registry/registrytest"
)

func rulesOf(t testing.TB) *registrytest.Rules {
	return registrytest.For(t, New(nil), discoveryv1.AddToScheme)
}

// slice is a sound one, changed.
func slice(change func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "s", Namespace: "default"},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}},
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](80)}},
	}
	if change != nil {
		change(s)
	}
	return s
}

func TestRecorded(t *testing.T) {
	recorded.Replay(t, "slice/", rulesOf(t), func() runtime.Object { return &discoveryv1.EndpointSlice{} })
}

func TestCreate(t *testing.T) {
	type S = discoveryv1.EndpointSlice
	many := func(n int) []discoveryv1.ForZone {
		out := make([]discoveryv1.ForZone, n)
		for i := range out {
			out[i].Name = "z" + strconv.Itoa(i)
		}
		return out
	}
	for name, c := range map[string]struct {
		change func(*S)
		causes []string
	}{
		"sound":         {nil, nil},
		"no endpoints":  {func(s *S) { s.Endpoints, s.Ports = nil, nil }, nil},
		"no addresses":  {func(s *S) { s.Endpoints[0].Addresses = nil }, []string{"endpoints[0].addresses FieldValueRequired"}},
		"loopback":      {func(s *S) { s.Endpoints[0].Addresses[0] = "127.0.0.1" }, []string{"endpoints[0].addresses[0] FieldValueInvalid"}},
		"leading zero":  {func(s *S) { s.Endpoints[0].Addresses[0] = "10.01.2.3" }, []string{"endpoints[0].addresses[0] FieldValueInvalid"}},
		"global cast":   {func(s *S) { s.Endpoints[0].Addresses[0] = "224.1.0.1" }, nil},
		"not canonical": {func(s *S) { s.AddressType, s.Endpoints[0].Addresses[0] = "IPv6", "2001:DB8::1" }, []string{"endpoints[0].addresses[0] FieldValueInvalid"}},
		"unknown type":  {func(s *S) { s.AddressType = "DNS" }, []string{"addressType FieldValueNotSupported"}},
		"finalizer":     {func(s *S) { s.Finalizers = []string{"mine"} }, []string{"metadata.finalizers[0] FieldValueInvalid"}},
		"nine zones":    {func(s *S) { s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: many(9)} }, []string{"endpoints[0].hints.forZones FieldValueTooMany"}},
		"same zone": {func(s *S) {
			s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "a"}}}
		}, []string{"endpoints[0].hints.forZones[1].name FieldValueDuplicate"}},
		"two unnamed":    {func(s *S) { s.Ports = []discoveryv1.EndpointPort{{}, {}} }, []string{"ports[1].name FieldValueDuplicate"}},
		"empty protocol": {func(s *S) { s.Ports[0].Protocol = ptr.To(corev1.Protocol("")) }, []string{"ports[0].protocol FieldValueNotSupported"}},
	} {
		t.Run(name, func(t *testing.T) {
			if causes := rulesOf(t).Create(t, slice(c.change)); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
		})
	}
}

func TestDefaults(t *testing.T) {
	s := slice(func(s *discoveryv1.EndpointSlice) {
		s.Ports[0].Name = nil
		s.Endpoints[0].DeprecatedTopology = map[string]string{"topology.kubernetes.io/zone": "a"}
	})
	if causes := rulesOf(t).Create(t, s); causes != nil {
		t.Fatal(causes)
	}
	if s.Generation != 1 || *s.Ports[0].Name != "" || *s.Ports[0].Protocol != corev1.ProtocolTCP || s.Endpoints[0].DeprecatedTopology != nil {
		t.Errorf("stored as %+v", s)
	}
}

func TestUpdate(t *testing.T) {
	type S = discoveryv1.EndpointSlice
	for name, c := range map[string]struct {
		old, change func(*S)
		causes      []string
		generation  int64
	}{
		"nothing":      {nil, nil, nil, 4},
		"annotation":   {nil, func(s *S) { s.Annotations = map[string]string{"a": "b"} }, nil, 4},
		"label":        {nil, func(s *S) { s.Labels = map[string]string{"a": "b"} }, nil, 5},
		"endpoint":     {nil, func(s *S) { s.Endpoints[0].Addresses[0] = "10.9.9.9" }, nil, 5},
		"type":         {nil, func(s *S) { s.AddressType, s.Endpoints = "IPv6", nil }, []string{"addressType FieldValueInvalid"}, 5},
		"no type":      {nil, func(s *S) { s.AddressType = "" }, []string{"addressType FieldValueInvalid", "addressType FieldValueRequired"}, 5},
		"bad label":    {nil, func(s *S) { s.Labels = map[string]string{"a": "b c"} }, []string{"metadata.labels FieldValueInvalid"}, 5},
		"was bad":      {func(s *S) { s.Endpoints[0].Addresses[0] = "010.1.1.1" }, func(s *S) { s.Labels = map[string]string{"a": "b"} }, nil, 5},
		"bad becoming": {nil, func(s *S) { s.Endpoints[0].Addresses[0] = "010.1.1.1" }, []string{"endpoints[0].addresses[0] FieldValueInvalid"}, 5},
	} {
		t.Run(name, func(t *testing.T) {
			old := slice(c.old)
			setDefaults(old)
			old.Generation, old.ResourceVersion, old.UID = 4, "1", "u"
			next := old.DeepCopy()
			if c.change != nil {
				c.change(next)
			}
			if causes := rulesOf(t).Update(t, next, old); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
			if next.Generation != c.generation {
				t.Errorf("generation %d, want %d", next.Generation, c.generation)
			}
		})
	}
}

// A slice that was written through an older API version knew its nodes by a label only.
func TestNodeNameFromTopology(t *testing.T) {
	old := slice(func(s *discoveryv1.EndpointSlice) {
		s.Endpoints[0].DeprecatedTopology = map[string]string{corev1.LabelHostname: "node-1"}
	})
	setDefaults(old)
	old.ResourceVersion = "1"
	next := old.DeepCopy()
	next.Endpoints = append(next.Endpoints, discoveryv1.Endpoint{
		Addresses: []string{"10.1.2.4"}, DeprecatedTopology: map[string]string{corev1.LabelHostname: "node-2"},
	})
	if causes := rulesOf(t).Update(t, next, old); causes != nil {
		t.Fatal(causes)
	}
	if next.Endpoints[0].NodeName == nil || *next.Endpoints[0].NodeName != "node-1" || next.Endpoints[0].DeprecatedTopology != nil {
		t.Errorf("the known node became %+v", next.Endpoints[0])
	}
	if next.Endpoints[1].NodeName != nil || next.Endpoints[1].DeprecatedTopology != nil {
		t.Errorf("the claimed node became %+v", next.Endpoints[1])
	}
}

func TestColumns(t *testing.T) {
	s := slice(func(s *discoveryv1.EndpointSlice) {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.1.2.4", "10.1.2.5", "10.1.2.6"}})
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("any")}, discoveryv1.EndpointPort{})
	})
	row := rulesOf(t).Row(t, s)
	for column, want := range map[string]string{
		"Name": "s", "AddressType": "IPv4", "Ports": "80,any,*", "Endpoints": "10.1.2.3,10.1.2.4,10.1.2.5 + 1 more...",
	} {
		if row[column] != want {
			t.Errorf("%s is %q, want %q", column, row[column], want)
		}
	}
	if row := rulesOf(t).Row(t, &discoveryv1.EndpointSlice{}); row["Ports"] != "<unset>" || row["Endpoints"] != "<unset>" {
		t.Errorf("of nothing: %v", row)
	}
}

func TestWarnings(t *testing.T) {
	s := slice(func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses[0] = "2001:0db8::1" })
	if got := warnings(s, s, nil); len(got) != 1 || !strings.Contains(got[0], "2001:db8::1") {
		t.Errorf("warned %q", got)
	}
	s.Labels = map[string]string{discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"}
	if got := warnings(s, s, nil); got != nil {
		t.Errorf("the controller was warned %q", got)
	}
	fqdn := slice(func(s *discoveryv1.EndpointSlice) {
		s.AddressType, s.Endpoints[0].Addresses[0] = "FQDN", "a.example.com"
	})
	if got := warnings(fqdn, nil, nil); len(got) != 1 {
		t.Errorf("warned %q", got)
	}
}

func FuzzValidate(f *testing.F) {
	f.Add("IPv4", "10.1.2.3", "h", "node", "zone", "http", "TCP", int32(80), 1)
	f.Add("IPv6", "::ffff:1.2.3.4", "", "", "", "", "", int32(-1), 0)
	f.Add("FQDN", "a..b", "A", "..", " ", "a/b", "x", int32(0), 1001)
	f.Fuzz(func(t *testing.T, kind, address, host, node, zone, port, protocol string, number int32, copies int) {
		endpoint := discoveryv1.Endpoint{
			Addresses: []string{address}, Hostname: &host, NodeName: &node, Zone: &zone,
			DeprecatedTopology: map[string]string{zone: node},
			Hints:              &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}, ForNodes: []discoveryv1.ForNode{{Name: node}}},
		}
		s := &discoveryv1.EndpointSlice{
			AddressType: discoveryv1.AddressType(kind),
			Endpoints:   make([]discoveryv1.Endpoint, max(0, copies%1100)),
			Ports:       []discoveryv1.EndpointPort{{}, {Name: &port, Port: &number, Protocol: (*corev1.Protocol)(&protocol), AppProtocol: &port}},
		}
		for i := range s.Endpoints {
			s.Endpoints[i] = *endpoint.DeepCopy()
		}
		setDefaults(s)
		stored := s.DeepCopy()
		prepareCreate(t.Context(), stored)
		if errs := validate(t.Context(), stored); len(errs) > 0 {
			return
		}
		warnings(stored, nil, nil)
		// What was once accepted stays acceptable.
		stored.Name, stored.Namespace, stored.ResourceVersion = "s", "default", "1"
		next := stored.DeepCopy()
		prepareUpdate(t.Context(), next, stored)
		if errs := validateUpdate(t.Context(), next, stored); len(errs) > 0 {
			t.Errorf("an update that changes nothing is refused: %v", errs)
		}
	})
}
