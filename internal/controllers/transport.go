package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

const (
	// requestTimeout bounds every request but a watch, so that a server that doesn't answer blocks no worker for ever.
	requestTimeout = 30 * time.Second
	// Informers' requests are retried with these delays.
	firstRetry, maxRetry = 100 * time.Millisecond, time.Second
	// client-go takes a watch that ends sooner than this without an event for a failed one.
	shortestWatch = 1100 * time.Millisecond
)

// transport carries the controllers' requests. Every request ends with ctx, whatever context it was made with, because
// libraries write with contexts of their own. The requests of informers are retried here: an informer that sees a
// failure backs off for up to a minute, and its cache would be stale for as long after the API server is back.
type transport struct {
	ctx      context.Context
	next     http.RoundTripper
	restored context.CancelCauseFunc // called when the API turns out to have been restored to an older revision
	health   *Health                 // may be nil
}

func (t transport) RoundTrip(req *http.Request) (*http.Response, error) {
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
		resp.Body = &watchBody{ReadCloser: resp.Body, ctx: ctx, began: time.Now()}
	}
	return resp, nil
}

// send sends a request, and an informer's again until it is answered.
func (t transport) send(req *http.Request) (*http.Response, error) {
	if !isInformers(req) {
		return t.next.RoundTrip(req)
	}
	for wait := firstRetry; ; wait = min(2*wait, maxRetry) {
		resp, err := t.sendInformers(req)
		t.note(req, resp, err)
		if err == nil && !isTransient(resp.StatusCode) || req.Context().Err() != nil {
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

func (t transport) sendInformers(req *http.Request) (*http.Response, error) {
	if err := t.checkRevision(req); err != nil {
		return nil, err
	}
	return t.next.RoundTrip(req)
}

func (t transport) note(req *http.Request, resp *http.Response, err error) {
	path := req.URL.Path
	switch {
	case errors.Is(req.Context().Err(), context.Canceled): // by whoever stops the informer
	case err != nil:
		t.health.failed(path, err.Error())
	case resp.StatusCode < http.StatusBadRequest,
		resp.StatusCode == http.StatusGone, // the informer lists again
		// A kind outside the core may be removed; its informer is stopped when discovery says so.
		resp.StatusCode == http.StatusNotFound && !strings.HasPrefix(path, "/api/"):
		t.health.worked(path)
	default:
		t.health.failed(path, resp.Status)
	}
}

// checkRevision compares what an informer has seen with a read by quorum. An API server accepts a watch from a version
// that it has not reached, and says nothing until it has.
func (t transport) checkRevision(req *http.Request) error {
	have := req.URL.Query().Get("resourceVersion")
	if have == "" || have == "0" {
		return nil
	}
	ctx, cancel := context.WithTimeout(req.Context(), requestTimeout)
	defer cancel()
	read := req.Clone(ctx)
	read.URL.RawQuery = url.Values{"limit": {"1"}}.Encode()
	read.Header.Set("Accept", "application/json")
	resp, err := t.next.RoundTrip(read)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil // the request itself gets the same answer, or a better one
	}
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		return fmt.Errorf("reading %s: %w", req.URL.Path, err)
	}
	if err := wentBack(req.URL.Path, list.Metadata.ResourceVersion, have); err != nil {
		t.restored(err)
		return err
	}
	return nil
}

// isTransient tells the answers of a server, or of a proxy before it, that a later try may not get.
func isTransient(status int) bool {
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
func (t transport) WrappedRoundTripper() http.RoundTripper { return t.next }

// boundBody frees a request's context when the answer has been read.
type boundBody struct {
	io.ReadCloser
	end func()
}

func (b boundBody) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}

// watchBody shows a watch whose connection breaks as one that came to its end. After an end an informer resumes at once;
// after an error it backs off and lists everything again.
type watchBody struct {
	io.ReadCloser
	ctx   context.Context
	began time.Time
}

func (b *watchBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == nil {
		return n, nil
	}
	select {
	case <-b.ctx.Done():
	case <-time.After(shortestWatch - time.Since(b.began)):
	}
	return n, io.EOF
}
