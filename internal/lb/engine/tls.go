package engine

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"portal/internal/lb/config"
)

// certificate is one of the configuration, parsed.
type certificate struct {
	source *config.Certificate
	parsed *tls.Certificate
	err    error
}

// certificates are by name. Those whose bytes did not change stay the same.
type certificates struct {
	mu    sync.Mutex
	known map[string]*certificate
}

func (s *certificates) load(sources map[string]*config.Certificate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := make(map[string]*certificate, len(sources))
	for name, source := range sources {
		if source == nil {
			continue
		}
		if c := s.known[name]; c != nil && bytes.Equal(c.source.Chain, source.Chain) && bytes.Equal(c.source.Key, source.Key) {
			known[name] = c
			continue
		}
		c := &certificate{source: source}
		parsed, err := tls.X509KeyPair(source.Chain, source.Key)
		c.parsed = &parsed
		if err != nil {
			c.err = fmt.Errorf("it can't be used: %w", err) // such errors quote nothing of a key
		}
		known[name] = c
	}
	s.known = known
}

func (s *certificates) named(names []string) ([]*certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*certificate
	for _, name := range names {
		c := s.known[name]
		switch {
		case c == nil:
			return nil, fmt.Errorf("certificate %q: there is none of this name", name)
		case c.err != nil:
			return nil, fmt.Errorf("certificate %q: %w", name, c.err)
		}
		out = append(out, c)
	}
	return out, nil
}

func same(a, b []*certificate) bool { return slices.Equal(a, b) }

// listenerTLS is how a listener speaks TLS.
func listenerTLS(cfg *config.Listener, certs []*certificate) (*tls.Config, error) {
	if cfg.TLS.MaxVersion != 0 && cfg.TLS.MinVersion > cfg.TLS.MaxVersion {
		return nil, fmt.Errorf("tls.minVersion %#x is higher than tls.maxVersion %#x", cfg.TLS.MinVersion, cfg.TLS.MaxVersion)
	}
	// Records of full size: small ones at first would get the first bytes there a little sooner, but each costs a system call.
	out := &tls.Config{MinVersion: cfg.TLS.MinVersion, MaxVersion: cfg.TLS.MaxVersion, CipherSuites: cfg.TLS.CipherSuites, DynamicRecordSizingDisabled: true}
	if cfg.Protocol == config.HTTPS {
		out.NextProtos = []string{"h2", "http/1.1", "http/1.0"}
	}
	byName, err := shownBy(cfg.TLS, certs)
	if err != nil {
		return nil, err
	}
	all := certs
	out.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		name := strings.ToLower(strings.TrimSuffix(hello.ServerName, "."))
		candidates := byName[name]
		if len(candidates) == 0 {
			if _, parent, ok := strings.Cut(name, "."); ok {
				candidates = byName["*."+parent]
			}
		}
		// A name may have one for each kind of key; clients don't take all.
		for _, c := range candidates {
			if hello.SupportsCertificate(c) == nil {
				return c, nil
			}
		}
		if len(candidates) > 0 {
			return candidates[0], nil
		}
		return all[0].parsed, nil
	}
	return out, nil
}

// shownBy is which certificates are shown for a name: as the configuration says, or by the names that are in them.
func shownBy(cfg *config.TLS, certs []*certificate) (map[string][]*tls.Certificate, error) {
	byName := map[string][]*tls.Certificate{}
	if len(cfg.Names) == 0 {
		for _, c := range certs {
			for _, name := range namesOf(c.parsed.Leaf) {
				name = strings.ToLower(strings.TrimSuffix(name, "."))
				byName[name] = append(byName[name], c.parsed)
			}
		}
		return byName, nil
	}
	for name, list := range cfg.Names {
		for _, of := range list {
			i := slices.Index(cfg.Certificates, of)
			if i < 0 {
				return nil, fmt.Errorf("tls.names[%q]: %q is not one of tls.certificates", name, of)
			}
			byName[name] = append(byName[name], certs[i].parsed)
		}
	}
	return byName, nil
}

func namesOf(leaf *x509.Certificate) []string {
	if leaf == nil {
		return nil
	}
	if len(leaf.DNSNames) == 0 && leaf.Subject.CommonName != "" {
		return []string{leaf.Subject.CommonName}
	}
	return leaf.DNSNames
}

// EndpointTLS is how TLS is spoken to the endpoints of a pool: verified if the pool has CA certificates, else not. It is nil if the
// pool's protocol is not encrypted.
func EndpointTLS(cfg *config.Pool) (*tls.Config, error) {
	if !cfg.Protocol.Encrypted() {
		return nil, nil
	}
	// Endpoints may be old programs; whether they are good enough is their owner's decision.
	out := &tls.Config{MinVersion: tls.VersionTLS10, ClientSessionCache: tls.NewLRUClientSessionCache(256)}
	if cfg.TLS == nil || len(cfg.TLS.CA) == 0 {
		out.InsecureSkipVerify = true
		if cfg.TLS != nil {
			out.ServerName = cfg.TLS.ServerName
		}
		return out, nil
	}
	out.RootCAs = x509.NewCertPool()
	if !out.RootCAs.AppendCertsFromPEM(cfg.TLS.CA) {
		return nil, errors.New("tls.ca: no certificate in PEM")
	}
	out.ServerName = cfg.TLS.ServerName
	if out.ServerName == "" {
		// Without a name the endpoint's address would have to be in its certificate, which it never is: verify the chain alone.
		roots := out.RootCAs
		out.InsecureSkipVerify = true
		out.VerifyConnection = func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 {
				return errors.New("the endpoint has no certificate")
			}
			options := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool()}
			for _, c := range state.PeerCertificates[1:] {
				options.Intermediates.AddCert(c)
			}
			_, err := state.PeerCertificates[0].Verify(options)
			return err
		}
	}
	return out, nil
}

func newDialing(cfg *config.Pool) *dialing {
	c, err := EndpointTLS(cfg)
	return &dialing{tls: c, err: err}
}
