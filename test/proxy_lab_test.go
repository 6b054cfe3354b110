package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/plan"
	"portal/internal/proxy"
	"portal/internal/proxy/backend/backendtest"
	"portal/test/harness"
)

// proxyLab is a node in a network namespace with `portal proxy` on it, Pods, clients, and an API server that the node
// reaches by a cable that can be pulled.
type proxyLab struct {
	*backendtest.Lab
	dir, mode string
	api       *harness.API
	apiArgs   []string
	relay     *harness.Relay
	client    *kubernetes.Clientset
	proxy     *harness.Process
	http      *http.Client
}

const labNamespace = "default"

// newProxyLab builds it all but the proxy.
func newProxyLab(t *testing.T, mode string, apiArgs ...string) *proxyLab {
	t.Helper()
	options := backendtest.Options{}
	if mode == "iptables" {
		options = backendtest.Options{PassesOtherPorts: true, PassesFromNode: true, RefusesFirst: true}
	}
	l := &proxyLab{Lab: backendtest.NewLab(t, options), dir: t.TempDir(), mode: mode}
	if !slices.Contains(apiArgs, "--controllers") {
		apiArgs = append([]string{"--controllers", "none"}, apiArgs...)
	}
	l.api, l.apiArgs = startPortal(t, apiArgs...), apiArgs
	l.client = connect(t, l.api.Kubeconfig)
	address := strings.TrimPrefix(l.api.URL, "https://")
	if err := l.Node.Do(func() error {
		cable, err := net.Listen("tcp", address) // the same address, so that the same kubeconfig leads to it
		if err == nil {
			l.relay = harness.NewRelay(cable, address)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.relay.Close)
	l.http = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = l.Node.Do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		},
	}}
	l.createNode(t)
	return l
}

