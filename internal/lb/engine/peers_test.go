//go:build peers

package engine

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"portal/internal/lb/config"
	"portal/internal/lb/tlspolicy"
)

// TestPeersOpenSSL: for each policy, openssl agrees on exactly the versions and suites that it has.
func TestPeersOpenSSL(t *testing.T) {
	s, ca := serve(t, echo), newAuthority(t)
	e := newEngine(t, Options{})
	var cfg config.Config
	at := map[string]netip.AddrPort{}
	for _, p := range tlspolicy.All() {
		at[p.Name] = unused(t)
		one := tcpConfig(at[p.Name], s.address)
		l := one.Listeners[0]
		l.Name, l.Protocol = p.Name, config.SSL
		l.TLS = &config.TLS{Certificates: []string{"ecdsa", "rsa"}, MinVersion: p.MinVersion, MaxVersion: p.MaxVersion, CipherSuites: p.CipherSuites}
		cfg.Listeners, cfg.Pools = append(cfg.Listeners, l), one.Pools
	}
	cfg.Certificates = map[string]*config.Certificate{"ecdsa": ca.issue(t, "a.test"), "rsa": issueRSA(t, ca, "a.test")}
	apply(t, e, cfg)
	versions := map[string]uint16{"-tls1": 0x0301, "-tls1_1": 0x0302, "-tls1_2": 0x0303, "-tls1_3": 0x0304}
	suites := opensslSuites(t)
	agreed, refused := 0, 0
	for _, p := range tlspolicy.All() {
		for flag, version := range versions {
			want := version >= p.MinVersion && version <= p.MaxVersion
			if version < 0x0303 && !slices.ContainsFunc(p.Suites, func(s string) bool { return strings.HasSuffix(s, "-SHA") }) {
				want = false // there is no other suite for these versions
			}
			if got := connects(t, at[p.Name], flag, "-cipher", "ALL:@SECLEVEL=0"); got != want {
				t.Errorf("%s: openssl %s connects: %v, want %v", p.Name, flag, got, want)
			}
		}
		for _, suite := range suites {
			version := "-tls1_2"
			if p.MaxVersion < 0x0303 {
				version = "-tls1"
			}
			want := slices.Contains(p.Suites, suite)
			got := connects(t, at[p.Name], version, "-cipher", suite+":@SECLEVEL=0")
			if got != want {
				t.Errorf("%s: openssl with %s connects: %v, want %v", p.Name, suite, got, want)
			}
			if got {
				agreed++
			} else {
				refused++
			}
		}
	}
	t.Logf("%d policies with %d suites: agreed %d times, refused %d times", len(at), len(suites), agreed, refused)
}

// opensslSuites are those of all policies that this openssl has.
func opensslSuites(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("openssl", "ciphers", "-s", "-tls1_2", "ALL:@SECLEVEL=0").Output()
	if err != nil {
		t.Fatalf("openssl is needed: %v", err)
	}
	has := strings.Split(strings.TrimSpace(string(out)), ":")
	var suites []string
	for _, p := range tlspolicy.All() {
		for _, s := range append(slices.Clone(p.Suites), p.NotOffered...) {
			if slices.Contains(has, s) && !slices.Contains(suites, s) {
				suites = append(suites, s)
			}
		}
	}
	if len(suites) < 15 {
		t.Fatalf("openssl has only %v", suites)
	}
	return suites
}

// connects says whether openssl gets its bytes back.
func connects(t *testing.T, at netip.AddrPort, args ...string) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "openssl", append([]string{"s_client", "-connect", at.String(), "-quiet", "-no_ign_eof", "-servername", "a.test"}, args...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(stdin, "hello\n")
	buf := make([]byte, 6)
	_, err = io.ReadFull(stdout, buf)
	_ = stdin.Close()
	_ = cmd.Wait()
	return err == nil && string(buf) == "hello\n"
}

func issueRSA(t *testing.T, a *authority, name string) *config.Certificate {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return &config.Certificate{
		Chain: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:   pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}),
	}
}

