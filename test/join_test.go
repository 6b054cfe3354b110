package test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/intent"
	"portal/test/harness"
)

// joinCommand is what `portal token create` prints, in words, without the first one.
func joinCommand(t *testing.T, api *harness.API, role string, more ...string) []string {
	t.Helper()
	out, err := harness.Run(t.Context(), nil, harness.Portal(), append([]string{"token", "create", "--kubeconfig", api.Kubeconfig, "--role", role, "-o", "json"}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	var made struct{ Command string }
	if err := json.Unmarshal([]byte(out), &made); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	words := strings.Fields(made.Command)
	if words[0] != "portal" || words[1] != role {
		t.Fatalf("the command is %q", made.Command)
	}
	return words[1:]
}

func word(t *testing.T, words []string, flag string) string {
	t.Helper()
	for i, w := range words {
		if w == flag {
			return words[i+1]
		}
	}
	t.Fatalf("%v has no %s", words, flag)
	return ""
}

// TestJoinProxy: on a machine of its own, the printed command joins a proxy, word for word. While Services change, its
// certificate is renewed several times; no watch is lost, no connection breaks, and a restart needs neither token nor server.
func TestJoinProxy(t *testing.T) {
	rootOnly(t)
	t.Parallel()
	const renewals = 3
	// The administrator's certificate is as short-lived as the others: the test itself has a token.
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("tester,tester,1,system:masters\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := newProxyLab(t, "nftables", "--controllers", "csr-approving,csr-signing", "--certificate-lifetime", "15s", "--token-auth-file", tokens)
	l.client = withToken(t, l.api, "tester")
	targets := l.steady(t)
	node, dir := l.Facts().Node, filepath.Join(l.dir, "joined")
	own := []string{
		"--data-dir", dir, "--hostname-override", node, "--proxy-mode", "nftables",
		"--cluster-cidr", "10.244.0.0/16,fd00:244::/32", "--nodeport-addresses", "primary",
	}
	start := func(args ...string) {
		var err error
		if l.proxy, err = harness.StartIn(l.Node.Namespace(), l.dir, "proxy", harness.Portal(), args...); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.proxy.Kill)
		l.settled(t, 30*time.Second)
	}
	start(append(joinCommand(t, l.api, "proxy"), own...)...)
	first := clientCertificate(t, dir)
	if first.Subject.CommonName != "system:portal:proxy:"+node || strings.Join(first.Subject.Organization, ",") != "system:portal:proxies" {
		t.Errorf("the certificate is for %s", first.Subject)
	}
	if info, err := os.Stat(filepath.Join(dir, "client.pem")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key's file: %v %v", info, err)
	}

	churn := l.churn(t, l.FarPods(intent.IPv4), 20, 1, 50*time.Millisecond)
	v := l.vigil(t, targets)
	eventually(t, 2*time.Minute, "renewals", func() string {
		if n := strings.Count(logOf(t, l.proxy), "certificate renewed"); n < renewals {
			return fmt.Sprintf("%d so far:\n%s", n, l.proxy.Tail())
		}
		return ""
	})
	churn.end(t)
	snap, _ := l.settled(t, soon)
	v.end(t)
	l.Judge(t, snap)
	log := logOf(t, l.proxy)
	if n := strings.Count(log, "watching the API"); n != 4 {
		t.Errorf("watches began %d times, want once for each of four resources:\n%s", n, log)
	}
	for _, bad := range []string{"level=WARN", "level=ERROR", "orbid"} {
		if strings.Contains(log, bad) {
			t.Errorf("%s in the log:\n%s", bad, log)
		}
	}
	if last := clientCertificate(t, dir); !last.NotAfter.After(first.NotAfter) || last.PublicKey.(*ecdsa.PublicKey).Equal(first.PublicKey) {
		t.Error("the certificate on disk is still the first, or has its key")
	}

	l.stop(t)
	start(append([]string{"proxy"}, own...)...)
	if strings.Contains(strings.TrimPrefix(logOf(t, l.proxy), log), "joined the cluster") {
		t.Error("it joined again")
	}
}

func logOf(t *testing.T, p *harness.Process) string {
	t.Helper()
	data, err := os.ReadFile(p.Log)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func clientCertificate(t *testing.T, dir string) *x509.Certificate {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "client.pem"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// TestJoinRefused: who can't join gets one line that says why.
func TestJoinRefused(t *testing.T) {
	t.Parallel()
	api, stranger := startPortal(t), startPortal(t, "--controllers", "none")
	good, expiring := joinCommand(t, api, "dns"), joinCommand(t, api, "dns", "--ttl", "1s")
	proxys, others := joinCommand(t, api, "proxy"), joinCommand(t, stranger, "dns")
	hash, token, server := word(t, good, "--ca-hash"), word(t, good, "--token"), word(t, good, "--server")
	time.Sleep(1100 * time.Millisecond)
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"an expired token":        {expiring[1:], "is wrong, has expired, or was deleted"},
		"a wrong token":           {[]string{"--server", server, "--ca-hash", hash, "--token", "aaaaaa.0123456789abcdef"}, "is wrong, has expired, or was deleted"},
		"a wrong token, unsafely": {[]string{"--server", server, "--unsafe-skip-ca-hash", "--token", "aaaaaa.0123456789abcdef"}, "does not know the token aaaaaa…"},
		"a token's wrong secret":  {[]string{"--server", server, "--unsafe-skip-ca-hash", "--token", token[:7] + "0123456789abcdef"}, "signed its CA with another token"},
		"a token of another role": {proxys[1:], "it needs a token of the role dns"},
		"the hash of another CA":  {[]string{"--server", server, "--token", token, "--ca-hash", word(t, others, "--ca-hash")}, "The token was not sent"},
		"another server":          {[]string{"--server", stranger.URL, "--token", token, "--ca-hash", hash}, "The token was not sent"},
		"no hash":                 {[]string{"--server", server, "--token", token}, "--token needs --ca-hash"},
		"no token":                {[]string{"--server", server}, "portal token create --role dns"},
		"nonsense for a hash":     {[]string{"--server", server, "--token", token, "--ca-hash", "abc"}, "must be sha256: and 64 hexadecimal digits"},
		"nonsense for a token":    {[]string{"--server", server, "--token", "abc"}, "--token: must be 6 and 16 characters"},
		"http":                    {[]string{"--server", "http://127.0.0.1:1"}, "must be the API server's URL"},
		"two places":              {[]string{"--server", server, "--kubeconfig", api.Kubeconfig}, "give one of them"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			args := append([]string{"dns", "--listen", "127.0.0.1:0", "--upstream", "none", "--metrics-bind-address", ""}, c.args...)
			if !strings.Contains(strings.Join(c.args, " "), "--kubeconfig") {
				args = append(args, "--data-dir", t.TempDir())
			}
			out, err := harness.Run(ctx, nil, harness.Portal(), args...)
			if err == nil || !strings.Contains(out, c.want) {
				t.Fatalf("want %q, got %v", c.want, err)
			}
			if strings.Contains(out, token) || strings.Contains(out, word(t, proxys, "--token")) {
				t.Errorf("it prints the token: %s", out)
			}
		})
	}
}

// TestJoinWaits: a machine that starts before its server joins when the server is there, and knows it by the token alone
// if asked to.
func TestJoinWaits(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	dir, port := t.TempDir(), harness.FreePort()
	api, err := harness.StartPortalAt(dir, port)
	if err != nil {
		t.Fatal(err)
	}
	token := word(t, joinCommand(t, api, "dns"), "--token")
	if err := api.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "token")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dns, err := harness.Start(t.TempDir(), "dns", harness.Portal(), "dns", "--server", api.URL, "--token-file", file, "--unsafe-skip-ca-hash",
		"--data-dir", filepath.Join(dir, "dns"), "--listen", "127.0.0.1:0", "--upstream", "none", "--metrics-bind-address", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dns.Kill)
	said := func(what string) func() string {
		return func() string {
			if strings.Contains(logOf(t, dns), what) {
				return ""
			}
			return dns.Tail()
		}
	}
	eventually(t, 20*time.Second, "a warning", said("can't join yet, retrying"))
	if api, err = harness.StartPortalAt(dir, port); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	eventually(t, 60*time.Second, "joining", said("joined the cluster"))
	eventually(t, 20*time.Second, "watching", said("watching the API"))
}

// TestJoinedAsNobodyElse: a token's role decides which identity it obtains, and so does the identity of who renews.
func TestJoinedAsNobodyElse(t *testing.T) {
	t.Parallel()
	api := startPortal(t)
	dns := withToken(t, api, word(t, joinCommand(t, api, "dns"), "--token"))
	const component, kubelet = "portal.dev/component-client", certificatesv1.KubeAPIServerClientKubeletSignerName
	issued := func(client kubernetes.Interface, signer, name string, organizations ...string) (bool, string) {
		t.Helper()
		return request(t, client, signer, name, organizations...)
	}
	if ok, why := issued(dns, component, "system:portal:dns:m1", "system:portal:dns"); !ok {
		t.Fatalf("a DNS server's token can't be a DNS server: %s", why)
	}
	for _, c := range []struct {
		signer, name  string
		organizations []string
	}{
		{component, "system:portal:proxy:m1", []string{"system:portal:proxies"}},
		{component, "system:portal:dns:m1", []string{"system:portal:proxies"}},
		{component, "system:portal:dns:m1", []string{"system:portal:dns", "system:masters"}},
		{component, "system:portal:dns:m1", []string{"system:portal:dns", "system:nodes"}},
		{component, "system:portal:controllers", []string{"system:portal:dns"}},
		{component, "system:kube-proxy", []string{"system:portal:dns"}},
		{component, "system:node:m1", []string{"system:nodes"}},
		{kubelet, "system:node:m1", []string{"system:nodes"}},
		{kubelet, "system:portal:dns:m1", []string{"system:portal:dns"}},
		{certificatesv1.KubeAPIServerClientSignerName, "system:portal:dns:m1", []string{"system:portal:dns"}},
	} {
		if ok, _ := issued(dns, c.signer, c.name, c.organizations...); ok {
			t.Errorf("a DNS server's token obtained %s %v from %s", c.name, c.organizations, c.signer)
		}
	}
	node := withToken(t, api, word(t, joinCommand(t, api, "node"), "--token"))
	if ok, why := issued(node, kubelet, "system:node:m1", "system:nodes"); !ok {
		t.Errorf("a node's token can't be a node: %s", why)
	}
	if ok, _ := issued(node, component, "system:portal:proxy:m1", "system:portal:proxies"); ok {
		t.Error("a node's token can be a proxy")
	}
	for what, do := range map[string]func() error{
		"read Secrets":  func() error { _, err := dns.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{}); return err },
		"read Services": func() error { _, err := dns.CoreV1().Services("").List(t.Context(), metav1.ListOptions{}); return err },
		"list requests": func() error {
			_, err := dns.CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
			return err
		},
	} {
		if err := do(); !apierrors.IsForbidden(err) {
			t.Errorf("with a token one can %s: %v", what, err)
		}
	}
}

