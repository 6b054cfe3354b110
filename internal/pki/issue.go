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
	chain := []*x509.Certificate{cert}
	if a.cross != nil {
		chain = append(chain, a.cross)
	}
	pair := Pair{Cert: EncodeCertificates(chain...)}
	if pair.Key, err = encodeKey(key); err != nil {
		return Pair{}, nil, err
	}
	// A crash between the two leaves a pair that doesn't match, which read refuses and the next start replaces.
	if err := WriteFile(a.file(r.File+".key"), pair.Key, 0o600); err != nil {
		return Pair{}, nil, err
	}
	return pair, cert, WriteFile(a.file(r.File+".crt"), pair.Cert, 0o644)
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

// Info describes a certificate in a server's folder.
type Info struct {
	Name    string    `json:"name"`
	File    string    `json:"file"`
	Subject string    `json:"subject"`
	Issuer  string    `json:"issuer"`
	Hosts   []string  `json:"hosts,omitempty"`
	Since   time.Time `json:"notBefore"`
	Until   time.Time `json:"notAfter"`
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
