package test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	accounts "portal/internal/identity"
	"portal/internal/pki"
	"portal/test/harness"
)

// witness is a node and an API server behind a Service in one, and remembers what certificates it was shown, by their names.
type witness struct {
	mu    sync.Mutex
	shown map[string]string
}

func (w *witness) ServeHTTP(answer http.ResponseWriter, r *http.Request) {
	if shown := r.TLS.PeerCertificates; len(shown) > 0 {
		w.mu.Lock()
		w.shown[shown[0].Subject.CommonName] = shown[0].SerialNumber.String()
		w.mu.Unlock()
	}
	answer.Header().Set("Content-Type", "application/json")
	fmt.Fprintln(answer, "{}")
}

func (w *witness) serial(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.shown[name]
}

// serve serves it with a certificate of the cluster's, a connection for each request, and returns the port.
func (w *witness) serve(t *testing.T, folder string) string {
	t.Helper()
	authority, err := pki.Open(folder, pki.DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := authority.Sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "witness"}, DNSNames: []string{"toys.shop.svc"}, IPAddresses: []net.IP{net.ParseIP(nodeAddress)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, key.Public(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	certs, err := pki.ParseCertificates(chain)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(w)
	_ = server.Listener.Close()
	if server.Listener, err = net.Listen("tcp", nodeAddress+":0"); err != nil {
		t.Fatal(err)
	}
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{certs[0].Raw}, PrivateKey: key}}, ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12}
	server.Config.SetKeepAlivesEnabled(false)
	server.StartTLS()
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// serials are those of the certificates in a server's folder.
func serials(t *testing.T, folder string) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.crt"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		certs, err := pki.ParseCertificates(data)
		if err != nil {
			t.Fatal(err)
		}
		out[strings.TrimSuffix(filepath.Base(file), ".crt")] = certs[0].SerialNumber.String()
	}
	return out
}

// TestRenewsWhatIsNamed: `portal certs renew` renews the certificates that are named and no others, and the server that runs
// uses them at once: for those who connect, in admin.kubeconfig, to nodes, and to API servers behind Services.
func TestRenewsWhatIsNamed(t *testing.T) {
	t.Parallel()
	if !inNamespace(t) {
		return
	}
	network(t)
	api := startPortal(t)
	k := newTerminal(t, api, []string{harness.Portal(), "kubectl"})
	folder := filepath.Join(filepath.Dir(api.Kubeconfig), "pki")
	seen := &witness{shown: map[string]string{}}
	port := seen.serve(t, folder)
	ca, err := os.ReadFile(filepath.Join(folder, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	k.run("create", "namespace", "shop")
	k.run("apply", "-f", k.file("toys.yaml", fmt.Sprintf(toysRegistered, "v1."+toysGroup, toysGroup, "v1", base64.StdEncoding.EncodeToString(ca))))
	k.run("apply", "-f", k.file("service.yaml", toysService))
	k.run("apply", "-f", k.file("slice.yaml", fmt.Sprintf(toysSlice, port)))
	k.run("create", "-f", k.file("node.yaml", fmt.Sprintf(`apiVersion: v1
kind: Node
metadata: {name: witness}
status:
  addresses: [{type: InternalIP, address: %s}]
  daemonEndpoints: {kubeletEndpoint: {Port: %s}}
`, nodeAddress, port)))
	at, err := url.Parse(api.URL)
	if err != nil {
		t.Fatal(err)
	}
	// used are the serial numbers of the certificates that the server uses.
	used := func() map[string]string {
		out := map[string]string{}
		if conn, err := tls.Dial("tcp", at.Host, &tls.Config{InsecureSkipVerify: true}); err == nil { //nolint:gosec // it only looks
			out["server"] = conn.ConnectionState().PeerCertificates[0].SerialNumber.String()
			conn.Close()
		}
		if config, err := clientcmd.LoadFromFile(api.Kubeconfig); err == nil {
			if block, _ := pem.Decode(config.AuthInfos["admin"].ClientCertificateData); block != nil {
				if cert, err := x509.ParseCertificate(block.Bytes); err == nil {
					out["admin"] = cert.SerialNumber.String()
				}
			}
		}
		_, _ = k.try("get", "--raw", "/api/v1/nodes/witness/proxy/healthz")
		_, _ = k.try("get", "--raw", toysAPI)
		out["node-client"], out["front-proxy-client"] = seen.serial(accounts.NodeClient), seen.serial(accounts.FrontProxy)
		return out
	}
	uses := func(when string) map[string]string {
		t.Helper()
		kept := serials(t, folder)
		var have map[string]string
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
			have = used()
			wrong := slices.DeleteFunc([]string{"server", "admin", "node-client", "front-proxy-client"}, func(name string) bool { return have[name] == kept[name] })
			if len(wrong) == 0 {
				return kept
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: the server uses others of %v: %v, in its folder are %v", when, wrong, have, kept)
			}
		}
	}
	before := uses("at first")
	leaves := []string{"server", "admin", "node-client", "front-proxy-client"}
	for _, c := range []struct{ named, renewed []string }{
		{[]string{"server"}, []string{"server"}},
		{[]string{"admin"}, []string{"admin"}},
		{[]string{"node-client"}, []string{"node-client"}},
		{[]string{"front-proxy-client"}, []string{"front-proxy-client"}},
		{[]string{"server", "admin"}, []string{"server", "admin"}},
		{nil, leaves},
		{[]string{"ca"}, append([]string{"ca"}, leaves...)}, // which signs all others
	} {
		when := fmt.Sprint("after certs renew ", c.named)
		out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"certs", "renew", "--kubeconfig", api.Kubeconfig}, c.named...)...)
		if err != nil {
			t.Fatalf("%s: %v\n%s", when, err, out)
		}
		after := uses(when)
		for _, name := range append([]string{"ca"}, leaves...) {
			if changed := before[name] != after[name]; changed != slices.Contains(c.renewed, name) {
				t.Errorf("%s: %s is new: %v", when, name, changed)
			}
		}
		before = after
	}
	if out, err := harness.Run(t.Context(), nil, harness.Portal(), "certs", "renew", "nothing", "--kubeconfig", api.Kubeconfig); err == nil {
		t.Errorf("a certificate that there is none of was renewed: %s", out)
	}
}
