package web

import (
	"bufio"
	"crypto/tls"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"portal/internal/lb/config"
)

func (s *site) parked() int {
	s.server.parking.mu.Lock()
	defer s.server.parking.mu.Unlock()
	return len(s.server.parking.parked)
}

func (s *site) watched() int {
	s.server.watched.mu.Lock()
	defer s.server.watched.mu.Unlock()
	return len(s.server.watched.all)
}

// asker opens a connection, and returns what asks for something over it: 200 is a good answer.
type asker func(t *testing.T, s *site) (c net.Conn, ask func() string)

func askHTTP1(t *testing.T, s *site) (net.Conn, func() string) {
	c := s.dial()
	if s.tls != nil {
		c = tls.Client(c, &tls.Config{InsecureSkipVerify: true})
	}
	r := bufio.NewReader(c)
	return c, func() string {
		if _, err := io.WriteString(c, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n"); err != nil {
			return err.Error()
		}
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			return err.Error()
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil {
			return err.Error()
		}
		return strconv.Itoa(res.StatusCode)
	}
}

func askHTTP2(t *testing.T, s *site) (net.Conn, func() string) {
	c := s.dial()
	if s.tls != nil {
		c = tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	}
	h := newRawOver(t, c)
	next := uint32(1)
	return h.c, func() string {
		if err := h.headers(next, true, ":method", "GET", ":scheme", "https", ":authority", "a", ":path", "/x"); err != nil {
			return err.Error()
		}
		next += 2
		return h.answer(next - 2)
	}
}

var askers = []struct {
	name   string
	ask    asker
	secure bool
}{{"HTTP/1.1", askHTTP1, false}, {"HTTP/1.1 over TLS", askHTTP1, true}, {"HTTP/2", askHTTP2, false}, {"HTTP/2 over TLS", askHTTP2, true}}

func parkingSite(t *testing.T, secure bool, change ...func(*config.Listener)) *site {
	return start(t, pool(named(t, "one")), func(s *site, l *config.Listener) {
		if secure {
			withTLS(s, l)
		}
		for _, f := range change {
			f(l)
		}
	})
}

// TestParked: connections that are idle have no goroutine, answer their next request all the same, again and again, and are gone with their clients.
func TestParked(t *testing.T) {
	const many = 20
	for _, how := range askers {
		t.Run(how.name, func(t *testing.T) {
			s := parkingSite(t, how.secure)
			var asks []func() string
			var conns []net.Conn
			for range many {
				c, ask := how.ask(t, s)
				asks, conns = append(asks, ask), append(conns, c)
			}
			for round := range 4 {
				for i, ask := range asks {
					if got := ask(); got != "200" {
						t.Fatalf("round %d, connection %d: %q", round, i, got)
					}
				}
				eventually(t, "all connections are parked", func() bool {
					return s.parked() == many && !runs("web.(*conn).serve") && !runs("web.(*http2Client).read")
				})
			}
			for _, c := range conns {
				c.Close()
			}
			eventually(t, "all connections are gone", func() bool { return s.parked() == 0 && s.watched() == 0 })
		})
	}
}

// TestParkedEnds: a parked connection ends when its idle time is over and when its listener drains, and goes on when nobody looks after parked ones any more.
func TestParkedEnds(t *testing.T) {
	t.Parallel()
	for _, how := range askers {
		for name, end := range map[string]func(*site){
			"idle":     func(*site) {},
			"draining": func(s *site) { s.drain() },
			"run ends": func(s *site) { s.server.parking.close() },
		} {
			t.Run(how.name+", "+name, func(t *testing.T) {
				t.Parallel()
				s := parkingSite(t, how.secure, func(l *config.Listener) {
					if name == "idle" {
						l.IdleTimeout = 2 * time.Second
					}
				})
				c, ask := how.ask(t, s)
				if got := ask(); got != "200" {
					t.Fatal(got)
				}
				eventually(t, "the connection is parked", func() bool { return s.parked() == 1 })
				end(s)
				if name == "run ends" {
					// It goes on with a goroutine of its own.
					if got := ask(); got != "200" || s.parked() != 0 {
						t.Errorf("%q, and %d are parked", got, s.parked())
					}
					return
				}
				c.SetReadDeadline(time.Now().Add(patience))
				if _, err := io.Copy(io.Discard, c); err != nil {
					t.Errorf("the client sees %v, want the end", err)
				}
				eventually(t, "nothing of it is left", func() bool { return s.watched() == 0 && s.parked() == 0 })
			})
		}
	}
}

