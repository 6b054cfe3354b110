package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"portal/test/harness"
)

// TestDNSConformance sends `portal dns` the queries recorded from CoreDNS, over UDP and over TCP. Afterwards its metrics must be readable.
// `make test-peers` does the same with Kubernetes' own API server.
func TestDNSConformance(t *testing.T) {
	dnsConformance(t, startPortal(t, "--controllers", "none"))
}

func dnsConformance(t *testing.T, api *harness.API) {
	folder := harness.Recorded("dns")
	server, status := startDNS(t, api.Kubeconfig)
	golden := filepath.Join(folder, "golden.json")
	env := []string{"KUBECONFIG=" + api.Kubeconfig, "DNS=" + server, "PYTHONDONTWRITEBYTECODE=1"}
	checkDNS(t, folder, golden, append(env, "KEEP=1"))
	checkDNS(t, folder, casesOverTCP(t, golden), append(env, "SETUP=0"))
	scrape(t, status)
}

// startDNS runs `portal dns` until the test ends, and returns its address and that of its metrics. One of the recorded answers
// over UDP is longer than 1,232 bytes.
func startDNS(t *testing.T, kubeconfig string) (addr, status string) {
	t.Helper()
	addr = fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	p, status := runDNS(t, "--kubeconfig", kubeconfig, "--listen", addr, "--upstream", "none")
	t.Cleanup(p.Kill)
	return addr, status
}

// runDNS runs `portal dns` and waits until it is ready.
func runDNS(t *testing.T, args ...string) (p *harness.Process, status string) {
	t.Helper()
	need(t, harness.Portal(), "build")
	status = fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	p, err := harness.Start(t.TempDir(), "portal-dns", harness.Portal(), append([]string{"dns", "--metrics-bind-address", status}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := harness.WaitURL("http://"+status+"/ready", time.Minute); err != nil {
		p.Kill()
		t.Fatalf("%v\n%s", err, p.Tail())
	}
	return p, status
}

// TestDNSAddressInUse: several servers run beside each other at addresses of their own; at the same one, the second says whose it is.
func TestDNSAddressInUse(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	at := func() string { return fmt.Sprintf("127.0.0.1:%d", harness.FreePort()) }
	taken := at()
	first, _ := runDNS(t, "--kubeconfig", api.Kubeconfig, "--listen", taken, "--upstream", "none")
	t.Cleanup(first.Kill)
	second, _ := runDNS(t, "--kubeconfig", api.Kubeconfig, "--listen", at(), "--upstream", "none")
	t.Cleanup(second.Kill)
	out, err := harness.Run(t.Context(), nil, harness.Portal(), "dns", "--kubeconfig", api.Kubeconfig, "--listen", at()+","+taken, "--metrics-bind-address", "", "--upstream", "none")
	want := fmt.Sprintf("portal: listen on tcp %s: bind: address already in use (pid %d (%s dns) has it; choose another with --listen)\n", taken, first.Pid(), harness.Portal())
	if exitStatus(err) != 2 || out != want {
		t.Errorf("exit status %d: %s, want 2: %s", exitStatus(err), out, want)
	}
}

// scrape reads the metrics.
func scrape(t *testing.T, status string) string {
	t.Helper()
	r, err := http.Get("http://" + status + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("/metrics: %s %v\n%.2000s", r.Status, err, body)
	}
	return string(body)
}

// TestDNSCorefile runs `portal dns` with a Corefile as clusters have it: with a stub zone, imports and node names. It ends in order
// when its terminal goes away.
func TestDNSCorefile(t *testing.T) {
	t.Parallel()
	api := startPortal(t, "--controllers", "none")
	dir := t.TempDir()
	port := harness.FreePort()
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	for name, text := range map[string]string{
		"Corefile": fmt.Sprintf(`.:%d {
    bind 127.0.0.1
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
      kubeconfig %s
      pods insecure
      fallthrough in-addr.arpa ip6.arpa
    }
    hosts %s/NodeHosts {
      ttl 60
      fallthrough
    }
    cache 30
    loop
    forward . %s
}
import %s/*.server
`, port, api.Kubeconfig, dir, upstreamDNS(t, "192.0.2.1"), dir),
		"lan.server": fmt.Sprintf("lan.example:%d {\n  bind 127.0.0.1\n  cache 30\n  forward . %s\n}\n", port, upstreamDNS(t, "192.0.2.2")),
		"NodeHosts":  "10.0.0.7 node-a\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p, status := runDNS(t, "--corefile", filepath.Join(dir, "Corefile"))
	defer p.Kill()
	for _, network := range []string{"udp", "tcp"} {
		for name, want := range map[string]string{
			"kubernetes.default.svc.cluster.local.": "10.96.0.1", "www.example.": "192.0.2.1", "a.lan.example.": "192.0.2.2", "lan.example.": "192.0.2.2", "node-a.": "10.0.0.7",
		} {
			m := new(dns.Msg)
			m.SetQuestion(name, dns.TypeA)
			r, _, err := (&dns.Client{Net: network, Timeout: 10 * time.Second}).Exchange(m, addr)
			if err != nil || len(r.Answer) != 1 || r.Answer[0].(*dns.A).A.String() != want {
				t.Errorf("%s over %s: %v %v, want %s", name, network, r, err, want)
			}
		}
	}
	if text := scrape(t, status); !strings.Contains(text, `zones="lan.example."`) {
		t.Error("the metrics lack the stub zone's cache")
	}
	if err := syscall.Kill(p.Pid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(20 * time.Second); err != nil {
		t.Errorf("after SIGHUP: %v\n%s", err, p.Tail())
	}
}

// upstreamDNS answers every query with one address until the test ends.
func upstreamDNS(t *testing.T, ip string) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started, done := make(chan struct{}), make(chan struct{})
	d := &dns.Server{PacketConn: c, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(r)
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(ip)}}
		_ = w.WriteMsg(m)
	})}
	go func() { _ = d.ActivateAndServe(); close(done) }()
	<-started
	t.Cleanup(func() { _ = d.Shutdown(); <-done })
	return c.LocalAddr().String()
}

func checkDNS(t *testing.T, folder, cases string, env []string) {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Fatal("python3 is needed for the checker of the recorded answers: ", err)
	}
	out, err := harness.Run(context.Background(), env, "python3", filepath.Join(folder, "check.py"), "check", cases)
	failed, passed := harness.Failures(out)
	for _, f := range failed {
		t.Errorf("%s\n  %s", f.Name, strings.Join(f.Lines, "\n  "))
	}
	if passed == 0 {
		t.Fatalf("nothing passed: %v\n%s", err, out)
	}
	t.Logf("%d cases of %s passed", passed, filepath.Base(cases))
}

// casesOverTCP writes a copy of the cases in which each comes by TCP; those about the size of a datagram are left out.
func casesOverTCP(t *testing.T, golden string) string {
	t.Helper()
	raw, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	var cases, out []map[string]any
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if c["raw"] == nil && c["part_of"] == nil {
			c["tcp"] = true
			out = append(out, c)
		}
	}
	raw, err = json.Marshal(out)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tcp.json")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
