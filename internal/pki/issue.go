package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Request describes a certificate to have: File is the name of its files without their endings.
type Request struct {
	File          string
	Name          string
	Organizations []string
	// Hosts are the names and addresses that a server's certificate stands for. Without them it is a client's.
	Hosts []string
}

// Issue returns the certificate in the request's files, replaced if it is missing, has lived two thirds of its life, was
// signed by another CA or does not stand for all the hosts; with force it is replaced in any case.
func (a *Authority) Issue(r Request, force bool) (Pair, *x509.Certificate, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if pair, cert, err := a.read(r.File); err == nil && !force && a.stillGood(cert, r) {
		return pair, cert, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, nil, err
	}
	template, err := template(r.Name, a.life.Certificate)
	if err != nil {
		return Pair{}, nil, err
	}
	if template.NotAfter.After(a.cert.NotAfter) {
		template.NotAfter = a.cert.NotAfter
	}
	template.Subject.Organization = r.Organizations
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if len(r.Hosts) > 0 {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	for _, host := range r.Hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	cert, err := sign(template, a.cert, key.Public(), a.key)
	if err != nil {
		return Pair{}, nil, err
	}
	pair := Pair{Cert: a.chain(cert)}
	if pair.Key, err = encodeKey(key); err != nil {
		return Pair{}, nil, err
	}
	// A crash between the two leaves a pair that doesn't match, which read refuses and the next start replaces.
	if err := WriteFile(a.file(r.File+".key"), pair.Key, 0o600); err != nil {
		return Pair{}, nil, err
	}
	return pair, cert, WriteFile(a.file(r.File+".crt"), pair.Cert, 0o644)
}

// chain is a certificate with what those need to trust it who know only the CA before, in PEM.
func (a *Authority) chain(cert *x509.Certificate) []byte {
	if a.cross == nil {
		return EncodeCertificates(cert)
	}
	return EncodeCertificates(cert, a.cross)
}

// Sign signs a certificate for somebody else's key with the CA of the moment. Serial number and life are filled in here; the
// life ends with the CA's at the latest.
func (a *Authority) Sign(wanted *x509.Certificate, key crypto.PublicKey, life time.Duration) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	cert, err := signFor(wanted, key, life, a.cert, a.key)
	if err != nil {
		return nil, err
	}
	return a.chain(cert), nil
}

// FileSigner signs with the CA in two files, which are read each time: they may be replaced while it is in use.
type FileSigner struct{ CertFile, KeyFile string }

// Sign is as Authority's.
func (f FileSigner) Sign(wanted *x509.Certificate, key crypto.PublicKey, life time.Duration) ([]byte, error) {
	ca, caKey, err := f.read()
	if err != nil {
		return nil, err
	}
	cert, err := signFor(wanted, key, life, ca, caKey)
	if err != nil {
		return nil, err
	}
	return EncodeCertificates(cert), nil
}

// Check says what is wrong with the files.
func (f FileSigner) Check() error {
	_, _, err := f.read()
	return err
}

func (f FileSigner) read() (*x509.Certificate, crypto.Signer, error) {
	data, err := os.ReadFile(f.CertFile)
	if err != nil {
		return nil, nil, err
	}
	certs, err := ParseCertificates(data)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", f.CertFile, err)
	}
	if data, err = os.ReadFile(f.KeyFile); err != nil {
		return nil, nil, err
	}
	key, err := parseKey(data)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", f.KeyFile, err)
	}
	if !certs[0].IsCA || !samePublicKey(certs[0], key.Public()) {
		return nil, nil, fmt.Errorf("%s must be a CA's certificate, and %s its key", f.CertFile, f.KeyFile)
	}
	return certs[0], key, nil
}

// signFor signs what is wanted for a life that begins a little earlier, because machines' clocks differ.
func signFor(wanted *x509.Certificate, key crypto.PublicKey, life time.Duration, ca *x509.Certificate, caKey crypto.Signer) (*x509.Certificate, error) {
	dates, err := template("", life)
	if err != nil {
		return nil, err
	}
	now, out := time.Now(), *wanted
	out.SerialNumber, out.NotBefore, out.NotAfter = dates.SerialNumber, now.Add(-min(5*time.Minute, life/10)), dates.NotAfter
	if out.NotAfter.After(ca.NotAfter) {
		out.NotAfter = ca.NotAfter
	}
	if !now.Before(out.NotAfter) {
		return nil, fmt.Errorf("the certificate authority expired at %s", ca.NotAfter)
	}
	return sign(&out, ca, key, caKey)
}

