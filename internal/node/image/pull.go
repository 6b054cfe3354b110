package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// plainOnly is a transport that speaks without encryption to this machine's registries only, and to those that are said to be insecure:
// also when a registry redirects.
func plainOnly(insecure []string, stall time.Duration) http.RoundTripper {
	t := &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		ForceAttemptHTTP2: true, MaxIdleConns: 20, IdleConnTimeout: 30 * time.Second, TLSHandshakeTimeout: 15 * time.Second, ResponseHeaderTimeout: time.Minute,
	}
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.URL.Scheme != "https" && !mayBePlain(r.URL.Host, insecure) {
			return nil, fmt.Errorf("%s is not reached without encryption unless --insecure-registry names it", r.URL.Host)
		}
		return watched(t, r, stall)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// call is a pull that several wait for. It ends when it has ended, or nobody waits any more.
type call struct {
	waiting int
	cancel  context.CancelFunc
	done    chan struct{}
	record  *Record
	err     error
	panic   string // what it ended with, and where
}

// Pull gets an image from its registry, or finds that what is here is still what the registry has. Those who ask for the same image with
// the same credentials at the same time share one pull.
func (s *Store) Pull(ctx context.Context, ref string, credentials Credentials, progress func(Progress)) (*Record, error) {
	parsed, err := parse(ref, s.Insecure)
	if err != nil {
		return nil, err
	}
	repo := parsed.Context()
	tries := credentials.forRepository(repo.RegistryStr(), repo.RepositoryStr())
	text, err := json.Marshal(tries)
	if err != nil {
		return nil, err
	}
	key := Normalize(ref) + " " + sum(text)
	s.mu.Lock()
	c := s.pulls[key]
	if c == nil {
		own, cancel := context.WithCancel(context.WithoutCancel(ctx))
		c = &call{cancel: cancel, done: make(chan struct{})}
		s.pulls[key] = c
		go func() {
			defer func() {
				if p := recover(); p != nil {
					c.panic = fmt.Sprintf("%v\n%s", p, debug.Stack())
				}
				s.mu.Lock()
				if s.pulls[key] == c {
					delete(s.pulls, key)
				}
				s.mu.Unlock()
				cancel()
				close(c.done)
			}()
			c.record, c.err = s.pull(own, ref, parsed, tries, progress)
		}()
	}
	c.waiting++
	s.mu.Unlock()
	select {
	case <-c.done:
		if c.panic != "" {
			panic(c.panic) // in a goroutine whose owner can deal with it
		}
		return c.record, c.err
	case <-ctx.Done():
	}
	s.mu.Lock()
	c.waiting--
	abandoned := c.waiting == 0
	if abandoned && s.pulls[key] == c {
		delete(s.pulls, key) // who asks now starts anew
	}
	s.mu.Unlock()
	if abandoned {
		c.cancel()
		<-c.done
	}
	return nil, ctx.Err()
}

// pull tries one credential after the other.
func (s *Store) pull(ctx context.Context, ref string, parsed name.Reference, tries []authn.AuthConfig, progress func(Progress)) (*Record, error) {
	ctx, release, err := s.slots.take(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	var first error
	for _, auth := range tries {
		rec, err := s.pullAs(ctx, ref, parsed, auth, progress)
		if err == nil {
			return rec, nil
		}
		if first == nil {
			first = err
		}
		var refused *transport.Error
		if !errors.As(err, &refused) || refused.StatusCode != http.StatusUnauthorized && refused.StatusCode != http.StatusForbidden {
			first = err
			break
		}
	}
	return nil, fmt.Errorf("pull %s: %w", ref, told(first))
}

// told makes a registry's error one line.
func told(err error) error {
	var refused *transport.Error
	if !errors.As(err, &refused) {
		return err
	}
	var said []string
	for _, d := range refused.Errors {
		said = append(said, strings.TrimSpace(string(d.Code)+" "+d.Message))
	}
	text := fmt.Sprintf("the registry answered %d %s", refused.StatusCode, http.StatusText(refused.StatusCode))
	if len(said) > 0 {
		text += ": " + strings.Join(said, ", ")
	}
	return errors.New(text)
}

func (s *Store) pullAs(ctx context.Context, ref string, parsed name.Reference, auth authn.AuthConfig, progress func(Progress)) (*Record, error) {
	options := []remote.Option{
		remote.WithContext(ctx), remote.WithTransport(s.transport), remote.WithPlatform(s.platform()), remote.WithAuth(authn.FromConfig(auth)),
		remote.WithUserAgent(s.UserAgent),
	}
	if auth == (authn.AuthConfig{}) {
		options[3] = remote.WithAuth(authn.Anonymous)
	}
	d, err := remote.Get(parsed, options...)
	if err != nil {
		return nil, err
	}
	if !d.MediaType.IsIndex() && !d.MediaType.IsImage() {
		return nil, fmt.Errorf("it is no image, but %q", d.MediaType)
	}
	img, err := d.Image()
	if err != nil {
		return nil, err
	}
	m, err := img.Manifest()
	if err != nil {
		return nil, err
	}
	if !m.Config.MediaType.IsConfig() {
		return nil, fmt.Errorf("it is no image, but %q", m.Config.MediaType)
	}
	if m.Config.Size > maxManifest {
		return nil, fmt.Errorf("its configuration has %d bytes, more than one has", m.Config.Size)
	}
	if len(m.Layers) > maxLayers {
		return nil, fmt.Errorf("it has more than %d layers", maxLayers)
	}
	src := &source{digest: d.Digest.String(), repo: repository(ref), configID: m.Config.Digest.String()}
	if _, byDigest := parsed.(name.Digest); !byDigest {
		src.names = []string{Normalize(ref)}
	}
	if src.config, err = img.RawConfigFile(); err != nil {
		return nil, err
	}
	for _, l := range m.Layers {
		if !l.MediaType.IsLayer() || !l.MediaType.IsDistributable() {
			return nil, fmt.Errorf("layer %s is of the kind %q, which this node does not pull", l.Digest, l.MediaType)
		}
		src.layers = append(src.layers, layerSource{size: l.Size, open: func(context.Context) (io.ReadCloser, error) { return openLayer(img, l.Digest) }})
	}
	return s.unpack(ctx, src, false, progress)
}

func openLayer(img v1.Image, digest v1.Hash) (io.ReadCloser, error) {
	l, err := img.LayerByDigest(digest)
	if err != nil {
		return nil, err
	}
	return l.Compressed()
}
