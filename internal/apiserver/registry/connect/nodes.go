package connect

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"portal/internal/csr"
)

// Nodes connects to nodes: with a certificate of the server's, and only to whoever proves to be the node.
type Nodes struct {
	// Certificate is what this server shows, and Authorities are the CAs that it trusts, in PEM; both may change.
	Certificate func() (cert, key []byte)
	Authorities func() []byte

	// Instead, if not nil, says where to connect to instead of a node's address and port.
	Instead func(address string) string

	now func() time.Time // nil: time.Now

	mu         sync.Mutex
	transports map[string]*nodeTransport
	swept      time.Time
}

type nodeTransport struct {
	host             string
	used             time.Time
	checked, trusted *http.Transport
}

// Transport reaches a node at an address. Unchecked does not ask for a proof, for those who read a log and say so.
func (n *Nodes) Transport(name, host string, unchecked bool) *http.Transport {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	if n.now != nil {
		now = n.now()
	}
	n.sweep(now)
	t := n.transports[name]
	if t == nil || t.host != host {
		if t != nil {
			t.close()
		}
		if n.transports == nil {
			n.transports = map[string]*nodeTransport{}
		}
		t = &nodeTransport{host: host, checked: n.transport(name, host, false), trusted: n.transport(name, host, true)}
		n.transports[name] = t
	}
	t.used = now
	if unchecked {
		return t.trusted
	}
	return t.checked
}

// unusedAfter is how long a transport is kept that nobody uses: nodes come and go.
const unusedAfter = 5 * time.Minute

// sweep forgets transports that nobody has used for long. Whoever still has one goes on with it.
func (n *Nodes) sweep(now time.Time) {
	if now.Sub(n.swept) < unusedAfter/5 {
		return
	}
	n.swept = now
	for name, t := range n.transports {
		if now.Sub(t.used) > unusedAfter {
			t.close()
			delete(n.transports, name)
		}
	}
}

func (t *nodeTransport) close() {
	t.checked.CloseIdleConnections()
	t.trusted.CloseIdleConnections()
}

// until is a transport whose connections end with ctx. SPDY waits for the other side when it is closed, and a command that says nothing
// would never learn that its client is gone.
func until(ctx context.Context, t *http.Transport) *http.Transport {
	out := t.Clone()
	out.DisableKeepAlives = true
	out.DialContext = func(dialing context.Context, network, address string) (net.Conn, error) {
		conn, err := t.DialContext(dialing, network, address)
		if err == nil {
			context.AfterFunc(ctx, func() { _ = conn.Close() })
		}
		return conn, err
	}
	return out
}

const (
	dialTimeout    = 10 * time.Second
	idleTimeout    = time.Minute
	maxIdlePerNode = 4
)

func (n *Nodes) transport(name, host string, unchecked bool) *http.Transport {
	config := &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, key := n.Certificate()
			pair, err := tls.X509KeyPair(cert, key)
			return &pair, err
		},
		// What is usual would ask for the address alone. Here it matters which node answers: see verify.
		InsecureSkipVerify: true,
	}
	if !unchecked {
		config.VerifyConnection = func(state tls.ConnectionState) error { return n.verify(name, host, state.PeerCertificates) }
	}
	return &http.Transport{
		TLSClientConfig: config, TLSHandshakeTimeout: dialTimeout, IdleConnTimeout: idleTimeout, MaxIdleConnsPerHost: maxIdlePerNode,
		DialContext: n.dial,
	}
}

func (n *Nodes) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if n.Instead != nil {
		address = n.Instead(address)
	}
	return (&net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}).DialContext(ctx, network, address)
}

// verify checks what a node shows: a certificate of this cluster for serving, that is the node's by its name, as the signer of nodes'
// serving certificates makes them, or that stands for the address.
func (n *Nodes) verify(name, host string, shown []*x509.Certificate) error {
	if len(shown) == 0 {
		return errors.New("the node shows no certificate")
	}
	roots, between := x509.NewCertPool(), x509.NewCertPool()
	roots.AppendCertsFromPEM(n.Authorities())
	for _, c := range shown[1:] {
		between.AddCert(c)
	}
	leaf := shown[0]
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
		return fmt.Errorf("the certificate that node %s serves with: %w", name, err)
	}
	if leaf.Subject.CommonName == csr.NodeUserPrefix+name && slices.Equal(leaf.Subject.Organization, []string{csr.NodeGroup}) {
		return nil
	}
	if err := leaf.VerifyHostname(host); err != nil {
		return fmt.Errorf("the certificate that node %s serves with: %w", name, err)
	}
	return nil
}

// backendTransport reaches Pods. Whatever address a request was sent to, it goes nowhere that is this machine's own. Pods' certificates
// prove nothing to this server, as it knows no CA of theirs.
func backendTransport() *http.Transport {
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second, Control: func(_, address string, _ syscall.RawConn) error {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return err
		}
		_, err = backend(host)
		return err
	}}
	return &http.Transport{
		DialContext: dialer.DialContext, TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: dialTimeout, IdleConnTimeout: idleTimeout, MaxIdleConnsPerHost: maxIdlePerNode, MaxIdleConns: 100,
	}
}
