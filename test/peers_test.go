//go:build peers

package test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"portal/test/harness"
)

var peersFor = flag.Duration("peers.for", 2*time.Minute, "how long the real components are kept busy")

// Who kube-proxy and CoreDNS are: the user and the account that Kubernetes' default bindings name.
const (
	kubeProxyUser = "system:kube-proxy"
	corednsUser   = "system:serviceaccount:kube-system:kube-dns"
)

// peersPolicy has the requests of real components in the audit log.
const peersPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: ["` + kubeProxyUser + `"]
- level: Metadata
  userGroups: ["system:serviceaccounts:kube-system", "system:bootstrappers", "system:nodes", "system:portal:proxies"]
- level: None
`

// audited are the flags by which a server writes such a log.
func audited(t *testing.T, log string) []string {
	t.Helper()
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, policy, peersPolicy)
	return []string{"--audit-policy-file", policy, "--audit-log-path", log}
}

// corednsRole is what CoreDNS' own manifests grant it. The default role system:kube-dns is that of the DNS server before CoreDNS: it has
// Services and Endpoints only, at Kubernetes as at Portal.
const corednsRole = `{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "system:coredns"}, "rules": [
	{"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
	{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]}`

const corednsBinding = `{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "system:coredns"},
	"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
	"subjects": [{"kind": "ServiceAccount", "namespace": "kube-system", "name": "kube-dns"}]}`

// TestPeers runs the real kube-proxy, kube-controller-manager and CoreDNS against Portal, kube-proxy and CoreDNS with the rights that
// Kubernetes' deployments give them, and demands that they do their work without an error in their logs and without being refused
// anything. All of it, this test included, is in a network namespace of its own, since kube-proxy writes rules for the whole of the one
// it is in.
func TestPeers(t *testing.T) {
	rootNeeded(t)
	if !inNamespace(t, "-peers.for", peersFor.String()) {
		return
	}
	network(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, "tokens.csv"), "proxys-token,"+kubeProxyUser+",1,\n")
	audit := filepath.Join(dir, "audit.log")
	api := startPortal(t, append(audited(t, audit), "--controllers", "none", "--token-auth-file", filepath.Join(dir, "tokens.csv"))...)
	client := connect(t, api.Kubeconfig)
	if err := peerNode(client); err != nil {
		t.Fatal(err)
	}
	proxyConfig, dnsConfig := filepath.Join(dir, "proxy.kubeconfig"), filepath.Join(dir, "dns.kubeconfig")
	tokenConfig(t, api, "proxys-token", proxyConfig)
	tokenConfig(t, api, corednsToken(t, api), dnsConfig)
	dns := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	peers := []*harness.Process{
		startPeer(t, dir, "kube-controller-manager", "--kubeconfig", api.Kubeconfig, "--authentication-kubeconfig", api.Kubeconfig,
			"--authorization-kubeconfig", api.Kubeconfig, "--bind-address", "127.0.0.1", "--secure-port", fmt.Sprint(harness.FreePort()),
			"--cert-dir", filepath.Join(dir, "kcm"), "--use-service-account-credentials=false", "--leader-elect=true",
			"--controllers", "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller"),
		startPeer(t, dir, "kube-proxy", "--kubeconfig", proxyConfig, "--hostname-override", nodeName, "--proxy-mode", "nftables",
			"--metrics-bind-address", fmt.Sprintf("127.0.0.1:%d", harness.FreePort()),
			"--healthz-bind-address", fmt.Sprintf("127.0.0.1:%d", harness.FreePort()), "--conntrack-max-per-core", "0",
			"--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0"),
		startPeer(t, dir, "coredns", "-conf", corefile(t, dir, dns, dnsConfig)),
	}
	if err := busy(client, *peersFor); err != nil {
		t.Error(err)
	}
	if err := peersDid(client, dns); err != nil {
		t.Error(err)
	}
	for _, p := range peers {
		select {
		case <-p.Done():
			t.Errorf("%s ended by itself:\n%s", p.Name, p.Tail())
		default:
			p.Kill()
		}
		for _, line := range complaints(t, p.Log) {
			t.Errorf("%s: %s", p.Name, line)
		}
	}
	for _, line := range complaints(t, api.Log) {
		t.Errorf("portal itself: %s", line)
	}
	notRefused(t, audit, kubeProxyUser, corednsUser)
}

// corednsToken makes CoreDNS' account with its rights, and a token of it.
func corednsToken(t *testing.T, api *harness.API) string {
	t.Helper()
	root := admin(t, api)
	for path, body := range map[string]string{
		rbacAPI + "/clusterroles": corednsRole, rbacAPI + "/clusterrolebindings": corednsBinding,
		"/api/v1/namespaces/kube-system/serviceaccounts": `{"metadata": {"name": "kube-dns"}}`,
	} {
		if code, answer := root.ask(t, "POST", path, body); code != http.StatusCreated {
			t.Fatalf("%s: %d %s", path, code, answer)
		}
	}
	const may = `{"spec":{"user":"` + corednsUser + `","resourceAttributes":{"verb":"list","resource":"namespaces"}}}`
	within(t, "CoreDNS' account has no rights", func() error {
		if _, answer := root.ask(t, "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", may); !strings.Contains(answer, `"allowed":true`) {
			return errors.New(answer)
		}
		return nil
	})
	return kubectl(t, api, "create", "token", "kube-dns", "-n", "kube-system", "--duration", "2h")
}

// notRefused fails if the audit log has a refusal of one of these users, or does not have the user at all.
func notRefused(t *testing.T, log string, users ...string) {
	t.Helper()
	requests := map[string]int{}
	for _, e := range readEvents(t, log) {
		requests[e.User.Username]++
		// Admission answers with 403 too: nothing is created in a namespace that ends.
		unknown := e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusUnauthorized
		if decision := e.Annotations["authorization.k8s.io/decision"]; decision == "forbid" || unknown {
			t.Errorf("%s was refused %s %s: %s", e.User.Username, e.Verb, e.RequestURI, e.Annotations["authorization.k8s.io/reason"])
		}
	}
	t.Logf("requests by user: %v", requests)
	for _, user := range users {
		if requests[user] == 0 {
			t.Errorf("%s asked for nothing", user)
		}
	}
}

// rootNeeded fails without root: a skipped test would look like one that passed.
func rootNeeded(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("a network namespace is needed for the real components: run this as root")
	}
}

const nodeName = "node-1"

func startPeer(t *testing.T, dir, name string, args ...string) *harness.Process {
	t.Helper()
	need(t, harness.Peer(name), "peers")
	p, err := harness.Start(dir, name, harness.Peer(name), args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

func corefile(t *testing.T, dir, listen, kubeconfig string) string {
	t.Helper()
	host, port, _ := net.SplitHostPort(listen)
	path := filepath.Join(dir, "Corefile")
	text := fmt.Sprintf(`.:%s {
  bind %s
  errors
  kubernetes cluster.local in-addr.arpa ip6.arpa {
    kubeconfig %s
    pods verified
  }
}
`, port, host, kubeconfig)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// homemade are complaints that have nothing to do with the server: they come against Kubernetes' own just so.
var homemade = []*regexp.Regexp{
	// component-base, of a flag that is not given.
	regexp.MustCompile(`The manifest file is empty, ignoring\.$`),
	// kube-proxy, of its own table in the kernel before it has made it.
	regexp.MustCompile(`"Failed to list existing sets" err=".*no such file or directory"`),
}

// complaints are the lines of a log that speak of an error.
func complaints(t *testing.T, path string) (out []string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	bad := regexp.MustCompile(`^[EF]\d{4} |^W\d{4} .*(reflector|could not find|Failed|failed)|\[(ERROR|FATAL|WARNING)\]|^panic|(?i:forbidden)`)
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		own := slices.ContainsFunc(homemade, func(r *regexp.Regexp) bool { return r.MatchString(lines.Text()) })
		if bad.MatchString(lines.Text()) && !own {
			out = append(out, lines.Text())
		}
	}
	return out
}

// peerNode makes the node that kube-proxy runs on.
func peerNode(client kubernetes.Interface) error {
	node, err := client.CoreV1().Nodes().Create(context.Background(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelHostname: nodeName, corev1.LabelTopologyZone: "z1"}},
		Spec:       corev1.NodeSpec{PodCIDR: "10.244.0.0/24", PodCIDRs: []string{"10.244.0.0/24"}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeAddress}, {Type: corev1.NodeHostName, Address: nodeName}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	_, err = client.CoreV1().Nodes().UpdateStatus(context.Background(), node, metav1.UpdateOptions{})
	return err
}

// busy makes, changes and removes Services, Pods, Endpoints and slices for a while. What is numbered 0 stays.
func busy(client kubernetes.Interface, limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for i := 0; i < 2 || time.Now().Before(deadline); i++ {
		if err := errors.Join(addRound(client, i), changeRound(client, i)); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		if i > 3 {
			if err := removeRound(client, i-3); err != nil {
				return fmt.Errorf("round %d: %w", i, err)
			}
		}
		time.Sleep(200 * time.Millisecond)
	}
	return nil
}

func addRound(client kubernetes.Interface, i int) error {
	ctx, core := context.Background(), client.CoreV1()
	label := map[string]string{"app": fmt.Sprintf("web-%d", i)}
	kinds := []corev1.ServiceType{corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer}
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("web-%d", i)},
		Spec:       corev1.ServiceSpec{Type: kinds[i%3], Selector: label, Ports: []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("web")}}},
	}
	if _, err := core.Services("default").Create(ctx, svc, metav1.CreateOptions{}); err != nil {
		return err
	}
	pod, err := core.Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("web-%d", i), Labels: label},
		Spec: corev1.PodSpec{NodeName: nodeName, Containers: []corev1.Container{{
			Name: "web", Image: "web", Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: 8080}},
		}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	ip := fmt.Sprintf("10.244.0.%d", 2+i%250)
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
	}
	if _, err := core.Pods("default").UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		return err
	}
	// One without a selector, whose Endpoints are mirrored.
	manual := fmt.Sprintf("manual-%d", i)
	_, err = core.Services("default").Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: manual}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = core.Endpoints("default").Create(ctx, &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: manual},
		Subsets:    []corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{{IP: "198.51.100.7"}}, Ports: []corev1.EndpointPort{{Port: 9376}}}},
	}, metav1.CreateOptions{})
	return err
}

func changeRound(client kubernetes.Interface, i int) error {
	name := fmt.Sprintf("web-%d", i)
	kind := []string{"LoadBalancer", "ClusterIP", "NodePort"}[i%3]
	_, err := client.CoreV1().Services("default").Patch(context.Background(), name, types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"type":%q,"sessionAffinity":"ClientIP"}}`, kind), metav1.PatchOptions{})
	return err
}

