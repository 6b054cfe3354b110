package csr

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"net"
	"net/url"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
)

func parsed(t *testing.T, template *x509.CertificateRequest) *x509.CertificateRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	out, err := Parse(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestSignable(t *testing.T) {
	node := pkix.Name{CommonName: "system:node:n1", Organization: []string{NodeGroup}}
	usage := func(u ...certificatesv1.KeyUsage) []certificatesv1.KeyUsage { return u }
	sign, crypt := certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment
	client, server := certificatesv1.UsageClientAuth, certificatesv1.UsageServerAuth
	kubelet, serving := certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.KubeletServingSignerName
	for name, c := range map[string]struct {
		signer  string
		request x509.CertificateRequest
		usages  []certificatesv1.KeyUsage
		fine    bool
	}{
		"node":             {kubelet, x509.CertificateRequest{Subject: node}, usage(sign, client), true},
		"node with RSA":    {kubelet, x509.CertificateRequest{Subject: node}, usage(client, crypt, sign), true},
		"node that serves": {kubelet, x509.CertificateRequest{Subject: node}, usage(sign, client, server), false},
		"too few usages":   {kubelet, x509.CertificateRequest{Subject: node}, usage(client), false},
		"a CA's usage":     {kubelet, x509.CertificateRequest{Subject: node}, usage(sign, client, certificatesv1.UsageCertSign), false},
		"another group":    {kubelet, x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:n1", Organization: []string{"x"}}}, usage(sign, client), false},
		"no group":         {kubelet, x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:n1"}}, usage(sign, client), false},
		"two groups": {kubelet, x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:n1", Organization: []string{NodeGroup, "system:masters"}}},
			usage(sign, client), false},
		"no node's name": {kubelet, x509.CertificateRequest{Subject: pkix.Name{CommonName: "admin", Organization: []string{NodeGroup}}}, usage(sign, client), false},
		"with a name":    {kubelet, x509.CertificateRequest{Subject: node, DNSNames: []string{"a"}}, usage(sign, client), false},
		"with an IP":     {kubelet, x509.CertificateRequest{Subject: node, IPAddresses: []net.IP{{1, 2, 3, 4}}}, usage(sign, client), false},
		"with a mail":    {kubelet, x509.CertificateRequest{Subject: node, EmailAddresses: []string{"a@b.c"}}, usage(sign, client), false},
		"with a URI":     {kubelet, x509.CertificateRequest{Subject: node, URIs: []*url.URL{{Scheme: "spiffe", Host: "x"}}}, usage(sign, client), false},

		"serving":            {serving, x509.CertificateRequest{Subject: node, DNSNames: []string{"n1"}}, usage(sign, server), true},
		"serving at an IP":   {serving, x509.CertificateRequest{Subject: node, IPAddresses: []net.IP{{1, 2, 3, 4}}}, usage(sign, crypt, server), true},
		"serving nowhere":    {serving, x509.CertificateRequest{Subject: node}, usage(sign, server), false},
		"serving a client":   {serving, x509.CertificateRequest{Subject: node, DNSNames: []string{"n1"}}, usage(sign, client), false},
		"serving with a URI": {serving, x509.CertificateRequest{Subject: node, DNSNames: []string{"n1"}, URIs: []*url.URL{{Scheme: "x", Host: "x"}}}, usage(sign, server), false},

		"client":             {certificatesv1.KubeAPIServerClientSignerName, x509.CertificateRequest{Subject: pkix.Name{CommonName: "ann"}}, usage(client), true},
		"client that serves": {certificatesv1.KubeAPIServerClientSignerName, x509.CertificateRequest{Subject: pkix.Name{CommonName: "ann"}}, usage(client, server), false},
		"no client":          {certificatesv1.KubeAPIServerClientSignerName, x509.CertificateRequest{Subject: pkix.Name{CommonName: "ann"}}, usage(sign), false},
		"another signer":     {"example.com/x", x509.CertificateRequest{}, usage(client), false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := Signable(c.signer, parsed(t, &c.request), c.usages); (err == nil) != c.fine {
				t.Error(err)
			}
		})
	}
}

// Of what a request holds, only what was checked is in the certificate: no second common name, no uid, no CA.
func TestTemplateLeavesOut(t *testing.T) {
	uid := asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}
	ca, err := asn1.Marshal(struct{ IsCA bool }{true})
	if err != nil {
		t.Fatal(err)
	}
	request := parsed(t, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "ann", ExtraNames: []pkix.AttributeTypeAndValue{{Type: uid, Value: "0"}, {Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "root"}}},
		ExtraExtensions: []pkix.Extension{
			{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: ca},
		},
	})
	out, err := Template(request, []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth, certificatesv1.UsageClientAuth, certificatesv1.UsageSigning})
	if err != nil {
		t.Fatal(err)
	}
	if len(out.Subject.ExtraNames)+len(out.Subject.Names)+len(out.ExtraExtensions)+len(out.Extensions) > 0 || out.IsCA || !out.BasicConstraintsValid {
		t.Errorf("%+v", out)
	}
	if len(out.ExtKeyUsage) != 1 || out.KeyUsage != x509.KeyUsageDigitalSignature {
		t.Errorf("usages %v %v", out.ExtKeyUsage, out.KeyUsage)
	}
	if out.Subject.CommonName != request.Subject.CommonName {
		t.Errorf("%q was judged and %q would be signed", request.Subject.CommonName, out.Subject.CommonName)
	}
	if _, err := Template(request, []certificatesv1.KeyUsage{"fun"}); err == nil {
		t.Error("an unknown usage is fine")
	}
}
