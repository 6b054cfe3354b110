package lb

import (
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"portal/internal/lb/announce"
	"portal/internal/lb/controller"
	"portal/internal/lb/pool"
)

// unstarted is a balancer that has not asked any API, with one pool of flags.
func unstarted(t *testing.T) *Balancer {
	t.Helper()
	p, err := pool.ParseFlag("flag=192.0.2.1")
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Options{Config: &rest.Config{Host: "http://127.0.0.1:1"}, Pools: pool.Set{p}, Class: controller.DefaultClass, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func configMap(name, key, text string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: name}, Data: map[string]string{key: text}}
}

// TestPools: a ConfigMap that can't be used changes nothing for who has read it before, and leaves who has not without pools.
func TestPools(t *testing.T) {
	good, bad := configMap(PoolsName, PoolsKey, "- {name: more, addresses: [192.0.2.7]}"), configMap(PoolsName, PoolsKey, "- {name: more, adresses: [192.0.2.7]}")
	b := unstarted(t)
	check := func(when string, want int) {
		t.Helper()
		pools, err := b.allPools()
		if len(pools) != want || (err != nil) != (want == 0) {
			t.Errorf("%s: %d pools, want %d; %v", when, len(pools), want, err)
		}
	}
	check("no ConfigMap", 1)
	for _, step := range []struct {
		when string
		list []any
		want int
	}{
		{"bad from the start", []any{bad}, 0},
		{"mended", []any{good}, 2},
		{"bad again", []any{bad}, 2},
		{"a typo in the key", []any{configMap(PoolsName, "pool", good.Data[PoolsKey])}, 2},
		{"deleted", nil, 1},
	} {
		if err := b.config.Replace(step.list, ""); err != nil {
			t.Fatal(err)
		}
		check(step.when, step.want)
	}
}

// TestSyncedWhenTakenIn: who waits for the first list finds all of it taken in.
func TestSyncedWhenTakenIn(t *testing.T) {
	b := unstarted(t)
	b.config.changed = func(_, _ any) {
		if b.config.hasSynced() {
			t.Error("synced before the ConfigMap was read")
		}
	}
	if err := b.config.Replace([]any{configMap(PoolsName, PoolsKey, "")}, ""); err != nil {
		t.Fatal(err)
	}
	if !b.config.hasSynced() {
		t.Error("not synced")
	}
}

// TestClaimsDeleted: what is announced stays so when the claims are deleted.
func TestClaimsDeleted(t *testing.T) {
	b := unstarted(t)
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "web", UID: "1"}}
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
	if err := b.services.Add(svc); err != nil {
		t.Fatal(err)
	}
	claims := configMap(controller.ClaimsName, controller.ClaimsKey, `[{"address":"192.0.2.1","owners":[{"namespace":"a","name":"web","uid":"1","ports":[]}]}]`)
	if err := b.claims.Add(claims); err != nil {
		t.Fatal(err)
	}
	if got := b.addresses(); len(got) != 1 {
		t.Fatalf("%v", got)
	}
	if err := b.claims.Delete(claims); err != nil {
		t.Fatal(err)
	}
	if got := b.addresses(); len(got) != 1 {
		t.Errorf("after the claims were deleted: %v", got)
	}
}

// TestLeaderLease: each class has a leader, and its Lease a name that is valid and no machine's.
func TestLeaderLease(t *testing.T) {
	names := map[string]bool{}
	for _, class := range []string{controller.DefaultClass, "example.com/A_b", "example.com/a-b", strings.Repeat("a.", 126) + "a/" + strings.Repeat("X", 63)} {
		name := leaderLease(class)
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 || names[name] || strings.HasPrefix(name, announce.LeasePrefix) {
			t.Errorf("%s: %s %v", class, name, problems)
		}
		names[name] = true
	}
	if !names[LeaderLease] {
		t.Errorf("%v", names)
	}
}

// TestReserved: addresses of pools that Nodes have are reserved, and reported once.
func TestReserved(t *testing.T) {
	var log strings.Builder
	b := unstarted(t)
	b.Log = slog.New(slog.NewTextHandler(&log, nil))
	node := func(addresses ...string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "n1"}}}}
		for _, a := range addresses {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
		}
		return n
	}
	p, err := pool.ParseFlag("flag=198.51.100.1")
	if err != nil {
		t.Fatal(err)
	}
	b.pools = pool.Set{p}
	if got := b.reserved(); len(got) != 0 {
		t.Errorf("without Nodes: %v", got)
	}
	if err := b.nodes.Add(node("198.51.100.1", "198.51.100.2")); err != nil { // the pool has the first
		t.Fatal(err)
	}
	for range 2 {
		if got := b.reserved(); len(got) != 1 || got[netip.MustParseAddr("198.51.100.1")] != "an address of Node n1" {
			t.Errorf("%v", got)
		}
	}
	if n := strings.Count(log.String(), "address=198.51.100.1 pool=flag"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, log.String())
	}
	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.ServiceSpec{ClusterIPs: []string{"198.51.100.1", "None"}}}
	if err := b.services.Add(web); err != nil {
		t.Fatal(err)
	}
	if got := b.reserved()[netip.MustParseAddr("198.51.100.1")]; got != "the cluster IP of Service shop/web" {
		t.Errorf("a pool with a cluster IP: %q", got)
	}
	if err := b.services.Delete(web); err != nil {
		t.Fatal(err)
	}
	if err := b.nodes.Update(node("198.51.100.2")); err != nil {
		t.Fatal(err)
	}
	if got := b.reserved(); len(got) != 0 {
		t.Errorf("when the Node has it no longer: %v", got)
	}
}

// TestHeadlessEndpoints: endpoints of headless Services are followed where Ingresses may lead to them, and only there.
func TestHeadlessEndpoints(t *testing.T) {
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web", corev1.IsHeadlessService: ""}}}
	for _, balancing := range []*Balancing{nil, {}} {
		b := unstarted(t)
		b.client, b.Balancing = fake.NewClientset(slice), balancing
		b.makeReplicas()
		list, err := b.slices.source.List(metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if n := meta.LenList(list); (n > 0) != (balancing != nil) {
			t.Errorf("balancing %v: %d slices", balancing != nil, n)
		}
	}
}

// TestNodesWithEndpoints: a node may announce an address if its proxy has somewhere to send packets.
func TestNodesWithEndpoints(t *testing.T) {
	endpoint := func(node string, ready, serving, terminating bool) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}}
	}
	ready, leaving := endpoint("n1", true, true, false), endpoint("n2", false, true, true)
	broken, gone := endpoint("n3", false, false, false), endpoint("n4", false, false, true)
	for name, c := range map[string]struct {
		of   []discoveryv1.Endpoint
		want string
	}{
		"ready ones":                {[]discoveryv1.Endpoint{ready, leaving, broken, gone}, "n1"},
		"all terminate":             {[]discoveryv1.Endpoint{leaving, broken, gone}, "n2"},
		"none serves":               {[]discoveryv1.Endpoint{broken, gone}, ""},
		"conditions that are unset": {[]discoveryv1.Endpoint{{NodeName: ready.NodeName}, {}}, "n1"},
	} {
		if got := strings.Join(slices.Sorted(maps.Keys(nodesWithEndpoints(c.of))), " "); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
