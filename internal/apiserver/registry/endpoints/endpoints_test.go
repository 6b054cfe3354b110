package endpoints

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/recorded"
	"portal/internal/apiserver/registry/registrytest"
)

func rulesOf(t testing.TB) *registrytest.Rules {
	return registrytest.For(t, New(nil), corev1.AddToScheme)
}

// endpoints are sound ones, changed.
func endpoints(change func(*corev1.Endpoints)) *corev1.Endpoints {
	e := &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "e", Namespace: "default"},
		Subsets: []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: "10.1.2.4"}, {IP: "10.1.2.3"}},
			Ports:     []corev1.EndpointPort{{Port: 80}},
		}},
	}
	if change != nil {
		change(e)
	}
	return e
}

func TestRecorded(t *testing.T) {
	recorded.Replay(t, "endpoints/", rulesOf(t), func() runtime.Object { return &corev1.Endpoints{} })
}

func TestCreate(t *testing.T) {
	type E = corev1.Endpoints
	const ip = "subsets[0].addresses[0].ip FieldValueInvalid"
	at := func(ip string) func(*E) { return func(e *E) { e.Subsets[0].Addresses[0].IP = ip } }
	for name, c := range map[string]struct {
		change func(*E)
		causes []string
	}{
		"sound":         {nil, nil},
		"unspecified":   {at("::"), []string{ip}},
		"loopback":      {at("127.3.2.1"), []string{ip}},
		"link-local":    {at("fe80::1"), []string{ip}},
		"link cast":     {at("ff02::1"), []string{ip}},
		"global cast":   {at("ff0e::1"), nil},
		"mapped":        {at("::ffff:10.1.1.1"), []string{ip}},
		"mapped loop":   {at("::ffff:127.0.0.1"), []string{ip, ip}},
		"no address":    {at(""), []string{ip, ip}},
		"not canonical": {at("2001:DB8::1"), nil},
		"node":          {func(e *E) { e.Subsets[0].Addresses[0].NodeName = ptr.To("A b") }, []string{"subsets[0].addresses[0].nodeName FieldValueInvalid"}},
		"not ready": {func(e *E) {
			e.Subsets[0].NotReadyAddresses, e.Subsets[0].Addresses = []corev1.EndpointAddress{{IP: "0.0.0.0"}}, nil
		}, []string{"subsets[0].notReadyAddresses[0].ip FieldValueInvalid"}},
		"unnamed": {func(e *E) { e.Subsets[0].Ports = append(e.Subsets[0].Ports, corev1.EndpointPort{Name: "b", Port: 81}) }, []string{"subsets[0].ports[0].name FieldValueRequired"}},
		"one name twice": {func(e *E) {
			e.Subsets[0].Ports = []corev1.EndpointPort{{Name: "a", Port: 80}, {Name: "a", Port: 81}}
		}, nil},
		"protocol":  {func(e *E) { e.Subsets[0].Ports[0].Protocol = "tcp" }, []string{"subsets[0].ports[0].protocol FieldValueNotSupported"}},
		"app":       {func(e *E) { e.Subsets[0].Ports[0].AppProtocol = ptr.To("a b") }, []string{"subsets[0].ports[0].appProtocol FieldValueInvalid"}},
		"finalizer": {func(e *E) { e.Finalizers = []string{"mine"} }, []string{"metadata.finalizers[0] FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			if causes := rulesOf(t).Create(t, endpoints(c.change)); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
		})
	}
}

// Order and repetition are the writer's: Kubernetes has not brought them into canonical form on writing since 1.33.
func TestKeptAsWritten(t *testing.T) {
	e := endpoints(func(e *corev1.Endpoints) { e.Subsets = append(e.Subsets, e.Subsets[0]) })
	if causes := rulesOf(t).Create(t, e); causes != nil {
		t.Fatal(causes)
	}
	if len(e.Subsets) != 2 || e.Subsets[0].Addresses[0].IP != "10.1.2.4" || e.Subsets[1].Ports[0].Protocol != corev1.ProtocolTCP {
		t.Errorf("stored as %+v", e.Subsets)
	}
}

