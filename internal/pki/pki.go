// Package pki creates, keeps and renews the certificates of a Portal server: a certificate authority (CA), and what it
// signs. It knows nothing of what they are used for.
package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// Lifetimes say how long what is issued from now on is valid. A certificate is renewed after two thirds of its life.
type Lifetimes struct{ Authority, Certificate time.Duration }

// DefaultLifetimes are ten years for the CA and one year for what it signs.
func DefaultLifetimes() Lifetimes {
	return Lifetimes{Authority: 10 * 365 * 24 * time.Hour, Certificate: 365 * 24 * time.Hour}
}

// Authority is a CA. Its files are ca.crt, which holds every CA certificate to trust, ca.key, and after a rotation
// ca-cross.crt: the new CA's key signed by the CA before it, by which clients that know only the old one trust the new.
type Authority struct {
	dir  string
	life Lifetimes

	mu   sync.Mutex
	cert *x509.Certificate
	key  crypto.Signer
	// earlier are CAs that signed before and have not expired; peers are those of other servers of the same cluster.
	earlier, peers []*x509.Certificate
	cross          *x509.Certificate
}

// Pair is a certificate and its key, both PEM.
type Pair struct{ Cert, Key []byte }

// Open reads the CA in a folder, or creates it.
func Open(dir string, life Lifetimes) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("certificates: %w", err)
	}
	a := &Authority{dir: dir, life: life}
	bundle, err := os.ReadFile(a.file("ca.crt"))
	if errors.Is(err, fs.ErrNotExist) {
		return a, a.create()
	}
	if err != nil {
		return nil, err
	}
	if err := a.load(bundle); err != nil {
		return nil, fmt.Errorf("certificate authority in %s: %w", dir, err)
	}
	if !time.Now().Before(a.cert.NotAfter) {
		_, err = a.Rotate(true)
	}
	return a, err
}

func (a *Authority) file(name string) string { return filepath.Join(a.dir, name) }

// load finds the certificate that belongs to ca.key, which signs; the others are only trusted.
func (a *Authority) load(bundle []byte) error {
	key, err := os.ReadFile(a.file("ca.key"))
	if err != nil {
		return fmt.Errorf("ca.crt has no readable key: %v", err)
	}
	if a.key, err = parseKey(key); err != nil {
		return err
	}
	all, err := ParseCertificates(bundle)
	if err != nil {
		return err
	}
	for _, cert := range all {
		if a.cert == nil && samePublicKey(cert, a.key.Public()) {
			a.cert = cert
		} else {
			a.earlier = append(a.earlier, cert)
		}
	}
	if a.cert == nil {
		return errors.New("ca.key does not belong to any certificate in ca.crt")
	}
	if data, err := os.ReadFile(a.file("ca-cross.crt")); err == nil {
		if cross, err := ParseCertificates(data); err == nil && samePublicKey(cross[0], a.key.Public()) {
			a.cross = cross[0]
		}
	}
	return nil
}

// create makes the first CA. The key is written first: a certificate without its key would stop the next start.
func (a *Authority) create() error {
	cert, key, err := a.newAuthority()
	if err != nil {
		return err
	}
	a.cert, a.key = cert, key
	if err := a.writeKey(key); err != nil {
		return err
	}
	return a.writeBundle()
}

func (a *Authority) newAuthority() (*x509.Certificate, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template, err := authorityTemplate(a.life.Authority)
	if err != nil {
		return nil, nil, err
	}
	cert, err := sign(template, template, key.Public(), key)
	return cert, key, err
}

// Rotate replaces the CA when two thirds of its life are over, or at once with force, and says whether it did. The one
// before stays trusted until it expires.
func (a *Authority) Rotate(force bool) (bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	kept := slices.DeleteFunc(slices.Clone(a.earlier), func(c *x509.Certificate) bool { return !now.Before(c.NotAfter) })
	pruned := len(kept) < len(a.earlier)
	a.earlier = kept
	if !force && now.Before(RenewAt(a.cert)) {
		if pruned {
			return false, a.writeBundle()
		}
		return false, nil
	}
	cert, key, err := a.newAuthority()
	if err != nil {
		return false, err
	}
	next := &Authority{dir: a.dir, life: a.life, cert: cert, key: key, earlier: a.earlier}
	if now.Before(a.cert.NotAfter) {
		next.earlier = append([]*x509.Certificate{a.cert}, a.earlier...)
		if next.cross, err = crossSign(cert, key, a.cert, a.key); err != nil {
			return false, err
		}
	}
	// The key is written last, and only after the others: until then the old key and its certificate, which is still in
	// the bundle, remain in force. A key without its certificate would stop the next start.
	if err := next.writeBundle(); err != nil {
		return false, err
	}
	if err := next.writeCross(); err != nil {
		return false, err
	}
	if err := next.writeKey(key); err != nil {
		return false, err
	}
	a.cert, a.key, a.cross, a.earlier = next.cert, next.key, next.cross, next.earlier
	return true, nil
}