func removeRound(client kubernetes.Interface, i int) error {
	ctx, core, now := context.Background(), client.CoreV1(), int64(0)
	name, manual := fmt.Sprintf("web-%d", i), fmt.Sprintf("manual-%d", i)
	discovery := client.DiscoveryV1().EndpointSlices("default")
	return errors.Join(
		core.Services("default").Delete(ctx, name, metav1.DeleteOptions{}),
		core.Pods("default").Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now}),
		core.Services("default").Delete(ctx, manual, metav1.DeleteOptions{}),
		// The controller may have been quicker.
		ifThere(core.Endpoints("default").Delete(ctx, manual, metav1.DeleteOptions{})),
		// No garbage collector runs here.
		discovery.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name}),
	)
}

func ifThere(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// peersDid says whether each of them did its work: slices, rules, names.
func peersDid(client kubernetes.Interface, dns string) error {
	time.Sleep(3 * time.Second)
	ctx := context.Background()
	svc, err := client.CoreV1().Services("default").Get(ctx, "web-0", metav1.GetOptions{})
	if err != nil {
		return err
	}
	var wrong []error
	for _, name := range []string{"web-0", "manual-0"} {
		list, err := client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name})
		if err != nil || len(list.Items) != 1 || len(list.Items[0].Endpoints) != 1 {
			wrong = append(wrong, fmt.Errorf("kube-controller-manager made no right slice of %s: %v %v", name, list, err))
		}
	}
	rules, err := exec.Command("nft", "list", "table", "ip", "kube-proxy").CombinedOutput()
	if err != nil || !strings.Contains(string(rules), svc.Spec.ClusterIP) || !strings.Contains(string(rules), "10.244.0.2") {
		wrong = append(wrong, fmt.Errorf("kube-proxy has no rules for web-0 at %s: %v\n%.2000s", svc.Spec.ClusterIP, err, rules))
	}
	resolver := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, dns)
	}}
	found, err := resolver.LookupHost(ctx, "web-0.default.svc.cluster.local.")
	if err != nil || len(found) != 1 || found[0] != svc.Spec.ClusterIP {
		wrong = append(wrong, fmt.Errorf("CoreDNS says %v for web-0, whose address is %s: %v", found, svc.Spec.ClusterIP, err))
	}
	return errors.Join(wrong...)
}

