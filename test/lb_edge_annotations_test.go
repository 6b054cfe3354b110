package test

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/internal/lab"
	"portal/test/harness"
)

// http: requests are read, and the Pod learns of the client in header fields. What is passed on as bytes has none.
func (e *edge) http(t *testing.T) {
	a := e.service(t, "http", "web", "", aws("backend-protocol", "http"))
	e.until(t, "the client's address in X-Forwarded-For", has("X-Forwarded-For: 203.0.113.10\n", "X-Forwarded-Proto: http\n", "X-Forwarded-Port: 80\n"), "http://"+a.String()+"/header")
	b := e.service(t, "tcp", "web", "", aws("backend-protocol", "tcp"), aws("connection-idle-timeout", "60"))
	if out := e.until(t, "an answer through bytes", has("GET HTTP/1.1"), "http://"+b.String()+"/header"); strings.Contains(out, "X-Forwarded") {
		t.Errorf("in tcp mode the Pod sees\n%s", out)
	}
	// From Pods and from the nodes themselves, the address is the balancer's as well.
	for _, name := range e.NodeNames() {
		if out := on(t, e.Node(name), "curl", "-sS", "--max-time", "20", "http://"+a.String()+"/header"); !strings.Contains(out, "X-Forwarded-For: 192.168.100.1") {
			t.Errorf("from %s the Pod sees\n%s", name, out)
		}
	}
	labKubectl(t, e.Lab, "", "delete", "service", "http", "tcp", "--timeout=60s")
}

// tls: TLS ends at the ports that are named, with the certificate of the ARN and the versions of the policy; a new certificate is used at once; without one the
// port is closed.
func (e *edge) tls(t *testing.T) {
	const id = "12345678-1234-1234-1234-123456789012"
	a := e.service(t, "tls", "web", "ports: [{name: http, port: 80, targetPort: 9376}, {name: https, port: 443, targetPort: 9376}, {name: alt, port: 8443, targetPort: 9376}]",
		aws("ssl-cert", "arn:aws:acm:us-east-1:123456789012:certificate/"+id), aws("backend-protocol", "http"), aws("ssl-ports", "443,8443"), aws("ssl-negotiation-policy", "ELBSecurityPolicy-TLS-1-2-2017-01")).String()
	eventWith(t, e.Lab, "tls", "CertificateUnavailable", "no Secret default/"+id)
	e.until(t, "a closed port without a certificate", fails("Failed to connect"), "-k", "https://"+a+"/")
	e.certificate(t, id, "first.example")
	e.until(t, "TLS", has("X-Forwarded-Proto: https\n", "X-Forwarded-Port: 443\n"), "-k", "https://"+a+"/header")
	e.until(t, "TLS at the other port", has("X-Forwarded-Port: 8443\n"), "-k", "https://"+a+":8443/header")
	e.until(t, "no TLS at a port that is not named", has("X-Forwarded-Proto: http\n"), "http://"+a+"/header")
	e.until(t, "the first certificate", has("CN=first.example"), "-k", "-v", "--stderr", "-", "https://"+a+"/")
	e.until(t, "TLS 1.2", has("web-"), "-k", "--tls-max", "1.2", "https://"+a+"/")
	e.until(t, "no TLS 1.1", fails("(35)"), "-k", "--tlsv1.1", "--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0", "https://"+a+"/")
	e.certificate(t, id, "second.example")
	e.until(t, "the second certificate", has("CN=second.example"), "-k", "-v", "--stderr", "-", "https://"+a+"/")
	labKubectl(t, e.Lab, "", "delete", "service", "tls", "--timeout=60s")
}

// endpointTLS: https and ssl speak TLS to Pods, which is said to be unverified.
func (e *edge) endpointTLS(t *testing.T) {
	for protocol, forwarded := range map[string]bool{"https": true, "ssl": false} {
		a := e.service(t, "to-"+protocol, "secret", "", aws("backend-protocol", protocol))
		out := e.until(t, "an answer through TLS", has("GET HTTP/1.1"), "http://"+a.String()+"/header")
		if strings.Contains(out, "X-Forwarded-For") != forwarded {
			t.Errorf("%s: the Pod sees\n%s", protocol, out)
		}
		eventWith(t, e.Lab, "to-"+protocol, "EndpointNotVerified", "portal.dev/endpoint-ca")
		labKubectl(t, e.Lab, "", "delete", "service", "to-"+protocol, "--timeout=60s")
	}
}

