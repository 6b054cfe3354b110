// Package console serves the web page that shows Services, what is wrong with them, and who has which address. It is a client of
// the API like any other: each session reads with the credentials of the person who signed in, and nothing is ever written. It
// knows nothing of the API server that it may be part of.
package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"portal/internal/explain"
)

// Path is where the page is served.
const Path = "/console/"

const apiPath = Path + "api/"

// Options are what a console needs to know.
type Options struct {
	// API is where the API server is. Its credentials are used by nobody but those who sign in with Code.
	API *rest.Config
	// Code lets whoever has it use the credentials of API; "" lets nobody.
	Code string
	// Loopback refuses requests for other hosts than this machine: a name in somebody else's DNS could lead here.
	Loopback bool
	// NodePorts is the range of node ports, such as 30000-32767, if it is known.
	NodePorts string
	// Known, if set, is called with the requests of those who have signed in, before they are answered.
	Known func(*http.Request)
	// Findings says what is wrong with Services in more detail; nil says nothing.
	Findings Findings
	Log      *slog.Logger
}

// Findings looks for what is wrong with Services, and returns it for each of them, in their order.
type Findings func(context.Context, Subject) ([][]Finding, error)

// Subject are the Services that findings are about, and how to look at them.
type Subject struct {
	Services []explain.Key
	// Namespace is the only one whose objects are looked at; empty: those of all are.
	Namespace string
	// Config has the rights of the person who asks.
	Config *rest.Config
	// Known has objects that this person may see, of the resources in Covered. Nobody may change them.
	Known   *explain.Evidence
	Covered map[string]bool
	// Turn waits until it may compute; release lets others.
	Turn func(context.Context) (release func(), err error)
}

// Finding is one thing that is wrong.
type Finding struct {
	// Severity is broken, degraded or notice.
	Severity string   `json:"severity"`
	Verdict  string   `json:"verdict"`
	Evidence []string `json:"evidence,omitempty"`
	// Fix is what to type.
	Fix []string `json:"fix,omitempty"`
}

// Console is the page's handler. It answers only while Run does.
type Console struct {
	opts     Options
	assets   *assets
	sessions *sessions
	attempts *attempts
	sameSite *http.CrossOriginProtection
	routes   *http.ServeMux
	accounts accounts
	// turn is for findings, traces for traces: one at a time of each.
	turn, traces turn

	mu sync.Mutex
	// running ends with Run; nil before it.
	running context.Context
	feeds   sync.WaitGroup
	// live counts feeds, copies the accounts' objects.
	live, copies atomic.Int32
	// kept counts the objects in all copies.
	kept atomic.Int64
}

// New makes a console.
func New(opts Options) (*Console, error) {
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	if opts.Known == nil {
		opts.Known = func(*http.Request) {}
	}
	files, err := newAssets()
	if err != nil {
		return nil, err
	}
	c := &Console{
		opts: opts, assets: files, sessions: newSessions(time.Now), attempts: newAttempts(time.Now),
		sameSite: http.NewCrossOriginProtection(), routes: http.NewServeMux(),
		accounts: accounts{all: map[accountKey]*account{}}, turn: make(turn, 1), traces: make(turn, 1),
	}
	c.routes.HandleFunc("POST "+apiPath+"signin", c.signIn)
	c.routes.HandleFunc("POST "+apiPath+"signout", c.signOut)
	c.routes.HandleFunc("GET "+apiPath+"about", c.about)
	c.routes.HandleFunc("GET "+apiPath+"session", c.showSession)
	c.routes.HandleFunc("POST "+apiPath+"namespaces", c.signedIn(c.setNamespaces))
	c.routes.HandleFunc("GET "+apiPath+"stream", c.signedIn(c.streamOverview))
	c.routes.HandleFunc("GET "+apiPath+"stream/services/{namespace}/{name}", c.signedIn(c.streamService))
	c.routes.HandleFunc("GET "+apiPath+"trace/{namespace}", c.signedIn(c.trace))
	c.routes.HandleFunc(apiPath, func(w http.ResponseWriter, r *http.Request) {
		refuse(w, http.StatusNotFound, "", fmt.Sprintf("the console has no %s %s", r.Method, r.URL.Path))
	})
	c.routes.Handle(Path, c.assets)
	return c, nil
}

// Run lets people sign in until ctx ends, and returns when nothing of any session is left.
func (c *Console) Run(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	c.mu.Lock()
	c.running = ctx
	c.mu.Unlock()
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			c.sessions.expire()
			c.accounts.expire(time.Now(), c.sessions.accounts())
			c.attempts.forget()
		case <-ctx.Done():
			c.mu.Lock()   // nobody is in start any more, and later ones see that it is over
			c.mu.Unlock() //nolint:staticcheck // as it says
			c.sessions.closeAll()
			c.feeds.Wait()
			return
		}
	}
}

// context is Run's.
func (c *Console) context() (context.Context, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil {
		return nil, errors.New("the server is starting: try again in a moment")
	}
	if c.running.Err() != nil {
		return nil, errStopping
	}
	return c.running, nil
}

// headers keep the page to itself: nothing from elsewhere is loaded, nothing elsewhere may hold it, no script is in the page.
var headers = map[string]string{
	"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Permissions-Policy":           "camera=(), geolocation=(), microphone=()",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
}

func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for name, value := range headers {
		w.Header().Set(name, value)
	}
	if c.opts.Loopback && !loopbackHost(r.Host) {
		refuse(w, http.StatusMisdirectedRequest, "", fmt.Sprintf("the console is for this machine only: open it as http://127.0.0.1%s, not as %s", Path, r.Host))
		return
	}
	if strings.HasPrefix(r.URL.Path, apiPath) {
		w.Header().Set("Cache-Control", "no-store")
		if err := c.sameSite.Check(r); err != nil {
			refuse(w, http.StatusForbidden, "", "the request comes from another page")
			return
		}
		// What other sites can make a browser send has another type.
		if r.Method == http.MethodPost && r.Header.Get("Content-Type") != "application/json" {
			refuse(w, http.StatusUnsupportedMediaType, "", "the Content-Type must be application/json")
			return
		}
		// A page must not take a server that stops for one that does not know it.
		if _, err := c.context(); err != nil {
			refuse(w, http.StatusServiceUnavailable, "", err.Error())
			return
		}
	}
	c.routes.ServeHTTP(w, r)
}

func loopbackHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.Trim(host, "[]")
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// refuse answers with what is wrong. field is that of the request which is, if one is.
func refuse(w http.ResponseWriter, status int, field, message string) {
	answer(w, status, map[string]string{"message": message, "field": field})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

// about says what somebody who has not signed in needs to know.
func (c *Console) about(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, map[string]any{"code": c.opts.Code != "", "server": c.serverName()})
}

// serverName is where the API server is, as people know it: this one's own address means nothing to them.
func (c *Console) serverName() string {
	if c.opts.Code == "" {
		return ""
	}
	return c.opts.API.Host
}
