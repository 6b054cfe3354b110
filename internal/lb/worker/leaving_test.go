package worker

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"portal/internal/lb/engine"
)

// agents are what calls a worker's handler, in a test whose time is turned.
type agents struct {
	t       *testing.T
	server  *server
	handler http.Handler
}

func newAgents(t *testing.T) *agents {
	s := newServer(ServeOptions{Drain: time.Second, Log: slog.New(slog.DiscardHandler)})
	s.engine = engine.New(engine.Options{})
	t.Cleanup(s.engine.Close)
	return &agents{t: t, server: s, handler: s.handler()}
}

// attach returns the agent's number, and what breaks its connection.
func (a *agents) attach() (id string, cut func()) {
	ctx, cancel := context.WithCancel(a.t.Context())
	w := httptest.NewRecorder()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		a.handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "POST", "/attach", nil))
	}()
	synctest.Wait()
	return w.Header().Get(agentHeader), func() {
		cancel()
		<-ended
	}
}

func (a *agents) detach(id, after string) {
	a.t.Helper()
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, httptest.NewRequestWithContext(a.t.Context(), "POST", "/detach?after="+after+"&agent="+id, nil))
	if w.Code != http.StatusOK {
		a.t.Fatal(w.Code, w.Body)
	}
}

// ends says whether the worker has decided to end after a while.
func (a *agents) ends(wait time.Duration) bool {
	time.Sleep(wait)
	synctest.Wait()
	return len(a.server.end) > 0
}

// TestDetach: a worker ends after its last agent has left, and not while another one is there, nor while another worker takes over.
func TestDetach(t *testing.T) {
	for name, test := range map[string]func(*testing.T, *agents){
		"the last one leaves": func(t *testing.T, a *agents) {
			id, cut := a.attach()
			a.detach(id, "1m")
			cut()
			if a.ends(59 * time.Second) {
				t.Error("it ends too early")
			}
			if !a.ends(2 * time.Second) {
				t.Error("it goes on")
			}
		},
		"it leaves, and its connection stays": func(t *testing.T, a *agents) {
			id, cut := a.attach()
			defer cut()
			a.detach(id, "1m")
			if !a.ends(time.Hour) {
				t.Error("it goes on")
			}
		},
		"another one came before": func(t *testing.T, a *agents) {
			first, cutFirst := a.attach()
			_, cutSecond := a.attach()
			a.detach(first, "1m")
			cutFirst()
			if a.ends(time.Hour) {
				t.Error("it ends although an agent is there")
			}
			cutSecond() // killed: it comes back
			if a.ends(time.Hour) {
				t.Error("it ends although its agent comes back")
			}
		},
		"another one comes in time": func(t *testing.T, a *agents) {
			first, cut := a.attach()
			a.detach(first, "1m")
			cut()
			time.Sleep(30 * time.Second)
			_, cut = a.attach()
			defer cut()
			if a.ends(time.Hour) {
				t.Error("it ends although an agent is there")
			}
		},
		"another worker takes over": func(t *testing.T, a *agents) {
			id, cut := a.attach()
			a.detach(id, "1m")
			cut()
			set := func(handing bool) {
				a.server.mu.Lock()
				defer a.server.mu.Unlock()
				a.server.handing = handing
			}
			set(true)
			if a.ends(time.Hour) {
				t.Error("it ends in the middle of it, with the short time for connections")
			}
			set(false) // it failed
			if !a.ends(time.Minute) {
				t.Error("it goes on")
			}
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { test(t, newAgents(t)) }) })
	}
}