// TestMachineIdentities: a node obtains the identities of its own machine's parts, and no other.
func TestMachineIdentities(t *testing.T) {
	t.Parallel()
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("node,system:node:m1,1,system:nodes\nfalse,system:node:m1,2,devs\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startPortal(t, "--token-auth-file", tokens)
	node, pretender := withToken(t, api, "node"), withToken(t, api, "false")
	const component = "portal.dev/component-client"
	for _, role := range []struct{ name, group string }{{"proxy", "system:portal:proxies"}, {"dns", "system:portal:dns"}} {
		own := "system:portal:" + role.name + ":m1"
		if ok, why := request(t, node, component, own, role.group); !ok {
			t.Errorf("a node can't have %s: %s", own, why)
		}
		for _, c := range []struct {
			client kubernetes.Interface
			name   string
			groups []string
		}{
			{node, "system:portal:" + role.name + ":m2", []string{role.group}},
			{node, own, []string{role.group, "system:masters"}},
			{node, own, []string{"system:masters"}},
			{node, "system:portal:controllers", []string{role.group}},
			{pretender, own, []string{role.group}},
		} {
			if ok, _ := request(t, c.client, component, c.name, c.groups...); ok {
				t.Errorf("a node has obtained %s %v", c.name, c.groups)
			}
		}
	}
}

func withToken(t *testing.T, api *harness.API, token string) *kubernetes.Clientset {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.CertData, config.KeyData, config.BearerToken, config.QPS = nil, nil, token, -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// request asks for a certificate and says whether it was issued within the time that those which are take many times over.
func request(t *testing.T, client kubernetes.Interface, signer, name string, organizations ...string) (bool, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: organizations}}, key)
	if err != nil {
		t.Fatal(err)
	}
	requests := client.CertificatesV1().CertificateSigningRequests()
	made, err := requests.Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: signer,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, err.Error()
	}
	for range 20 {
		if made, err = requests.Get(t.Context(), made.Name, metav1.GetOptions{}); err != nil {
			t.Fatal(err)
		}
		if len(made.Status.Certificate) > 0 {
			return true, ""
		}
		for _, c := range made.Status.Conditions {
			if c.Type == certificatesv1.CertificateDenied {
				return false, c.Message
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	return false, "nobody decided"
}
