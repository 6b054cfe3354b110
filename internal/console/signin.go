package console

import (
	"context"
	"crypto/subtle"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	maxSignInBytes = 64 << 10
	signInTimeout  = 10 * time.Second
	// maxNamespaces bounds the watches of somebody who may not see all namespaces.
	maxNamespaces = 100
)

// credentials are what somebody signs in with: a token, or a certificate with its key, or the code of `portal console`.
type credentials struct {
	Token       string   `json:"token"`
	Certificate string   `json:"certificate"`
	Key         string   `json:"key"`
	Code        string   `json:"code"`
	Namespaces  []string `json:"namespaces"`
}

// fieldError is a mistake in a field of a request.
type fieldError struct{ field, message string }

func (e fieldError) Error() string { return e.message }

// config is how the API is reached with these credentials.
func (c credentials) config(o Options) (*rest.Config, error) {
	given := 0
	for _, one := range []string{c.Token, c.Certificate + c.Key, c.Code} {
		if one != "" {
			given++
		}
	}
	if given != 1 {
		return nil, fieldError{"token", "give a token, or a certificate with its key"}
	}
	config := rest.AnonymousClientConfig(o.API)
	config.QPS = -1
	config.UserAgent = "portal-console"
	switch {
	case c.Code != "":
		if o.Code == "" || subtle.ConstantTimeCompare([]byte(c.Code), []byte(o.Code)) != 1 {
			return nil, fieldError{"code", "the code is wrong: open the address that `portal console` printed last"}
		}
		config = rest.CopyConfig(o.API)
		config.QPS = -1
		config.UserAgent = "portal-console"
	case c.Token != "":
		config.BearerToken = c.Token
	default:
		if _, err := tls.X509KeyPair([]byte(c.Certificate), []byte(c.Key)); err != nil {
			return nil, fieldError{"certificate", "the certificate and its key do not fit together: both must be PEM, from one kubeconfig user"}
		}
		config.CertData, config.KeyData = []byte(c.Certificate), []byte(c.Key)
	}
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	config.ContentType = "application/vnd.kubernetes.protobuf"
	return config, nil
}

func validNamespaces(names []string) error {
	if len(names) > maxNamespaces {
		return fieldError{"namespaces", fmt.Sprintf("%d namespaces: at most %d can be shown at once", len(names), maxNamespaces)}
	}
	for _, name := range names {
		if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
			return fieldError{"namespaces", fmt.Sprintf("%q is no namespace: use lower-case letters, digits and dashes", name)}
		}
	}
	return nil
}

func read(w http.ResponseWriter, r *http.Request, into any) error {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxSignInBytes))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return fieldError{"", "the request is not the JSON that is expected, or longer than 64 KiB"}
	}
	return nil
}

func refuseFor(w http.ResponseWriter, err error) {
	var mistake fieldError
	if errors.As(err, &mistake) {
		refuse(w, http.StatusUnprocessableEntity, mistake.field, mistake.message)
		return
	}
	refuse(w, http.StatusServiceUnavailable, "", err.Error())
}

// signIn asks the API server who somebody is, and starts a session for them.
func (c *Console) signIn(w http.ResponseWriter, r *http.Request) {
	ctx, err := c.context()
	if err != nil {
		refuse(w, http.StatusServiceUnavailable, "", err.Error())
		return
	}
	if wait := c.attempts.take(r.RemoteAddr); wait > 0 {
		w.Header().Set("Retry-After", fmt.Sprint(int(wait.Seconds())+1))
		refuse(w, http.StatusTooManyRequests, "", fmt.Sprintf("too many attempts to sign in: try again in %d s", int(wait.Seconds())+1))
		return
	}
	var given credentials
	if err := read(w, r, &given); err != nil {
		refuseFor(w, err)
		return
	}
	if err := validNamespaces(given.Namespaces); err != nil {
		refuseFor(w, err)
		return
	}
	config, err := given.config(c.opts)
	if err != nil {
		refuseFor(w, err)
		return
	}
	shared := rest.CopyConfig(config) // of all sessions of the account, wherever they come from
	if !c.opts.Loopback {
		from := networkHost(r.RemoteAddr)
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return forwarded{next, from} })
	}
	ctx, cancel := context.WithTimeout(ctx, signInTimeout)
	defer cancel()
	context.AfterFunc(r.Context(), cancel)
	name, err := whoIs(ctx, config)
	if err != nil {
		c.opts.Log.Info("console: sign-in refused", "from", r.RemoteAddr, "err", err)
		refuseFor(w, err)
		return
	}
	c.opts.Log.Info("console: signed in", "user", name, "from", r.RemoteAddr)
	c.opts.Known(r)
	if old, err := r.Cookie(cookieName(r)); err == nil {
		c.sessions.remove(old.Value)
	}
	setCookie(w, r, c.sessions.add(&session{user: name, config: config, account: c.accounts.get(c, given.key(), shared), namespaces: slices.Compact(slices.Sorted(slices.Values(given.Namespaces)))}))
	answer(w, http.StatusOK, map[string]string{"user": name})
}

