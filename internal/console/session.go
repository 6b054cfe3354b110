package console

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

const (
	maxSessions = 200
	// maxStreams is for one session: a tab has two.
	maxStreams = 24
	// maxFeeds bounds the memory that all sessions' copies of the cluster can take.
	maxFeeds = 40
	// maxAccountFeeds leaves some of them for other people than one with many sessions.
	maxAccountFeeds = 30
	// maxObjects is how many objects there may be in the accounts' copies before another account gets one. A cluster of 10,000 Services
	// with two Pods each has about 70,000.
	maxObjects  = 400_000
	sessionLife = 12 * time.Hour
	sessionIdle = time.Hour
	// feedIdle is how long a session's watches go on without a page that shows them: a reload should not start anew.
	feedIdle = 20 * time.Second
)

// session is one person's sign-in. Their credentials are in config, in memory and nowhere else.
type session struct {
	user    string
	config  *rest.Config
	account *account
	created time.Time

	mu         sync.Mutex
	namespaces []string // that they asked for
	used       time.Time
	streams    int
	feed       *feed
	closed     bool
}

var (
	errTooManyStreams  = errors.New("too many pages of the console are open: close some")
	errTooManyFeeds    = errors.New("too many people look at the console: try again later")
	errTooManySessions = errors.New("too many sign-ins with the same credentials have a page open: close some")
	errSignedOut       = errors.New("signed out")
	errStopping        = errors.New("the server is stopping")
)

// attach has the session's feed run, for a page that shows it, until release is called.
func (s *session) attach(ctx context.Context, c *Console) (_ *feed, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, nil, errSignedOut
	case s.streams >= maxStreams:
		return nil, nil, errTooManyStreams
	}
	if s.feed == nil || s.feed.ended.Err() != nil {
		feed := newFeed(s.config, s.namespaces, c.opts.NodePorts)
		if err := c.start(ctx, feed, s.account); err != nil {
			return nil, nil, err
		}
		s.feed = feed
	}
	s.streams++
	return s.feed, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.streams--
		s.used = c.sessions.now()
	}, nil
}

// start runs a feed as long as the console does.
func (c *Console) start(ctx context.Context, f *feed, of *account) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ctx.Err() != nil {
		return errStopping
	}
	if c.live.Add(1) > maxFeeds {
		c.live.Add(-1)
		return errTooManyFeeds
	}
	if of.feeds.Add(1) > maxAccountFeeds {
		c.live.Add(-1)
		of.feeds.Add(-1)
		return errTooManySessions
	}
	f.ended, f.stop = context.WithCancel(ctx)
	c.feeds.Go(func() {
		defer c.live.Add(-1)
		defer of.feeds.Add(-1)
		f.run(f.ended)
	})
	return nil
}

// stopFeed ends the watches; the next page starts them anew.
func (s *session) stopFeed() {
	if s.feed != nil {
		s.feed.stop()
		s.feed = nil
	}
}

func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.stopFeed()
}

// sessions are known by the hashes of their ids, so that how long a look-up takes says nothing about them.
type sessions struct {
	now func() time.Time

	mu  sync.Mutex
	all map[[sha256.Size]byte]*session
}

func newSessions(now func() time.Time) *sessions {
	return &sessions{now: now, all: map[[sha256.Size]byte]*session{}}
}

// add returns the id of a new session. The one that was used longest ago makes room for it.
func (s *sessions) add(one *session) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= maxSessions {
		var oldest [sha256.Size]byte
		var when time.Time
		for key, other := range s.all {
			if used := other.lastUsed(s.now()); when.IsZero() || used.Before(when) {
				oldest, when = key, used
			}
		}
		s.all[oldest].close()
		delete(s.all, oldest)
	}
	id := rand.Text() + rand.Text()
	one.created, one.used = s.now(), s.now()
	s.all[sha256.Sum256([]byte(id))] = one
	return id
}

// lastUsed is now while a page is open.
func (s *session) lastUsed(now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams > 0 {
		return now
	}
	return s.used
}

func (s *sessions) get(id string) *session {
	s.mu.Lock()
	one := s.all[sha256.Sum256([]byte(id))]
	s.mu.Unlock()
	if one == nil || s.expired(one) {
		return nil
	}
	one.mu.Lock()
	one.used = s.now()
	one.mu.Unlock()
	return one
}

func (s *sessions) remove(id string) {
	key := sha256.Sum256([]byte(id))
	s.mu.Lock()
	one := s.all[key]
	delete(s.all, key)
	s.mu.Unlock()
	if one != nil {
		one.close()
	}
}

func (s *sessions) expired(one *session) bool {
	one.mu.Lock()
	defer one.mu.Unlock()
	return s.now().Sub(one.created) > sessionLife || one.streams == 0 && s.now().Sub(one.used) > sessionIdle
}

// expire ends sessions whose time is over, and the watches of those that nobody looks at.
func (s *sessions) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, one := range s.all {
		if s.expired(one) {
			one.close()
			delete(s.all, key)
			continue
		}
		one.mu.Lock()
		if one.feed != nil && one.streams == 0 && s.now().Sub(one.used) > feedIdle {
			one.stopFeed()
		}
		one.mu.Unlock()
	}
}

// accounts are those of all sessions.
func (s *sessions) accounts() map[*account]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[*account]bool{}
	for _, one := range s.all {
		out[one.account] = true
	}
	return out
}

func (s *sessions) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, one := range s.all {
		one.close()
		delete(s.all, key)
	}
}

// cookieName has the port in it: browsers keep one set of cookies for all ports of a machine.
func cookieName(r *http.Request) string {
	name := "portal-console"
	if _, port, err := net.SplitHostPort(r.Host); err == nil {
		name += "-" + port
	}
	if r.TLS != nil {
		name = "__Secure-" + name
	}
	return name
}

// setCookie gives the browser a session's id, or takes it away if that is "". No script can read it, no other site can use it.
func setCookie(w http.ResponseWriter, r *http.Request, id string) {
	cookie := &http.Cookie{
		Name: cookieName(r), Value: id, Path: strings.TrimSuffix(Path, "/"), HttpOnly: true, SameSite: http.SameSiteStrictMode,
		// Without TLS the console is served to this machine only; not all browsers keep secure cookies for it.
		Secure: r.TLS != nil,
		MaxAge: int(sessionLife.Seconds()),
	}
	if id == "" {
		cookie.MaxAge = -1
	}
	http.SetCookie(w, cookie)
}

// sessionOf is the session of a request, or nil.
func (c *Console) sessionOf(r *http.Request) *session {
	cookie, err := r.Cookie(cookieName(r))
	if err != nil {
		return nil
	}
	one := c.sessions.get(cookie.Value)
	if one != nil {
		c.opts.Known(r)
	}
	return one
}

// signedIn serves those who have a session.
func (c *Console) signedIn(next func(http.ResponseWriter, *http.Request, *session)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		one := c.sessionOf(r)
		if one == nil {
			refuse(w, http.StatusUnauthorized, "", "the session has ended, or there was none: sign in")
			return
		}
		next(w, r, one)
	}
}
