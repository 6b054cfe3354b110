package pki

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func leaf(t *testing.T, pair Pair) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(pair.Cert)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestCertificatesAreKeptWhileTheyAreGood(t *testing.T) {
	dir := t.TempDir()
	ca, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	first, err := ca.Server("server", Subject{Name: "s", Hosts: []string{"localhost", "127.0.0.1"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tls.X509KeyPair(first.Cert, first.Key); err != nil {
		t.Fatalf("certificate and key don't belong together: %v", err)
	}
	ca, err = Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	same, err := ca.Server("server", Subject{Name: "s", Hosts: []string{"127.0.0.1"}})
	if err != nil {
		t.Fatal(err)
	}
	if string(same.Cert) != string(first.Cert) {
		t.Error("a certificate that was still good was replaced")
	}
	more, err := ca.Server("server", Subject{Name: "s", Hosts: []string{"localhost", "10.96.0.1"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := leaf(t, more).VerifyHostname("10.96.0.1"); err != nil {
		t.Errorf("a new host is not in the certificate: %v", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.PEM)
	if _, err := leaf(t, more).Verify(x509.VerifyOptions{Roots: roots, DNSName: "localhost"}); err != nil {
		t.Errorf("the authority's own certificate is not trusted: %v", err)
	}
}

func TestKeysAreForTheirOwnerOnly(t *testing.T) {
	dir := t.TempDir()
	ca, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Client("admin", Subject{Name: "a", Organizations: []string{"o"}}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.key", "admin.key"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", name, info.Mode().Perm())
		}
	}
}

func TestAnotherAuthorityReplacesCertificates(t *testing.T) {
	dir := t.TempDir()
	ca, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	old, err := ca.Client("admin", Subject{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.crt", "ca.key"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if ca, err = Open(dir); err != nil {
		t.Fatal(err)
	}
	replaced, err := ca.Client("admin", Subject{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if string(old.Cert) == string(replaced.Cert) {
		t.Error("a certificate of an authority that is gone was kept")
	}
}

func TestBrokenAuthorityIsNamed(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"ca.crt", "ca.key"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("nonsense"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v, want an error that names the folder", err)
	}
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "key") {
		t.Errorf("got %v, want an error about the missing key", err)
	}
}
