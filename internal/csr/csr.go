// Package csr reads what a CertificateSigningRequest asks for and says whether its signer may sign it. It is pure: it asks
// nobody, and knows neither keys nor the API server.
package csr

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"

	"portal/internal/identity"
)

const (
	// NodeUserPrefix begins the user name of a node, and NodeGroup is the group of all nodes.
	NodeUserPrefix = "system:node:"
	NodeGroup      = "system:nodes"
)

// Parse reads the PKCS#10 request in the PEM of spec.request and checks that its sender has the key.
func Parse(data []byte) (*x509.CertificateRequest, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, errors.New("must be PEM of the type CERTIFICATE REQUEST")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	return request, request.CheckSignature()
}

// Signers are the names of the signers that Signable knows.
func Signers() []string {
	return []string{
		certificatesv1.KubeAPIServerClientSignerName, certificatesv1.KubeAPIServerClientKubeletSignerName,
		certificatesv1.KubeletServingSignerName, identity.Signer,
	}
}

// Signable says why a signer rejects a request, or nil. It is asked about Signers only.
func Signable(signer string, request *x509.CertificateRequest, usages []certificatesv1.KeyUsage) error {
	switch signer {
	case certificatesv1.KubeAPIServerClientSignerName:
		return Client(usages)
	case certificatesv1.KubeAPIServerClientKubeletSignerName:
		return NodeClient(request, usages)
	case certificatesv1.KubeletServingSignerName:
		return NodeServing(request, usages)
	case identity.Signer:
		_, _, err := Component(request, usages)
		return err
	}
	return fmt.Errorf("the signer %q is not known here", signer)
}

// Client checks a request for a certificate that proves who a client of the API is.
func Client(usages []certificatesv1.KeyUsage) error {
	for _, u := range usages {
		if u != certificatesv1.UsageClientAuth && u != certificatesv1.UsageDigitalSignature && u != certificatesv1.UsageKeyEncipherment {
			return fmt.Errorf("usages: a client's certificate cannot have %q", u)
		}
	}
	if !slices.Contains(usages, certificatesv1.UsageClientAuth) {
		return fmt.Errorf("usages: a client's certificate needs %q", certificatesv1.UsageClientAuth)
	}
	return nil
}

// NodeClient checks a request for a certificate by which a node proves who it is.
func NodeClient(request *x509.CertificateRequest, usages []certificatesv1.KeyUsage) error {
	if err := node(request, usages, certificatesv1.UsageClientAuth); err != nil {
		return err
	}
	if len(request.DNSNames)+len(request.IPAddresses) > 0 {
		return errors.New("subject alternative names: a node's client certificate has none")
	}
	return nil
}

// NodeServing checks a request for a certificate that a node serves its own API with.
func NodeServing(request *x509.CertificateRequest, usages []certificatesv1.KeyUsage) error {
	if err := node(request, usages, certificatesv1.UsageServerAuth); err != nil {
		return err
	}
	if len(request.DNSNames)+len(request.IPAddresses) == 0 {
		return errors.New("subject alternative names: at least one DNS name or IP address is needed")
	}
	return nil
}

// ServingName is a name for a node's serving certificate that is nobody else's, whatever the node is called and wherever it runs: beside an
// API server, for example, whose names and addresses no node's certificate may have.
func ServingName(node string) string { return node + ".node.internal" }

