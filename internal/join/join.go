// Package join gives a machine an identity in a cluster, and keeps it: with a bootstrap token it obtains a certificate of its own,
// which it renews before it ends. It knows where the files are and how the server is asked; what an identity may do, it doesn't.
package join

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"os"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"portal/internal/bootstrap"
	"portal/internal/identity"
)

// Options say who joins what.
type Options struct {
	Role identity.Role
	// Machine is the name of this machine: its Node's, if it has one.
	Machine string
	// Server is the URL of the API server; empty: the one that was joined before.
	Server string
	// Token is needed as long as there is no valid certificate. The zero value is none.
	Token bootstrap.Token
	// Hashes pin the CA of the server: one of them must be its. Without any, SkipHash must say that the token alone is to
	// vouch for the server.
	Hashes   []string
	SkipHash bool
	// Through is the identity of this machine's node. With it, no token is needed: a node may have its machine's other identities.
	Through *Credentials
	// Dir is where the key, the certificate and a kubeconfig are kept.
	Dir string
	Log *slog.Logger
}

// Validate says what is wrong with the options, naming the flags.
func (o *Options) Validate() error {
	if o.Server != "" {
		if u, err := url.Parse(o.Server); err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil {
			return fmt.Errorf("--server %q: must be the API server's URL, like https://10.0.0.1:6443", o.Server)
		}
	}
	if err := identity.ValidMachine(o.Machine); err != nil {
		return fmt.Errorf("%w: give another with --hostname-override", err)
	}
	if len(o.Hashes) > 0 && o.SkipHash {
		return errors.New("--ca-hash and --unsafe-skip-ca-hash: give one of them")
	}
	if o.Token != (bootstrap.Token{}) && len(o.Hashes) == 0 && !o.SkipHash {
		return errors.New("--token needs --ca-hash, by which the server is known before the token is sent to it: " +
			"`portal token create` prints both. (--unsafe-skip-ca-hash does without, and trusts everybody who has the token)")
	}
	return nil
}

// Credentials are a machine's identity. Run renews it.
type Credentials struct {
	opts    Options
	current atomic.Pointer[material]
	// random is from 0 to 1; tests choose it.
	random func() float64
}

// Join uses the certificate of an earlier run if it is valid, and otherwise obtains one with the token. While the server is
// away it retries until ctx ends.
func Join(ctx context.Context, opts Options) (*Credentials, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if opts.Through != nil {
		opts.Hashes = opts.Through.current.Load().hashes // so that a certificate of a cluster that was left is not used
	}
	c := &Credentials{opts: opts, random: rand.Float64}
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	stored, err := load(opts.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("--data-dir %s: %w: repair it, or remove the folder and join again", opts.Dir, err)
	}
	why := c.unusable(stored)
	if why == "" {
		if opts.Server != "" {
			stored.server = opts.Server
		}
		if opts.Through != nil {
			stored.server = opts.Through.current.Load().server
		}
		c.current.Store(stored)
		return c, stored.save(opts.Dir)
	}
	if opts.Through != nil {
		return c, c.retrying(ctx, func() error { return c.join(ctx) })
	}
	if opts.Token == (bootstrap.Token{}) {
		return nil, fmt.Errorf("%s in %s: give --server, --token and --ca-hash as `portal token create --role %s` prints them", why, opts.Dir, opts.Role)
	}
	if opts.Server == "" {
		return nil, errors.New("--token needs --server: the URL of the API server to join")
	}
	return c, c.retrying(ctx, func() error { return c.join(ctx) })
}

// unusable says why there is no certificate to go on with, or "".
func (c *Credentials) unusable(m *material) string {
	switch {
	case m == nil:
		return "there is no certificate"
	case time.Now().After(m.leaf.NotAfter):
		return "the certificate has expired (" + m.leaf.NotAfter.Format(time.RFC3339) + ")"
	case m.leaf.Subject.CommonName != c.opts.Role.User(c.opts.Machine):
		return "the certificate is for " + m.leaf.Subject.CommonName + ", not " + c.opts.Role.User(c.opts.Machine) + ","
	case !m.sameCluster(c.opts.Hashes):
		return "the certificate is of another cluster, with another --ca-hash,"
	}
	return ""
}

// join obtains the first certificate.
func (c *Credentials) join(ctx context.Context) error {
	if c.opts.Through != nil {
		return c.joinThrough(ctx, c.opts.Through)
	}
	ca, err := discover(ctx, &c.opts)
	if err != nil {
		return err
	}
	m, err := obtain(ctx, &c.opts, &rest.Config{
		Host: c.opts.Server, BearerToken: c.opts.Token.String(), TLSClientConfig: rest.TLSClientConfig{CAData: ca},
	})
	if err != nil {
		return err
	}
	m.ca, m.server, m.hashes = ca, c.opts.Server, c.opts.Hashes
	return c.begin(m)
}