// proxyProtocol: Pods get a PROXY header, of version 1 as ELB sends it, or of version 2, and see the client's address.
func (e *edge) proxyProtocol(t *testing.T) {
	for version, more := range []string{"", `portal.dev/proxy-protocol-version: "2"`} {
		a := e.service(t, "proxied", "proxied", "", aws("proxy-protocol", "*"), more).String()
		e.until(t, "the version of the header", has(fmt.Sprint(version+1, "\n")), "http://"+a+"/proxy")
		e.until(t, "the client's address in the header", has("203.0.113.10"), "http://"+a+"/client")
	}
	labKubectl(t, e.Lab, "", "delete", "service", "proxied", "--timeout=60s")
}

// zones: by itself a balancer uses the Pods of the entry's zone, and those of all zones if it is to.
func (e *edge) zones(t *testing.T) {
	answered := func(a netip.Addr) map[string]bool {
		seen := map[string]bool{}
		for range 12 {
			out, err := e.curl(t, "http://"+a.String()+"/")
			if err != nil {
				return nil
			}
			seen[strings.TrimSpace(out)] = true
		}
		return seen
	}
	a := e.service(t, "zones", "web", "", aws("backend-protocol", "http"))
	eventually(t, lbLimit, "answers of one zone", func() string {
		if seen := answered(a); len(seen) != 1 {
			return fmt.Sprint(seen)
		}
		return ""
	})
	labKubectl(t, e.Lab, "", "annotate", "service", "zones", awsLB+"cross-zone-load-balancing-enabled=true")
	eventually(t, lbLimit, "answers of both zones", func() string {
		if seen := answered(a); len(seen) != 2 {
			return fmt.Sprint(seen)
		}
		return ""
	})
	labKubectl(t, e.Lab, "", "delete", "service", "zones", "--timeout=60s")
}

// groups: security groups are added to the ranges, or stand in their place, also where packets are passed on.
func (e *edge) groups(t *testing.T) {
	group := func(name, prefixes string) {
		labKubectl(t, e.Lab, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: portal-lb-security-groups, namespace: kube-system}\ndata: {%s: %q, sg-42efd82e: 198.51.100.0/24}\n", name, prefixes), "apply")
	}
	group("sg-53fae93f", "203.0.113.0/24")
	a := e.service(t, "groups", "web", "loadBalancerSourceRanges: [198.51.100.0/24]", aws("extra-security-groups", "sg-53fae93f,sg-42efd82e")).String()
	e.until(t, "an answer to who is in an extra group", has("web-"), "http://"+a+"/")
	group("sg-53fae93f", "203.0.113.128/25")
	e.until(t, "no answer to others", fails("(28)"), "--connect-timeout", "1", "http://"+a+"/")
	b := e.service(t, "groups-l4", "web", "", aws("security-groups", "sg-42efd82e")).String()
	e.until(t, "no answer to who is in no group", fails("(28)"), "--connect-timeout", "1", "http://"+b+"/")
	group("sg-53fae93f", "203.0.113.10")
	labKubectl(t, e.Lab, "", "annotate", "--overwrite", "service", "groups-l4", awsLB+"security-groups=sg-53fae93f,sg-none")
	e.until(t, "an answer to who is in the group", has("web-"), "http://"+b+"/")
	eventWith(t, e.Lab, "groups-l4", "SecurityGroupNotFound", "sg-none")
	labKubectl(t, e.Lab, "", "delete", "service", "groups", "groups-l4", "--timeout=60s")
}

