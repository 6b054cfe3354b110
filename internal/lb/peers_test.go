package lb

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"portal/internal/lb/bgp"
	"portal/internal/lb/controller"
	"portal/internal/lb/pool"
)

// speakingBalancer is one with a peer and a pool of flags that has not asked any API.
func speakingBalancer(t *testing.T, log *strings.Builder) *Balancer {
	t.Helper()
	flag, err := bgp.ParseFlag("192.0.2.1;as=64500")
	if err != nil {
		t.Fatal(err)
	}
	p, err := pool.ParseFlag("office=198.51.100.0/28")
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Options{
		Config: &rest.Config{Host: "http://127.0.0.1:1"}, Node: "n1", Pools: pool.Set{p}, Class: controller.DefaultClass, BGP: true, Peers: []bgp.Peer{flag},
		Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func addresses(peers []bgp.Peer) (out []string) {
	for _, p := range peers {
		text := p.Address.String()
		if p.Password != "" {
			text += " signed"
		}
		out = append(out, text)
	}
	return out
}

// TestPeers: peers are those of flags and of the ConfigMap that select this node; a ConfigMap that can't be used changes nothing, and is named in the log.
func TestPeers(t *testing.T) {
	var log strings.Builder
	b := speakingBalancer(t, &log)
	if err := b.nodes.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"rack": "a"}}}); err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: PasswordsName}, Data: map[string][]byte{"rack-a": []byte("correct horse\n")}}
	good := `peers: [{address: 192.0.2.2, passwordKey: rack-a, nodeSelector: {matchLabels: {rack: a}}}, {address: 192.0.2.3, nodeSelector: {matchLabels: {rack: b}}}]`
	both := configMap(PoolsName, PeersKey, good)
	both.Data[PoolsKey] = "- {name: more, addresses: [192.0.2.7]}"
	const flag, signed = "192.0.2.1", "192.0.2.2 signed"
	for _, step := range []struct {
		when   string
		do     func() error
		want   []string
		logged string
	}{
		{"no ConfigMap", func() error { return b.config.Replace(nil, "") }, []string{flag}, ""},
		{"without the password", func() error { return b.config.Replace([]any{configMap(PoolsName, PeersKey, good)}, "") }, []string{flag}, "the Secret kube-system/portal-lb-bgp has no key rack-a"},
		{"with it", func() error { return b.passwords.Replace([]any{secret}, "") }, []string{flag, signed}, ""},
		{"the Secret deleted", func() error { return b.passwords.Delete(secret) }, []string{flag, signed}, ""},
		{"a mistake", func() error {
			return b.config.Replace([]any{configMap(PoolsName, PeersKey, "peers: [{address: 192.0.2.9, holdTime: 1s}]")}, "")
		}, []string{flag, signed}, "bgp.peers[0].holdTime"},
		{"a peer of the flags again", func() error {
			return b.config.Replace([]any{configMap(PoolsName, PeersKey, "peers: [{address: 192.0.2.1}]")}, "")
		}, []string{flag, signed}, "peer 192.0.2.1 is there twice"},
		{"a typo in the key", func() error { return b.config.Replace([]any{configMap(PoolsName, "bpg", good)}, "") }, []string{flag, signed}, `the keys of data are [\"bpg\"]`},
		{"another rack", func() error {
			return b.nodes.Update(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"rack": "b"}}})
		}, []string{flag, "192.0.2.3"}, ""},
		{"pools, too", func() error { return b.config.Replace([]any{both}, "") }, []string{flag, "192.0.2.3"}, "pools=2"},
		{"pools alone", func() error {
			return b.config.Replace([]any{configMap(PoolsName, PoolsKey, both.Data[PoolsKey])}, "")
		}, []string{flag}, ""},
	} {
		log.Reset()
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if got := addresses(b.myPeers()); !slices.Equal(got, step.want) || !strings.Contains(log.String(), step.logged) {
			t.Errorf("%s: %q, want %q; log:\n%s", step.when, got, step.want, log.String())
		}
		if strings.Contains(log.String(), "horse") {
			t.Errorf("%s: the password is logged:\n%s", step.when, log.String())
		}
	}
	if pools, err := b.allPools(); err != nil || len(pools) != 2 {
		t.Errorf("pools %v %v", pools, err)
	}
}

