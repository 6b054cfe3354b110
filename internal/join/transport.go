package join

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"sync"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
)

type dialer = func(ctx context.Context, network, address string) (net.Conn, error)

// transport sends requests over connections that were made with the certificate of the moment. When that was renewed, new
// requests go over new connections, and what runs on the old ones, watches above all, ends there in its own time.
type transport struct {
	creds *Credentials
	dial  dialer

	mu   sync.Mutex
	of   *material
	http *http.Transport
}

// WithDial is the same over connections of another dialer, for those who want to know where they lead.
func (t *transport) WithDial(dial dialer) http.RoundTripper {
	return &transport{creds: t.creds, dial: dial}
}

func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	return t.current().RoundTrip(r)
}

func (t *transport) current() *http.Transport {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.creds.current.Load()
	if t.of == m {
		return t.http
	}
	if t.http != nil {
		t.http.CloseIdleConnections()
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(m.ca)
	dial := t.dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	t.of, t.http = m, utilnet.SetTransportDefaults(&http.Transport{
		DialContext:         dial,
		TLSHandshakeTimeout: 10 * time.Second,
		IdleConnTimeout:     90 * time.Second,
		MaxIdleConnsPerHost: 25,
		DisableCompression:  true,
		TLSClientConfig:     &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{m.cert}, MinVersion: tls.VersionTLS12},
	})
	return t.http
}
