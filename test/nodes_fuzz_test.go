package test

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"math/rand/v2"
	"net"
	"net/url"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// fuzzed is what a request for a certificate asks for, and who asks.
type fuzzed struct {
	who      string
	signer   string
	usages   []certificatesv1.KeyUsage
	template *x509.CertificateRequest
}

func newSeeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

func pick[T any](random *rand.Rand, list ...T) T { return list[random.IntN(len(list))] }

// fuzz is a node's request with a few things changed.
func fuzz(random *rand.Rand, i int) fuzzed {
	f := fuzzed{
		signer: nodeClient, usages: nodeUsages,
		template: &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:n1", Organization: []string{"system:nodes"}}},
	}
	changes := []func(){
		func() {
			f.template.Subject.CommonName = pick(random, "system:node:n2", "system:node:", "system:node:n1 ", "System:node:n1", "admin", "portal-admin",
				"system:masters", "system:kube-controller-manager", "system:serviceaccount:kube-system:default", "", "*", "system:node:n1\x00")
		},
		func() {
			f.template.Subject.Organization = pick(random, []string{"system:masters"}, []string{"system:nodes", "system:masters"},
				[]string{"system:masters", "system:nodes"}, nil, []string{"System:Masters"}, []string{"system:nodes", "system:nodes"}, []string{"system:nodes "})
		},
		func() {
			f.template.DNSNames = pick(random, []string{"kubernetes.default.svc"}, []string{"localhost", "n1"})
		},
		func() { f.template.IPAddresses = []net.IP{pick(random, net.IP{127, 0, 0, 1}, net.IP{10, 96, 0, 1})} },
		func() {
			f.template.URIs = []*url.URL{{Scheme: "spiffe", Host: "cluster", Path: "/ns/kube-system/sa/default"}}
		},
		func() { f.template.EmailAddresses = []string{"root@example.com"} },
		func() {
			f.signer = pick(random, certificatesv1.KubeAPIServerClientSignerName, certificatesv1.KubeletServingSignerName, "example.com/signer")
		},
		func() {
			f.usages = pick(random, []certificatesv1.KeyUsage{certificatesv1.UsageCertSign, certificatesv1.UsageClientAuth},
				[]certificatesv1.KeyUsage{certificatesv1.UsageServerAuth, certificatesv1.UsageDigitalSignature},
				append([]certificatesv1.KeyUsage{certificatesv1.UsageServerAuth}, nodeUsages...), []certificatesv1.KeyUsage{certificatesv1.UsageAny},
				[]certificatesv1.KeyUsage{certificatesv1.UsageClientAuth})
		},
		func() { // a second common name, a uid, and the mark of a CA
			f.template.Subject.ExtraNames = []pkix.AttributeTypeAndValue{
				{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: pick(random, "admin", "system:node:n2")},
				{Type: asn1.ObjectIdentifier{2, 5, 4, 10}, Value: "system:masters"},
				{Type: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}, Value: "0"},
			}[:1+random.IntN(3)]
		},
		func() {
			f.template.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}}
		},
	}
	// Each change alone first, then several together.
	if i < len(changes) {
		changes[i]()
		return f
	}
	for range 1 + random.IntN(3) {
		pick(random, changes...)()
	}
	return f
}
