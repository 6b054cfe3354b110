package controllers

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// serverFunc is an API server as a function.
type serverFunc func(*http.Request) (*http.Response, error)

func (f serverFunc) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func answer(status int) *http.Response {
	return &http.Response{StatusCode: status, Status: http.StatusText(status), Body: io.NopCloser(strings.NewReader(""))}
}

func get(t *testing.T, rt http.RoundTripper, url string) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := rt.RoundTrip(req)
	if err == nil {
		resp.Body.Close()
	}
	return resp, err
}

func TestInformersWaitForTheServer(t *testing.T) {
	for _, c := range []struct {
		url     string
		retried bool
	}{
		{"http://x/api/v1/pods?watch=true", true},
		{"http://x/api/v1/pods?resourceVersion=0", true},
		{"http://x/api/v1/pods", false},
		{"http://x/api/v1/namespaces/a/pods/p", false},
	} {
		synctest.Test(t, func(t *testing.T) {
			begin := time.Now()
			tries := 0
			server := serverFunc(func(*http.Request) (*http.Response, error) {
				tries++
				switch {
				case time.Since(begin) > 20*time.Second:
					return answer(http.StatusOK), nil
				case tries%2 == 0:
					return answer(http.StatusServiceUnavailable), nil
				}
				return nil, io.ErrUnexpectedEOF
			})
			resp, err := get(t, transport{ctx: t.Context(), next: server}, c.url)
			if answered := err == nil && resp.StatusCode == http.StatusOK; answered != c.retried {
				t.Errorf("%s: %v, %v after %d tries", c.url, resp, err, tries)
			}
			if waited := time.Since(begin); c.retried && waited > 22*time.Second {
				t.Errorf("%s: answered %s after the server was back", c.url, waited-20*time.Second)
			}
		})
	}
}

func TestRequestsEnd(t *testing.T) {
	silent := serverFunc(func(req *http.Request) (*http.Response, error) {
		<-req.Context().Done()
		return nil, req.Context().Err()
	})
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		if _, err := get(t, transport{ctx: t.Context(), next: silent}, "http://x/api/v1/pods"); err == nil || time.Since(begin) != requestTimeout {
			t.Errorf("a silent server: %v after %s", err, time.Since(begin))
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, cancel)
		begin = time.Now()
		if _, err := get(t, transport{ctx: ctx, next: silent}, "http://x/api/v1/pods?watch=1"); err == nil || time.Since(begin) != time.Hour {
			t.Errorf("a watch when the controllers end: %v after %s", err, time.Since(begin))
		}
	})
}

// A watch whose connection breaks ends like any other, and not so soon that its informer calls it a failure.
func TestABrokenWatchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := io.MultiReader(strings.NewReader("an event"), iotest.ErrReader(io.ErrClosedPipe))
		server := serverFunc(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(broken)}, nil
		})
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://x/api/v1/pods?watch=true", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := transport{ctx: t.Context(), next: server}.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		begin := time.Now()
		if got, err := io.ReadAll(resp.Body); err != nil || string(got) != "an event" || time.Since(begin) <= time.Second {
			t.Errorf("%q, %v after %s", got, err, time.Since(begin))
		}
	})
}

// An API server takes a watch from a version of the future, and lists by such a version are refused for ever: both mean
// that it was restored.
func TestARestoredServerIsNoticed(t *testing.T) {
	for _, c := range []struct {
		url, version string
		restored     bool
	}{
		{"http://x/api/v1/pods?watch=true&resourceVersion=1000", "999", true},
		{"http://x/api/v1/pods?watch=true&resourceVersion=1000", "1000", false},
		{"http://x/api/v1/pods?watch=true&resourceVersion=999", "1000", false},
		{"http://x/api/v1/pods?resourceVersion=1000&resourceVersionMatch=NotOlderThan", "20", true},
		{"http://x/api/v1/pods?resourceVersion=0", "20", false},
		{"http://x/api/v1/pods?watch=true", "20", false},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, stop := context.WithCancelCause(t.Context())
			defer stop(nil)
			server := serverFunc(func(req *http.Request) (*http.Response, error) {
				switch {
				case req.URL.Query().Get("watch") == "" && !req.URL.Query().Has("resourceVersion"):
					resp := answer(http.StatusOK)
					resp.Body = io.NopCloser(strings.NewReader(`{"metadata":{"resourceVersion":"` + c.version + `"}}`))
					return resp, nil
				case c.restored && req.URL.Query().Get("watch") == "":
					return answer(http.StatusGatewayTimeout), nil
				}
				return answer(http.StatusOK), nil
			})
			resp, err := get(t, transport{ctx: ctx, next: server, restored: stop}, c.url)
			if restored := errors.Is(context.Cause(ctx), errRestored); restored != c.restored {
				t.Errorf("%s at a server of version %s: %v, %v, %v", c.url, c.version, context.Cause(ctx), resp, err)
			}
		})
	}
}

func TestHealthTellsInformersThatFailForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mended atomic.Bool
		server := serverFunc(func(req *http.Request) (*http.Response, error) {
			switch {
			case req.URL.Path == "/apis/example.com/v1/removed":
				return answer(http.StatusNotFound), nil
			case req.URL.Path == "/api/v1/pods" && !mended.Load():
				return answer(http.StatusGatewayTimeout), nil
			}
			return answer(http.StatusOK), nil
		})
		var health Health
		rt := transport{ctx: t.Context(), next: server, health: &health}
		go func() { _, _ = get(t, rt, "http://x/api/v1/pods?watch=true") }()
		for _, path := range []string{"/api/v1/nodes", "/apis/example.com/v1/removed"} {
			_, _ = get(t, rt, "http://x"+path+"?watch=true")
		}
		time.Sleep(20 * time.Second)
		if got := health.Problems(); len(got) != 0 {
			t.Errorf("after 20 s: %q", got)
		}
		time.Sleep(20 * time.Second)
		if got := health.Problems(); len(got) != 1 || !strings.Contains(got[0], "/api/v1/pods has been failing for 4") {
			t.Errorf("after 40 s: %q", got)
		}
		mended.Store(true)
		time.Sleep(2 * time.Second)
		if got := health.Problems(); len(got) != 0 {
			t.Errorf("when it works again: %q", got)
		}
	})
}
