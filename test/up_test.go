package test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// TestUpWithoutNetwork: on a machine that has nothing but lo, where no address can stand in for a client's, DNS answers at its
// cluster IPs all the same. Whoever deletes kube-dns or its endpoints has them back within seconds.
func TestUpWithoutNetwork(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			m := newLonelyMachine(t)
			m.do(t, ".cache/bin/portal up --cluster-cidr 10.244.0.0/16,fd00:244::/64 --proxy-mode "+mode+" >up.log 2>&1 &")
			m.wait(t, "up.log", "Ctrl-C stops it")
			resolves := func(when string) {
				t.Helper()
				for _, server := range []string{"10.96.0.10", "fd00:96::a"} {
					eventually(t, 10*time.Second, "DNS at "+server+" "+when, func() string {
						got := m.do(t, "dig +short +tries=1 +time=2 @"+server+" kubernetes.default.svc.cluster.local")
						if got == "10.96.0.1\n" {
							return ""
						}
						return got
					})
				}
			}
			resolves("at first")
			kubectl := ".cache/bin/portal kubectl -n kube-system "
			const want = "10.96.0.10 kube-dns-ipv4 kube-dns-ipv6"
			for _, harm := range []string{
				"delete service kube-dns", "delete endpointslices --all", "label endpointslices --all kubernetes.io/service-name-",
				`patch service kube-dns --type=merge -p '{"spec":{"type":"ExternalName","externalName":"a.example"}}'`,
			} {
				m.do(t, kubectl+harm)
				eventually(t, 20*time.Second, "kube-dns after "+harm, func() string {
					got := m.do(t, kubectl+"get service/kube-dns -o jsonpath={.spec.clusterIP}; echo; "+
						kubectl+"get endpointslices -l kubernetes.io/service-name=kube-dns -o jsonpath={.items[*].metadata.name}; echo")
					if strings.Join(strings.Fields(got), " ") == want {
						return ""
					}
					return got
				})
				resolves("after " + harm)
			}
		})
	}
}

// TestUpPods: Pods run while portal up does. When it ends, they do, and the machine's network is as it was; the next run starts
// them again.
func TestUpPods(t *testing.T) {
	t.Parallel()
	rootOnly(t)
	m := newMachine(t)
	eventually(t, 10*time.Second, "the machine's own addresses", func() string { return m.do(t, "ip -6 -o address show tentative") })
	look := func() string {
		return m.do(t, "ip -o link; ip -o address; ip route show table all; ip -6 route show table all; nft list ruleset; "+
			"cat /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding /proc/sys/net/ipv4/conf/all/send_redirects; "+
			"ps -e -o args | grep '[p]ortal-'; find /sys/fs/cgroup -maxdepth 4 -path \"*/portal/up-$(stat -Lc %i /proc/self/ns/net)\"")
	}
	before := look()
	const up = ".cache/bin/portal up >up.log 2>&1 & up=$!"
	const name = ".cache/bin/portal kubectl get pods -o jsonpath={.items[0].metadata.name}"
	m.do(t, up)
	m.wait(t, "up.log", "Ctrl-C stops it")
	m.do(t, ".cache/bin/portal kubectl apply -f /var/lib/portal/example.yaml")
	const ask = "curl --max-time 5 http://$(.cache/bin/portal kubectl get service my-service -o jsonpath={.spec.clusterIP})/"
	answers := func(when string) {
		t.Helper()
		eventually(t, time.Minute, "an answer "+when, func() string {
			if got := m.do(t, ask+" 2>&1"); !strings.HasPrefix(got, "image-processing-") {
				return got
			}
			return ""
		})
	}
	answers("at first")
	first := m.do(t, name)
	m.do(t, "kill -INT $up; wait $up")
	m.wait(t, "up.log", "Portal has stopped.")
	if after := look(); after != before {
		t.Errorf("it has left this behind:\n%s\n%s", changedLines(before, after), m.do(t, "cat up.log"))
	}
	m.do(t, up)
	m.wait(t, "up.log", "Ctrl-C stops it")
	answers("after a restart")
	if second := m.do(t, name); second != first {
		t.Errorf("the Pod %s was replaced by %s", first, second)
	}
	m.do(t, "kill -INT $up; wait $up")
}

// TestUpKeepsFilesForEtcd: clients that hold as many connections as they get to the API and to DNS leave files for etcd, which would end the
// process without them.
func TestUpKeepsFilesForEtcd(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	const files, left = 256, 64
	dir := t.TempDir()
	api, names := fmt.Sprintf("127.0.0.1:%d", harness.FreePort()), fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	p, err := harness.Start(dir, "up", "sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, files), harness.Portal(), "up", "--data-dir", filepath.Join(dir, "data"),
		"--listen", api, "--dns", names, "--dns-metrics-bind-address", "", "--run-pods", "none", "--proxy-mode", "none")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	eventually(t, time.Minute, "portal up", func() string {
		if out := p.Tail(); !strings.Contains(out, "Ctrl-C stops it") {
			return "it says " + out
		}
		return ""
	})
	client := connect(t, filepath.Join(dir, "data", "admin.kubeconfig"))
	configMap(t, client, "before") // over a connection that is known from now on
	for range files {
		for _, address := range []string{api, names} {
			c, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}
	}
	for i := range 20 {
		configMap(t, client, fmt.Sprintf("during-%d", i))
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
		if err != nil {
			t.Fatalf("%v\n%s", err, p.Tail())
		}
		if len(open) > files-left {
			t.Fatalf("%d of %d files are open: %d should be left", len(open), files, left)
		}
	}
	if err := p.Stop(30 * time.Second); err != nil {
		t.Errorf("%v\n%s", err, p.Tail())
	}
}