// ServingFor says why a node must not be given a certificate to serve with unless a person has had a look, or nil. Own are the names and
// addresses that the Node object has; taken says that one is somebody else's, too: another node's or an API server's.
func ServingFor(request *x509.CertificateRequest, node string, own []string, taken func(host string) bool) error {
	if request.Subject.CommonName != NodeUserPrefix+node {
		return fmt.Errorf("subject: the common name must be %s", NodeUserPrefix+node)
	}
	for _, name := range request.DNSNames {
		if name == ServingName(node) {
			continue
		}
		// Other names are only as good as whoever resolves them.
		if name != node || name == "localhost" || name == "kubernetes" || strings.HasPrefix(name, "kubernetes.") || serviceName(name) || taken(name) {
			return fmt.Errorf("subject alternative names: %s is not known to be the node's", name)
		}
	}
	for _, ip := range request.IPAddresses {
		addr, ok := netip.AddrFromSlice(ip)
		addr = addr.Unmap()
		if !ok || !addr.IsGlobalUnicast() || !slices.Contains(own, addr.String()) || taken(addr.String()) {
			return fmt.Errorf("subject alternative names: %s is not known to be the node's", ip)
		}
	}
	return nil
}

// node checks what both certificates of a node have in common.
func node(request *x509.CertificateRequest, usages []certificatesv1.KeyUsage, purpose certificatesv1.KeyUsage) error {
	if !slices.Equal(request.Subject.Organization, []string{NodeGroup}) {
		return fmt.Errorf("subject: the organization must be %s alone", NodeGroup)
	}
	if !strings.HasPrefix(request.Subject.CommonName, NodeUserPrefix) {
		return fmt.Errorf("subject: the common name must begin with %s", NodeUserPrefix)
	}
	if len(request.EmailAddresses)+len(request.URIs) > 0 {
		return errors.New("subject alternative names: e-mail addresses and URIs are not allowed")
	}
	return exactly(usages, purpose)
}

// exactly wants the usages of a certificate with one purpose. Only RSA keys encipher.
func exactly(usages []certificatesv1.KeyUsage, purpose certificatesv1.KeyUsage) error {
	set := map[certificatesv1.KeyUsage]bool{}
	for _, u := range usages {
		set[u] = true
	}
	if set[certificatesv1.UsageKeyEncipherment] {
		delete(set, certificatesv1.UsageKeyEncipherment)
	}
	if len(set) != 2 || !set[certificatesv1.UsageDigitalSignature] || !set[purpose] {
		return fmt.Errorf("usages: must be %q and %q, with %q or without", certificatesv1.UsageDigitalSignature, purpose, certificatesv1.UsageKeyEncipherment)
	}
	return nil
}

// Component checks a request for a certificate by which a part of Portal on another machine proves who it is, and says as
// what role on which machine.
func Component(request *x509.CertificateRequest, usages []certificatesv1.KeyUsage) (role identity.Role, machine string, err error) {
	if role, machine, err = identity.Parse(request.Subject.CommonName, request.Subject.Organization); err != nil {
		return "", "", fmt.Errorf("subject: %w", err)
	}
	plain := pkix.Name{CommonName: role.User(machine), Organization: []string{role.Group()}}
	if request.Subject.String() != plain.String() {
		return "", "", errors.New("subject: it must have a common name and an organization, and nothing else")
	}
	if len(request.DNSNames)+len(request.IPAddresses)+len(request.EmailAddresses)+len(request.URIs) > 0 {
		return "", "", errors.New("subject alternative names: a component's certificate has none")
	}
	return role, machine, exactly(usages, certificatesv1.UsageClientAuth)
}

// Template is the certificate that a request asks for, without serial number and life. Of the subject it has what the
// request's parsed name has, once each; extensions are left out: no request makes a CA.
func Template(request *x509.CertificateRequest, usages []certificatesv1.KeyUsage) (*x509.Certificate, error) {
	s := request.Subject
	out := &x509.Certificate{
		Subject: pkix.Name{
			Country: s.Country, Organization: s.Organization, OrganizationalUnit: s.OrganizationalUnit, Locality: s.Locality,
			Province: s.Province, StreetAddress: s.StreetAddress, PostalCode: s.PostalCode, SerialNumber: s.SerialNumber,
			CommonName: s.CommonName,
		},
		DNSNames: request.DNSNames, IPAddresses: request.IPAddresses, EmailAddresses: request.EmailAddresses, URIs: request.URIs,
		BasicConstraintsValid: true,
	}
	for _, u := range usages {
		key, isKey := keyUsages[u]
		extended, isExtended := extendedKeyUsages[u]
		switch {
		case isKey:
			out.KeyUsage |= key
		case !isExtended:
			return nil, fmt.Errorf("usages: %q is not known", u)
		case !slices.Contains(out.ExtKeyUsage, extended):
			out.ExtKeyUsage = append(out.ExtKeyUsage, extended)
		}
	}
	slices.Sort(out.ExtKeyUsage)
	return out, nil
}

