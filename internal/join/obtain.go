package join

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	certificates "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"

	"portal/internal/identity"
)

const (
	// pollEvery is how often a request is looked at; a watch would need rights to see those of others.
	pollEvery = 250 * time.Millisecond
	// patience is how long to wait for a certificate before asking anew.
	patience = 2 * time.Minute
)

// obtain makes a key and asks for a certificate of the role and machine.
func obtain(ctx context.Context, o *Options, config *rest.Config) (*material, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: o.Role.User(o.Machine), Organization: []string{o.Role.Group()}},
	}, key)
	if err != nil {
		return nil, err
	}
	client, err := certificates.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	signer := identity.Signer
	if o.Role == identity.Node {
		signer = certificatesv1.KubeAPIServerClientKubeletSignerName
	}
	request, err := client.CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "portal-" + string(o.Role) + "-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: signer,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	switch {
	case apierrors.IsUnauthorized(err):
		return nil, &notYet{fmt.Errorf("%s does not accept the credentials: the token %s… is wrong, has expired, or was deleted. `portal token create --role %s` makes another",
			config.Host, o.Token.ID, o.Role)}
	case apierrors.IsForbidden(err):
		return nil, &notYet{fmt.Errorf("the token may not join as %s: `portal token create --role %s` makes one that may (%w)", o.Role, o.Role, err)}
	case err != nil:
		return nil, fmt.Errorf("ask %s for a certificate: %w", config.Host, explain(err, config.Host))
	}
	chain, err := await(ctx, client.CertificateSigningRequests(), request.Name, o.Role)
	if err != nil {
		return nil, err
	}
	return newMaterial(chain, key, o.Role.User(o.Machine))
}

// await waits for the certificate.
func await(ctx context.Context, client certificates.CertificateSigningRequestInterface, name string, role identity.Role) ([]byte, error) {
	inner, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for pause(inner, pollEvery) {
		request, err := client.Get(inner, name, metav1.GetOptions{})
		switch {
		case apierrors.IsUnauthorized(err) || apierrors.IsNotFound(err):
			return nil, fmt.Errorf("the request %s: %w", name, err) // from the start
		case err != nil:
			continue // a server that restarts
		}
		for _, c := range request.Status.Conditions {
			if c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed {
				return nil, fail("the server refuses a certificate of the role %s: %s", role, c.Message)
			}
		}
		if len(request.Status.Certificate) > 0 {
			return request.Status.Certificate, nil
		}
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, errors.New("the server did not sign the request " + name + ": do its controllers run (csr-approving and csr-signing)?")
}
