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
	return resp, nil
}

const firstRetry, maxRetry = 100 * time.Millisecond, time.Second

// send sends a request, and an informer's again until it is answered. An informer told of each failure would wait up to
// a minute before it tried again, and see nothing for as long after the API server is back.
func (t boundTransport) send(req *http.Request) (*http.Response, error) {
	for wait := firstRetry; ; wait = min(2*wait, maxRetry) {
		resp, err := t.next.RoundTrip(req)
		if !isInformers(req) || err == nil && !passing[resp.StatusCode] || req.Context().Err() != nil {
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

// passing are the answers of a server that will soon give another.
var passing = map[int]bool{
	http.StatusTooManyRequests: true, http.StatusInternalServerError: true, http.StatusBadGateway: true,
	http.StatusServiceUnavailable: true, http.StatusGatewayTimeout: true,
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
