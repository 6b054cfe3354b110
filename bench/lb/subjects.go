package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"portal/bench/report"
)

// The subjects.
const (
	nginx        = "nginx"
	haproxy      = "HAProxy"
	caddy        = "Caddy"
	reverseProxy = "ReverseProxy"
	goTLS        = "GoTLS"
	portal       = "Portal"
)

// bench is one run.
type bench struct {
	options
	ctx      context.Context
	dir      string
	report   *report.Report
	endpoint string
	subjects []*subject
	others   []*exec.Cmd
	fresh    int // how many were started again
}

// subject is a running balancer.
type subject struct {
	name string
	host string // its address; the ports are those of serving
	cmd  *exec.Cmd
}

func (s *subject) address(port int) string { return fmt.Sprintf("%s:%d", s.host, firstPort+port) }

const firstPort = 18080

// stop ends what was started.
func (b *bench) stop() {
	for _, s := range b.subjects {
		b.end(s)
	}
	for _, cmd := range b.others {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

func (b *bench) end(s *subject) {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// again starts another process of a subject, at an address of its own.
func (b *bench) again(s *subject) (*subject, error) {
	b.fresh++
	out := &subject{name: s.name, host: fmt.Sprintf("127.0.92.%d", b.fresh)}
	var err error
	if out.cmd, err = b.command(out); err != nil {
		return nil, err
	}
	return out, b.begin(out.cmd, out.address(plainPort))
}

// start starts the endpoint and the subjects.
func (b *bench) start(names []string) error {
	if err := writeCertificate(b.path("cert.pem"), b.path("key.pem")); err != nil {
		return err
	}
	both, err := os.ReadFile(b.path("cert.pem"))
	if err != nil {
		return err
	}
	key, err := os.ReadFile(b.path("key.pem"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.path("both.pem"), append(both, key...), 0o600); err != nil {
		return err
	}
	if err := b.startEndpoint(); err != nil {
		return err
	}
	for i, name := range names {
		s := &subject{name: name, host: fmt.Sprintf("127.0.91.%d", i+2)}
		if s.cmd, err = b.command(s); err != nil {
			return err
		}
		if s.cmd == nil {
			b.report.Note("%s was left out: %s is not there (make peers-lb builds it).", name, b.caddy)
			continue
		}
		if err := b.begin(s.cmd, s.address(plainPort)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		b.subjects = append(b.subjects, s)
	}
	return nil
}

func (b *bench) path(name string) string { return filepath.Join(b.dir, name) }

func (b *bench) write(name, text string) (string, error) {
	return b.path(name), os.WriteFile(b.path(name), []byte(text), 0o600)
}

// begin starts a program, and waits until it listens.
func (b *bench) begin(cmd *exec.Cmd, address string) error {
	output, err := os.Create(b.path(strings.ReplaceAll(address, ":", "-") + ".log"))
	if err != nil {
		return err
	}
	defer output.Close()
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		return err
	}
	err = report.Until(b.ctx, 30*time.Second, 20*time.Millisecond, func() error {
		c, err := net.Dial("tcp", address)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	if err == nil {
		return nil
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	text, _ := os.ReadFile(output.Name())
	return fmt.Errorf("%s does not listen: %w: %s", cmd.Path, err, text)
}

// nginxMain are settings of every nginx here. As one process it is easiest to measure.
const nginxMain = `daemon off; master_process off; pid %[1]s/%[2]s.pid; error_log %[1]s/%[2]s.error;
include /etc/nginx/modules-enabled/50-mod-stream.conf;
events { worker_connections 16384; }
`

const nginxTemporary = `access_log off; keepalive_requests 1000000000; keepalive_timeout 300s;
client_body_temp_path %[1]s/%[2]s.1; proxy_temp_path %[1]s/%[2]s.2; fastcgi_temp_path %[1]s/%[2]s.3; uwsgi_temp_path %[1]s/%[2]s.4; scgi_temp_path %[1]s/%[2]s.5;
`

func (b *bench) startEndpoint() error {
	b.endpoint = fmt.Sprintf("127.0.91.1:%d", firstPort)
	if err := os.WriteFile(b.path("bulk"), make([]byte, bulkBytes), 0o644); err != nil {
		return err
	}
	conf, err := b.write("endpoint.conf", fmt.Sprintf(nginxMain+`http { `+nginxTemporary+` sendfile on;
server { listen %[3]s backlog=8192; location = /bulk { root %[1]s; } location / { default_type text/plain; return 200 "hello, world\n"; } } }
`, b.dir, "endpoint", b.endpoint))
	if err != nil {
		return err
	}
	cmd := exec.Command("nginx", "-c", conf)
	if err := b.begin(cmd, b.endpoint); err != nil {
		return err
	}
	b.others = append(b.others, cmd)
	return nil
}

// command is how a subject is started; nil: it is not there.
func (b *bench) command(s *subject) (*exec.Cmd, error) {
	plain, secure, tcp := s.address(plainPort), s.address(securePort), s.address(tcpPort)
	switch s.name {
	case nginx:
		b.report.Version(nginx, "nginx", "-v")
		conf, err := b.write("nginx.conf", fmt.Sprintf(nginxMain+`http { `+nginxTemporary+`
upstream u { server %[3]s; keepalive 512; keepalive_requests 1000000000; }
server { listen %[4]s backlog=8192; listen %[5]s ssl http2 backlog=8192; ssl_certificate %[1]s/cert.pem; ssl_certificate_key %[1]s/key.pem;
http2_max_concurrent_streams 250;
location / { proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;
proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; proxy_set_header X-Forwarded-Proto $scheme; proxy_set_header X-Forwarded-Port $server_port; } } }
stream { server { listen %[6]s backlog=8192; proxy_pass %[3]s; } }
`, b.dir, "nginx", b.endpoint, plain, secure, tcp))
		return exec.Command("nginx", "-c", conf), err
	case haproxy:
		b.report.Version(haproxy, "haproxy", "-v")
		conf, err := b.write("haproxy.cfg", fmt.Sprintf(`global
  nbthread 1
  maxconn 16000
  no strict-limits
defaults
  timeout client 300s
  timeout server 300s
  timeout connect 3s
  maxconn 16000
frontend http
  mode http
  option forwardfor
  http-request set-header X-Forwarded-Proto http
  bind %[2]s backlog 8192
  bind %[3]s backlog 8192 ssl crt %[1]s/both.pem alpn h2,http/1.1
  default_backend http
backend http
  mode http
  http-reuse always
  server s %[5]s
frontend tcp
  mode tcp
  bind %[4]s backlog 8192
  default_backend tcp
backend tcp
  mode tcp
  server s %[5]s
`, b.dir, plain, secure, tcp, b.endpoint))
		return exec.Command("haproxy", "-db", "-f", conf), err
	case caddy:
		if _, err := os.Stat(b.caddy); err != nil {
			return nil, nil
		}
		b.report.Version(caddy, b.caddy, "version")
		conf, err := b.write("Caddyfile", fmt.Sprintf(`{
	admin off
	auto_https off
	persist_config off
	default_sni bench.example
	servers {
		protocols h1 h2
	}
}
http://%[2]s {
	bind %[4]s
	reverse_proxy %[5]s
}
https://:%[3]d {
	bind %[4]s
	tls %[1]s/cert.pem %[1]s/key.pem
	reverse_proxy %[5]s
}
`, b.dir, plain, firstPort+securePort, s.host, b.endpoint))
		return single(exec.Command(b.caddy, "run", "--config", conf, "--adapter", "caddyfile"), b.dir), err
	case reverseProxy, goTLS, portal:
		return b.self(s, 0)
	}
	return nil, fmt.Errorf("-subjects: %q is none of %s", s.name, strings.Join([]string{nginx, haproxy, caddy, reverseProxy, goTLS, portal}, ", "))
}

// self is this program as a subject.
func (b *bench) self(s *subject, hosts int) (*exec.Cmd, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return single(exec.Command(program, "-serve", strings.ToLower(s.name), "-listen", s.address(plainPort), "-endpoint", b.endpoint,
		"-cert", b.path("cert.pem"), "-key", b.path("key.pem"), "-hosts", fmt.Sprint(hosts)), b.dir), nil
}

// single gives a Go program one thread, as the others have.
func single(cmd *exec.Cmd, home string) *exec.Cmd {
	cmd.Env = append(slices.Clone(os.Environ()), "GOMAXPROCS=1", "HOME="+home)
	return cmd
}

func writeCertificate(cert, key string) error {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bench"}, DNSNames: []string{"bench.example"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		return err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return err
	}
	if err := os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		return err
	}
	return os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), 0o600)
}