// TestRoutes: a node announces what it may serve, with what the ConfigMap says of the pool.
func TestRoutes(t *testing.T) {
	b := speakingBalancer(t, &strings.Builder{})
	svc := func(name, ip string, policy corev1.ServiceExternalTrafficPolicy) *corev1.Service {
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, UID: "1"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: policy},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: ip}}}},
		}
	}
	endpoint := func(node string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "local-1", Labels: map[string]string{discoveryv1.LabelServiceName: "local"}},
			Endpoints:  []discoveryv1.Endpoint{{NodeName: &node}},
		}
	}
	label := func(labels map[string]string) error {
		return b.nodes.Update(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: labels}})
	}
	for _, step := range []struct {
		when string
		do   func() error
		want string
	}{
		{"nothing", func() error { return nil }, ""},
		{"claimed, and in the status", func() error {
			if err := b.services.Add(svc("web", "198.51.100.1", "Cluster")); err != nil {
				return err
			}
			if err := b.services.Add(svc("local", "198.51.100.2", "Local")); err != nil {
				return err
			}
			return b.claims.Add(configMap(controller.ClaimsName, controller.ClaimsKey, `[{"address":"198.51.100.1","owners":[{"namespace":"a","name":"web","uid":"1","ports":[]}]},
{"address":"198.51.100.2","owners":[{"namespace":"a","name":"local","uid":"1","ports":[]}]}]`))
		}, "198.51.100.1"},
		{"an endpoint elsewhere", func() error { return b.slices.Update(endpoint("n2")) }, "198.51.100.1"},
		{"an endpoint here", func() error { return b.slices.Update(endpoint("n1")) }, "198.51.100.1 198.51.100.2"},
		{"excluded", func() error { return label(map[string]string{corev1.LabelNodeExcludeBalancers: ""}) }, ""},
		{"and not any more", func() error { return label(nil) }, "198.51.100.1 198.51.100.2"},
		{"a Service gone", func() error { return b.services.Delete(svc("web", "198.51.100.1", "Cluster")) }, "198.51.100.2"},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, r := range b.routes() {
			got = append(got, r.Addr.String())
		}
		if strings.Join(got, " ") != step.want {
			t.Errorf("%s: %v, want %s", step.when, got, step.want)
		}
	}
	if err := b.config.Add(configMap(PoolsName, PeersKey, `pools: [{name: office, communities: ["64512:7"]}]`)); err != nil {
		t.Fatal(err)
	}
	if r := b.routes(); len(r) != 1 || !slices.Equal(r[0].Communities, []uint32{64512<<16 | 7}) || r[0].Metric != 0 {
		t.Errorf("%+v", r)
	}
	// A client that must always come to the same endpoint comes in by one node, unless routers see to that.
	sticky := svc("local", "198.51.100.2", "Local")
	sticky.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	if err := b.services.Update(sticky); err != nil {
		t.Fatal(err)
	}
	if r := b.routes(); len(r) != 1 || r[0].Metric == 0 || r[0].Metric == bgp.Metric(r[0].Addr, "n2") {
		t.Errorf("%+v", r)
	}
	if err := b.config.Update(configMap(PoolsName, PeersKey, `pools: [{name: office, hashByClient: true}]`)); err != nil {
		t.Fatal(err)
	}
	if r := b.routes(); len(r) != 1 || r[0].Metric != 0 {
		t.Errorf("%+v", r)
	}
}

// TestPeerMetrics: a session that is not up is seen in the metrics, and so is a ConfigMap that can't be used.
func TestPeerMetrics(t *testing.T) {
	b := speakingBalancer(t, &strings.Builder{})
	b.speaker = bgp.New(bgp.Options{Node: "n1", Log: slog.New(slog.DiscardHandler)})
	if err := b.config.Add(configMap(PoolsName, PeersKey, "peers: [{adress: 192.0.2.1}]")); err != nil {
		t.Fatal(err)
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	peer, err := bgp.ParseFlag(fmt.Sprintf("127.0.0.1;as=64500;port=%d", netip.MustParseAddrPort(closed.Addr().String()).Port()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { b.speaker.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	b.speaker.Set([]bgp.Peer{peer}, nil)
	registry := prometheus.NewRegistry()
	registry.MustRegister(b)
	want := map[string]float64{"portal_lb_bgp_session_up": 0, "portal_lb_bgp_announced_routes": 0, "portal_lb_bgp_session_flaps_total": 0, "portal_lb_bgp_sync_failures_total": 0, "portal_lb_bgp_config_stale": 1}
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			if strings.HasPrefix(f.GetName(), "portal_lb_bgp_") {
				for _, m := range f.GetMetric() {
					got[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
		if maps.Equal(got, want) {
			return
		}
		if time.Since(begin) > 30*time.Second {
			t.Fatalf("%v, want %v", got, want)
		}
	}
}