// forwarded says in the API server's audit log whom a request was made for.
type forwarded struct {
	next http.RoundTripper
	from string
}

// WrappedRoundTripper is how client-go finds what is inside.
func (f forwarded) WrappedRoundTripper() http.RoundTripper { return f.next }

func (f forwarded) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-Forwarded-For", f.from)
	return f.next.RoundTrip(r)
}

// whoIs asks the API server.
func whoIs(ctx context.Context, config *rest.Config) (string, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", fmt.Errorf("the API server can't be asked: %w", err)
	}
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	switch {
	case apierrors.IsUnauthorized(err):
		return "", fieldError{"token", "the API server does not accept these credentials: they are wrong, have expired, or are for another cluster"}
	case err != nil:
		return "", fmt.Errorf("the API server could not say who you are: %w", err)
	case review.Status.UserInfo.Username == user.Anonymous:
		return "", fieldError{"token", "the API server does not know these credentials: they are for another cluster, or have expired"}
	}
	return review.Status.UserInfo.Username, nil
}

func (c *Console) signOut(w http.ResponseWriter, r *http.Request) {
	if cookie, err := r.Cookie(cookieName(r)); err == nil {
		c.sessions.remove(cookie.Value)
	}
	setCookie(w, r, "")
	answer(w, http.StatusOK, map[string]string{})
}

// showSession says who has signed in. That nobody has is no error: the page asks before it shows the form.
func (c *Console) showSession(w http.ResponseWriter, r *http.Request) {
	one := c.sessionOf(r)
	if one == nil {
		answer(w, http.StatusOK, map[string]any{"user": ""})
		return
	}
	answer(w, http.StatusOK, map[string]any{"user": one.user})
}

// setNamespaces is for those who may not list namespaces: they know which ones are theirs.
func (c *Console) setNamespaces(w http.ResponseWriter, r *http.Request, s *session) {
	var wanted struct {
		Namespaces []string `json:"namespaces"`
	}
	err := read(w, r, &wanted)
	if err == nil {
		err = validNamespaces(wanted.Namespaces)
	}
	if err != nil {
		refuseFor(w, err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.namespaces = slices.Compact(slices.Sorted(slices.Values(wanted.Namespaces)))
	s.stopFeed()
	answer(w, http.StatusOK, map[string]any{"namespaces": s.namespaces})
}

// attempts limits how often somebody tries to sign in: a few at once, then one every few seconds, for each network that
// requests come from.
type attempts struct {
	now func() time.Time

	mu sync.Mutex
	// next is when all of a network's attempts are there again.
	next map[netip.Prefix]time.Time
}

const (
	attemptEvery = 3 * time.Second
	attemptBurst = 10
	// maxNetworks bounds the memory of the limit; beyond it all further networks share one.
	maxNetworks = 10000
)

func newAttempts(now func() time.Time) *attempts {
	return &attempts{now: now, next: map[netip.Prefix]time.Time{}}
}

// take returns how long to wait before the next attempt; 0 allows this one.
func (a *attempts) take(remote string) time.Duration {
	network := networkOf(remote)
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, known := a.next[network]; !known && len(a.next) >= maxNetworks {
		network = netip.Prefix{}
	}
	now := a.now()
	next := a.next[network]
	if next.Before(now) {
		next = now
	}
	if over := next.Sub(now) - (attemptBurst-1)*attemptEvery; over > 0 {
		return over
	}
	a.next[network] = next.Add(attemptEvery)
	return 0
}

func (a *attempts) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for network, next := range a.next {
		if next.Before(a.now()) {
			delete(a.next, network)
		}
	}
}

func networkHost(remote string) string {
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		return ""
	}
	return host
}

// networkOf is an IPv4 address, or the /64 that one customer has.
func networkOf(remote string) netip.Prefix {
	ip, err := netip.ParseAddr(networkHost(remote))
	if err != nil {
		return netip.Prefix{}
	}
	ip = ip.Unmap().WithZone("")
	bits := 32
	if ip.Is6() {
		bits = 64
	}
	prefix, _ := ip.Prefix(bits)
	return prefix
}
