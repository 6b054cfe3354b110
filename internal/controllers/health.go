package controllers

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// An informer may fail for this long before the controllers count as unhealthy.
	unhealthyAfter = 30 * time.Second
	// One that doesn't even try any more has been stopped: its kind is gone.
	stoppedAfter = 2 * time.Minute
)

// Health knows which informers can't read what they watch. The zero value is ready to use.
type Health struct {
	mu      sync.Mutex
	failing map[string]trouble // by path
}

type trouble struct {
	since, last time.Time
	reason      string
}

func (h *Health) failed(path, reason string) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failing == nil {
		h.failing = map[string]trouble{}
	}
	now := time.Now()
	t, known := h.failing[path]
	if !known {
		t.since = now
	}
	t.last, t.reason = now, reason
	h.failing[path] = t
}

func (h *Health) worked(path string) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.failing, path)
}

// Problems are the informers that have been failing for long, a line each.
func (h *Health) Problems() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	var out []string
	for path, t := range h.failing {
		switch {
		case now.Sub(t.last) > stoppedAfter:
			delete(h.failing, path)
		case now.Sub(t.since) > unhealthyAfter:
			out = append(out, fmt.Sprintf("informer of %s has been failing for %s: %s", path, now.Sub(t.since).Round(time.Second), t.reason))
		}
	}
	slices.Sort(out)
	return out
}

// ServeHTTP answers a health probe.
func (h *Health) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if problems := h.Problems(); len(problems) > 0 {
		http.Error(w, strings.Join(problems, "\n"), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprint(w, "ok")
}
