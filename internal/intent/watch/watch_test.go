package watch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"portal/internal/intent"
	"portal/internal/intent/watch/watchtest"
)

func service(name, ip string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{Port: 80}}},
	}
}

// watched runs a watcher of Services against the server until the test ends.
func watched(t *testing.T, api *watchtest.Server, sources ...intent.Source) (*intent.Cluster, *Watcher) {
	t.Helper()
	config, err := api.Start("")
	if err != nil {
		t.Fatal(err)
	}
	cluster := intent.NewCluster(sources...)
	w, err := New(cluster, Options{Config: config, Sources: sources})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { w.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait(); api.Kill() })
	return cluster, w
}

func eventually(t *testing.T, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %v: not %s", within, what)
		}
	}
}

func TestListsThenFollows(t *testing.T) {
	api := watchtest.New(100, "u1")
	for i := range 3*pageLimit + 7 {
		api.Put(service(fmt.Sprintf("s%04d", i), "10.96.0.1"))
	}
	cluster, _ := watched(t, api, intent.Services, intent.Namespaces)
	eventually(t, time.Minute, "complete", cluster.Complete)
	if n := len(cluster.Keys(intent.Services)); n != 3*pageLimit+7 {
		t.Fatalf("%d Services after the list", n)
	}
	for _, list := range api.Lists() {
		if !strings.Contains(list, "resourceVersion=0") && !strings.Contains(list, "continue=") {
			t.Errorf("the first list is not from the watch cache: %s", list)
		}
	}
	k := intent.Key{Namespace: "default", Name: "s0000"}
	api.Put(service("s0000", "10.96.0.9"))
	eventually(t, time.Minute, "changed", func() bool { return cluster.Entry(k).Service.ClusterIPs[0] == netip.MustParseAddr("10.96.0.9") })
	api.Delete(service("s0000", "10.96.0.9"))
	eventually(t, time.Minute, "gone", func() bool { return cluster.Entry(k) == nil })
}

func TestForgottenHistoryIsListedAgain(t *testing.T) {
	api := watchtest.New(100, "u1")
	api.Put(service("old", "10.96.0.1"))
	cluster, _ := watched(t, api, intent.Services)
	eventually(t, time.Minute, "complete", cluster.Complete)
	api.Kill()
	api.Delete(service("old", ""))
	api.Put(service("new", "10.96.0.2"))
	api.Forget()
	if _, err := api.Start(api.Addr()); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "renewed", func() bool {
		return cluster.Entry(intent.Key{Namespace: "default", Name: "new"}) != nil && cluster.Entry(intent.Key{Namespace: "default", Name: "old"}) == nil
	})
}

// TestResumes: after an API restart every source goes on from its version without a list, also with an account that may not
// read namespaces, and with an API that knows no watches that begin with all objects.
func TestResumes(t *testing.T) {
	for name, change := range map[string]func(*watchtest.Server){
		"may read all":          func(*watchtest.Server) {},
		"may not read identity": func(s *watchtest.Server) { s.Forbidden = "namespaces" },
	} {
		t.Run(name, func(t *testing.T) {
			api := watchtest.New(100, "u1")
			change(api)
			api.Put(service("kept", "10.96.0.1"), service("gone", "10.96.0.2"))
			cluster, w := watched(t, api, intent.Services, intent.EndpointSlices, intent.Nodes, intent.ServiceCIDRs)
			eventually(t, time.Minute, "complete", cluster.Complete)
			for round := range 3 {
				api.Kill()
				eventually(t, 20*time.Second, "the API reported as away", func() bool {
					return !slices.ContainsFunc(w.Status(), func(s Status) bool { return s.Connected })
				})
				api.Lists()
				api.Put(service(fmt.Sprint("new", round), "10.96.0.3"))
				api.Delete(service("gone", ""))
				if _, err := api.Start(api.Addr()); err != nil {
					t.Fatal(err)
				}
				eventually(t, 20*time.Second, "up to date", func() bool {
					return cluster.Entry(intent.Key{Namespace: "default", Name: fmt.Sprint("new", round)}) != nil &&
						cluster.Entry(intent.Key{Namespace: "default", Name: "gone"}) == nil &&
						!slices.ContainsFunc(w.Status(), func(s Status) bool { return !s.Connected })
				})
				if lists := api.Lists(); len(lists) > 0 {
					t.Errorf("listed after the restart: %q", lists)
				}
			}
		})
	}
}

