package console

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

func testConsole(t *testing.T, opts Options) *Console {
	t.Helper()
	opts.API, opts.Log = &rest.Config{Host: "http://127.0.0.1:1"}, slog.New(slog.NewTextHandler(io.Discard, nil))
	c, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestPage: the page is small, loads nothing from elsewhere, has nothing inline, and every path below it is the page.
func TestPage(t *testing.T) {
	c := testConsole(t, Options{})
	total := 0
	for name, file := range c.assets.files {
		if file.kind == "" {
			t.Errorf("%s has no content type", name)
		}
		if name != "licences.txt" {
			total += min(len(file.compressed), len(file.plain))
		}
	}
	if total > 250_000 {
		t.Errorf("the page has %d bytes compressed; 250,000 are the limit", total)
	}
	get := func(at string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		c.ServeHTTP(w, httptest.NewRequest(http.MethodGet, at, nil))
		return w
	}
	page := get(Path).Body.String()
	for _, m := range regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllStringSubmatch(page, -1) {
		answer := get(m[1])
		if !strings.HasPrefix(m[1], Path) || answer.Code != http.StatusOK || path.Ext(m[1]) != ".svg" && !strings.Contains(answer.Header().Get("Cache-Control"), "immutable") {
			t.Errorf("%s: %d %v", m[1], answer.Code, answer.Header())
		}
	}
	if regexp.MustCompile(`<script[^>]*>[^<]|<style| style=| on[a-z]+=`).MatchString(page) {
		t.Errorf("the page has something inline, which its own policy forbids:\n%s", page)
	}
	if deep := get(Path + "services/shop/web"); deep.Body.String() != page {
		t.Error("a deep link is not answered with the page")
	}
	if old := get(Path + "assets/console-of-yesterday.js"); old.Code != http.StatusNotFound {
		t.Errorf("a script that does not exist: %d", old.Code)
	}
	policy := get(Path).Header().Get("Content-Security-Policy")
	for _, rule := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'none'"} {
		if !strings.Contains(policy, rule) {
			t.Errorf("the policy lacks %s: %s", rule, policy)
		}
	}
	if strings.Contains(policy, "unsafe") {
		t.Error("the policy allows what is unsafe: ", policy)
	}
}

// TestForeignRequests: what another site can make a browser send is refused before anything looks at it.
func TestForeignRequests(t *testing.T) {
	c := testConsole(t, Options{Loopback: true})
	for name, change := range map[string]struct {
		do   func(*http.Request)
		want int
	}{
		"its own":          {func(*http.Request) {}, http.StatusServiceUnavailable}, // nobody runs it
		"another site":     {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, http.StatusForbidden},
		"another origin":   {func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") }, http.StatusForbidden},
		"a form":           {func(r *http.Request) { r.Header.Set("Content-Type", "application/x-www-form-urlencoded") }, http.StatusUnsupportedMediaType},
		"another name":     {func(r *http.Request) { r.Host = "evil.example:8010" }, http.StatusMisdirectedRequest},
		"another address":  {func(r *http.Request) { r.Host = "192.0.2.1:8010" }, http.StatusMisdirectedRequest},
		"loopback by name": {func(r *http.Request) { r.Host = "localhost:8010" }, http.StatusServiceUnavailable},
		"loopback, IPv6":   {func(r *http.Request) { r.Host = "[::1]:8010" }, http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodPost, "http://127.0.0.1:8010"+apiPath+"signin", strings.NewReader(`{"token":"x"}`))
			r.Header.Set("Content-Type", "application/json")
			change.do(r)
			w := httptest.NewRecorder()
			if c.ServeHTTP(w, r); w.Code != change.want {
				t.Errorf("%d, want %d: %s", w.Code, change.want, w.Body)
			}
		})
	}
}

// TestCredentials: exactly one kind, and only with the right code the console's own.
func TestCredentials(t *testing.T) {
	own := Options{API: &rest.Config{Host: "https://192.0.2.1", BearerToken: "own"}, Code: "secret"}
	for name, c := range map[string]struct {
		given credentials
		opts  Options
		token string
		field string
	}{
		"a token":               {credentials{Token: "mine"}, own, "mine", ""},
		"the code":              {credentials{Code: "secret"}, own, "own", ""},
		"a wrong code":          {credentials{Code: "guess"}, own, "", "code"},
		"a code without one":    {credentials{Code: "secret"}, Options{API: own.API}, "", "code"},
		"nothing":               {credentials{}, own, "", "token"},
		"two":                   {credentials{Token: "mine", Code: "secret"}, own, "", "token"},
		"a certificate, no key": {credentials{Certificate: "x"}, own, "", "certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			config, err := c.given.config(c.opts)
			if mistake, ok := err.(fieldError); c.field != "" && (!ok || mistake.field != c.field) || c.field == "" && (err != nil || config.BearerToken != c.token) {
				t.Errorf("got %v, %v", config, err)
			}
		})
	}
}

