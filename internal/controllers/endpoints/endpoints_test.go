package endpoints

import (
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func service(change ...func(*corev1.Service)) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s", Labels: map[string]string{"team": "blue"}},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "a"}, ClusterIP: "10.96.0.1", IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(8080)}},
		},
	}
	for _, f := range change {
		f(svc)
	}
	return svc
}

func pod(name, ip string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": "a"}},
		Spec:       corev1.PodSpec{NodeName: "n1"},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func notReady(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func terminating(p *corev1.Pod) {
	now := metav1.Now()
	p.DeletionTimestamp = &now
}

func named(number int32) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers = []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: number, Protocol: corev1.ProtocolTCP}}}}
	}
}

// brief is a subset in few words.
type brief struct {
	Ready, NotReady []string
	Ports           []int32
}

func briefly(in []corev1.EndpointSubset) []brief {
	var out []brief
	for _, s := range in {
		var b brief
		for _, a := range s.Addresses {
			b.Ready = append(b.Ready, a.TargetRef.Name+" "+a.IP+a.Hostname)
		}
		for _, a := range s.NotReadyAddresses {
			b.NotReady = append(b.NotReady, a.TargetRef.Name+" "+a.IP+a.Hostname)
		}
		for _, p := range s.Ports {
			b.Ports = append(b.Ports, p.Port)
		}
		out = append(out, b)
	}
	return out
}

func TestSubsets(t *testing.T) {
	byName := func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromString("web") }
	headless := func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }
	noPorts := func(s *corev1.Service) { s.Spec.Ports = nil }
	publish := func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true }
	ipv6 := func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol} }
	dual := func(p *corev1.Pod) { p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "fd00::0:1"}) }
	for _, c := range []struct {
		name string
		svc  *corev1.Service
		pods []*corev1.Pod
		want []brief
	}{
		{"ready and not", service(), []*corev1.Pod{pod("a", "10.0.0.1"), pod("b", "10.0.0.2", notReady)},
			[]brief{{Ready: []string{"a 10.0.0.1"}, NotReady: []string{"b 10.0.0.2"}, Ports: []int32{8080}}}},
		{"without an address", service(), []*corev1.Pod{pod("a", "", func(p *corev1.Pod) { p.Status.PodIPs = nil })}, nil},
		{"finished", service(), []*corev1.Pod{pod("a", "10.0.0.1", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })}, nil},
		{"terminating", service(), []*corev1.Pod{pod("a", "10.0.0.1", terminating)}, nil},
		{"terminating, published", service(publish), []*corev1.Pod{pod("a", "10.0.0.1", terminating, notReady)},
			[]brief{{Ready: []string{"a 10.0.0.1"}, Ports: []int32{8080}}}},
		{"a named port in each Pod's own way", service(byName), []*corev1.Pod{pod("a", "10.0.0.1", named(81)), pod("b", "10.0.0.2", named(82)), pod("c", "10.0.0.3")},
			[]brief{{Ready: []string{"a 10.0.0.1"}, Ports: []int32{81}}, {Ready: []string{"b 10.0.0.2"}, Ports: []int32{82}}}},
		{"headless without ports", service(headless, noPorts), []*corev1.Pod{pod("a", "10.0.0.1", func(p *corev1.Pod) { p.Spec.Hostname, p.Spec.Subdomain = "-h", "s" })},
			[]brief{{Ready: []string{"a 10.0.0.1-h"}}}},
		{"a cluster IP without ports", service(noPorts), []*corev1.Pod{pod("a", "10.0.0.1")}, nil},
		{"somebody else's subdomain", service(headless), []*corev1.Pod{pod("a", "10.0.0.1", func(p *corev1.Pod) { p.Spec.Hostname, p.Spec.Subdomain = "-h", "t" })},
			[]brief{{Ready: []string{"a 10.0.0.1"}, Ports: []int32{8080}}}},
		{"the other family", service(ipv6), []*corev1.Pod{pod("a", "10.0.0.1", dual), pod("b", "10.0.0.2")},
			[]brief{{Ready: []string{"a fd00::1"}, Ports: []int32{8080}}}},
		{"no families yet, a cluster IP", service(func(s *corev1.Service) { s.Spec.IPFamilies, s.Spec.ClusterIP = nil, "fd00:96::1" }), []*corev1.Pod{pod("a", "10.0.0.1", dual)},
			[]brief{{Ready: []string{"a fd00::1"}, Ports: []int32{8080}}}},
		{"an unusual spelling", service(), []*corev1.Pod{pod("a", "10.0.0.010")}, []brief{{Ready: []string{"a 10.0.0.10"}, Ports: []int32{8080}}}},
		{"no address at all", service(), []*corev1.Pod{pod("a", "localhost")}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, briefly(Subsets(c.svc, c.pods))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDesired(t *testing.T) {
	since := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	pods := []*corev1.Pod{pod("a", "10.0.0.1")}
	first := desired(service(), pods, nil, since)
	if first == nil || first.Name != "s" || first.Namespace != "ns" {
		t.Fatalf("made %v", first)
	}
	if diff := cmp.Diff(map[string]string{"team": "blue", LabelManagedBy: Name}, first.Labels); diff != "" {
		t.Error(diff)
	}
	if got := first.Annotations[corev1.EndpointsLastChangeTriggerTime]; got != "2026-01-02T03:04:05.000006Z" {
		t.Errorf("trigger time %q", got)
	}
	if again := desired(service(), pods, first, since.Add(time.Hour)); again != nil {
		t.Errorf("written again although nothing changed: %v", again)
	}
	for name, next := range map[string]*corev1.Endpoints{
		"labels of the Service": desired(service(func(s *corev1.Service) { s.Labels = nil }), pods, first, time.Time{}),
		"headless":              desired(service(func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }), pods, first, time.Time{}),
		"a Pod less":            desired(service(), nil, first, time.Time{}),
	} {
		if next == nil {
			t.Errorf("%s: not written", name)
		} else if _, has := next.Annotations[corev1.EndpointsLastChangeTriggerTime]; has {
			t.Errorf("%s: a trigger time without a trigger", name)
		}
	}
	foreign := first.DeepCopy()
	foreign.Labels = map[string]string{"team": "blue"}
	foreign.Annotations["keep"] = "me"
	if next := desired(service(), pods, foreign, since); next == nil || next.Annotations["keep"] != "me" {
		t.Errorf("Endpoints that were there are taken over with their annotations: %v", next)
	}
}

func TestOverCapacity(t *testing.T) {
	var pods []*corev1.Pod
	for i := range 1001 {
		pods = append(pods, pod(string(rune('a'+i%26))+time.Duration(i).String(), "10.0."+string(rune('0'+i/256))+"."+itoa(i%256)))
	}
	full := desired(service(), pods, nil, time.Now())
	if full.Annotations[corev1.EndpointsOverCapacity] != "truncated" || len(full.Subsets[0].Addresses) != 1000 {
		t.Errorf("%v with %d addresses", full.Annotations, len(full.Subsets[0].Addresses))
	}
	if again := desired(service(), pods, full, time.Now()); again != nil {
		t.Error("written again although nothing changed")
	}
	if less := desired(service(), pods[:999], full, time.Now()); less == nil || less.Annotations[corev1.EndpointsOverCapacity] != "" {
		t.Errorf("the mark stays: %v", less)
	}
}

func itoa(i int) string { return strconv.Itoa(i) }
