//go:build peers

package test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"

	"portal/internal/lb/announce"
	"portal/test/harness"
)

// TestPeersLoadBalancer: `portal lb` gives addresses in Kubernetes' own API as in Portal's.
func TestPeersLoadBalancer(t *testing.T) { balancerLeaders(t, startKubernetes(t)) }

// TestPeersBalancing: with kube-apiserver, and kube-proxy on two nodes, `portal lb` gives addresses, announces them and leads to Pods, as packets and, where
// annotations ask for it, through its own process; with the rights of deploy/lb/rbac.yaml and no others.
func TestPeersBalancing(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			if inNamespace(t) {
				newForeign(t, mode).run(t)
			}
		})
	}
}

// host is a machine of the test: a network namespace that a process holds.
type host struct {
	name string
	pid  int
	dir  string
}

// foreign is a Kubernetes of other programs: an API server in the test's own network namespace, with a switch that two nodes and a client are at, and a Pod behind
// each node.
type foreign struct {
	api      *harness.API
	admin    *kubernetes.Clientset
	nodes    [2]*host
	client   *host
	balancer [2]*harness.Process
	config   string // the kubeconfig of balancers
	mode     string
	dir      string
}

func ipCommand(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v: %v %s", args, err, out)
	}
}

// newHost makes a machine that is connected to an interface of this namespace, or of another host.
func newHost(t *testing.T, dir, name string) *host {
	t.Helper()
	p, err := harness.Start(dir, name, "unshare", "-n", "sleep", "infinity")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	h := &host{name: name, pid: p.Pid(), dir: dir}
	eventually(t, lbLimit, "the network of "+name, func() string {
		out, err := exec.Command("nsenter", h.in("readlink", "/proc/self/ns/net")...).Output()
		own, err2 := exec.Command("readlink", "/proc/self/ns/net").Output()
		if err != nil || err2 != nil || string(out) == string(own) {
			return fmt.Sprintf("%s %s %v %v", out, own, err, err2)
		}
		return ""
	})
	h.must(t, "ip", "link", "set", "lo", "up")
	return h
}

// in are nsenter's arguments for a command on the machine.
func (h *host) in(args ...string) []string {
	return append([]string{"-t", fmt.Sprint(h.pid), "-n", "--"}, args...)
}

func (h *host) exec(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "nsenter", h.in(args...)...).CombinedOutput()
	return string(out), err
}

func (h *host) must(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), lbLimit)
	defer cancel()
	out, err := h.exec(ctx, args...)
	if err != nil {
		t.Fatalf("on %s: %v: %v %s", h.name, args, err, out)
	}
	return out
}

// start runs a program on the machine until the test ends.
func (h *host) start(t *testing.T, name string, args ...string) *harness.Process {
	t.Helper()
	p, err := harness.Start(h.dir, name+"-"+h.name, "nsenter", h.in(args...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s on %s:\n%s", name, h.name, p.Tail())
		}
	})
	return p
}

const foreignPool = "192.0.2.200-192.0.2.219"