// TestResumesFromAnOldAPI asks such an API for nothing but its version.
func TestResumesFromAnOldAPI(t *testing.T) {
	api := watchtest.New(100, "u1")
	api.Old = true
	api.Put(service("a", "10.96.0.1"))
	cluster, w := watched(t, api, intent.Services)
	eventually(t, time.Minute, "complete", cluster.Complete)
	api.Kill()
	eventually(t, 20*time.Second, "the API reported as away", func() bool { return !w.Status()[0].Connected })
	api.Lists()
	if _, err := api.Start(api.Addr()); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "connected", func() bool { return w.Status()[0].Connected })
	for _, list := range api.Lists() {
		if !strings.Contains(list, "labelSelector=portal.invalid") {
			t.Errorf("listed everything after the restart: %s", list)
		}
	}
}

// TestRestoredToAnOlderVersion: the same cluster, whose store was restored from a backup, is listed anew. (A watch from a
// version that is yet to come would be silent.)
func TestRestoredToAnOlderVersion(t *testing.T) {
	for _, old := range []bool{false, true} {
		api := watchtest.New(100, "u1")
		api.Old = old
		for range 50 {
			api.Put(service("after-backup", "10.96.0.1"))
		}
		cluster, w := watched(t, api, intent.Services)
		eventually(t, time.Minute, "complete", cluster.Complete)
		api.Kill()
		eventually(t, 20*time.Second, "the API reported as away", func() bool { return !w.Status()[0].Connected })
		restored := watchtest.New(100, "u1")
		restored.Old = old
		restored.Put(service("before-backup", "10.96.0.2"))
		if _, err := restored.Start(api.Addr()); err != nil {
			t.Fatal(err)
		}
		defer restored.Kill()
		eventually(t, 20*time.Second, "the restored state", func() bool {
			return cluster.Entry(intent.Key{Namespace: "default", Name: "before-backup"}) != nil &&
				cluster.Entry(intent.Key{Namespace: "default", Name: "after-backup"}) == nil
		})
	}
}

func TestServiceCIDRs(t *testing.T) {
	api := watchtest.New(100, "u1")
	one := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "one"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"fd00:96::/112", "10.96.0.0/16"}}}
	api.Put(one)
	cluster, _ := watched(t, api, intent.Services, intent.ServiceCIDRs)
	eventually(t, time.Minute, "complete", cluster.Complete)
	expect := func(want string) {
		t.Helper()
		eventually(t, time.Minute, want, func() bool { return fmt.Sprint(cluster.ServicePrefixes()) == want })
	}
	expect("[10.96.0.0/16 fd00:96::/112]")
	api.Put(&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "two"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.50.0.0/24", "10.96.0.0/16"}}})
	expect("[10.50.0.0/24 10.96.0.0/16 fd00:96::/112]")
	api.Delete(one)
	expect("[10.50.0.0/24 10.96.0.0/16]")
}

// An API from before there were ServiceCIDRs is complete without, and counts as connected.
func TestNoServiceCIDRs(t *testing.T) {
	api := watchtest.New(100, "u1")
	api.Old = true
	cluster, w := watched(t, api, intent.Services, intent.ServiceCIDRs)
	eventually(t, time.Minute, "complete", cluster.Complete)
	for _, st := range w.Status() {
		if st.Err != nil {
			t.Errorf("%s: %v", st.Source, st.Err)
		}
	}
}

