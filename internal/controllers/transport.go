package controllers

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// requestTimeout bounds every request but a watch. An API server that is silent for so long won't answer any more,
// and a worker that waits for it works on nothing else.
const requestTimeout = 30 * time.Second

// boundTo makes every request end with ctx, whatever context it was made with: libraries write with contexts of
// their own.
func boundTo(ctx context.Context) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper { return boundTransport{ctx, next} }
}

type boundTransport struct {
	ctx  context.Context
	next http.RoundTripper
}

func (t boundTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := req.Context(), context.CancelFunc(nil)
	if isWatch(req) {
		ctx, cancel = context.WithCancel(ctx)
	} else {
		ctx, cancel = context.WithTimeout(ctx, requestTimeout)
	}
	unbind := context.AfterFunc(t.ctx, cancel)
	end := sync.OnceFunc(func() { unbind(); cancel() })
	resp, err := t.send(req.WithContext(ctx))
	if err != nil {
		end()
		return nil, err
	}
	resp.Body = boundBody{resp.Body, end}
	if isWatch(req) && resp.StatusCode == http.StatusOK {
		resp.Body = &calmBody{ReadCloser: resp.Body, ctx: ctx, began: time.Now()}
	}
	return resp, nil
}

const firstRetry, maxRetry = 100 * time.Millisecond, time.Second

// send sends a request, and an informer's again until it is answered. An informer told of each failure would wait up to
// a minute before it tried again, and see nothing for as long after the API server is back.
func (t boundTransport) send(req *http.Request) (*http.Response, error) {
	for wait := firstRetry; ; wait = min(2*wait, maxRetry) {
		resp, err := t.next.RoundTrip(req)
		if !isInformers(req) || err == nil && !passes(resp.StatusCode) || req.Context().Err() != nil {
			return resp, err
		}
		if err == nil {
			resp.Body.Close()
		}
		select {
		case <-req.Context().Done():
			return nil, req.Context().Err()
		case <-time.After(wait):
		}
	}
}

// passes tells the answers of a server, or of something before it, that will soon give another.
func passes(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	}
	return status >= http.StatusInternalServerError
}

// isInformers tells the requests of informers: watches, and lists as of some version.
func isInformers(req *http.Request) bool {
	return req.Method == http.MethodGet && (isWatch(req) || req.URL.Query().Has("resourceVersion"))
}

func isWatch(req *http.Request) bool {
	watch := req.URL.Query().Get("watch")
	return watch == "true" || watch == "1" || strings.Contains(req.URL.Path, "/watch/")
}

// WrappedRoundTripper lets client-go see the transport beneath.
func (t boundTransport) WrappedRoundTripper() http.RoundTripper { return t.next }

// boundBody lets go of the request when its answer has been read.
type boundBody struct {
	io.ReadCloser
	end func()
}

func (b boundBody) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}

// calmBody is a watch whose connection breaks as if it had come to its end. A watch that ended goes on where it was at
// once; an informer told of an error lists everything again, and waits before that, up to a minute if it was told of
// several.
type calmBody struct {
	io.ReadCloser
	ctx   context.Context
	began time.Time
}

// A watch that ends sooner than this without an event counts as an error too.
const shortestWatch = 1100 * time.Millisecond

func (b *calmBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == nil || b.ctx.Err() != nil {
		return n, err
	}
	select {
	case <-b.ctx.Done():
	case <-time.After(shortestWatch - time.Since(b.began)):
	}
	return n, io.EOF
}
