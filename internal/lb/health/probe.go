package health

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"

	"portal/internal/lb/config"
)

// userAgent is how HTTP checks introduce themselves.
const userAgent = "portal-lb-health/1"

// The PROXY headers of a connection that is nobody's but the sender's. Endpoints that expect one refuse connections without.
var local = map[int]string{
	1: "PROXY UNKNOWN\r\n",
	2: "\r\n\r\n\x00\r\nQUIT\n\x20\x00\x00\x00",
}

func (t target) String() string {
	if t.check.Protocol.Parsed() {
		return fmt.Sprintf("%s:%d%s", t.check.Protocol, t.address.Port(), t.path())
	}
	return fmt.Sprintf("%s:%d", t.check.Protocol, t.address.Port())
}

func (t target) path() string {
	if t.check.Path == "" {
		return "/"
	}
	return t.check.Path
}

// probe checks once.
func (t target) probe(ctx context.Context) error {
	if t.check.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, t.check.Timeout)
		defer cancel()
	}
	switch t.check.Protocol {
	case config.HTTP, config.HTTPS:
		return t.request(ctx)
	case config.SSL:
		c, err := t.dial(ctx, "tcp", "")
		if err != nil {
			return err
		}
		defer c.Close()
		return tls.Client(c, unverified()).HandshakeContext(ctx)
	default:
		c, err := t.dial(ctx, "tcp", "")
		if err == nil {
			_ = c.Close()
		}
		return err
	}
}

// unverified takes every certificate: a check finds out whether something answers, not who.
func unverified() *tls.Config {
	return &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10}
}

// dial connects to the target, whatever address is given.
func (t target) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", t.address.String())
	if err != nil {
		return nil, err
	}
	if header := local[t.proxyProtocol]; header != "" {
		if _, err := c.Write([]byte(header)); err != nil {
			_ = c.Close()
			return nil, err
		}
	}
	return c, nil
}

// request wants the answer 200. It does not follow redirects.
func (t target) request(ctx context.Context) error {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: t.dial, TLSClientConfig: unverified(), MaxResponseHeaderBytes: 64 << 10, DisableCompression: true}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s://%v%s", t.check.Protocol, t.address, t.path()), nil)
	if err != nil {
		return err
	}
	request.Header.Set("User-Agent", userAgent)
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("answer %s, want 200", answer.Status)
	}
	return nil
}