// A server that comes back with other objects, whose versions look like a continuation, must not be mistaken for the
// old one; and nothing that both hold may go in between.
func TestAnotherClusterBehindTheSameAddress(t *testing.T) {
	api := watchtest.New(100, "u1")
	api.Put(service("both", "10.96.0.1"), service("only-old", "10.96.0.2"))
	cluster, w := watched(t, api, intent.Services)
	eventually(t, time.Minute, "complete", cluster.Complete)
	api.Kill()
	eventually(t, time.Minute, "the API reported as away", func() bool { s := w.Status()[0]; return !s.Connected && s.Listed && s.Err != nil })
	other := watchtest.New(50, "u2")
	other.Put(service("only-new", "10.96.0.3"), service("both", "10.96.0.1"))
	for range 100 { // its versions pass the old server's
		other.Put(service("both", "10.96.0.1"))
	}
	key := func(n string) intent.Key { return intent.Key{Namespace: "default", Name: n} }
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if cluster.Entry(key("both")) == nil {
					t.Error("a Service that was there all along went in between")
					return
				}
			}
		}
	})
	if _, err := other.Start(api.Addr()); err != nil {
		t.Fatal(err)
	}
	defer other.Kill()
	eventually(t, time.Minute, "the new cluster's", func() bool {
		return cluster.Entry(key("only-new")) != nil && cluster.Entry(key("only-old")) == nil
	})
	close(stop)
	wg.Wait()
}

func TestConvertService(t *testing.T) {
	policy, proxy := corev1.ServiceInternalTrafficPolicyLocal, corev1.LoadBalancerIPModeProxy
	timeout, near := int32(60), corev1.ServiceTrafficDistributionPreferSameNode
	got := Service(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", Labels: map[string]string{
			"service.kubernetes.io/service-proxy-name": "other", "service.kubernetes.io/headless": ""}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00:96::1"},
			IPFamilies:  []corev1.IPFamily{"IPv4", "IPv6"},
			Ports:       []corev1.ServicePort{{Name: "p", Protocol: "UDP", Port: 53, NodePort: 30053, TargetPort: intstr.FromString("dns")}},
			ExternalIPs: []string{"192.0.2.1"}, LoadBalancerSourceRanges: []string{" 192.0.2.7/24 "},
			InternalTrafficPolicy: &policy, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 31000,
			SessionAffinity: corev1.ServiceAffinityClientIP, SessionAffinityConfig: &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}},
			TrafficDistribution: &near, PublishNotReadyAddresses: true, Selector: map[string]string{"a": "b"},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "192.0.2.2", IPMode: &proxy}, {Hostname: "lb.example"}}}},
	})
	want := &intent.Service{
		Key: intent.Key{Namespace: "ns", Name: "web"}, Type: intent.LoadBalancer,
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1")}, Families: []intent.Family{intent.IPv4, intent.IPv6},
		Ports:       []intent.Port{{Name: "p", Protocol: intent.UDP, Port: 53, NodePort: 30053, Target: "dns"}},
		ExternalIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
		Ingress:       []intent.Ingress{{Addr: netip.MustParseAddr("192.0.2.2"), Proxied: true}, {Hostname: "lb.example"}},
		InternalLocal: true, ExternalLocal: true, HealthCheckNodePort: 31000, Affinity: time.Minute, Distribution: intent.PreferSameNode,
		PublishNotReady: true, HasSelector: true, ProxyName: "other", HeadlessLabel: true,
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got  %+v\nwant %+v", got, want)
	}
}

func TestConvertSlice(t *testing.T) {
	yes, no, name, port := true, false, "http", int32(80)
	host, node, zone := "h", "n1", "z1"
	got := Slice(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web-1", Labels: map[string]string{"kubernetes.io/service-name": "web"},
			Annotations: map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:05.5Z"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port}, {}},
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.0.0.1", "10.0.0.2"}, Hostname: &host, NodeName: &node, Zone: &zone, Hints: &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z1"}}}},
			{Addresses: []string{"10.0.0.3"}, Conditions: discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "p"}},
			{Addresses: []string{"10.0.0.4"}, Conditions: discoveryv1.EndpointConditions{Ready: &no, Terminating: &yes}},
			{Addresses: []string{"10.0.0.5"}, Conditions: discoveryv1.EndpointConditions{Ready: &no, Serving: &no}},
		},
	})
	hints := &intent.Hints{ForZones: []string{"z1"}}
	addr := netip.MustParseAddr
	want := &intent.Slice{
		Key: intent.Key{Namespace: "ns", Name: "web-1"}, Service: "web", Family: intent.IPv4,
		Ports: []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: 80}, {Protocol: intent.TCP}},
		Endpoints: []intent.Endpoint{
			{Addr: addr("10.0.0.1"), Hostname: "h", NodeName: "n1", Zone: "z1", Hints: hints, Condition: intent.Ready | intent.Serving},
			{Addr: addr("10.0.0.2"), Hostname: "h", NodeName: "n1", Zone: "z1", Hints: hints, Condition: intent.Ready | intent.Serving | intent.Secondary},
			{Addr: addr("10.0.0.3"), Condition: intent.Serving | intent.Terminating, Pod: "p"},
			{Addr: addr("10.0.0.4"), Condition: intent.Serving | intent.Terminating},
			{Addr: addr("10.0.0.5")},
		},
		TriggerTime: time.Date(2026, 1, 2, 3, 4, 5, 5e8, time.UTC),
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got  %+v\nwant %+v", got, want)
	}
}

