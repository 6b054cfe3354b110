package engine

import (
	"crypto/tls"
	"net"
	"net/netip"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// TestProtocolChanges: connections from before a listener spoke another protocol go on for the draining time, and are closed then. Whatever else changes
// leaves them alone.
func TestProtocolChanges(t *testing.T) {
	ca := newAuthority(t)
	certs := map[string]*config.Certificate{"a": ca.issue(t, "a.test"), "b": ca.issue(t, "b.test")}
	ssl := func(c *config.Config) {
		c.Listeners[0].Protocol, c.Listeners[0].TLS, c.Certificates = config.SSL, &config.TLS{Certificates: []string{"a"}, MinVersion: tls.VersionTLS12}, certs
	}
	trusts := func(prefixes ...string) func(*config.Config) {
		return func(c *config.Config) {
			for _, p := range prefixes {
				c.Listeners[0].TrustedProxies = append(c.Listeners[0].TrustedProxies, netip.MustParsePrefix(p))
			}
		}
	}
	for name, tc := range map[string]struct {
		before, after func(*config.Config)
		ends          bool
	}{
		"tcp to ssl":          {nil, ssl, true},
		"ssl to tcp":          {ssl, nil, true},
		"proxy headers":       {nil, trusts("192.0.2.0/24"), true},
		"no proxy headers":    {trusts("192.0.2.0/24"), nil, true},
		"endpoints' headers":  {nil, func(c *config.Config) { c.Pools["web"].ProxyProtocol = 2 }, true},
		"endpoints' protocol": {nil, func(c *config.Config) { c.Pools["web"].Protocol = config.SSL }, true},
		"another proxy":       {trusts("192.0.2.0/24"), trusts("192.0.2.0/24", "198.51.100.0/24"), false},
		"certificate": {ssl, func(c *config.Config) {
			ssl(c)
			c.Listeners[0].TLS.Certificates = []string{"b"}
		}, false},
		"tls versions": {ssl, func(c *config.Config) {
			ssl(c)
			c.Listeners[0].TLS.MinVersion = tls.VersionTLS13
		}, false},
		"tls cipher suites": {ssl, func(c *config.Config) {
			ssl(c)
			c.Listeners[0].TLS.MaxVersion, c.Listeners[0].TLS.CipherSuites = tls.VersionTLS12, []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384}
		}, false},
		"the rest": {nil, func(c *config.Config) {
			l := &c.Listeners[0]
			l.IdleTimeout, l.Limits, l.Tags = 30*time.Second, config.Limits{Connections: 5}, map[string]string{"a": "b"}
			p := c.Pools["web"]
			p.Endpoints = append(p.Endpoints, config.Endpoint{Address: netip.MustParseAddrPort("192.0.2.1:80")})
			p.Policy, p.Retries, p.ConnectTimeout = config.Policy{Kind: config.LeastConnections}, 5, time.Second
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			at, s := unused(t), serve(t, echo)
			records := make(chan *Record, 1)
			e := newEngine(t, Options{Record: func(r *Record) { records <- r }})
			configure := func(change func(*config.Config)) {
				cfg := tcpConfig(at, s.address)
				cfg.Pools["web"].Draining = time.Second
				if change != nil {
					change(&cfg)
				}
				apply(t, e, cfg)
			}
			configure(tc.before)
			var c net.Conn = dialTo(t, at)
			if e.listeners[at].state.Load().tls != nil {
				c = tls.Client(c, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12})
			}
			ask(t, c, "before")
			changed := time.Now()
			configure(tc.after)
			configure(tc.after) // once more, as when endpoints change: the time does not begin anew
			ask(t, c, "goes on")
			if !tc.ends {
				if until := e.listeners[at].state.Load().generation.until.Load(); until != 0 || e.Connections() != 1 {
					t.Errorf("its end is at %v, and there are %d connections", until, e.Connections())
				}
				return
			}
			wantEnd(t, c)
			if took := time.Since(changed); took < time.Second {
				t.Errorf("the connection ended after %v, want 1s", took)
			}
			if r := <-records; r.End != endChanged {
				t.Errorf("the record says that it ended because of %q", r.End)
			}
		})
	}
}
