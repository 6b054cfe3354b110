package test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
)

// inside is a client in the machine's network.
func (m *streamMachine) inside(config *tls.Config) *http.Client {
	return &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: config,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = m.do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		},
	}}
}

func (m *streamMachine) testProxies(t *testing.T) {
	for path, want := range map[string]string{
		"/api/v1/namespaces/default/pods/web/proxy/a/b?c=d":             "GET /a/b?c=d 0",
		"/api/v1/namespaces/default/pods/web:8080/proxy/":               "GET / 0",
		"/api/v1/namespaces/default/pods/http:web:8080/proxy/x":         "GET /x 0",
		"/api/v1/namespaces/default/services/web:80/proxy/a/":           "GET /a/ 0",
		"/api/v1/namespaces/default/services/web:http/proxy/a":          "GET /a 0",
		"/api/v1/namespaces/default/services/http:web:http/proxy/a?b=c": "GET /a?b=c 0",
	} {
		out, err := m.run(t.Context(), nil, nil, "get", "--raw", path)
		if err != nil || out != want {
			t.Errorf("%s: %q, %v, want %q", path, out, err, want)
		}
	}
	if out := m.must(t, nil, "get", "--raw", "/api/v1/nodes/"+m.name+"/proxy/pods"); !strings.Contains(out, `"name":"web"`) {
		t.Errorf("the node's Pods: %q", out)
	}
	if out := m.must(t, nil, "get", "--raw", "/api/v1/nodes/"+m.name+":10250/proxy/metrics"); !strings.Contains(out, "kubelet_running_pods") {
		t.Errorf("the node's metrics: %.200q", out)
	}
	if out := m.must(t, nil, "get", "--raw", "/api/v1/nodes/"+m.name+"/proxy/logs/"); !strings.Contains(out, "<pre>") {
		t.Errorf("the machine's logs: %.200q", out)
	}
	// Nothing else is reached through an object that names it.
	m.must(t, strings.NewReader(`apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: trap, labels: {kubernetes.io/service-name: trap}}
addressType: IPv4
ports: [{name: "", port: 6443}]
endpoints: [{addresses: [`+machineAddress+`], conditions: {ready: true}}]
---
apiVersion: v1
kind: Service
metadata: {name: trap}
spec: {ports: [{port: 443}]}
`), "apply", "-f", "-")
	for path, want := range map[string]string{
		"/api/v1/namespaces/default/services/https:trap:443/proxy/": "no endpoints available",
		"/api/v1/namespaces/default/services/none/proxy/":           "not found",
		"/api/v1/namespaces/default/services/web:81/proxy/":         "no service port 81",
		"/api/v1/namespaces/default/pods/waits:80/proxy/":           "",
		"/api/v1/namespaces/default/pods/ftp:web:80/proxy/":         "SCHEME:NAME:PORT",
		"/api/v1/namespaces/default/pods/web:0/proxy/":              "port",
	} {
		if out, err := m.run(t.Context(), nil, nil, "get", "--raw", path); err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %q, %v, want %q", path, out, err, want)
		}
	}
}

