package test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
)

const awsLB = "service.beta.kubernetes.io/aws-load-balancer-"

// edge is a lab whose balancers end connections.
type edge struct {
	*lab.Lab
	logs string // the folder of access logs
}

// TestLabBalancing: what the documents' annotations ask of a balancer, word for word, and what comes of it on the wire.
func TestLabBalancing(t *testing.T) {
	t.Parallel()
	logs := filepath.Join(t.TempDir(), "logs")
	e := &edge{logs: logs, Lab: startLab(t, lab.Options{
		Nodes: 2, Zones: 2, BalancerPools: []string{"192.168.100.220-192.168.100.239,fd00:100::c0-fd00:100::df", "inside=192.168.100.240-192.168.100.249;internal", "subnet-xxxxx=192.168.100.250;internal"},
		NodeArgs: []string{"--load-balancer-access-log-url", "my-bucket=file://" + logs + "?create_dir=true"},
	})}
	labKubectl(t, e.Lab, workload{name: "web", replicas: 2, pod: spread("web")}.String()+
		workload{name: "proxied", replicas: 1, args: "--proxy-protocol", probe: "{tcpSocket: {port: 9376}, periodSeconds: 1}"}.String()+
		workload{name: "secret", replicas: 1, args: "--tls", probe: "{tcpSocket: {port: 9376}, periodSeconds: 1}"}.String(), "apply")
	for _, name := range []string{"web", "proxied", "secret"} {
		deployed(t, e.Lab, name, 2*time.Minute)
	}
	slow := e.slow(t) // what takes a minute goes on beside the rest
	t.Run("http", e.http)
	t.Run("tls", e.tls)
	t.Run("tls to endpoints", e.endpointTLS)
	t.Run("proxy protocol", e.proxyProtocol)
	t.Run("zones", e.zones)
	t.Run("groups", e.groups)
	t.Run("network", e.network)
	t.Run("internal", e.internal)
	t.Run("policies", e.policies)
	t.Run("ingress", e.ingress)
	t.Run("killed", e.killed)
	t.Run("health", e.health)
	t.Run("slow", slow)
	t.Run("repaired", e.repaired)
}

// service makes a Service of type LoadBalancer in front of an app, and returns its first address.
func (e *edge) service(t *testing.T, name, app, spec string, annotations ...string) netip.Addr {
	t.Helper()
	labKubectl(t, e.Lab, serviceManifest(name, "LoadBalancer", app, spec, annotations...), "apply")
	return ingressOf(t, e.Lab, name, 1)[0]
}

// aws is a line of annotations.
func aws(key, value string) string { return fmt.Sprintf("%s%s: %q", awsLB, key, value) }

// curl asks from outside, once.
func (e *edge) curl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return e.Client.Exec(ctx, append([]string{"curl", "-sS", "--max-time", "5"}, args...)...)
}

// until asks from outside until the answer is right, and returns it. wrong says what is, or nothing.
func (e *edge) until(t *testing.T, what string, wrong func(out string, err error) string, args ...string) (out string) {
	t.Helper()
	eventually(t, lbLimit, what, func() string {
		var err error
		out, err = e.curl(t, args...)
		return wrong(out, err)
	})
	return out
}

// has is for until: the answer has all of these parts.
func has(parts ...string) func(string, error) string {
	return func(out string, err error) string {
		for _, part := range parts {
			if err != nil || !strings.Contains(out, part) {
				return fmt.Sprintf("%q, %v; want %q", out, err, part)
			}
		}
		return ""
	}
}

// fails is for until: there is no answer, because of what curl says so.
func fails(how string) func(string, error) string {
	return func(out string, err error) string {
		if err == nil || !strings.Contains(err.Error()+out, how) {
			return fmt.Sprintf("%q, %v; want %q", out, err, how)
		}
		return ""
	}
}

// certificate makes a Secret with a certificate that signs itself.
func (e *edge) certificate(t *testing.T, name string, hosts ...string) {
	t.Helper()
	secret := selfSignedSecret(t, name, hosts...)
	api := e.API.CoreV1().Secrets("default")
	if _, err := api.Update(t.Context(), secret, metav1.UpdateOptions{}); err == nil {
		return
	}
	if _, err := api.Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func selfSignedSecret(t *testing.T, name string, hosts ...string) *corev1.Secret {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: hosts, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	template.Subject.CommonName = hosts[0]
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Type: corev1.SecretTypeTLS, Data: map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), "tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}),
	}}
}

// conn is a connection from a machine, over which requests go one after another.
type conn struct {
	net.Conn
	in *bufio.Reader
}

func connectFrom(t *testing.T, m *lab.Machine, address string) *conn {
	t.Helper()
	var c net.Conn
	if err := m.Do(func() (err error) {
		c, err = net.DialTimeout("tcp", address, 30*time.Second)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &conn{c, bufio.NewReader(c)}
}

// get asks over the connection for a path.
func (c *conn) get(path string) (string, error) {
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: web\r\n\r\n", path); err != nil {
		return "", err
	}
	answer, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	return strings.TrimSpace(string(body)), err
}

// state is what the balancing process of a node says about itself.
func (e *edge) state(t *testing.T, node, path string) string {
	t.Helper()
	return on(t, e.Node(node), "curl", "-sS", "--max-time", "20", "--unix-socket", filepath.Join(lab.NodeDir(e.Dir, node), "balancing", "control"), "http://worker/"+path)
}
