package join

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/identity"
)

// issue makes a certificate for a user, valid from and to some time from now.
func issue(t *testing.T, user string, from, to time.Duration) (chain []byte, key *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: user}, NotBefore: now.Add(from), NotAfter: now.Add(to),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key
}

func selfSigned(t *testing.T) *x509.Certificate {
	t.Helper()
	chain, _ := issue(t, "ca", -time.Hour, time.Hour)
	block, _ := pem.Decode(chain)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func saved(t *testing.T, dir, user string, to time.Duration) *material {
	t.Helper()
	chain, key := issue(t, user, -2*time.Hour, to)
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	m, err := parse(append(chain, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})...))
	if err != nil {
		t.Fatal(err)
	}
	m.ca, m.server, m.hashes = chain, "https://10.0.0.1:6443", []string{"sha256:one"}
	if err := m.save(dir); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestRestart: what is on disk is used as long as it is valid, this machine's and of this cluster.
func TestRestart(t *testing.T) {
	const user = "system:portal:proxy:m1"
	for name, c := range map[string]struct {
		user    string
		to      time.Duration
		hashes  []string
		refused string
	}{
		"valid":                 {user, time.Hour, nil, ""},
		"with the hash":         {user, time.Hour, []string{"sha256:one", "sha256:two"}, ""},
		"expired":               {user, -time.Minute, nil, "the certificate has expired"},
		"another machine's":     {"system:portal:proxy:m2", time.Hour, nil, "is for system:portal:proxy:m2"},
		"another cluster's":     {user, time.Hour, []string{"sha256:two"}, "of another cluster"},
		"another role's, alike": {"system:portal:dns:m1", time.Hour, nil, "is for system:portal:dns:m1"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			want := saved(t, dir, c.user, c.to)
			got, err := Join(t.Context(), Options{Role: identity.Proxy, Machine: "m1", Hashes: c.hashes, Dir: dir})
			if c.refused != "" {
				if err == nil || !strings.Contains(err.Error(), c.refused) || !strings.Contains(err.Error(), "portal token create --role proxy") {
					t.Errorf("%v", err)
				}
				return
			}
			if err != nil || !got.current.Load().leaf.Equal(want.leaf) || got.Config().Host != want.server {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestFiles: keys are for their owner alone, and the kubeconfig works for other programs.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	saved(t, dir, "system:portal:proxy:m1", time.Hour)
	info, err := os.Stat(filepath.Join(dir, pairFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(dir, KubeconfigFile))
	if err != nil || config.Host != "https://10.0.0.1:6443" || config.CertFile != filepath.Join(dir, pairFile) {
		t.Errorf("%+v, %v", config, err)
	}
	if err := os.WriteFile(filepath.Join(dir, pairFile), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Join(t.Context(), Options{Role: identity.Proxy, Machine: "m1", Dir: dir}); err == nil || !strings.Contains(err.Error(), "join again") {
		t.Errorf("with a damaged file: %v", err)
	}
}

// TestClock: a certificate that is not valid by this machine's clock is about the clock.
func TestClock(t *testing.T) {
	for _, life := range [][2]time.Duration{{time.Hour, 2 * time.Hour}, {-2 * time.Hour, -time.Hour}} {
		chain, key := issue(t, "me", life[0], life[1])
		if _, err := newMaterial(chain, key, "me"); err == nil || !permanent(err) || !strings.Contains(err.Error(), "set the clock right") {
			t.Errorf("%v", err)
		}
	}
	chain, key := issue(t, "me", -time.Hour, time.Hour)
	if _, err := newMaterial(chain, key, "you"); err == nil {
		t.Error("a certificate for somebody else was accepted")
	}
	_, other := issue(t, "me", -time.Hour, time.Hour)
	if _, err := newMaterial(chain, other, "me"); err == nil {
		t.Error("a certificate for another key was accepted")
	}
	if _, err := newMaterial(chain, key, "me"); err != nil {
		t.Error(err)
	}
}