func (m *streamMachine) testAccess(t *testing.T) {
	as := func(token string, args ...string) (string, error) {
		// Without the administrator's certificate, which would win.
		return m.portal(t.Context(), nil, nil, append([]string{"kubectl", "--kubeconfig", m.asUser(t, token)}, args...)...)
	}
	if out, err := as("ann-token", "logs", "talk", "-c", "quiet"); err != nil || out != "only this\n" {
		t.Errorf("who may view reads: %q, %v", out, err)
	}
	for _, c := range [][]string{
		{"ann-token", "exec", "talk", "-c", "quiet", "--", "true"},
		{"ann-token", "logs", "talk", "-c", "quiet", "-n", "kube-system"},
		{"bob-token", "logs", "talk", "-c", "quiet"},
		{"eve-token", "exec", "talk", "-c", "quiet", "--", "true"}, // begins with GET, which eve may
		{"ann-token", "get", "--raw", "/api/v1/nodes/" + m.name + "/proxy/pods"},
		{"ann-token", "get", "--raw", "/api/v1/namespaces/default/pods/web:8080/proxy/"},
	} {
		if out, err := as(c[0], c[1:]...); err == nil || !strings.Contains(strings.ToLower(out), "forbidden") {
			t.Errorf("%v: %q, %v", c, out, err)
		}
	}
	// The node itself lets nobody in either.
	base := "https://" + net.JoinHostPort(machineAddress, "10250")
	config, err := clientcmd.BuildConfigFromFlags("", m.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	own, err := tls.LoadX509KeyPair(filepath.Join(m.dir, "node", "client.pem"), filepath.Join(m.dir, "node", "client.pem"))
	if err != nil {
		t.Fatal(err)
	}
	admin, err := tls.X509KeyPair(config.CertData, config.KeyData)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		pair  *tls.Certificate
		token string
		code  int
	}{
		"nobody":           {nil, "", http.StatusUnauthorized},
		"a wrong token":    {nil, "wrong", http.StatusUnauthorized},
		"a user":           {nil, "ann-token", http.StatusForbidden},
		"a node":           {&own, "", http.StatusForbidden},
		"an administrator": {&admin, "", http.StatusOK},
	} {
		for _, path := range []string{"/pods", "/containerLogs/default/talk/quiet", "/healthz", "/metrics"} {
			tlsConfig := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // what matters here is who asks
			if c.pair != nil {
				tlsConfig.Certificates = []tls.Certificate{*c.pair}
			}
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, base+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.token != "" {
				r.Header.Set("Authorization", "Bearer "+c.token)
			}
			answer, err := m.inside(tlsConfig).Do(r)
			if err != nil {
				t.Errorf("%s, %s: %v", name, path, err)
				continue
			}
			body, _ := io.ReadAll(answer.Body)
			_ = answer.Body.Close()
			if answer.StatusCode != c.code {
				t.Errorf("%s, %s: %d %s, want %d", name, path, answer.StatusCode, body, c.code)
			}
		}
	}
}

// testMonitoring: who may get nodes/proxy reads what nodes say, and runs no commands, neither at the node nor through the API server, though a
// WebSocket begins with GET.
func (m *streamMachine) testMonitoring(t *testing.T) {
	client := m.inside(&tls.Config{InsecureSkipVerify: true}) //nolint:gosec // what matters here is who asks
	command := "exec/default/talk/quiet?command=id&output=1"
	for _, base := range []string{
		"https://" + net.JoinHostPort(machineAddress, "10250") + "/", "https://127.0.0.1:6443/api/v1/nodes/" + m.name + "/proxy/",
		"https://127.0.0.1:6443/api/v1/nodes/" + m.name + ":10250/proxy/", "https://127.0.0.1:6443/api/v1/nodes/https:" + m.name + ":10250/proxy/",
	} {
		for path, want := range map[string]int{
			"pods": http.StatusOK, "healthz": http.StatusOK, "containerLogs/default/talk/quiet": http.StatusOK,
			command: http.StatusForbidden, "attach/default/talk/quiet?output=1": http.StatusForbidden, "portForward/default/talk": http.StatusForbidden,
			"run/default/talk/quiet?cmd=id": http.StatusForbidden,
		} {
			for _, upgrade := range []bool{false, true} {
				if upgrade && want == http.StatusOK {
					continue
				}
				r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, base+path, nil)
				if err != nil {
					t.Fatal(err)
				}
				r.Header.Set("Authorization", "Bearer dan-token")
				if upgrade {
					for key, value := range map[string]string{
						"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
						"Sec-WebSocket-Protocol": "v4.channel.k8s.io",
					} {
						r.Header.Set(key, value)
					}
				}
				answer, err := client.Do(r)
				if err != nil {
					t.Errorf("%s%s: %v", base, path, err)
					continue
				}
				body, _ := io.ReadAll(io.LimitReader(answer.Body, 1000))
				_ = answer.Body.Close()
				if answer.StatusCode != want {
					t.Errorf("%s%s, upgraded %v: %d %s, want %d", base, path, upgrade, answer.StatusCode, body, want)
				}
			}
		}
	}
}

// asUser is a kubeconfig with a token and nothing else.
func (m *streamMachine) asUser(t *testing.T, token string) string {
	t.Helper()
	config, err := clientcmd.LoadFromFile(m.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, who := range config.AuthInfos {
		who.ClientCertificateData, who.ClientKeyData, who.ClientCertificate, who.ClientKey, who.Token = nil, nil, "", "", token
	}
	path := filepath.Join(t.TempDir(), token)
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	return path
}