// KnownUsage says whether a usage exists.
func KnownUsage(u certificatesv1.KeyUsage) bool {
	_, key := keyUsages[u]
	_, extended := extendedKeyUsages[u]
	return key || extended
}

// KnownUsages are all usages there are, sorted.
func KnownUsages() []string {
	var out []string
	for u := range keyUsages {
		out = append(out, string(u))
	}
	for u := range extendedKeyUsages {
		out = append(out, string(u))
	}
	slices.Sort(out)
	return out
}

var keyUsages = map[certificatesv1.KeyUsage]x509.KeyUsage{
	certificatesv1.UsageSigning:           x509.KeyUsageDigitalSignature,
	certificatesv1.UsageDigitalSignature:  x509.KeyUsageDigitalSignature,
	certificatesv1.UsageContentCommitment: x509.KeyUsageContentCommitment,
	certificatesv1.UsageKeyEncipherment:   x509.KeyUsageKeyEncipherment,
	certificatesv1.UsageKeyAgreement:      x509.KeyUsageKeyAgreement,
	certificatesv1.UsageDataEncipherment:  x509.KeyUsageDataEncipherment,
	certificatesv1.UsageCertSign:          x509.KeyUsageCertSign,
	certificatesv1.UsageCRLSign:           x509.KeyUsageCRLSign,
	certificatesv1.UsageEncipherOnly:      x509.KeyUsageEncipherOnly,
	certificatesv1.UsageDecipherOnly:      x509.KeyUsageDecipherOnly,
}

var extendedKeyUsages = map[certificatesv1.KeyUsage]x509.ExtKeyUsage{
	certificatesv1.UsageAny:             x509.ExtKeyUsageAny,
	certificatesv1.UsageServerAuth:      x509.ExtKeyUsageServerAuth,
	certificatesv1.UsageClientAuth:      x509.ExtKeyUsageClientAuth,
	certificatesv1.UsageCodeSigning:     x509.ExtKeyUsageCodeSigning,
	certificatesv1.UsageEmailProtection: x509.ExtKeyUsageEmailProtection,
	certificatesv1.UsageSMIME:           x509.ExtKeyUsageEmailProtection,
	certificatesv1.UsageIPsecEndSystem:  x509.ExtKeyUsageIPSECEndSystem,
	certificatesv1.UsageIPsecTunnel:     x509.ExtKeyUsageIPSECTunnel,
	certificatesv1.UsageIPsecUser:       x509.ExtKeyUsageIPSECUser,
	certificatesv1.UsageTimestamping:    x509.ExtKeyUsageTimeStamping,
	certificatesv1.UsageOCSPSigning:     x509.ExtKeyUsageOCSPSigning,
	certificatesv1.UsageMicrosoftSGC:    x509.ExtKeyUsageMicrosoftServerGatedCrypto,
	certificatesv1.UsageNetscapeSGC:     x509.ExtKeyUsageNetscapeServerGatedCrypto,
}

// Has says whether a request has a condition.
func Has(r *certificatesv1.CertificateSigningRequest, condition certificatesv1.RequestConditionType) bool {
	return slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool { return c.Type == condition })
}

// serviceName says whether a name is one by which Services are reached, or another node's: a Node may be called anything.
func serviceName(name string) bool {
	return strings.HasSuffix(name, ".svc") || strings.Contains(name, ".svc.") || strings.HasSuffix(name, ".node.internal")
}
