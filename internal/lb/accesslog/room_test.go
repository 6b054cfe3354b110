package accesslog

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/lb/config"
)

const patience = time.Minute

func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// of is a listener with a balancer of its own.
func of(balancer, url string) *config.Listener {
	l := listener(url)
	l.AccessLog.Balancer = balancer
	return l
}

// notAnswering is a server that stands for S3: it refuses, or does not answer until answer is called.
type notAnswering struct {
	*httptest.Server
	refuses atomic.Bool
	asked   atomic.Int64 // requests that wait for an answer
	all     atomic.Int64 // since the beginning
	answer  func()       // from now on
}

func newNotAnswering(t *testing.T) *notAnswering {
	t.Setenv("AWS_ACCESS_KEY_ID", "a")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "b")
	n, ended := &notAnswering{}, make(chan struct{})
	n.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.all.Add(1)
		if n.refuses.Load() {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		n.asked.Add(1)
		defer n.asked.Add(-1)
		select {
		case <-r.Context().Done():
		case <-ended:
		}
	}))
	n.answer = sync.OnceFunc(func() { close(ended) })
	t.Cleanup(n.Close)
	t.Cleanup(n.answer)
	return n
}

func (n *notAnswering) url(bucket string) string {
	return "s3://" + bucket + "?region=eu-west-1&use_path_style=true&disable_https=true&endpoint=" + n.URL
}

// What one bucket does not take is at the cost of its own lines, the oldest first, and not of others'.
func TestShares(t *testing.T) {
	dir := t.TempDir()
	blocked := filepath.Join(dir, "blocked")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := &clock{at: time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)}
	l := New(Options{Now: c.now, MaxBytes: 100_000})
	bad, good := of("bad", "file://"+blocked), of("good", "file://"+filepath.Join(dir, "good"))
	const rounds, goodLines = 20, 20
	written := 0
	for range rounds {
		for range 500 {
			r := sample()
			r.URL = fmt.Sprintf("http://a/%d", written)
			written++
			l.Write(bad, r)
		}
		for range goodLines {
			l.Write(good, sample())
		}
		c.turn(5 * time.Minute)
		l.write(context.Background(), false)
		if held := l.held.Load(); held > 100_000 {
			t.Fatalf("%d bytes are held", held)
		}
	}
	if _, dropped, _, failures := l.Stats("good"); dropped != 0 || failures != 0 {
		t.Errorf("of the other's lines %d are dropped, and %d attempts failed", dropped, failures)
	}
	found := 0
	for _, lines := range logs(t, filepath.Join(dir, "good")) {
		found += lines
	}
	if found != rounds*goodLines {
		t.Errorf("%d lines of the other one are written, want %d", found, rounds*goodLines)
	}
	lines, dropped, _, _ := l.Stats("bad")
	if lines != uint64(written) || dropped == 0 {
		t.Errorf("%d lines and %d dropped of %d", lines, dropped, written)
	}
	// What is left of the blocked one are its newest lines, and none is missing among them.
	if err := os.Remove(blocked); err != nil {
		t.Fatal(err)
	}
	l.write(context.Background(), true)
	found = 0
	has := map[int]bool{}
	for name, n := range logs(t, blocked) {
		found += n
		data, err := os.ReadFile(filepath.Join(blocked, name))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			var number int
			if _, err := fmt.Sscanf(line[strings.Index(line, "http://a/"):], "http://a/%d", &number); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			has[number] = true
		}
	}
	if found != written-int(dropped) {
		t.Errorf("%d lines are written, want %d", found, written-int(dropped))
	}
	for i := written - found; i < written; i++ {
		if !has[i] {
			t.Fatalf("line %d of %d is missing, with %d left", i, written, found)
		}
	}
	if held := l.held.Load(); held != 0 {
		t.Errorf("%d bytes are held after all is written", held)
	}
}

// While a bucket does not answer, what comes later for others is written.
func TestRunDoesNotWait(t *testing.T) {
	server, dir := newNotAnswering(t), t.TempDir()
	c := &clock{at: time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)}
	l := New(Options{Now: c.now})
	l.timeout = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { l.Run(ctx) })
	defer running.Wait()
	defer cancel()
	defer server.answer() // or the end waits for it
	l.Write(of("bad", server.url("bad")), sample())
	c.turn(5 * time.Minute)
	until(t, "the bucket is asked", func() bool { return server.asked.Load() == 1 })
	for i := range 3 {
		l.Write(of("good", "file://"+dir), sample())
		c.turn(5 * time.Minute)
		until(t, "the other's lines are written", func() bool { return len(logs(t, dir)) == i+1 })
	}
	if server.asked.Load() != 1 || server.all.Load() != 1 {
		t.Errorf("%d requests wait and %d were made, want one", server.asked.Load(), server.all.Load())
	}
}

// However many buckets have failed before and do not answer now, there is room for others.
func TestManyBucketsDoNotAnswer(t *testing.T) {
	server, dir := newNotAnswering(t), t.TempDir()
	server.refuses.Store(true)
	c := &clock{at: time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)}
	l := New(Options{Now: c.now})
	l.timeout = time.Hour
	const many = parallelPuts + 1
	for i := range many {
		l.Write(of("bad", server.url(fmt.Sprintf("bad-%d", i))), sample())
	}
	c.turn(5 * time.Minute)
	l.write(t.Context(), false)
	if _, _, _, failures := l.Stats("bad"); failures != many {
		t.Fatalf("%d failures, want %d", failures, many)
	}
	server.refuses.Store(false)
	c.turn(longestBackoff)
	ctx, cancel := context.WithCancel(t.Context())
	var puts sync.WaitGroup
	defer puts.Wait()
	defer cancel()
	l.start(ctx, &puts, false)
	until(t, "as many as may are asked", func() bool { return server.asked.Load() == parallelRetries })
	l.Write(of("good", "file://"+dir), sample())
	c.turn(5 * time.Minute)
	l.start(ctx, &puts, false)
	until(t, "the other's line is written", func() bool { return len(logs(t, dir)) == 1 })
	if n := server.asked.Load(); n != parallelRetries {
		t.Errorf("%d requests wait, want %d", n, parallelRetries)
	}
}