// network: a network load balancer keeps the client's address, and nodes have its firewall rules.
func (e *edge) network(t *testing.T) {
	a := e.service(t, "nlb", "web", "externalTrafficPolicy: Local", aws("type", "nlb")).String()
	e.until(t, "the client's address at the Pod", has("203.0.113.10"), "http://"+a+"/client")
	name := "a" + strings.ReplaceAll(string(serviceOf(t, e.Lab, "nlb").UID), "-", "")[:31]
	for _, node := range e.NodeNames() {
		eventually(t, lbLimit, "the firewall rules of "+node, func() string {
			rules, err := e.Node(node).Exec(t.Context(), "nft", "list", "table", "ip", "portal-lb")
			for _, kind := range []string{"health", "client", "mtu"} {
				if !strings.Contains(rules, fmt.Sprintf(`comment "kubernetes.io/rule/nlb/%s=%s"`, kind, name)) {
					return fmt.Sprint(rules, err)
				}
			}
			return ""
		})
	}
	labKubectl(t, e.Lab, "", "delete", "service", "nlb", "--timeout=60s")
}

// internal: the internal balancers of all providers have addresses of an internal pool, and answer.
func (e *edge) internal(t *testing.T) {
	providers := map[string]string{
		"aws": awsLB + `internal: "true"`, "aws-old": awsLB + "internal: 0.0.0.0/0", "azure": `service.beta.kubernetes.io/azure-load-balancer-internal: "true"`,
		"openstack": `service.beta.kubernetes.io/openstack-internal-load-balancer: "true"`, "baidu": `service.beta.kubernetes.io/cce-load-balancer-internal-vpc: "true"`,
		"google": `cloud.google.com/load-balancer-type: "Internal"`, "gke": `networking.gke.io/load-balancer-type: "Internal"`,
		"alibaba": `service.beta.kubernetes.io/alibaba-cloud-loadbalancer-address-type: "intranet"`,
		"tencent": "service.kubernetes.io/qcloud-loadbalancer-internal-subnetid: subnet-xxxxx",
	}
	var all strings.Builder
	names := []string{"delete", "service", "--timeout=60s"}
	for name, line := range providers {
		all.WriteString(serviceManifest(name, "LoadBalancer", "web", "", line))
		names = append(names, name)
	}
	labKubectl(t, e.Lab, all.String(), "apply")
	inside := netip.MustParsePrefix("192.168.100.240/28")
	for name := range providers {
		a := ingressOf(t, e.Lab, name, 1)[0]
		if !inside.Contains(a) || (name == "tencent") != (a.String() == "192.168.100.250") {
			t.Errorf("%s has %s", name, a)
		}
		e.until(t, "an answer of "+name, has("web-"), "http://"+a.String()+"/")
	}
	labKubectl(t, e.Lab, "", names...)
}

// policies: a ClusterIP Service with a policy is led to the balancer too, wherever the client is.
func (e *edge) policies(t *testing.T) {
	labKubectl(t, e.Lab, serviceManifest("leader", "ClusterIP", "web", "", "portal.dev/load-balancing-policy: leader")+
		serviceManifest("sticky", "ClusterIP", "web", "ports: [{port: 80, targetPort: 9376, appProtocol: http}]", "portal.dev/load-balancing-hash: header:X-User"), "apply")
	answers := func(node, service string, header string) (map[string]bool, error) {
		seen := map[string]bool{}
		for range 10 {
			out, err := e.Node(node).Exec(t.Context(), "curl", "-sS", "--max-time", "5", "-H", header, "http://"+serviceOf(t, e.Lab, service).Spec.ClusterIP+"/")
			if err != nil {
				return nil, err
			}
			seen[strings.TrimSpace(out)] = true
		}
		return seen, nil
	}
	for _, service := range []string{"leader", "sticky"} {
		eventually(t, lbLimit, "one endpoint for all requests to "+service, func() string {
			all := map[string]bool{}
			for _, node := range e.NodeNames() {
				seen, err := answers(node, service, "X-User: somebody")
				if err != nil {
					return err.Error()
				}
				for pod := range seen {
					all[pod] = true
				}
			}
			if len(all) != 1 {
				return fmt.Sprint(all)
			}
			return ""
		})
	}
	eventually(t, lbLimit, "another endpoint for another user", func() string {
		all := map[string]bool{}
		for i := range 10 {
			seen, err := answers("node1", "sticky", fmt.Sprint("X-User: ", i))
			if err != nil {
				return err.Error()
			}
			for pod := range seen {
				all[pod] = true
			}
		}
		if len(all) != 2 {
			return fmt.Sprint(all)
		}
		return ""
	})
	labKubectl(t, e.Lab, "", "delete", "service", "leader", "sticky", "--timeout=60s")
}

