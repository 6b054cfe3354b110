package server

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func selfSigned(t *testing.T) (*tls.Config, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, _ := x509.ParseCertificate(der)
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, pool
}

func TestOverTLSAndHTTPS(t *testing.T) {
	config, pool := selfSigned(t)
	s, _ := started(t, small(), Options{TLS: config, ListenTLS: []netip.AddrPort{loopback}, ListenHTTPS: []netip.AddrPort{loopback}, Forward: upstream(t)})
	overTLS := s.streams[1].l.Addr().String()
	client := dns.Client{Net: "tcp-tls", TLSConfig: &tls.Config{RootCAs: pool}, Timeout: 3 * time.Second}
	q := new(dns.Msg)
	q.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	if m, _, err := client.Exchange(q, overTLS); err != nil || len(m.Answer) != 1 {
		t.Errorf("TLS: %v %v", m, err)
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	web := &http.Client{Transport: transport, Timeout: 3 * time.Second}
	url := "https://" + s.https[0].l.Addr().String() + "/dns-query"
	for _, name := range []string{"web.shop.svc.cluster.local.", "www.example.com."} {
		q.SetQuestion(name, dns.TypeA)
		raw, _ := q.Pack()
		get, err := web.Get(url + "?dns=" + base64.RawURLEncoding.EncodeToString(raw))
		checkHTTPS(t, get, err)
		post, err := web.Post(url, "application/dns-message", bytes.NewReader(raw))
		checkHTTPS(t, post, err)
	}
	if r, err := web.Get(url + "?dns=x"); err != nil || r.StatusCode != http.StatusBadRequest {
		t.Errorf("garbage: %v %v", r, err)
	}
}

func checkHTTPS(t *testing.T, r *http.Response, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
		return
	}
	defer r.Body.Close()
	body, _ := io.ReadAll(r.Body)
	m := new(dns.Msg)
	if err := m.Unpack(body); err != nil || len(m.Answer) != 1 || r.Header.Get("Content-Type") != "application/dns-message" {
		t.Errorf("%s: %v %v", r.Status, err, m)
	}
}
