package image

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestStalledRegistry: a registry that stops sending in the middle of a layer fails the pull, which says so.
func TestStalledRegistry(t *testing.T) {
	needRoot(t)
	r := newRegistry(t)
	s := newTestStore(t)
	s.transport = plainOnly(nil, 300*time.Millisecond)
	img := testImage(t, v1.Config{}, testLayer(t, "plain", file("a", strings.Repeat("x", 100_000))))
	ref := r.push(t, "stalls:v1", img)
	r.change = func(w http.ResponseWriter, q *http.Request) bool {
		if !strings.Contains(q.URL.Path, "/blobs/") {
			return false
		}
		_, _ = w.Write(make([]byte, 10))
		_ = http.NewResponseController(w).Flush()
		<-q.Context().Done()
		return true
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := s.Pull(ctx, ref, Credentials{}, nil)
	var stalled *StalledError
	if !errors.As(err, &stalled) || !strings.Contains(err.Error(), "sent nothing for 300ms") || !strings.Contains(err.Error(), r.host) {
		t.Errorf("%v", err)
	}
	// A registry that sends again is pulled from.
	r.change = nil
	if _, err := s.Pull(ctx, ref, Credentials{}, nil); err != nil {
		t.Error(err)
	}
}

// TestSlowRegistries: registries that trickle don't keep others waiting, however many pulls they hold.
func TestSlowRegistries(t *testing.T) {
	needRoot(t)
	slow, fast := newRegistry(t), newRegistry(t)
	s := newTestStore(t)
	s.slots.interval = 50 * time.Millisecond
	layer := testLayer(t, "plain", file("a", "x"))
	var refs []string
	for _, name := range []string{"a:v1", "b:v1", "c:v1", "d:v1"} {
		refs = append(refs, slow.push(t, name, testImage(t, v1.Config{Env: []string{"NAME=" + name}}, layer)))
	}
	other := fast.push(t, "other:v1", testImage(t, v1.Config{}, layer))
	slow.change = func(w http.ResponseWriter, q *http.Request) bool {
		if !strings.Contains(q.URL.Path, "/blobs/") {
			return false
		}
		for q.Context().Err() == nil {
			_, _ = w.Write([]byte{0})
			_ = http.NewResponseController(w).Flush()
			time.Sleep(100 * time.Millisecond)
		}
		return true
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, len(refs))
	for _, ref := range refs {
		go func() {
			_, err := s.Pull(ctx, ref, Credentials{}, nil)
			ended <- err
		}()
	}
	limited, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	if _, err := s.Pull(limited, other, Credentials{}, nil); err != nil {
		t.Errorf("another registry: %v", err)
	}
	cancel()
	for range refs {
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("a slow pull ended with %v", err)
		}
	}
	if len(s.slots.fast) != 0 || len(s.slots.slow) != 0 {
		t.Errorf("%d and %d slots are taken after all pulls", len(s.slots.fast), len(s.slots.slow))
	}
}