// killed: connections live on when the program that configures the balancing process is killed.
func (e *edge) killed(t *testing.T) {
	labKubectl(t, e.Lab, serviceManifest("lasting", "ClusterIP", "web", "", "portal.dev/load-balancing-policy: random"), "apply")
	node := e.Node("node1")
	address := net.JoinHostPort(serviceOf(t, e.Lab, "lasting").Spec.ClusterIP, "80")
	eventually(t, lbLimit, "a captured cluster IP", func() string {
		if out := e.state(t, "node1", "state"); !strings.Contains(out, address) {
			return out
		}
		return ""
	})
	c := connectFrom(t, node, address)
	before, err := c.get("/")
	if err != nil {
		t.Fatal(err)
	}
	pid := program(t, "node1", e.Dir)
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	if again, err := c.get("/"); err != nil || again != before {
		t.Errorf("after the kill: %q, %v; want %q", again, err, before)
	}
	if out := on(t, node, "curl", "-sS", "--max-time", "20", "http://"+address+"/"); !strings.HasPrefix(out, "web-") {
		t.Errorf("a new connection while nobody configures the process: %q", out)
	}
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, lbLimit, "another program", func() string {
		if out := e.state(t, "node1", "state"); !strings.Contains(out, `"agents":1`) {
			return out
		}
		if program(t, "node1", e.Dir) == pid {
			return "the same one"
		}
		return ""
	})
	if again, err := c.get("/"); err != nil || again != before {
		t.Errorf("after the restart: %q, %v; want %q", again, err, before)
	}
	labKubectl(t, e.Lab, "", "delete", "service", "lasting", "--timeout=60s")
}

// repaired: what somebody removes of the rules is put back, and so are rules and process after a clean-up that came too early.
func (e *edge) repaired(t *testing.T) {
	a := e.service(t, "repaired", "web", "", aws("backend-protocol", "http")).String()
	answers := has("X-Forwarded-For: 203.0.113.10\n")
	e.until(t, "an answer", answers, "http://"+a+"/header")
	for what, command := range map[string][]string{
		"the table":        {"nft", "delete", "table", "ip", "portal-lb"},
		"the routing rule": {"ip", "rule", "del", "priority", "101"},
	} {
		for _, node := range e.NodeNames() {
			// The one that the answer came by has them; another may still be about to make them.
			eventually(t, lbLimit, what+" on "+node, func() string {
				if _, err := e.Node(node).Exec(t.Context(), command...); err != nil {
					return err.Error()
				}
				return ""
			})
		}
		e.until(t, "an answer after "+what+" was removed", answers, "http://"+a+"/header")
	}
	for _, node := range e.NodeNames() {
		pid := e.state(t, node, "state")
		on(t, e.Node(node), harness.Portal(), "lb", "--cleanup", "--run-dir", filepath.Join(lab.NodeDir(e.Dir, node), "balancing"))
		eventually(t, lbLimit, "another process on "+node, func() string {
			now, err := e.Node(node).Exec(t.Context(), "curl", "-sS", "--max-time", "20", "--unix-socket", filepath.Join(lab.NodeDir(e.Dir, node), "balancing", "control"), "http://worker/state")
			if err != nil || !strings.Contains(now, a) || strings.Contains(pid, now[:min(len(now), 100)]) {
				return fmt.Sprint(now, err)
			}
			return ""
		})
	}
	e.until(t, "an answer of the new processes", answers, "http://"+a+"/header")
	labKubectl(t, e.Lab, "", "delete", "service", "repaired", "--timeout=60s")
}