// TestAttempts: a burst, then one every few seconds; others are not held up.
func TestAttempts(t *testing.T) {
	now := time.Unix(1000, 0)
	a := newAttempts(func() time.Time { return now })
	for i := range attemptBurst {
		if wait := a.take("192.0.2.1:5000"); wait != 0 {
			t.Fatalf("attempt %d must wait %s", i, wait)
		}
	}
	if wait := a.take("192.0.2.1:6000"); wait != attemptEvery {
		t.Errorf("one too many must wait %s, want %s", wait, attemptEvery)
	}
	if a.take("192.0.2.2:5000") != 0 {
		t.Error("somebody else must wait")
	}
	now = now.Add(attemptEvery)
	if a.take("192.0.2.1:5000") != 0 || a.take("192.0.2.1:5000") == 0 {
		t.Error("after some seconds there is not one attempt more")
	}
	if networkOf("[2001:db8::1]:1") != networkOf("[2001:db8::ffff]:2") {
		t.Error("addresses of one IPv6 network have attempts of their own")
	}
	now = now.Add(time.Hour)
	if a.forget(); len(a.next) != 0 {
		t.Error("the limits of long ago are still there")
	}
}

// TestSessions: they end by time, by sign-out, and when there are too many the one that was used longest ago does.
func TestSessions(t *testing.T) {
	now := time.Unix(1000, 0)
	all := newSessions(func() time.Time { return now })
	first := all.add(&session{user: "first"})
	now = now.Add(time.Second)
	second := all.add(&session{user: "second"})
	if all.get(first).user != "first" || all.get("nonsense") != nil || all.get("") != nil {
		t.Fatal("sessions are not found by their ids")
	}
	for range maxSessions - 1 {
		now = now.Add(time.Second)
		if first == "" || all.get(first) == nil {
			t.Fatal("a session in use made room for another")
		}
		all.add(&session{})
	}
	if all.get(second) != nil || len(all.all) != maxSessions {
		t.Errorf("the session that was used longest ago is still there, of %d", len(all.all))
	}
	all.remove(first)
	if all.get(first) != nil {
		t.Error("a session outlives its sign-out")
	}
	idle, busy := all.add(&session{}), &session{streams: 1}
	watched := all.add(busy)
	now = now.Add(sessionIdle + time.Second)
	if all.get(idle) != nil || all.get(watched) == nil {
		t.Error("an idle session goes on, or one with an open page does not")
	}
	for range maxSessions {
		now = now.Add(time.Second)
		all.add(&session{})
	}
	if all.get(watched) == nil {
		t.Error("a session with an open page made room for one without")
	}
	now = now.Add(sessionLife)
	all.expire()
	if len(all.all) != 0 || !busy.closed {
		t.Error("sessions outlive their time")
	}
}

// TestKnown: requests of those who have signed in are reported, and no others.
func TestKnown(t *testing.T) {
	var known []string
	c := testConsole(t, Options{Known: func(r *http.Request) { known = append(known, r.URL.Path) }})
	c.running = t.Context()
	get := func(path, cookie string) {
		r := httptest.NewRequest(http.MethodGet, "https://127.0.0.1:6443"+path, nil)
		r.AddCookie(&http.Cookie{Name: cookieName(r), Value: cookie})
		c.ServeHTTP(httptest.NewRecorder(), r)
	}
	id := c.sessions.add(&session{user: "alice"})
	for _, cookie := range []string{"", "guess", id} {
		for _, path := range []string{Path, apiPath + "about", apiPath + "session", apiPath + "trace/NO-NAMESPACE"} {
			get(path, cookie)
		}
	}
	if want := []string{apiPath + "session", apiPath + "trace/NO-NAMESPACE"}; !slices.Equal(known, want) {
		t.Errorf("reported are %q, want %q", known, want)
	}
}

// TestCookie: no script can read it, no other site can use it, and with TLS it goes nowhere without.
func TestCookie(t *testing.T) {
	for _, url := range []string{"https://127.0.0.1:6443/console/", "http://127.0.0.1:8010/console/"} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, url, nil)
		setCookie(w, r, "id")
		cookie := w.Result().Cookies()[0]
		tls := strings.HasPrefix(url, "https")
		if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode || cookie.Secure != tls || strings.HasPrefix(cookie.Name, "__Secure-") != tls || cookie.Path != "/console" {
			t.Errorf("%s: %v", url, cookie)
		}
	}
}