// TestParkedIsClosed: what closes a connection here, as the engine does when it ends, ends it also while it is parked.
func TestParkedIsClosed(t *testing.T) {
	s := parkingSite(t, false)
	_, ask := askHTTP1(t, s)
	ask()
	eventually(t, "the connection is parked", func() bool { return s.parked() == 1 })
	s.server.parking.mu.Lock()
	parked := slices.Collect(maps.Values(s.server.parking.parked))
	s.server.parking.mu.Unlock()
	for _, w := range parked {
		w.client.Close()
	}
	eventually(t, "nothing of it is left", func() bool { return s.watched() == 0 && s.parked() == 0 })
}

// TestParkedTrickle: parts of a TLS record, which wake a connection, are no request: the idle time goes on.
func TestParkedTrickle(t *testing.T) {
	t.Parallel()
	s := parkingSite(t, true, func(l *config.Listener) { l.IdleTimeout = 3 * time.Second })
	plain := s.dial()
	c := tls.Client(plain, &tls.Config{InsecureSkipVerify: true})
	r := bufio.NewReader(c)
	if _, body := s.ask(c, r, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n", "GET"); !strings.Contains(body, "one") {
		t.Fatal(body)
	}
	begin := time.Now()
	record := append([]byte{23, 3, 3, 0x40, 0}, make([]byte, 200)...) // the head of one of 16 kB
	for i := 0; ; i++ {
		if i < len(record) {
			if _, err := plain.Write(record[i : i+1]); err != nil {
				break
			}
		}
		plain.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := plain.Read(make([]byte, 100)); err != nil && !strings.Contains(err.Error(), "timeout") {
			break
		}
		if time.Since(begin) > patience {
			t.Fatal("the connection lives on")
		}
	}
	if took := time.Since(begin); took < 2*time.Second {
		t.Errorf("it ended after %v, want 3 s", took)
	}
	eventually(t, "nothing of it is left", func() bool { return s.watched() == 0 })
}

// TestParkedUnderLoad: requests that come at the moment in which connections are parked are answered.
func TestParkedUnderLoad(t *testing.T) {
	t.Parallel()
	for _, how := range askers {
		t.Run(how.name, func(t *testing.T) {
			t.Parallel()
			s := parkingSite(t, how.secure)
			var all sync.WaitGroup
			for i := range 16 {
				c, ask := how.ask(t, s)
				defer c.Close()
				all.Go(func() {
					// Before, with and after the sweeper.
					for n := range 40 {
						time.Sleep(testSweepInterval * time.Duration(80+(i*7+n*13)%40) / 100)
						if got := ask(); got != "200" {
							t.Errorf("request %d: %q", n, got)
							return
						}
					}
				})
			}
			all.Wait()
		})
	}
}

// lastDeadline is a connection that notes the last deadline of reading.
type lastDeadline struct {
	net.Conn
	at time.Time
}

func (d *lastDeadline) SetReadDeadline(at time.Time) error {
	d.at = at
	return nil
}

// TestParkingKeepsOtherDeadlines: when the sweeper's request to park is withdrawn, somebody else's request to end is not.
func TestParkingKeepsOtherDeadlines(t *testing.T) {
	for name, c := range map[string]struct {
		stopped, fired bool
		err, want      error
		at             time.Time
	}{
		"nothing else":                 {err: os.ErrDeadlineExceeded, want: errPark},
		"nothing else, with a request": {},
		"stopped":                      {stopped: true, err: os.ErrDeadlineExceeded, want: os.ErrDeadlineExceeded, at: past},
		"stopped, with a frame":        {stopped: true, at: past},
		"timed out":                    {fired: true, err: os.ErrDeadlineExceeded, want: os.ErrDeadlineExceeded, at: past},
		"timed out, with a request":    {fired: true, at: past},
	} {
		client := &lastDeadline{}
		w := &watch{server: New(Options{}), client: client, parks: true, stopped: func() bool { return c.stopped }}
		w.enter(phaseIdle)
		w.beginWait()
		w.rest()
		if client.at != past {
			t.Fatalf("%s: the sweeper sets no deadline", name)
		}
		if c.fired {
			w.fire(w.state.Load(), reasonIdle)
		}
		if err := w.endWait(c.err); err != c.want || client.at != c.at {
			t.Errorf("%s: %v and the deadline %v, want %v and %v", name, err, client.at, c.want, c.at)
		}
	}
}