func newForeign(t *testing.T, mode string) *foreign {
	f := &foreign{mode: mode, dir: t.TempDir()}
	ipCommand(t, "link", "set", "lo", "up")
	ipCommand(t, "link", "add", "switch", "type", "bridge")
	ipCommand(t, "addr", "add", "192.0.2.1/24", "dev", "switch")
	ipCommand(t, "link", "set", "switch", "up")
	ipCommand(t, "route", "add", "default", "via", "192.0.2.254") // kube-apiserver looks for its own address there
	attach := func(name, address string) *host {
		h := newHost(t, f.dir, name)
		ipCommand(t, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(h.pid))
		ipCommand(t, "link", "set", name, "master", "switch", "up")
		h.must(t, "ip", "addr", "add", address+"/24", "dev", "eth0")
		h.must(t, "ip", "link", "set", "eth0", "up")
		h.must(t, "ip", "route", "add", "default", "via", "192.0.2.1")
		return h
	}
	f.client = attach("client", "192.0.2.20")
	f.api = startKubernetes(t)
	f.admin = connect(t, f.api.Kubeconfig)
	l, err := net.Listen("tcp", "192.0.2.1:0")
	if err != nil {
		t.Fatal(err)
	}
	relay := harness.NewRelay(l, strings.TrimPrefix(f.api.URL, "https://"))
	t.Cleanup(relay.Close)
	reach := func(token string) string {
		path := filepath.Join(f.dir, token[:4]+".kubeconfig")
		config, err := clientcmd.LoadFromFile(f.api.Kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range config.Clusters {
			c.Server = "https://" + l.Addr().String()
		}
		for name := range config.AuthInfos {
			config.AuthInfos[name] = &api.AuthInfo{Token: token}
		}
		if err := clientcmd.WriteToFile(*config, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	kubectl(t, f.api, "apply", "-f", filepath.Join(harness.Root(), "deploy", "lb", "rbac.yaml"))
	f.config = reach(strings.TrimSpace(kubectl(t, f.api, "create", "token", "portal-lb", "-n", "portal-lb", "--duration", "2h")))
	admin := reach(harness.KubeToken)
	for i := range f.nodes {
		f.nodes[i] = attach(fmt.Sprint("node", i+1), fmt.Sprint("192.0.2.1", i+1))
	}
	for i, n := range f.nodes {
		f.node(t, i, n, admin)
	}
	return f
}

// node makes a Node with kube-proxy and a balancer, and a Pod behind it.
func (f *foreign) node(t *testing.T, i int, n *host, admin string) {
	t.Helper()
	if _, err := f.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.name}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprint("192.0.2.1", i+1)}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.must(t, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
	pod := newHost(t, f.dir, fmt.Sprint("pod", i+1))
	n.must(t, "ip", "link", "add", "pod", "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(pod.pid))
	n.must(t, "ip", "addr", "add", fmt.Sprintf("10.244.%d.1/24", i+1), "dev", "pod")
	n.must(t, "ip", "link", "set", "pod", "up")
	pod.must(t, "ip", "addr", "add", podAt(i)+"/24", "dev", "eth0")
	pod.must(t, "ip", "link", "set", "eth0", "up")
	pod.must(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.244.%d.1", i+1))
	n.must(t, "ip", "route", "add", fmt.Sprintf("10.244.%d.0/24", 2-i), "via", fmt.Sprint("192.0.2.1", 2-i))
	pod.start(t, "echo", harness.Portal(), "echo", "--listen", ":9376")
	pod.start(t, "echo-proxied", harness.Portal(), "echo", "--listen", ":9377", "--proxy-protocol")
	n.start(t, "kube-proxy", harness.Peer("kube-proxy"), "--kubeconfig", admin, "--hostname-override", n.name, "--proxy-mode", f.mode, "--cluster-cidr", "10.244.0.0/16",
		"--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0")
	t.Cleanup(func() { // the balancing process outlives its agent
		ctx, cancel := context.WithTimeout(context.Background(), lbLimit)
		defer cancel()
		_, _ = n.exec(ctx, harness.Portal(), "lb", "--cleanup", "--run-dir", filepath.Join(f.dir, "run-"+n.name))
	})
	f.balancer[i] = n.start(t, "lb", harness.Portal(), "lb", "--kubeconfig", f.config, "--hostname-override", n.name, "--pool", foreignPool, "--run-dir", filepath.Join(f.dir, "run-"+n.name),
		"--lease-namespace", "portal-lb", "--ingress-service", "portal-lb/portal-ingress")
}

func podAt(i int) string { return fmt.Sprintf("10.244.%d.2", i+1) }

// service makes a Service in front of the Pods, and returns its address.
func (f *foreign) service(t *testing.T, name string, target int32, change func(*corev1.Service), annotations ...string) netip.Addr {
	t.Helper()
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Name: "http", Port: 80}},
	}}
	for i := 0; i+1 < len(annotations); i += 2 {
		svc.Annotations[awsLB+annotations[i]] = annotations[i+1]
	}
	if change != nil {
		change(svc)
	}
	if _, err := f.admin.CoreV1().Services("default").Create(t.Context(), svc, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, p := range svc.Spec.Ports {
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &p.Name, Port: &target, Protocol: ptr.To(corev1.ProtocolTCP)})
	}
	for i, n := range f.nodes {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{podAt(i)}, NodeName: &n.name, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}})
	}
	if _, err := f.admin.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var out netip.Addr
	eventually(t, lbLimit, "the address of "+name, func() string {
		svc, err := f.admin.CoreV1().Services("default").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || len(svc.Status.LoadBalancer.Ingress) != 1 {
			return fmt.Sprint(err, f.balancer[0].Tail())
		}
		out = netip.MustParseAddr(svc.Status.LoadBalancer.Ingress[0].IP)
		return ""
	})
	return out
}

// until asks from the client until the answer has these parts.
func (f *foreign) until(t *testing.T, what string, parts []string, args ...string) (out string) {
	t.Helper()
	eventually(t, lbLimit, what, func() string {
		var err error
		out, err = f.client.exec(t.Context(), append([]string{"curl", "-sS", "--max-time", "5"}, args...)...)
		return has(parts...)(out, err)
	})
	return out
}