func TestUpdate(t *testing.T) {
	type E = corev1.Endpoints
	for name, c := range map[string]struct {
		old, change func(*E)
		causes      []string
	}{
		"nothing":   {nil, nil, nil},
		"node":      {nil, func(e *E) { e.Subsets[0].Addresses[0].NodeName = ptr.To("other") }, nil},
		"bad":       {nil, func(e *E) { e.Subsets[0].Addresses[0].IP = "127.0.0.1" }, []string{"subsets[0].addresses[0].ip FieldValueInvalid"}},
		"was bad":   {func(e *E) { e.Subsets[0].Addresses[0].IP = "127.0.0.1" }, func(e *E) { e.Labels = map[string]string{"a": "b"} }, nil},
		"bad label": {nil, func(e *E) { e.Labels = map[string]string{"a": "b c"} }, []string{"metadata.labels FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			old := endpoints(c.old)
			setDefaults(old)
			old.ResourceVersion = "1"
			next := old.DeepCopy()
			if c.change != nil {
				c.change(next)
			}
			if causes := rulesOf(t).Update(t, next, old); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
		})
	}
}

func TestColumns(t *testing.T) {
	for _, c := range []struct {
		change func(*corev1.Endpoints)
		want   string
	}{
		{func(e *corev1.Endpoints) { e.Subsets = nil }, "<none>"},
		{func(e *corev1.Endpoints) { e.Subsets[0].Ports = nil }, "10.1.2.4,10.1.2.3"},
		{func(e *corev1.Endpoints) {
			e.Subsets[0].Addresses[1].IP = "fd00::1"
			e.Subsets[0].Ports = append(e.Subsets[0].Ports, corev1.EndpointPort{Name: "b", Port: 81})
		}, "10.1.2.4:80,[fd00::1]:80,10.1.2.4:81 + 1 more..."},
		{func(e *corev1.Endpoints) {
			e.Subsets[0].NotReadyAddresses, e.Subsets[0].Addresses = e.Subsets[0].Addresses, nil
		}, ""},
	} {
		if got := rulesOf(t).Row(t, endpoints(c.change))["Endpoints"]; got != c.want {
			t.Errorf("shown as %q, want %q", got, c.want)
		}
	}
}

func TestWarnings(t *testing.T) {
	e := endpoints(func(e *corev1.Endpoints) {
		e.Subsets[0].NotReadyAddresses = []corev1.EndpointAddress{{IP: "2001:DB8::1"}}
	})
	if got := warnings(e, nil); len(got) != 1 {
		t.Errorf("warned %q", got)
	}
	e.Labels = map[string]string{writer: controller}
	if got := warnings(e, nil); got != nil {
		t.Errorf("the controller was warned %q", got)
	}
}

func FuzzValidate(f *testing.F) {
	f.Add("10.1.2.3", "::1", "host", "node", "http", "TCP", int32(80), "uid")
	f.Add("010.1.1.1", "", "A", "..", "", "tcp", int32(-5), "")
	f.Fuzz(func(t *testing.T, ip, other, host, node, port, protocol string, number int32, uid string) {
		e := &corev1.Endpoints{Subsets: []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: ip, Hostname: host, NodeName: &node}, {IP: other}, {IP: ip}},
			Ports:     []corev1.EndpointPort{{Name: port, Port: number, Protocol: corev1.Protocol(protocol), AppProtocol: &host}, {Port: number}},
		}, {
			NotReadyAddresses: []corev1.EndpointAddress{{IP: ip, TargetRef: &corev1.ObjectReference{UID: "u"}}, {IP: other}},
		}, {}}}
		setDefaults(e)
		validate(t.Context(), e)
		if len(e.Subsets) > 0 && len(validateSubsets(&corev1.Endpoints{Subsets: e.Subsets})) == 0 {
			warnings(e, nil)
		}
	})
}
