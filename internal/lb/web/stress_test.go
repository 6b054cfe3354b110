package web

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// Endpoints close kept connections without notice at any time, one closes some new ones too, and one refuses all: no GET may fail, and
// no POST may reach an endpoint twice.
func TestRestlessEndpoints(t *testing.T) {
	var mu sync.Mutex
	posts := map[string]int{}
	restless := func(_ int, c net.Conn, r *bufio.Reader) {
		for range rand.IntN(5) + 1 {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			io.Copy(io.Discard, req.Body)
			if id := req.Header.Get("X-Id"); id != "" {
				mu.Lock()
				posts[id]++
				mu.Unlock()
			}
			ok(c)
		}
	}
	rude := func(n int, c net.Conn, r *bufio.Reader) {
		if n%7 != 3 {
			restless(n, c, r)
		}
	}
	s := start(t, pool(raw(t, restless), raw(t, restless), raw(t, rude), refused(t)))
	var failed, lost atomic.Int64
	var all sync.WaitGroup
	for worker := range 16 {
		all.Go(func() {
			c := client(t, false)
			for i := range 150 {
				res, err := c.Get(s.url("/"))
				if err != nil || res.StatusCode != 200 {
					failed.Add(1)
				}
				if err == nil {
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
				req, _ := http.NewRequest("POST", s.url("/"), strings.NewReader(strings.Repeat("a", i*300)))
				req.GetBody = nil // the client itself must not try again
				req.Header.Set("X-Id", fmt.Sprint(worker, "-", i))
				if res, err = c.Do(req); err != nil || res.StatusCode != 200 {
					lost.Add(1) // it may have been sent to a connection that was about to close
				}
				if err == nil {
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
			}
		})
	}
	all.Wait()
	if failed.Load() != 0 {
		t.Errorf("%d of 2400 GETs failed", failed.Load())
	}
	for id, n := range posts {
		if n > 1 {
			t.Errorf("POST %s was sent %d times", id, n)
		}
	}
	t.Logf("%d of 2400 POSTs failed", lost.Load())
	eventually(t, "nothing is left", func() bool { return s.server.Stats("test").Active.Load() == 0 })
}