// crossSign is the certificate of a new CA's key by the old CA, valid as long as the old one.
func crossSign(cert *x509.Certificate, key *ecdsa.PrivateKey, old *x509.Certificate, oldKey crypto.Signer) (*x509.Certificate, error) {
	template, err := authorityTemplate(time.Until(old.NotAfter))
	if err != nil {
		return nil, err
	}
	template.Subject, template.SubjectKeyId, template.NotAfter = cert.Subject, cert.SubjectKeyId, old.NotAfter
	return sign(template, old, key.Public(), oldKey)
}

// SetPeers replaces the CAs of other servers of the cluster, which are trusted as well.
func (a *Authority) SetPeers(certs []*x509.Certificate) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.peers = certs
}

// Own are this server's CA certificates, the one that signs first.
func (a *Authority) Own() []*x509.Certificate {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*x509.Certificate{a.cert}, a.earlier...)
}

// Trusted are all CA certificates that have not expired: this server's own, the one that signs first, and its peers'.
func (a *Authority) Trusted() []*x509.Certificate {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	var out []*x509.Certificate
	for _, cert := range slices.Concat([]*x509.Certificate{a.cert}, a.earlier, a.peers) {
		if now.Before(cert.NotAfter) && !slices.ContainsFunc(out, cert.Equal) {
			out = append(out, cert)
		}
	}
	return out
}

// Bundle is what Trusted gives, in PEM.
func (a *Authority) Bundle() []byte { return EncodeCertificates(a.Trusted()...) }

// RenewAt is when a certificate should be replaced: after two thirds of its life.
func RenewAt(cert *x509.Certificate) time.Time {
	return cert.NotBefore.Add(cert.NotAfter.Sub(cert.NotBefore) / 3 * 2)
}

func (a *Authority) writeKey(key *ecdsa.PrivateKey) error {
	data, err := encodeKey(key)
	if err != nil {
		return err
	}
	return WriteFile(a.file("ca.key"), data, 0o600)
}

func (a *Authority) writeBundle() error {
	return WriteFile(a.file("ca.crt"), EncodeCertificates(append([]*x509.Certificate{a.cert}, a.earlier...)...), 0o644)
}

func (a *Authority) writeCross() error {
	if a.cross == nil {
		if err := os.Remove(a.file("ca-cross.crt")); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	return WriteFile(a.file("ca-cross.crt"), EncodeCertificates(a.cross), 0o644)
}

// WriteFile replaces a file in one step, so that a reader never sees half of it and a crash never leaves half. One that has this content
// stays, so that a server starts also where the disk is full.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	if info, err := os.Lstat(path); err == nil && info.Mode() == mode {
		if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, data) {
			return nil
		}
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	if err := errors.Join(tmp.Chmod(mode), second(tmp.Write(data)), tmp.Sync(), tmp.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return os.Rename(tmp.Name(), path)
}

func second(_ int, err error) error { return err }

// EncodeCertificates writes certificates as PEM, one after the other.
func EncodeCertificates(certs ...*x509.Certificate) []byte {
	var out bytes.Buffer
	for _, cert := range certs {
		_ = pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
	}
	return out.Bytes()
}

// ParseCertificates reads PEM with one certificate or more.
func ParseCertificates(data []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		out = append(out, cert)
	}
	if len(out) == 0 {
		return nil, errors.New("the certificate is not PEM")
	}
	return out, nil
}

func samePublicKey(cert *x509.Certificate, key crypto.PublicKey) bool {
	public, ok := cert.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	return ok && public.Equal(key)
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw}), nil
}

func parseKey(data []byte) (crypto.Signer, error) {
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, errors.New("the key is not PEM")
	}
	if key, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
		return key, nil
	}
	if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
		return key, nil
	}
	any, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("the key is neither EC, RSA (PKCS#1) nor PKCS#8")
	}
	key, ok := any.(crypto.Signer)
	if !ok {
		return nil, errors.New("the key cannot sign")
	}
	return key, nil
}