// slow begins what takes a minute: an idle timeout, draining, and health checks, with the values of the documents. What it returns waits for
// the ends.
func (e *edge) slow(t *testing.T) func(*testing.T) {
	idle := e.service(t, "rest", "web", "", aws("connection-idle-timeout", "60"), aws("cross-zone-load-balancing-enabled", "true"), aws("additional-resource-tags", "environment=prod,owner=devops"))
	well, gone := e.patient(t, "well"), e.patient(t, "gone")
	if err := gone.close(); err != nil {
		t.Fatal(err)
	}
	checking := time.Now()
	checked := e.external(t, "checked", map[string]string{"healthcheck-healthy-threshold": "", "healthcheck-unhealthy-threshold": "3", "healthcheck-interval": "20", "healthcheck-timeout": "5"}, well, gone)
	drained := e.service(t, "drained", "drained", "", aws("connection-draining-enabled", "true"), aws("connection-draining-timeout", "60"))
	logged := e.service(t, "logged", "web", "", aws("access-log-enabled", "true"), aws("access-log-emit-interval", "60"), aws("access-log-s3-bucket-name", "my-bucket"), aws("access-log-s3-bucket-prefix", "my-bucket-prefix/prod"))
	tagged := e.service(t, "tagged", "web", "", aws("backend-protocol", "http"), aws("access-log-enabled", "true"), aws("access-log-s3-bucket-name", "my-bucket"), aws("access-log-s3-bucket-prefix", "tagged"),
		"portal.dev/access-log-format: json", aws("additional-resource-tags", "environment=prod,owner=devops"))
	labKubectl(t, e.Lab, workload{name: "drained", replicas: 1}.String(), "apply")
	deployed(t, e.Lab, "drained", 2*time.Minute)
	for _, a := range []netip.Addr{idle, drained, logged, tagged} {
		answers(t, e.Lab, a, "/")
	}
	silent := connectFrom(t, e.Client, net.JoinHostPort(idle.String(), "80"))
	if _, err := silent.get("/"); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	// The endpoint leaves while its Pod lives on.
	leaving := connectFrom(t, e.Client, net.JoinHostPort(drained.String(), "80"))
	pod, err := leaving.get("/")
	if err != nil {
		t.Fatal(err)
	}
	labKubectl(t, e.Lab, "", "label", "pod", pod, "app-")
	left := time.Now()
	closed := make(chan time.Duration, 1)
	go func() {
		_ = silent.SetReadDeadline(time.Now().Add(3 * time.Minute))
		_, _ = silent.in.ReadByte()
		closed <- time.Since(begin)
	}()
	return func(t *testing.T) {
		t.Run("tags", func(t *testing.T) {
			eventually(t, lbLimit, "the tags in metrics", func() string {
				for _, node := range e.NodeNames() {
					if m := e.state(t, node, "metrics"); strings.Contains(m, "environment") && strings.Contains(m, "devops") {
						return ""
					}
				}
				return e.state(t, "node1", "metrics")
			})
		})
		t.Run("health", func(t *testing.T) {
			eventually(t, 3*time.Minute, "an endpoint that fails its checks", func() string {
				if s := e.state(t, "node1", "state"); !strings.Contains(s, `"healthy":false`) {
					return s
				}
				return ""
			})
			took := time.Since(checking)
			if took < 35*time.Second {
				t.Errorf("three checks 20 s apart took %v", took)
			}
			well.mu.Lock()
			seen := maps.Clone(well.conns)
			well.mu.Unlock()
			for _, node := range []string{"192.168.100.11", "192.168.100.12"} {
				if n, most := seen[node], int(took/(20*time.Second))+2; n < 1 || n > most {
					t.Errorf("%d connections of %s within %v; want 1 to %d", n, node, took, most)
				}
			}
			if out := answers(t, e.Lab, checked, "/"); out != "well" {
				t.Errorf("%s answers", out)
			}
		})
		t.Run("draining", func(t *testing.T) {
			for {
				last := time.Since(left)
				if _, err := leaving.get("/"); err != nil {
					if last < 50*time.Second {
						t.Errorf("the connection was closed %v after its endpoint had left: %v", last, err)
					}
					break
				}
				if last > 3*time.Minute {
					t.Fatalf("the connection is open %v after its endpoint has left", last)
				}
				time.Sleep(time.Second)
			}
		})
		t.Run("idle", func(t *testing.T) {
			if took := <-closed; took < 55*time.Second || took > 150*time.Second {
				t.Errorf("a silent connection was closed after %v", took)
			}
		})
		t.Run("log", func(t *testing.T) { e.accessLog(t) })
		t.Run("tagged log", e.taggedLog)
		labKubectl(t, e.Lab, "", "delete", "service", "rest", "checked", "drained", "logged", "tagged", "--timeout=60s")
	}
}
