// Package pki makes and keeps the certificates of a Portal server: an authority, the server's own certificate and the
// administrator's. It knows nothing of what they are used for.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const (
	authorityLife   = 10 * 365 * 24 * time.Hour
	certificateLife = 365 * 24 * time.Hour
	// renewBefore is how long before its end a certificate is made anew, at the next start.
	renewBefore = 30 * 24 * time.Hour
)

// Authority signs certificates. Its files are ca.crt and ca.key.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  crypto.Signer
	// PEM is the authority's certificate, for those who trust it.
	PEM []byte
}

// Pair is a certificate and its key, both PEM.
type Pair struct{ Cert, Key []byte }

// Subject says whose a certificate is and what for.
type Subject struct {
	Name          string
	Organizations []string
	// Hosts are names and addresses that a server's certificate stands for; a client's has none.
	Hosts []string
}

// Open reads the authority in a folder, or makes it.
func Open(dir string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("certificates: %w", err)
	}
	pair, err := read(dir, "ca")
	if errors.Is(err, fs.ErrNotExist) {
		return create(dir)
	}
	if err != nil {
		return nil, err
	}
	cert, key, err := parse(pair)
	if err != nil {
		return nil, fmt.Errorf("certificate authority in %s: %w", dir, err)
	}
	if time.Now().After(cert.NotAfter) {
		return nil, fmt.Errorf("the certificate authority in %s ended on %s: remove ca.crt and ca.key to have a new one made, "+
			"and give every client the new kubeconfig", dir, cert.NotAfter.Format(time.DateOnly))
	}
	return &Authority{dir: dir, cert: cert, key: key, PEM: pair.Cert}, nil
}

func create(dir string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template, err := certificate("portal-ca", authorityLife)
	if err != nil {
		return nil, err
	}
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	pair, err := encode(der, key)
	if err != nil {
		return nil, err
	}
	if err := write(dir, "ca", pair); err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Authority{dir: dir, cert: cert, key: key, PEM: pair.Cert}, nil
}

// Server gives the certificate name.crt of a server, made anew if it is missing, soon ends, was signed by another
// authority or does not stand for all the hosts.
func (a *Authority) Server(name string, s Subject) (Pair, error) {
	return a.keep(name, s, x509.ExtKeyUsageServerAuth)
}

// Client gives the certificate name.crt of a client, made anew if it is missing, soon ends or was signed by another
// authority.
func (a *Authority) Client(name string, s Subject) (Pair, error) {
	return a.keep(name, s, x509.ExtKeyUsageClientAuth)
}

func (a *Authority) keep(name string, s Subject, usage x509.ExtKeyUsage) (Pair, error) {
	if pair, err := read(a.dir, name); err == nil {
		if cert, _, err := parse(pair); err == nil && a.stillGood(cert, s) {
			return pair, nil
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, err
	}
	template, err := certificate(s.Name, certificateLife)
	if err != nil {
		return Pair{}, err
	}
	template.Subject.Organization = s.Organizations
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{usage}
	for _, host := range s.Hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return Pair{}, err
	}
	pair, err := encode(der, key)
	if err != nil {
		return Pair{}, err
	}
	return pair, write(a.dir, name, pair)
}

func (a *Authority) stillGood(cert *x509.Certificate, s Subject) bool {
	if cert.CheckSignatureFrom(a.cert) != nil || time.Until(cert.NotAfter) < renewBefore || cert.Subject.CommonName != s.Name {
		return false
	}
	return !slices.ContainsFunc(s.Hosts, func(host string) bool { return cert.VerifyHostname(host) != nil })
}

func certificate(name string, life time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		// Machines' clocks differ: a certificate that is valid a little earlier spares a puzzle.
		NotBefore: now.Add(-time.Hour),
		NotAfter:  now.Add(life),
	}, nil
}

func encode(der []byte, key *ecdsa.PrivateKey) (Pair, error) {
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return Pair{}, err
	}
	return Pair{
		Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:  pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw}),
	}, nil
}

func read(dir, name string) (Pair, error) {
	cert, err := os.ReadFile(filepath.Join(dir, name+".crt"))
	if err != nil {
		return Pair{}, err
	}
	key, err := os.ReadFile(filepath.Join(dir, name+".key"))
	if err != nil {
		return Pair{}, fmt.Errorf("%s has %s.crt but no readable key: %v", dir, name, err) // not "neither is there"
	}
	return Pair{Cert: cert, Key: key}, nil
}

// write keeps the key before the certificate: a certificate without its key would stop the next start.
func write(dir, name string, pair Pair) error {
	if err := WriteFile(filepath.Join(dir, name+".key"), pair.Key, 0o600); err != nil {
		return err
	}
	return WriteFile(filepath.Join(dir, name+".crt"), pair.Cert, 0o644)
}

// WriteFile replaces a file in one step, so that a reader never sees half of it and a crash never leaves half.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
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

func parse(pair Pair) (*x509.Certificate, crypto.Signer, error) {
	block, _ := pem.Decode(pair.Cert)
	if block == nil {
		return nil, nil, errors.New("the certificate is not PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, nil, err
	}
	block, _ = pem.Decode(pair.Key)
	if block == nil {
		return nil, nil, errors.New("the key is not PEM")
	}
	if key, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
		return cert, key, nil
	}
	any, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, nil, errors.New("the key is neither EC nor PKCS#8")
	}
	key, ok := any.(crypto.Signer)
	if !ok {
		return nil, nil, errors.New("the key cannot sign")
	}
	return cert, key, nil
}
