package csr

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"portal/internal/identity"
)

func TestComponent(t *testing.T) {
	usages := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}
	good := func() *x509.CertificateRequest {
		return &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:portal:proxy:n1", Organization: []string{"system:portal:proxies"}}}
	}
	if role, machine, err := Component(good(), usages); err != nil || role != identity.Proxy || machine != "n1" {
		t.Fatalf("%s %s, %v", role, machine, err)
	}
	if err := Signable(identity.Signer, good(), usages); err != nil {
		t.Error(err)
	}
	for what, spoil := range map[string]func(*x509.CertificateRequest){
		"no group": func(r *x509.CertificateRequest) { r.Subject.Organization = nil },
		"masters":  func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:masters"} },
		"a second group": func(r *x509.CertificateRequest) {
			r.Subject.Organization = append(r.Subject.Organization, "system:masters")
		},
		"another's group": func(r *x509.CertificateRequest) { r.Subject.Organization = []string{"system:portal:dns"} },
		"a node's name":   func(r *x509.CertificateRequest) { r.Subject.CommonName = "system:node:n1" },
		"an inner name":   func(r *x509.CertificateRequest) { r.Subject.CommonName = "system:portal:controllers" },
		"no machine":      func(r *x509.CertificateRequest) { r.Subject.CommonName = "system:portal:proxy:" },
		"more of a name":  func(r *x509.CertificateRequest) { r.Subject.OrganizationalUnit = []string{"x"} },
		"a host":          func(r *x509.CertificateRequest) { r.DNSNames = []string{"kubernetes"} },
		"an address":      func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{net.IPv4zero} },
	} {
		r := good()
		spoil(r)
		if _, _, err := Component(r, usages); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
	for _, bad := range [][]certificatesv1.KeyUsage{nil, {certificatesv1.UsageClientAuth}, append(usages, certificatesv1.UsageServerAuth), append(usages, certificatesv1.UsageCertSign)} {
		if _, _, err := Component(good(), bad); err == nil {
			t.Errorf("usages %v: accepted", bad)
		}
	}
}
