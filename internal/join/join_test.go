package join

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"portal/internal/bootstrap"
	"portal/internal/identity"
)

var token = bootstrap.Token{ID: "abcdef", Secret: "0123456789abcdef"}

// impostor answers as a cluster would, with its own CA or another's, and tells when it was given credentials.
type impostor struct {
	*httptest.Server
	info        corev1.ConfigMap
	credentials atomic.Bool
	asked       atomic.Int32
}

func newImpostor(t *testing.T, shown ...*x509.Certificate) *impostor {
	i := &impostor{}
	i.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i.asked.Add(1)
		if r.Header.Get("Authorization") != "" || len(r.TLS.PeerCertificates) > 0 {
			i.credentials.Store(true)
		}
		if r.URL.Path != infoPath {
			http.NotFound(w, r)
			return
		}
		_ = json.NewEncoder(w).Encode(&i.info)
	}))
	t.Cleanup(i.Close)
	i.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError) // refused handshakes are what is tested
	var bundle []byte
	for _, cert := range append(shown, i.Certificate())[:max(1, len(shown))] {
		bundle = append(bundle, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})...)
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[""] = &clientcmdapi.Cluster{Server: i.URL, CertificateAuthorityData: bundle}
	text, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	i.info.Data = map[string]string{bootstrap.KubeconfigKey: string(text)}
	return i
}

func (i *impostor) join(t *testing.T, change func(*Options)) error {
	t.Helper()
	o := Options{Role: identity.DNS, Machine: "m1", Server: i.URL, Token: token, Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}
	change(&o)
	_, err := Join(t.Context(), o)
	return err
}

// TestImpostors: none of them is sent the token.
func TestImpostors(t *testing.T) {
	genuine := newImpostor(t) // the cluster that was to be joined, and its hash
	hash := bootstrap.Hash(genuine.Certificate())
	for name, c := range map[string]struct {
		shown  []*x509.Certificate
		change func(*impostor, *Options)
		want   string
	}{
		"another CA": {nil, func(_ *impostor, o *Options) {
			o.Hashes = []string{"sha256:" + strings.Repeat("00", 32)}
		}, "which is not what --ca-hash says"},
		"unsigned": {nil, func(_ *impostor, o *Options) { o.SkipHash = true }, "does not know the token abcdef…"},
		"signed with another secret": {nil, func(i *impostor, o *Options) {
			o.SkipHash = true
			i.info.Data[bootstrap.SignaturePrefix+token.ID] = bootstrap.Token{ID: token.ID, Secret: "fedcba9876543210"}.Sign(i.info.Data[bootstrap.KubeconfigKey])
		}, "signed its CA with another token"},
		"signed for another text": {nil, func(i *impostor, o *Options) {
			o.SkipHash = true
			i.info.Data[bootstrap.SignaturePrefix+token.ID] = token.Sign("something else")
		}, "signed its CA with another token"},
		"no ConfigMap": {nil, func(i *impostor, o *Options) {
			o.Hashes, i.info.Data = []string{hash}, nil
		}, "holds no kubeconfig"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := newImpostor(t, c.shown...)
			err := i.join(t, func(o *Options) { c.change(i, o) })
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if i.credentials.Load() {
				t.Error("it was sent credentials")
			}
			if i.asked.Load() == 0 {
				t.Error("it was not asked at all")
			}
		})
	}
}

// TestShownCA: who shows the right CA and can't prove to be of it is not sent the token either.
func TestShownCA(t *testing.T) {
	cert := selfSigned(t)
	i := newImpostor(t, cert)
	err := i.join(t, func(o *Options) { o.Hashes = []string{bootstrap.Hash(cert)} })
	if err == nil || !strings.Contains(err.Error(), "somebody may be in between") {
		t.Errorf("%v", err)
	}
	if i.credentials.Load() {
		t.Error("it was sent credentials")
	}
}

func TestRenewAt(t *testing.T) {
	from := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	to := from.Add(100 * time.Hour)
	for random, want := range map[float64]time.Duration{0: 70 * time.Hour, 0.5: 80 * time.Hour, 1: 90 * time.Hour} {
		if got := renewAt(from, to, random).Sub(from).Round(time.Second); got != want {
			t.Errorf("at %v: after %s, want %s", random, got, want)
		}
	}
}

func TestValidate(t *testing.T) {
	good := Options{Role: identity.Proxy, Machine: "m1", Server: "https://10.0.0.1:6443", Token: token, Hashes: []string{"sha256:00"}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, spoil := range map[string]func(*Options){
		"--server":              func(o *Options) { o.Server = "10.0.0.1:6443" },
		"--hostname-override":   func(o *Options) { o.Machine = "my_machine" },
		"--unsafe-skip-ca-hash": func(o *Options) { o.SkipHash = true },
		"--ca-hash":             func(o *Options) { o.Hashes = nil },
	} {
		o := good
		spoil(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