func (f *foreign) run(t *testing.T) {
	t.Run("packets", func(t *testing.T) {
		a := f.service(t, "packets", 9376, func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
		f.until(t, "the client's address at the Pod", []string{"192.0.2.20"}, "http://"+a.String()+"/client")
	})
	t.Run("http", func(t *testing.T) {
		a := f.service(t, "http", 9376, nil, "backend-protocol", "http", "additional-resource-tags", "environment=prod,owner=devops")
		f.until(t, "the client's address in a header field", []string{"X-Forwarded-For: 192.0.2.20\n", "X-Forwarded-Port: 80\n"}, "http://"+a.String()+"/header")
		for _, n := range f.nodes {
			eventually(t, lbLimit, "the tags in the metrics of "+n.name, func() string {
				out, err := n.exec(t.Context(), "curl", "-sS", "--max-time", "5", "http://127.0.0.1:10261/metrics")
				for _, part := range []string{`tag_environment="prod"`, `tag_owner="devops"`} {
					if err != nil || !strings.Contains(out, part) {
						return fmt.Sprint(err, " no ", part)
					}
				}
				return ""
			})
		}
	})
	t.Run("tls", f.tls)
	t.Run("proxy protocol", func(t *testing.T) {
		a := f.service(t, "proxied", 9377, nil, "proxy-protocol", "*")
		f.until(t, "the version of the header", []string{"1\n"}, "http://"+a.String()+"/proxy")
		f.until(t, "the client's address in the header", []string{"192.0.2.20"}, "http://"+a.String()+"/client")
	})
	t.Run("rights", f.rights)
	t.Run("lost", f.lost)
}

// tls: TLS ends at the balancer, once it may read the certificate's Secret.
func (f *foreign) tls(t *testing.T) {
	secret := selfSignedSecret(t, "cert", "shop.example")
	if _, err := f.admin.CoreV1().Secrets("default").Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	a := f.service(t, "tls", 9376, func(s *corev1.Service) { s.Spec.Ports[0] = corev1.ServicePort{Name: "https", Port: 443} }, "ssl-cert", "cert", "backend-protocol", "http")
	eventually(t, lbLimit, "an Event that the Secret can't be read", func() string {
		list, err := f.admin.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=tls,reason=CertificateUnavailable"})
		if err != nil || len(list.Items) == 0 || !strings.Contains(list.Items[0].Message, "system:portal:lb-certificates") {
			return fmt.Sprint(list, err)
		}
		return ""
	})
	kubectl(t, f.api, "create", "rolebinding", "lb-certificates", "-n", "default", "--clusterrole", "system:portal:lb-certificates", "--serviceaccount", "portal-lb:portal-lb")
	f.until(t, "TLS", []string{"X-Forwarded-Proto: https\n", "CN=shop.example"}, "-k", "-v", "--stderr", "-", "https://"+a.String()+"/header")
}

// rights: its Leases are in its own namespace, and those of others out of its reach.
func (f *foreign) rights(t *testing.T) {
	for namespace, want := range map[string]int{"portal-lb": 3, metav1.NamespaceSystem: 0} {
		list, err := f.admin.CoordinationV1().Leases(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range list.Items {
			if strings.HasPrefix(l.Name, "portal-lb") {
				names = append(names, l.Name)
			}
		}
		if len(names) != want {
			t.Errorf("the Leases in %s are %v", namespace, names)
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", f.config)
	if err != nil {
		t.Fatal(err)
	}
	as, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	other := &metav1.ObjectMeta{Name: "kube-controller-manager", Namespace: metav1.NamespaceSystem}
	for what, try := range map[string]func() error{
		"read another leader's Lease": func() error {
			_, err := as.CoordinationV1().Leases(other.Namespace).Get(t.Context(), other.Name, metav1.GetOptions{})
			return err
		},
		"delete another leader's Lease": func() error {
			return as.CoordinationV1().Leases(other.Namespace).Delete(t.Context(), other.Name, metav1.DeleteOptions{})
		},
		"make a Service in kube-system": func() error {
			_, err := as.CoreV1().Services(other.Namespace).Create(t.Context(), &corev1.Service{ObjectMeta: *other, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 1}}}}, metav1.CreateOptions{})
			return err
		},
		"make a ConfigMap in kube-system": func() error {
			_, err := as.CoreV1().ConfigMaps(other.Namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: *other}, metav1.CreateOptions{})
			return err
		},
		"read Secrets of kube-system": func() error {
			_, err := as.CoreV1().Secrets(other.Namespace).List(t.Context(), metav1.ListOptions{})
			return err
		},
	} {
		if err := try(); !apierrors.IsForbidden(err) {
			t.Errorf("a balancer that wants to %s gets %v", what, err)
		}
	}
}

// lost: the node that an address is announced by is unplugged, and the other one takes over.
func (f *foreign) lost(t *testing.T) {
	a := f.service(t, "lost", 9376, func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
	f.until(t, "an answer", []string{"192.0.2.20"}, "http://"+a.String()+"/client")
	owner := -1
	eventually(t, lbLimit, "an owner in a Lease", func() string {
		for i, n := range f.nodes {
			lease, err := f.admin.CoordinationV1().Leases("portal-lb").Get(t.Context(), announce.LeasePrefix+n.name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if strings.Contains(fmt.Sprint(lease.Annotations)+",", a.String()) {
				owner = i
			}
		}
		if owner < 0 {
			return "none"
		}
		return ""
	})
	ipCommand(t, "link", "set", f.nodes[owner].name, "down")
	begin := time.Now()
	f.until(t, "an answer through the other node", []string{"192.0.2.20"}, "--connect-timeout", "1", "http://"+a.String()+"/client")
	t.Logf("%s was lost, and the other node answered after %v", f.nodes[owner].name, time.Since(begin).Round(time.Millisecond))
	ipCommand(t, "link", "set", f.nodes[owner].name, "up")
	for _, p := range f.balancer {
		select {
		case <-p.Done():
			t.Errorf("a balancer has ended:\n%s", p.Tail())
		default:
		}
	}
}
