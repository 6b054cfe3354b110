package test

import (
	"bufio"
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/lab"
)

var strictRequests = flag.Bool("roll.strict", false, "a request that takes more than 5 s counts as failed, and so does too little load: for a machine that does nothing else")

// requestLimit is how long one request may take, from its connection to the end of its answer. A machine that is busy with other
// things may stop for seconds: then only what is refused, cut or never answered is Portal's fault.
func requestLimit() time.Duration {
	if *strictRequests {
		return 5 * time.Second
	}
	return time.Minute
}

// requestSource is a machine of a lab that sends requests to addresses in turn, each on a connection of its own.
type requestSource struct {
	name      string
	machine   *lab.Machine
	addresses []string
	rate      int // requests a second
	// limit and waiting are how long a request may take and how many may wait at a time, if not as usual.
	limit   time.Duration
	waiting int
}

// requests are sent all the time, and never twice.
type requests struct {
	began time.Time
	stop  context.CancelFunc
	done  sync.WaitGroup

	mu       sync.Mutex
	sent     map[string]int // by source
	answered map[string]int // by Pod
	failed   []failedRequest
	skipped  int
	slowest  time.Duration
}

// failedRequest is one without an answer, or with a wrong one.
type failedRequest struct {
	at, took        time.Duration // at is since the first request
	source, address string
	err             error
}

func (f failedRequest) String() string {
	return fmt.Sprintf("%s %s to %s: %v after %s", f.at.Round(time.Millisecond), f.source, f.address, f.err, f.took.Round(time.Millisecond))
}

// sendRequests sends requests until it is told to stop.
func sendRequests(t *testing.T, sources ...requestSource) *requests {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r := &requests{began: time.Now(), stop: cancel, sent: map[string]int{}, answered: map[string]int{}}
	for _, s := range sources {
		r.done.Go(func() { r.send(ctx, t, s) })
	}
	t.Cleanup(func() {
		cancel()
		r.done.Wait()
	})
	return r
}

// send has requests begin at a constant rate, however long others take.
func (r *requests) send(ctx context.Context, t *testing.T, s requestSource) {
	jobs := make(chan string)
	var threads sync.WaitGroup
	defer threads.Wait()
	defer close(jobs)
	limit := cmp.Or(s.limit, requestLimit())
	for range cmp.Or(s.waiting, max(8, s.rate/2)) {
		threads.Go(func() {
			err := s.machine.Do(func() error { // a thread in the machine's network
				for address := range jobs {
					r.one(s.name, address, limit)
				}
				return nil
			})
			if err != nil && ctx.Err() == nil {
				t.Errorf("requests from %s: %v", s.name, err)
			}
		})
	}
	tick := time.NewTicker(time.Second / time.Duration(s.rate))
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		select {
		case jobs <- s.addresses[n%len(s.addresses)]:
		default: // all threads are busy
			r.mu.Lock()
			r.skipped++
			r.mu.Unlock()
		}
	}
}

// one sends a request and notes what became of it.
func (r *requests) one(source, address string, limit time.Duration) {
	begin := time.Now()
	pod, err := ask(address, begin.Add(limit))
	took := time.Since(begin)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent[source]++
	if err != nil {
		r.failed = append(r.failed, failedRequest{at: begin.Sub(r.began), took: took, source: source, address: address, err: err})
		return
	}
	r.answered[pod]++
	r.slowest = max(r.slowest, took)
}

// ask asks a Pod for its name, from the network of the calling thread.
func ask(address string, deadline time.Time) (string, error) { return askAt(0, address, deadline) }

// askAt is ask from a port; 0: any.
func askAt(port int, address string, deadline time.Time) (string, error) {
	c, err := (&net.Dialer{Deadline: deadline, LocalAddr: &net.TCPAddr{Port: port}}).Dial("tcp", address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: roll\r\nConnection: close\r\n\r\n"); err != nil {
		return "", fmt.Errorf("from %s: %w", c.LocalAddr(), err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", fmt.Errorf("from %s: %w", c.LocalAddr(), err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return "", fmt.Errorf("from %s: %w", c.LocalAddr(), err)
	}
	if pod := strings.TrimSpace(string(body)); answer.StatusCode == http.StatusOK && pod != "" {
		return pod, nil
	}
	return "", fmt.Errorf("from %s: %s: %q", c.LocalAddr(), answer.Status, body)
}

// end stops, waits for the last answers and reports what failed.
func (r *requests) end(t *testing.T) []failedRequest {
	t.Helper()
	r.stop()
	r.done.Wait()
	t.Logf("%d requests within %s from %v, answered by %d Pods; %d failed, %d were not sent in time; the slowest answer took %s",
		r.total(), time.Since(r.began).Round(time.Second), r.sent, len(r.answered), len(r.failed), r.skipped, r.slowest.Round(time.Millisecond))
	return r.failed
}

func (r *requests) total() (n int) {
	for _, sent := range r.sent {
		n += sent
	}
	return n
}

// none fails the test if a request failed.
func (r *requests) none(t *testing.T) {
	t.Helper()
	failed := r.end(t)
	for i, f := range failed {
		if i == 20 {
			t.Errorf("and %d more", len(failed)-i)
			break
		}
		t.Error(f)
	}
	// Even a machine of its own may be late now and then.
	if total := r.total(); *strictRequests && r.skipped > total/20 {
		t.Errorf("%d requests could not be sent in time, beside %d that were: that is too little load", r.skipped, total)
	}
}

// pods are those that have answered.
func (r *requests) pods() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.answered))
}

// answeredBy waits until so many Pods have answered.
func (r *requests) answeredBy(t *testing.T, pods int) {
	t.Helper()
	eventually(t, time.Minute, "answers of all Pods", func() string {
		if n := len(r.pods()); n < pods {
			return fmt.Sprintf("%d Pods have answered", n)
		}
		return ""
	})
}

// longestPause begins to measure for how long this machine lets a process wait that has something to do.
func longestPause(ctx context.Context) (soFar func() time.Duration) {
	var longest atomic.Int64
	go func() {
		for last := time.Now(); ctx.Err() == nil; {
			time.Sleep(10 * time.Millisecond)
			now := time.Now()
			longest.Store(max(longest.Load(), int64(now.Sub(last)-10*time.Millisecond)))
			last = now
		}
	}()
	return func() time.Duration { return time.Duration(longest.Load()) }
}