// TestPeersOldAPI runs Portal's controllers on the oldest Kubernetes that they work with. It serves no ServiceCIDRs, which
// is said once and is no reason for an error.
func TestPeersOldAPI(t *testing.T) {
	const old = "kube-apiserver-1.30"
	need(t, harness.Peer(old), "test-peers")
	dir := t.TempDir()
	api, err := harness.StartKubeAPIServerOf(dir, old, startEtcd(t, 1)[0].ClientURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	client := connect(t, api.Kubeconfig)
	if err := peerNode(client); err != nil {
		t.Fatal(err)
	}
	metrics := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	controllers, err := harness.Start(dir, "controllers", harness.Portal(), "controllers", "--kubeconfig", api.Kubeconfig, "--metrics-bind-address", metrics)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(controllers.Kill)
	for i := range 5 {
		if err := errors.Join(addRound(client, i), changeRound(client, i)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"web-0", "manual-0", "web-4", "manual-4"} {
		expectSlice(t, client, name)
	}
	if err := removeRound(client, 1); err != nil {
		t.Fatal(err)
	}
	time.Sleep(35 * time.Second) // informers that fail are unhealthy after half a minute
	if err := harness.WaitURL("http://"+metrics+"/healthz", time.Second); err != nil {
		t.Error(err)
	}
	controllers.Kill()
	for _, line := range complaints(t, controllers.Log) {
		t.Errorf("portal controllers: %s", line)
	}
	log, err := os.ReadFile(controllers.Log)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(log), "servicecidrs"); n != 1 {
		t.Errorf("what is not served is said %d times:\n%s", n, log)
	}
}

// TestPeersDataplane is TestDataplaneConformance with a real kube-apiserver behind the proxies.
func TestPeersDataplane(t *testing.T) {
	for _, l := range laboratories {
		t.Run(l.mode, func(t *testing.T) {
			experiment(t, l.mode, "pt", harness.Recorded("dataplane", "golden.json"), nil, append(l.args, "--bin", filepath.Dir(harness.Peer("etcd")), "--port", fmt.Sprint(harness.FreePort())))
		})
	}
}