// TestPeersProxyProtocol: nginx and HAProxy as endpoints see the client's address in both versions, with and without TLS.
func TestPeersProxyProtocol(t *testing.T) {
	ca := newAuthority(t)
	cert := ca.issue(t, "pod.test")
	for name, start := range map[string]func(*testing.T, netip.AddrPort, string){"nginx": startNginx, "haproxy": startHAProxy} {
		for _, encrypted := range []bool{false, true} {
			for version := 1; version <= 2; version++ {
				t.Run(fmt.Sprintf("%s/v%d/tls=%v", name, version, encrypted), func(t *testing.T) {
					endpoint, at := unused(t), unused(t)
					pemFile := ""
					if encrypted {
						pemFile = filepath.Join(t.TempDir(), "pem")
						if err := os.WriteFile(pemFile, append(slices.Clone(cert.Chain), cert.Key...), 0o600); err != nil {
							t.Fatal(err)
						}
					}
					start(t, endpoint, pemFile)
					e := newEngine(t, Options{})
					cfg := tcpConfig(at, endpoint)
					p := cfg.Pools["web"]
					p.ProxyProtocol = version
					p.HealthCheck = &config.HealthCheck{Protocol: config.HTTP, Path: "/", Healthy: 1, Unhealthy: 2, Interval: 50 * time.Millisecond, Timeout: patience}
					if encrypted {
						p.Protocol, p.TLS, p.HealthCheck.Protocol = config.SSL, &config.EndpointTLS{CA: ca.pem, ServerName: "pod.test"}, config.HTTPS
					}
					apply(t, e, cfg)
					c := dialTo(t, at)
					fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
					answer, err := io.ReadAll(c)
					if want := "client=" + localOf(c).String() + " "; err != nil || !strings.Contains(string(answer), want) {
						t.Fatalf("the endpoint answered %q, %v; want %q in it", answer, err, want)
					}
					// Checks have a header of their own, or the endpoint would refuse them.
					eventually(t, "some checks are done", func() bool {
						return e.checks.Results()["web"][endpoint].Checks >= 3
					})
					if r := e.checks.Results()["web"][endpoint]; r.Failures > 0 {
						t.Errorf("checks failed: %+v", r)
					}
				})
			}
		}
	}
}

func startNginx(t *testing.T, at netip.AddrPort, pemFile string) {
	dir := t.TempDir()
	options := "proxy_protocol"
	ssl := ""
	if pemFile != "" {
		options, ssl = "ssl proxy_protocol", fmt.Sprintf("ssl_certificate %[1]s; ssl_certificate_key %[1]s;", pemFile)
	}
	conf := fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/error;
events {}
http { access_log off; client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
server { listen %[2]s %[3]s; %[4]s return 200 "client=$proxy_protocol_addr:$proxy_protocol_port \n"; } }
`, dir, at, options, ssl)
	runPeer(t, at, conf, "nginx", func(file string) []string { return []string{"-c", file, "-p", dir} })
}

func startHAProxy(t *testing.T, at netip.AddrPort, pemFile string) {
	options := "accept-proxy"
	if pemFile != "" {
		options += " ssl crt " + pemFile
	}
	conf := fmt.Sprintf(`defaults
  mode http
  timeout client 60s
frontend f
  bind %s %s
  http-request return status 200 content-type text/plain lf-string "client=%%[src]:%%[src_port] "
`, at, options)
	runPeer(t, at, conf, "haproxy", func(file string) []string { return []string{"-db", "-f", file} })
}

// runPeer starts a program and waits until it listens.
func runPeer(t *testing.T, at netip.AddrPort, conf, name string, args func(string) []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), name+".conf")
	if err := os.WriteFile(file, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(name, args(file)...)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatalf("%s is needed (a Debian package): %v", name, err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	eventually(t, name+" listens", func() bool {
		c, err := net.Dial("tcp", at.String())
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
}
