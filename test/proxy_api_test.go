package test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"portal/internal/intent"
	"portal/test/harness"
)

// TestOwnWayToAPI: a Service whose external IP and port are those of the API server takes them from others, and not from the node's own
// proxy, which hears of all that comes after it, and removes the Service's rules when it is deleted.
func TestOwnWayToAPI(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	l := newProxyLab(t, "nftables")
	const port = 6443
	beside := netip.MustParseAddr("198.51.100.77") // an address of the node that is not among those of its Node
	l.run(t, "ip", "address", "add", beside.String()+"/32", "dev", "lo")
	var relay *harness.Relay
	if err := l.Node.Do(func() error {
		at, err := net.Listen("tcp", netip.AddrPortFrom(beside, port).String())
		if err == nil {
			relay = harness.NewRelay(at, strings.TrimPrefix(l.api.URL, "https://"))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(relay.Close)
	config, err := clientcmd.LoadFromFile(l.api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, cluster := range config.Clusters {
		cluster.Server, cluster.TLSServerName = fmt.Sprintf("https://%s:%d", beside, port), "127.0.0.1"
	}
	l.api.Kubeconfig = filepath.Join(l.dir, "beside.kubeconfig")
	if err := clientcmd.WriteToFile(*config, l.api.Kubeconfig); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	far := l.FarPods(intent.IPv4)
	l.create(t, labService("greedy", func(s *corev1.ServiceSpec) {
		s.ExternalIPs = []string{beside.String()}
		s.Ports[0].Port = port
	}), labSlice("greedy", intent.IPv4, far, nil))
	l.start(t)
	follows := func(name string) {
		t.Helper()
		relay.Cut() // a connection that is there already would go on
		relay.Mend()
		made := l.create(t, labService(name, nil), labSlice(name, intent.IPv4, far, nil))
		eventually(t, afterOutage, name+" arrives", func() string {
			st := l.state()
			if st == nil {
				return "the proxy does not answer; it said\n" + l.proxy.Tail()
			}
			for _, f := range st.Frontends {
				if f.Address != nil && f.Address.String() == made.Spec.ClusterIP && !f.Acknowledged.IsZero() {
					return ""
				}
			}
			return "it is not there"
		})
	}
	l.synced(t)
	follows("after")
	if rules := l.tables(t); strings.Contains(rules, beside.String()+" . tcp") {
		t.Errorf("the node's own way to the API leads to a Service:\n%s", rules)
	}
	if err := l.client.CoreV1().Services(labNamespace).Delete(ctx, "greedy", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	follows("afterwards")
	if rules := l.tables(t); strings.Contains(rules, beside.String()) {
		t.Errorf("of the Service that was deleted there still is\n%s", rules)
	}
}

// TestResumesWithoutLists restarts the API server under a proxy, with no more rights than kube-proxy has, and a DNS server. Both go on
// where they were: neither lists anything.
func TestResumesWithoutLists(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	dir := t.TempDir()
	log := filepath.Join(dir, "audit.log")
	replaceFile(t, filepath.Join(dir, "policy.yaml"), "apiVersion: audit.k8s.io/v1\nkind: Policy\nrules:\n- {level: Metadata, users: [\"system:kube-proxy\", dns]}\n- level: None\n")
	replaceFile(t, filepath.Join(dir, "tokens.csv"), "proxys,system:kube-proxy,1,\ndnss,dns,2,system:masters\n")
	l := newProxyLab(t, "nftables", "--controllers", "none", "--audit-policy-file", filepath.Join(dir, "policy.yaml"), "--audit-log-path", log,
		"--token-auth-file", filepath.Join(dir, "tokens.csv"))
	admin := l.api.Kubeconfig
	as := func(token string) string {
		config, err := clientcmd.LoadFromFile(admin)
		if err != nil {
			t.Fatal(err)
		}
		for _, user := range config.AuthInfos {
			*user = *clientcmdapi.NewAuthInfo()
			user.Token = token
		}
		path := filepath.Join(dir, token+".kubeconfig")
		if err := clientcmd.WriteToFile(*config, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	l.create(t, labService("before", nil), labSlice("before", intent.IPv4, l.FarPods(intent.IPv4), nil))
	l.api.Kubeconfig = as("proxys")
	l.start(t, "--report=false") // a report reads the Node
	l.settled(t, 30*time.Second)
	address := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	dns, _ := runDNS(t, "--kubeconfig", as("dnss"), "--listen", address, "--upstream", "none", "--report=false")
	t.Cleanup(dns.Kill)
	resolves := func(name string) {
		t.Helper()
		eventually(t, afterOutage, "the name of "+name, func() string {
			out, err := harness.Run(t.Context(), nil, "dig", "+short", "+time=1", "+tries=1", "-p", strings.TrimPrefix(address, "127.0.0.1:"), "@127.0.0.1", name+"."+labNamespace+".svc.cluster.local")
			if err != nil || strings.TrimSpace(out) == "" {
				return fmt.Sprintf("%q %v", out, err)
			}
			return ""
		})
	}
	resolves("before")
	before := len(readEvents(t, log))
	if before == 0 {
		t.Fatal("the audit log does not have how they began")
	}
	l.api.Kubeconfig = admin
	if err := l.api.Stop(time.Minute); err != nil {
		t.Fatal(err)
	}
	restart(t, l)
	far := l.FarPods(intent.IPv4)
	l.create(t, labService("after", nil), labSlice("after", intent.IPv4, far, nil))
	l.settled(t, afterOutage)
	resolves("after")
	watched := map[string]bool{}
	for _, e := range readEvents(t, log)[before:] {
		switch {
		case strings.Contains(e.RequestURI, "no-object"): // it asks whether the server knows the version, and gets no objects
		case e.Verb == "list", strings.Contains(e.RequestURI, "sendInitialEvents=true"):
			t.Errorf("%s listed anew: %s", e.User.Username, e.RequestURI)
		case e.ResponseStatus != nil && e.ResponseStatus.Code == http.StatusForbidden && strings.Contains(e.RequestURI, "watch=true"):
			t.Errorf("%s was told that it may not: %s", e.User.Username, e.RequestURI)
		case e.Verb == "watch":
			watched[e.User.Username] = true
		}
	}
	if len(watched) != 2 {
		t.Errorf("only %v watched after the restart", watched)
	}
}

// TestConfigureSysctls: the proxy says that forwarding is off and leaves it so, or turns it on if it is told to, for good.
func TestConfigureSysctls(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	l := newProxyLab(t, "nftables")
	const forward = "net.ipv4.ip_forward"
	far := l.FarPods(intent.IPv4)
	l.create(t, labService("forwarded", nil), labSlice("forwarded", intent.IPv4, far, nil))
	l.run(t, "sysctl", "-w", forward+"=0")
	forwards := func() string { return strings.TrimSpace(l.run(t, "sysctl", "-n", forward)) }
	l.start(t)
	l.synced(t)
	eventually(t, soon, "the proxy says that packets will be lost", func() string {
		if st := l.state(); st == nil || !strings.Contains(fmt.Sprint(st.Problems), "ip_forward") {
			return fmt.Sprintf("%+v", st)
		}
		return ""
	})
	if forwards() != "0" {
		t.Error("the proxy turned forwarding on without being told to")
	}
	l.stop(t)
	l.start(t, "--configure-sysctls")
	l.synced(t)
	eventually(t, soon, "forwarding is on", func() string {
		if got := forwards(); got != "1" {
			return got
		}
		return ""
	})
	l.stop(t)
	if forwards() != "1" {
		t.Error("forwarding is off again: others may count on it meanwhile")
	}
}