func (a *Authority) read(name string) (Pair, *x509.Certificate, error) {
	cert, err := os.ReadFile(a.file(name + ".crt"))
	if err != nil {
		return Pair{}, nil, err
	}
	key, err := os.ReadFile(a.file(name + ".key"))
	if err != nil {
		return Pair{}, nil, err
	}
	certs, err := ParseCertificates(cert)
	if err != nil {
		return Pair{}, nil, err
	}
	signer, err := parseKey(key)
	if err != nil {
		return Pair{}, nil, err
	}
	if !samePublicKey(certs[0], signer.Public()) {
		return Pair{}, nil, fmt.Errorf("%s.key does not belong to %s.crt", name, name)
	}
	return Pair{Cert: cert, Key: key}, certs[0], nil
}

func (a *Authority) stillGood(cert *x509.Certificate, r Request) bool {
	if cert.CheckSignatureFrom(a.cert) != nil || !time.Now().Before(RenewAt(cert)) || cert.Subject.CommonName != r.Name {
		return false
	}
	return !slices.ContainsFunc(r.Hosts, func(host string) bool { return cert.VerifyHostname(host) != nil })
}

// template is a certificate without its purpose. Machines' clocks differ, so it is valid a little earlier.
func template(name string, life time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    now.Add(-min(time.Hour, life/10)),
		NotAfter:     now.Add(life),
	}, nil
}

// authorityTemplate has a name of its own for each CA, so that a chain says which one it ends in.
func authorityTemplate(life time.Duration) (*x509.Certificate, error) {
	out, err := template("", life)
	if err != nil {
		return nil, err
	}
	out.Subject.CommonName = fmt.Sprintf("portal-ca-%08x", new(big.Int).Rsh(out.SerialNumber, 95))
	out.IsCA = true
	out.BasicConstraintsValid = true
	out.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	return out, nil
}

func sign(template, parent *x509.Certificate, public crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// Info describes a certificate in a server's folder, or a key, which has no times of its own.
type Info struct {
	Name    string    `json:"name"`
	File    string    `json:"file"`
	Subject string    `json:"subject"`
	Issuer  string    `json:"issuer"`
	Hosts   []string  `json:"hosts,omitempty"`
	Since   time.Time `json:"notBefore,omitzero"`
	Until   time.Time `json:"notAfter,omitzero"`
	// RenewAt is when the server renews it; nil for a CA that is only trusted any more.
	RenewAt *time.Time `json:"renewAt,omitempty"`
}

// List describes the certificates in a folder, the CA that signs first.
func List(dir string) ([]Info, error) {
	a := &Authority{dir: dir}
	bundle, err := os.ReadFile(a.file("ca.crt"))
	if err != nil {
		return nil, err
	}
	if err := a.load(bundle); err != nil {
		return nil, fmt.Errorf("certificate authority in %s: %w", dir, err)
	}
	out := []Info{describe("ca", a.file("ca.crt"), a.cert, true)}
	for _, cert := range a.earlier {
		out = append(out, describe("ca (earlier)", a.file("ca.crt"), cert, false))
	}
	files, err := filepath.Glob(a.file("*.crt"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".crt")
		if name == "ca" || name == "ca-cross" {
			continue
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		certs, err := ParseCertificates(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		out = append(out, describe(name, file, certs[0], true))
	}
	return out, nil
}

func describe(name, file string, cert *x509.Certificate, renewed bool) Info {
	info := Info{
		Name: name, File: file, Subject: cert.Subject.String(), Issuer: cert.Issuer.String(),
		Hosts: slices.Clone(cert.DNSNames), Since: cert.NotBefore, Until: cert.NotAfter,
	}
	for _, ip := range cert.IPAddresses {
		info.Hosts = append(info.Hosts, ip.String())
	}
	if renewed {
		at := RenewAt(cert)
		info.RenewAt = &at
	}
	return info
}
