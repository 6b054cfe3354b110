package stream

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	randv2 "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/csr"
	"portal/internal/pki"
)

// certificate is what a server shows to its clients: one that the cluster signs for the node, renewed before it ends.
type certificate struct {
	server *Server

	mu   sync.Mutex
	pair *tls.Certificate
}

const (
	// CertificateFile has the certificate that the server shows, and its key.
	CertificateFile = "serving.pem"
	// pollEvery is how often a request is looked at. After patience it is given up and made anew: a person may have to approve it.
	pollEvery = 250 * time.Millisecond
	patience  = 10 * time.Minute
	maxDelay  = time.Minute
	// A node that has no certificate does not wait that long for one with its addresses: after soon it asks for one with its name alone, which
	// the API server needs no more than, and asks again later. Another Node may have one of its addresses, and then no request with it is
	// approved.
	soon  = 20 * time.Second
	later = 30 * time.Minute
)

// errUnsigned says that a request was refused, or not signed in time.
var errUnsigned = errors.New("it was not signed")

// current is for the TLS server.
func (c *certificate) current(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pair == nil {
		return nil, errors.New("the cluster has not signed a serving certificate for this node yet")
	}
	return c.pair, nil
}

func (c *certificate) path() string { return filepath.Join(c.server.Dir, CertificateFile) }

func (c *certificate) set(pair *tls.Certificate) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pair = pair
}

// load reads the one of an earlier run.
func (c *certificate) load() (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(c.path(), c.path())
	if err != nil {
		return nil, err
	}
	if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
		return nil, err
	}
	return &pair, nil
}

// run keeps a valid certificate until ctx ends.
func (c *certificate) run(ctx context.Context) {
	log := c.server.Log
	pair, err := c.load()
	if err == nil && pair.Leaf.Subject.CommonName == csr.NodeUserPrefix+c.server.Node && time.Now().Before(pair.Leaf.NotAfter) {
		c.set(pair)
	} else {
		pair = nil
	}
	delay, told := time.Second, ""
	var alone time.Time // until when a certificate with the name alone will do
	for ctx.Err() == nil {
		hosts, err := c.hosts(ctx)
		if err == nil {
			if time.Now().Before(alone) {
				hosts = hosts[:1]
			}
			if pair != nil {
				if wait := c.due(pair.Leaf, hosts); wait > 0 {
					sleep(ctx, min(wait, time.Minute)) // a machine may have slept, or have other addresses
					continue
				}
			}
			var next *tls.Certificate
			limit := patience
			if pair == nil && len(hosts) > 1 {
				limit = soon
			}
			if next, err = c.obtain(ctx, hosts, limit); err == nil {
				pair, delay, told = next, time.Second, ""
				c.set(pair)
				log.Info("serving certificate obtained", "hosts", strings.Join(hosts, ","), "until", pair.Leaf.NotAfter)
				continue
			}
			if errors.Is(err, errUnsigned) && len(hosts) > 1 && ctx.Err() == nil {
				alone = time.Now().Add(later)
				log.Warn("no serving certificate with this node's addresses is signed: does another Node have one of them? One with its name alone is used meanwhile", "hosts", strings.Join(hosts, ","), "err", err)
				continue
			}
		}
		if ctx.Err() != nil {
			return
		}
		if err.Error() != told {
			told = err.Error()
			log.Warn("no serving certificate could be obtained, retrying", "err", err)
		}
		sleep(ctx, delay)
		delay = min(2*delay, maxDelay)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// due says how long a certificate is still good: until a point between 70 % and 90 % of its life that is the same each time it is asked,
// or not at all if it does not stand for all hosts.
func (c *certificate) due(leaf *x509.Certificate, hosts []string) time.Duration {
	for _, h := range hosts {
		if leaf.VerifyHostname(h) != nil {
			return 0
		}
	}
	const earliest, latest = 0.7, 0.9
	random := randv2.New(randv2.NewPCG(leaf.SerialNumber.Uint64(), 0)).Float64()
	life := leaf.NotAfter.Sub(leaf.NotBefore)
	return time.Until(leaf.NotBefore.Add(time.Duration(float64(life) * (earliest + (latest-earliest)*random))))
}

// hosts are what the certificate stands for: the node's own name, and the addresses that it serves at, but for those that an API server has,
// too. No node's certificate gets these, and the API server knows nodes by their names.
func (c *certificate) hosts(ctx context.Context) ([]string, error) {
	out := []string{csr.ServingName(c.server.Node)}
	servers, err := c.server.Client.CoreV1().Endpoints(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{}) //nolint:staticcheck // nodes may read no slices
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("read the API servers' addresses: %w", err)
	}
	var taken []string
	if err == nil {
		for _, subset := range servers.Subsets {
			for _, a := range slices.Concat(subset.Addresses, subset.NotReadyAddresses) {
				taken = append(taken, a.IP)
			}
		}
	}
	node, err := c.server.Client.CoreV1().Nodes().Get(ctx, c.server.Node, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the Node: %w", err)
	}
	for _, a := range node.Status.Addresses {
		ip := net.ParseIP(a.Address)
		if a.Type == corev1.NodeInternalIP && ip != nil && ip.IsGlobalUnicast() && !slices.Contains(taken, a.Address) {
			out = append(out, a.Address)
		}
	}
	return out, nil
}

// obtain makes a key and has the cluster sign a certificate for it.
func (c *certificate) obtain(ctx context.Context, hosts []string, limit time.Duration) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.CertificateRequest{Subject: pkix.Name{CommonName: csr.NodeUserPrefix + c.server.Node, Organization: []string{csr.NodeGroup}}}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return nil, err
	}
	chain, err := c.ask(ctx, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), limit)
	if err != nil {
		return nil, err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	data := append(slices.Clone(chain), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret})...)
	pair, err := tls.X509KeyPair(data, data)
	if err != nil {
		return nil, fmt.Errorf("the certificate that the cluster signed: %w", err)
	}
	if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.server.Dir, 0o700); err != nil {
		return nil, err
	}
	return &pair, pki.WriteFile(c.path(), data, 0o600)
}

func (c *certificate) ask(ctx context.Context, request []byte, limit time.Duration) ([]byte, error) {
	requests := c.server.Client.CertificatesV1().CertificateSigningRequests()
	made, err := requests.Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "csr-serving-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: request, SignerName: certificatesv1.KubeletServingSignerName,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("ask for a serving certificate: %w", err)
	}
	began, told := time.Now(), false
	for wait := pollEvery; time.Since(began) < limit && ctx.Err() == nil; wait = min(wait*3/2, 10*time.Second) {
		sleep(ctx, wait)
		now, err := requests.Get(ctx, made.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil, fmt.Errorf("the request %s is gone", made.Name)
		case err != nil:
			continue // a server that restarts
		case len(now.Status.Certificate) > 0:
			return now.Status.Certificate, nil
		}
		for _, cond := range now.Status.Conditions {
			if cond.Type == certificatesv1.CertificateDenied || cond.Type == certificatesv1.CertificateFailed {
				return nil, fmt.Errorf("request %s: %w: %s", made.Name, errUnsigned, cond.Message)
			}
		}
		if time.Since(began) > 15*time.Second && !told {
			told = true
			c.server.Log.Warn("the serving certificate is not signed yet: does the controller csr-approving run? If it leaves the request to a person, approve it", "command", "kubectl certificate approve "+made.Name)
		}
	}
	return nil, fmt.Errorf("request %s: %w in %s", made.Name, errUnsigned, limit)
}
