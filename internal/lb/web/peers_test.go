//go:build peers

package web

import (
	"bufio"
	"crypto/x509"
	"encoding/pem"
	"encoding/xml"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"portal/internal/lb/web/probes"
)

// free is a port at which nobody listens at present.
func free(t *testing.T) netip.AddrPort { return refused(t) }

// run starts a program that listens at an address, and ends it with the test.
func run(t *testing.T, at netip.AddrPort, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		t.Fatalf("%s is needed (a Debian package): %v", name, err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(os.Interrupt)
		cmd.Wait()
	})
	eventually(t, name+" listens", func() bool {
		c, err := net.Dial("tcp", at.String())
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func nginx(t *testing.T, endpoint netip.AddrPort) netip.AddrPort {
	at := free(t)
	dir := t.TempDir()
	conf := write(t, "nginx.conf", fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/error;
events {}
http { access_log off; client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
server { listen %[2]s; location / { proxy_pass http://%[3]s; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host; } } }
`, dir, at, endpoint))
	run(t, at, "nginx", "-c", conf)
	return at
}

func haproxy(t *testing.T, endpoint netip.AddrPort) netip.AddrPort {
	at := free(t)
	conf := write(t, "haproxy.cfg", fmt.Sprintf(`defaults
  mode http
  timeout client 5s
  timeout server 5s
  timeout connect 5s
frontend f
  bind %s
  default_backend b
backend b
  server s %s
`, at, endpoint))
	run(t, at, "haproxy", "-db", "-f", conf)
	return at
}

// quiet is true when nothing more comes: how many answers a peer gives is not known.
func quiet(answers int, c net.Conn, r *bufio.Reader) bool {
	wait := 2 * time.Second
	if answers > 0 {
		wait = 300 * time.Millisecond
	}
	c.SetReadDeadline(time.Now().Add(wait))
	_, err := r.Peek(1)
	c.SetReadDeadline(time.Now().Add(patience))
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// TestPeersProbes shows what nginx and HAProxy do with every probe. Portal must refuse what both refuse.
func TestPeersProbes(t *testing.T) {
	w := &witness{}
	endpoint := handler(t, w.ServeHTTP)
	s := start(t, pool(endpoint))
	peers := []netip.AddrPort{nginx(t, endpoint), haproxy(t, endpoint)}
	var table strings.Builder
	tw := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "probe\tPortal\tnginx\tHAProxy")
	accepted := [3]int{}
	smuggled := [3]int{}
	all := probes.All()
	for _, p := range all {
		var answers [3]string
		for i, at := range append([]netip.AddrPort{s.address}, peers...) {
			answers[i] = strings.ReplaceAll(probe(t, at, p, quiet), "+open", "")
			seen := w.take()
			if strings.HasPrefix(answers[i], "200") {
				accepted[i]++
			}
			if judge(answers[i], seen) != nil {
				answers[i] += fmt.Sprintf(" (%d reached the endpoint)", len(seen))
				smuggled[i]++
			}
		}
		mark := ""
		refuses := func(answer string) bool { return !strings.HasPrefix(answer, "200") }
		if !refuses(answers[0]) && refuses(answers[1]) && refuses(answers[2]) {
			mark = "\tonly Portal accepts"
			t.Errorf("%s: Portal answers %s, nginx %s, HAProxy %s", p.Name, answers[0], answers[1], answers[2])
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s%s\n", p.Name, answers[0], answers[1], answers[2], mark)
	}
	tw.Flush()
	t.Logf("\n%s", table.String())
	t.Logf("of %d probes accepted: Portal %d, nginx %d, HAProxy %d; more or fewer requests at the endpoint than answers: %d, %d, %d", len(all), accepted[0], accepted[1], accepted[2], smuggled[0], smuggled[1], smuggled[2])
}

// h2spec runs the conformance tests for HTTP/2 servers, and returns what failed.
func h2spec(t *testing.T, at netip.AddrPort) (failed []string, passed int) {
	t.Helper()
	report := filepath.Join(t.TempDir(), "report.xml")
	program := filepath.Join("..", "..", "..", ".cache", "peers", "h2spec")
	cmd := exec.Command(program, "-h", at.Addr().String(), "-p", fmt.Sprint(at.Port()), "-t", "-k", "-o", "5", "-j", report)
	output, err := cmd.CombinedOutput()
	data, missing := os.ReadFile(report)
	if missing != nil {
		t.Fatalf("%s (make peers-lb builds it): %v: %s", program, err, output)
	}
	var suites struct {
		Suites []struct {
			Name  string `xml:"name,attr"`
			Cases []struct {
				Package string    `xml:"package,attr"`
				Name    string    `xml:"classname,attr"`
				Failure *struct{} `xml:"failure"`
				Error   *struct{} `xml:"error"`
				Skipped *struct{} `xml:"skipped"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(data, &suites); err != nil {
		t.Fatal(err)
	}
	for _, suite := range suites.Suites {
		for _, c := range suite.Cases {
			switch {
			case c.Failure != nil || c.Error != nil:
				failed = append(failed, c.Package+": "+c.Name)
			case c.Skipped == nil:
				passed++
			}
		}
	}
	return failed, passed
}

// TestPeersH2spec compares with nginx: Portal must not fail more of the tests.
func TestPeersH2spec(t *testing.T) {
	endpoint := named(t, "a")
	s := start(t, pool(endpoint), withTLS)
	own, passed := h2spec(t, s.address)
	theirs, theirPassed := h2spec(t, nginxTLS(t, endpoint))
	t.Logf("Portal passes %d and fails %d: %s", passed, len(own), strings.Join(own, "; "))
	t.Logf("nginx passes %d and fails %d: %s", theirPassed, len(theirs), strings.Join(theirs, "; "))
	if len(own) > len(theirs) || passed < 100 {
		t.Errorf("Portal fails %d, nginx %d", len(own), len(theirs))
	}
}

func nginxTLS(t *testing.T, endpoint netip.AddrPort) netip.AddrPort {
	at := free(t)
	dir := t.TempDir()
	pair := certificate(t)
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	cert := write(t, "cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]})))
	private := write(t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})))
	conf := write(t, "nginx.conf", fmt.Sprintf(`daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/error;
events {}
http { access_log off; client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
server { listen %[2]s ssl http2; ssl_certificate %[4]s; ssl_certificate_key %[5]s; location / { proxy_pass http://%[3]s; } } }
`, dir, at, endpoint, cert, private))
	run(t, at, "nginx", "-c", conf)
	return at
}