// TestPortsOutOfRange: a port that is none is left out, never cut to sixteen bits.
func TestPortsOutOfRange(t *testing.T) {
	for _, bad := range []int32{70000, 65536, -1, 0} {
		name, other := "bad", "good"
		got := Slice(&discoveryv1.EndpointSlice{Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &bad}, {Name: &other, Port: ptr.To[int32](65535)}}})
		if len(got.Ports) != 1 || got.Ports[0].Port != 65535 {
			t.Errorf("a slice with port %d has %+v", bad, got.Ports)
		}
		s := Service(&corev1.Service{Spec: corev1.ServiceSpec{
			HealthCheckNodePort: bad, Ports: []corev1.ServicePort{{Name: "bad", Port: bad}, {Name: "good", Port: 80, NodePort: bad}},
		}})
		if len(s.Ports) != 1 || s.Ports[0].Port != 80 || s.Ports[0].NodePort != 0 || s.HealthCheckNodePort != 0 {
			t.Errorf("a Service with port %d is %+v", bad, s)
		}
	}
	if got := Slice(&discoveryv1.EndpointSlice{Ports: []discoveryv1.EndpointPort{{}}}); len(got.Ports) != 1 || got.Ports[0].Port != 0 {
		t.Errorf("no port means every port: %+v", got.Ports)
	}
}

// TestRememberDialed: where the API was reached is known when the first list is there.
func TestRememberDialed(t *testing.T) {
	api := watchtest.New(100, "u1")
	config, err := api.Start("")
	if err != nil {
		t.Fatal(err)
	}
	defer api.Kill()
	at := netip.MustParseAddrPort(api.Addr())
	config.Host = fmt.Sprintf("http://localhost:%d", at.Port())
	config, dialed := RememberDialed(config)
	if _, err := ListServices(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	if got := dialed.List(); len(got) != 1 || got[0] != at {
		t.Errorf("reached at %v, want %v", got, at)
	}
	select {
	case <-dialed.Changed():
	default:
		t.Error("nobody was notified")
	}
}

type refusing func()

func (r refusing) RoundTrip(*http.Request) (*http.Response, error) {
	r()
	return nil, errors.New("connection refused")
}

// TestBackoff: an API that does not answer is asked less and less often, every 30 seconds at least, at moments that differ from one
// node to the next.
func TestBackoff(t *testing.T) {
	pauses := func() (out []time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			last := time.Now()
			config := &rest.Config{Host: "https://192.0.2.1:6443", Transport: refusing(func() {
				if pause := time.Since(last); pause > 0 { // else it is a further request of the same attempt
					out, last = append(out, pause), time.Now()
				}
			})}
			w, err := New(intent.NewCluster(intent.Services), Options{Config: config, Sources: []intent.Source{intent.Services}})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			w.Run(ctx)
		})
		return out
	}
	one, other := pauses(), pauses()
	if len(one) < 20 || len(one) > 60 {
		t.Fatalf("asked %d times in 10 minutes", len(one))
	}
	for i, pause := range one {
		most := min(minBackoff<<min(i, 20), maxBackoff)
		if pause < most/2 || pause > most {
			t.Errorf("pause %d was %v, want between %v and %v", i, pause, most/2, most)
		}
	}
	if slices.Equal(one[:10], other[:10]) {
		t.Errorf("two nodes asked at the same moments: %v", one[:10])
	}
}