// joinThrough obtains it with the node's certificate, from the server that the node has joined.
func (c *Credentials) joinThrough(ctx context.Context, node *Credentials) error {
	m, err := obtain(ctx, &c.opts, node.Config())
	if err != nil {
		return err
	}
	of := node.current.Load()
	m.ca, m.server, m.hashes = of.ca, of.server, of.hashes
	return c.begin(m)
}

// begin uses a first certificate.
func (c *Credentials) begin(m *material) error {
	if err := m.save(c.opts.Dir); err != nil {
		return err
	}
	c.current.Store(m)
	c.opts.Log.Info("joined the cluster", "server", m.server, "as", m.leaf.Subject.CommonName, "until", m.leaf.NotAfter)
	return nil
}

// Config is how the API is reached with the identity. Renewed certificates are used for new connections; watches go on
// on the old ones.
func (c *Credentials) Config() *rest.Config {
	return &rest.Config{Host: c.current.Load().server, Transport: &transport{creds: c}}
}

// renewal bounds: the part of its life after which a certificate is renewed is chosen at random between the two, so that machines
// which joined together don't renew together.
const earliest, latest = 0.7, 0.9

func renewAt(notBefore, notAfter time.Time, random float64) time.Time {
	life := notAfter.Sub(notBefore)
	return notBefore.Add(time.Duration(float64(life) * (earliest + (latest-earliest)*random)))
}

// Run renews the certificate until ctx ends.
func (c *Credentials) Run(ctx context.Context) {
	failing := false
	for {
		m := c.current.Load()
		at := renewAt(m.leaf.NotBefore, m.leaf.NotAfter, c.random())
		for wait := time.Until(at); wait > 0; wait = time.Until(at) {
			if !pause(ctx, min(wait, time.Minute)) { // a machine may have slept
				return
			}
		}
		for {
			err := c.renew(ctx, m)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				failing = false
				break
			}
			if !failing {
				c.opts.Log.Warn("the certificate could not be renewed, retrying", "err", err, "validUntil", m.leaf.NotAfter)
			}
			failing = true
			if left := time.Until(m.leaf.NotAfter); !pause(ctx, min(max(left/20, 500*time.Millisecond), 5*time.Minute)) {
				return
			}
		}
	}
}

// renew obtains the next certificate with the one at hand, or with the token if that has expired.
func (c *Credentials) renew(ctx context.Context, m *material) error {
	if time.Now().After(m.leaf.NotAfter) {
		if c.opts.Through != nil || c.opts.Token != (bootstrap.Token{}) && c.opts.Server != "" {
			return c.join(ctx)
		}
		return fmt.Errorf("it expired at %s: start again with --server, --token and --ca-hash as `portal token create --role %s` prints them",
			m.leaf.NotAfter.Format(time.RFC3339), c.opts.Role)
	}
	config := c.Config()
	ca, err := refresh(ctx, config)
	if err != nil {
		return err
	}
	next, err := obtain(ctx, &c.opts, config)
	if err != nil {
		return err
	}
	next.ca, next.server, next.hashes = ca, m.server, m.hashes
	if err := next.save(c.opts.Dir); err != nil {
		return err
	}
	c.current.Store(next)
	c.opts.Log.Info("certificate renewed", "as", next.leaf.Subject.CommonName, "until", next.leaf.NotAfter)
	return nil
}

const (
	firstBackoff, maxBackoff = 500 * time.Millisecond, 30 * time.Second
	// maxAnswers is how often a server may say what it would not say when it has started, or has heard from its peers.
	maxAnswers = 4
)

// retrying calls do until it succeeds, or fails for good, or ctx ends. It logs the first failure and those of another kind.
func (c *Credentials) retrying(ctx context.Context, do func() error) error {
	backoff, told, answers := firstBackoff, "", 0
	for {
		err := do()
		if err == nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		if permanent(err) {
			return err
		}
		if soon := (&notYet{}); errors.As(err, &soon) {
			if answers++; answers > maxAnswers {
				return err
			}
			if answers == 1 {
				backoff = firstBackoff // the server is there
			}
		}
		if err.Error() != told {
			told = err.Error()
			c.opts.Log.Warn("can't join yet, retrying", "server", c.opts.Server, "err", err)
		}
		if !pause(ctx, backoff/2+time.Duration(c.random()*float64(backoff)/2)) {
			return ctx.Err()
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