func (l *proxyLab) createNode(t *testing.T) {
	t.Helper()
	facts := l.Facts()
	nodes := l.client.CoreV1().Nodes()
	node, err := nodes.Create(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: facts.Node, Labels: map[string]string{corev1.LabelTopologyZone: facts.Zone},
	}}, metav1.CreateOptions{})
	if err == nil {
		for _, a := range facts.Addrs {
			node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
		}
		_, err = nodes.UpdateStatus(context.Background(), node, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// start runs the proxy and doesn't wait for it.
func (l *proxyLab) start(t *testing.T, more ...string) {
	t.Helper()
	var err error
	l.proxy, err = harness.StartIn(l.Node.Namespace(), l.dir, "proxy", harness.Portal(), append([]string{
		"proxy", "--kubeconfig", l.api.Kubeconfig, "--hostname-override", l.Facts().Node, "--proxy-mode", l.mode,
		"--cluster-cidr", "10.244.0.0/16,fd00:244::/32", "--nodeport-addresses", "primary",
	}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.proxy.Kill)
}

// stop asks the proxy to end.
func (l *proxyLab) stop(t *testing.T) {
	t.Helper()
	if err := l.proxy.Stop(20 * time.Second); err != nil {
		t.Fatalf("the proxy does not end well: %v\n%s", err, l.proxy.Tail())
	}
}

// run runs a program on the node to its end.
func (l *proxyLab) run(t *testing.T, path string, args ...string) string {
	t.Helper()
	var out []byte
	if err := l.Node.Do(func() (err error) {
		out, err = exec.Command(path, args...).CombinedOutput()
		return err
	}); err != nil {
		t.Fatalf("%s %s: %v\n%s", path, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// get reads a page of the proxy's.
func (l *proxyLab) get(path string) (status int, body []byte, err error) {
	resp, err := l.http.Get("http://127.0.0.1:10249" + path)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}

// state is what the proxy says of itself; nil while it says nothing.
func (l *proxyLab) state() *proxy.State {
	_, body, err := l.get("/state")
	var out proxy.State
	if err != nil || json.Unmarshal(body, &out) != nil {
		return nil
	}
	return &out
}

// metric reads the value of a series from the proxy's metrics; its name may end before the labels.
func (l *proxyLab) metric(t *testing.T, series string) (sum float64) {
	t.Helper()
	_, body, err := l.get("/metrics")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(body), "\n") {
		if rest, ok := strings.CutPrefix(line, series); ok && (rest[0] == ' ' || rest[0] == '{') {
			var v float64
			if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &v); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			sum += v
		}
	}
	return sum
}

// eventually waits until something is so, and returns how long that took. The limit is for an idle machine; others get a minute.
func eventually(t *testing.T, limit time.Duration, what string, so func() string) time.Duration {
	t.Helper()
	begin := time.Now()
	for {
		why := so()
		if why == "" {
			return time.Since(begin)
		}
		if time.Since(begin) > max(limit, time.Minute) {
			t.Fatalf("%s: not within %s, nor within a minute: %s", what, limit, why)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// synced waits until the proxy that was started last has synced.
func (l *proxyLab) synced(t *testing.T) {
	t.Helper()
	eventually(t, 30*time.Second, "the first sync", func() string {
		select {
		case <-l.proxy.Done():
			t.Fatalf("the proxy has ended:\n%s", l.proxy.Tail())
		default:
		}
		if st := l.state(); st == nil || st.LastSync.IsZero() {
			return "nothing yet"
		}
		return ""
	})
}

// wanted is the plan for what the API has.
func (l *proxyLab) wanted(t *testing.T) *plan.Snapshot {
	t.Helper()
	ctx := context.Background()
	services, err := l.client.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	endpoints, err := l.client.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cluster := intent.NewCluster()
	for i := range services.Items {
		cluster.SetService(watch.Service(&services.Items[i]))
	}
	for i := range endpoints.Items {
		cluster.SetSlice(watch.Slice(&endpoints.Items[i]))
	}
	facts := l.Facts()
	if l.mode == "nftables" {
		ranges, err := l.client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range ranges.Items {
			cluster.SetServiceCIDR(watch.ServiceCIDR(&ranges.Items[i]))
		}
		facts.ServicePrefixes = cluster.ServicePrefixes()
	}
	snap := plan.NewSnapshot(facts)
	for key, entry := range cluster.Snapshot().Services {
		snap.Set(key, plan.For(entry, snap.Facts))
	}
	return snap
}

// settled waits until the proxy has programmed what the API has, and returns that as a plan.
func (l *proxyLab) settled(t *testing.T, limit time.Duration) (*plan.Snapshot, time.Duration) {
	t.Helper()
	want := l.wanted(t)
	took := eventually(t, limit, "the proxy is in sync with the API", func() string {
		st := l.state()
		if st == nil {
			return "the proxy does not answer; it said\n" + l.proxy.Tail()
		}
		return difference(st, want)
	})
	return want, took
}

// difference compares what the proxy acknowledged with a plan; empty: nothing.
func difference(st *proxy.State, want *plan.Snapshot) string {
	has := map[string]string{}
	for _, f := range st.Frontends {
		key := fmt.Sprintf("%s %s %d", f.Family, f.Protocol, f.Port)
		if f.Address != nil {
			key += " " + f.Address.String()
		}
		var routes [plan.Origins]string
		for _, r := range f.Routes {
			text := fmt.Sprintf("%v %v ", r.Verdict, r.Masquerade)
			if r.Pool != nil {
				text += fmt.Sprint(st.Pools[*r.Pool].Endpoints)
			}
			for o := range plan.Origins {
				if slices.Contains(r.From, o.String()) {
					routes[o] = text
				}
			}
		}
		if f.Acknowledged.IsZero() {
			key += " not acknowledged"
		}
		has[key] = fmt.Sprint(routes, f.AffinitySeconds)
	}
	for k, f := range want.Frontends {
		key := fmt.Sprintf("IPv%d %s %d", k.Family, k.Protocol, k.Port)
		if k.Addr.IsValid() {
			key += " " + k.Addr.String()
		}
		var routes [plan.Origins]string
		for o, r := range f.Routes {
			routes[o] = fmt.Sprintf("%v %v ", r.Verdict, r.Masquerade)
			if r.Pool != nil {
				var list []netip.AddrPort
				for _, e := range r.Pool.Endpoints {
					list = append(list, e.Addr)
				}
				routes[o] += fmt.Sprint(list)
			}
		}
		if got, text := has[key], fmt.Sprint(routes, int(f.Affinity/time.Second)); got != text {
			return fmt.Sprintf("%s is %q, wanted %q", key, got, text)
		}
		delete(has, key)
	}
	if len(has) > 0 {
		return fmt.Sprintf("%d frontends too many: %v", len(has), has)
	}
	return ""
}

// labService is a Service in few words; what it does not say is left to the API server.
func labService(name string, change func(*corev1.ServiceSpec)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{
			IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicySingleStack),
			Ports:          []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromInt32(backendtest.ServerPort)}},
		},
	}
	if change != nil {
		change(&s.Spec)
	}
	return s
}

// labSlice is a slice of a Service's endpoints; those in local are on the node.
func labSlice(service string, family intent.Family, addrs, local []netip.Addr) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:   fmt.Sprintf("%s-%d", service, family),
			Labels: map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "test"},
		},
		AddressType: discoveryv1.AddressType(fmt.Sprintf("IPv%d", family)),
		Ports: []discoveryv1.EndpointPort{
			{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(int32(backendtest.ServerPort))},
			{Name: ptr.To("dns"), Protocol: ptr.To(corev1.ProtocolUDP), Port: ptr.To(int32(backendtest.ServerPort))},
		},
	}
	for _, a := range addrs {
		node := "elsewhere"
		if slices.Contains(local, a) {
			node = "node"
		}
		out.Endpoints = append(out.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}, NodeName: &node,
		})
	}
	return out
}

// create makes a Service with endpoints.
func (l *proxyLab) create(t *testing.T, s *corev1.Service, list ...*discoveryv1.EndpointSlice) *corev1.Service {
	t.Helper()
	ctx := context.Background()
	made, err := l.client.CoreV1().Services(labNamespace).Create(ctx, s, metav1.CreateOptions{})
	if err == nil && len(s.Status.LoadBalancer.Ingress) > 0 {
		made.Status = s.Status
		made, err = l.client.CoreV1().Services(labNamespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
	}
	for _, slice := range list {
		if err == nil {
			_, err = l.client.DiscoveryV1().EndpointSlices(labNamespace).Create(ctx, slice, metav1.CreateOptions{})
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// endpoints gives a Service other endpoints of IPv4.
func (l *proxyLab) endpoints(t *testing.T, service string, addrs ...netip.Addr) {
	t.Helper()
	l.update(t, labSlice(service, intent.IPv4, addrs, l.LocalPods(intent.IPv4)))
}

func (l *proxyLab) update(t *testing.T, slice *discoveryv1.EndpointSlice) {
	t.Helper()
	if _, err := l.client.DiscoveryV1().EndpointSlices(labNamespace).Update(context.Background(), slice, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func rootOnly(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	need(t, harness.Portal(), "build")
}
