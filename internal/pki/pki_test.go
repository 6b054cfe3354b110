package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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
	ca, err := Open(dir, DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	first, _, err := ca.Issue(Request{File: "server", Name: "s", Hosts: []string{"localhost", "127.0.0.1"}}, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tls.X509KeyPair(first.Cert, first.Key); err != nil {
		t.Fatalf("certificate and key don't belong together: %v", err)
	}
	ca, err = Open(dir, DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	same, _, err := ca.Issue(Request{File: "server", Name: "s", Hosts: []string{"127.0.0.1"}}, false)
	if err != nil {
		t.Fatal(err)
	}
	if string(same.Cert) != string(first.Cert) {
		t.Error("a certificate that was still good was replaced")
	}
	more, _, err := ca.Issue(Request{File: "server", Name: "s", Hosts: []string{"localhost", "10.96.0.1"}}, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := leaf(t, more).VerifyHostname("10.96.0.1"); err != nil {
		t.Errorf("a new host is not in the certificate: %v", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.Bundle())
	if _, err := leaf(t, more).Verify(x509.VerifyOptions{Roots: roots, DNSName: "localhost"}); err != nil {
		t.Errorf("the authority's own certificate is not trusted: %v", err)
	}
}

func TestKeysAreForTheirOwnerOnly(t *testing.T) {
	dir := t.TempDir()
	ca, err := Open(dir, DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := ca.Issue(Request{File: "admin", Name: "a", Organizations: []string{"o"}}, false); err != nil {
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
	ca, err := Open(dir, DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	old, _, err := ca.Issue(Request{File: "admin", Name: "a"}, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.crt", "ca.key"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if ca, err = Open(dir, DefaultLifetimes()); err != nil {
		t.Fatal(err)
	}
	replaced, _, err := ca.Issue(Request{File: "admin", Name: "a"}, false)
	if err != nil {
		t.Fatal(err)
	}
	if string(old.Cert) == string(replaced.Cert) {
		t.Error("a certificate of an authority that is gone was kept")
	}
}

// verify checks a server's chain as a client does that trusts only the given CAs.
func verify(pair Pair, roots ...*x509.Certificate) error {
	chain, err := ParseCertificates(pair.Cert)
	if err != nil {
		return err
	}
	pool, between := x509.NewCertPool(), x509.NewCertPool()
	for _, root := range roots {
		pool.AddCert(root)
	}
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}
	_, err = chain[0].Verify(x509.VerifyOptions{Roots: pool, Intermediates: between, DNSName: "localhost"})
	return err
}

// TestRotatedAuthorityIsTrustedByOldAndNewClients: those that know only the old CA trust what the new one signed, and those
// that know only the new one do too; a restart changes nothing.
func TestRotatedAuthorityIsTrustedByOldAndNewClients(t *testing.T) {
	dir := t.TempDir()
	ca, err := Open(dir, DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	request := Request{File: "server", Name: "s", Hosts: []string{"localhost"}}
	before, _, err := ca.Issue(request, false)
	if err != nil {
		t.Fatal(err)
	}
	old := ca.Own()[0]
	if rotated, err := ca.Rotate(false); err != nil || rotated {
		t.Fatalf("a young CA was rotated: %v %v", rotated, err)
	}
	if rotated, err := ca.Rotate(true); err != nil || !rotated {
		t.Fatalf("rotated: %v %v", rotated, err)
	}
	for _, when := range []string{"at once", "after a restart"} {
		own := ca.Own()
		if len(own) != 2 || !own[1].Equal(old) || own[0].Equal(old) {
			t.Fatalf("%s: the CAs are %v", when, own)
		}
		after, _, err := ca.Issue(request, false)
		if err != nil {
			t.Fatal(err)
		}
		if string(after.Cert) == string(before.Cert) {
			t.Errorf("%s: the certificate is still the old CA's", when)
		}
		for who, root := range map[string]*x509.Certificate{"the old CA": old, "the new CA": own[0]} {
			if err := verify(after, root); err != nil {
				t.Errorf("%s: a client that knows only %s: %v", when, who, err)
			}
		}
		if ca, err = Open(dir, DefaultLifetimes()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestInterruptedRotationKeepsTheOldAuthority: a crash after the bundle was written and before the key was.
func TestInterruptedRotationKeepsTheOldAuthority(t *testing.T) {
	dir := t.TempDir()
	ca, err := Open(dir, DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	old := ca.Own()[0]
	key, err := os.ReadFile(filepath.Join(dir, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Rotate(true); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.key"), key, 0o600); err != nil {
		t.Fatal(err)
	}
	if ca, err = Open(dir, DefaultLifetimes()); err != nil {
		t.Fatal(err)
	}
	if !ca.Own()[0].Equal(old) {
		t.Error("the certificate that belongs to ca.key does not sign")
	}
	pair, _, err := ca.Issue(Request{File: "server", Name: "s", Hosts: []string{"localhost"}}, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(pair, old); err != nil {
		t.Error(err)
	}
}

// TestFailedRotationKeepsTheOldKey: a key without its certificate would stop the next start.
func TestFailedRotationKeepsTheOldKey(t *testing.T) {
	for _, unwritable := range []string{"ca.crt", "ca-cross.crt"} {
		t.Run(unwritable, func(t *testing.T) {
			dir := t.TempDir()
			ca, err := Open(dir, DefaultLifetimes())
			if err != nil {
				t.Fatal(err)
			}
			old := ca.Own()[0]
			// A folder that isn't empty can't be replaced by a file, not even by root.
			path, aside := filepath.Join(dir, unwritable), filepath.Join(dir, "aside")
			if err := os.Rename(path, aside); err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
				t.Fatal(err)
			}
			if rotated, err := ca.Rotate(true); rotated || err == nil {
				t.Fatalf("rotated %v, error %v", rotated, err)
			}
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(aside, path); err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			if ca, err = Open(dir, DefaultLifetimes()); err != nil {
				t.Fatalf("the next start fails: %v", err)
			}
			if !ca.Own()[0].Equal(old) {
				t.Error("the old certificate no longer signs")
			}
		})
	}
}

// TestExpiredAuthorityIsReplaced: a server that was off for longer than its CA lived starts.
func TestExpiredAuthorityIsReplaced(t *testing.T) {
	dir := t.TempDir()
	ca, err := Open(dir, Lifetimes{Authority: time.Nanosecond, Certificate: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	old := ca.Own()[0]
	if ca, err = Open(dir, DefaultLifetimes()); err != nil {
		t.Fatal(err)
	}
	if trusted := ca.Trusted(); len(trusted) != 1 || trusted[0].Equal(old) {
		t.Errorf("trusted are %v", trusted)
	}
}

func TestBrokenAuthorityIsNamed(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"ca.crt", "ca.key"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("nonsense"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(dir, DefaultLifetimes()); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v, want an error that names the folder", err)
	}
	if err := os.Remove(filepath.Join(dir, "ca.key")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, DefaultLifetimes()); err == nil || !strings.Contains(err.Error(), "key") {
		t.Errorf("got %v, want an error about the missing key", err)
	}
}

// A CA in files signs what it is given, and files that don't belong together are refused.
func TestFileSigner(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	a, err := Open(dir, DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(other, DefaultLifetimes()); err != nil {
		t.Fatal(err)
	}
	s := FileSigner{CertFile: filepath.Join(dir, "ca.crt"), KeyFile: filepath.Join(dir, "ca.key")}
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	data, err := s.Sign(&x509.Certificate{Subject: pkix.Name{CommonName: "x"}}, key.Public(), 100*365*24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	certs, err := ParseCertificates(data)
	if err != nil || certs[0].CheckSignatureFrom(a.Own()[0]) != nil || certs[0].NotAfter.After(a.Own()[0].NotAfter) {
		t.Errorf("signed %v, %v", certs, err)
	}
	for _, wrong := range []FileSigner{
		{CertFile: s.CertFile, KeyFile: filepath.Join(other, "ca.key")},
		{CertFile: s.KeyFile, KeyFile: s.KeyFile},
		{CertFile: s.CertFile, KeyFile: s.CertFile},
		{CertFile: s.CertFile, KeyFile: filepath.Join(dir, "none")},
	} {
		if wrong.Check() == nil {
			t.Errorf("%v is fine", wrong)
		}
	}
}
