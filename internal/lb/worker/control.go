package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"portal/internal/lb/engine"
)

// State is what GET /state answers.
type State struct {
	Identity string    `json:"identity"`
	PID      int       `json:"pid"`
	Began    time.Time `json:"began"`
	// Agents is how many are attached, Handing whether another worker takes over.
	Agents  int  `json:"agents"`
	Handing bool `json:"handing,omitempty"`
	engine.State
}

// problem is how requests that fail are answered. Parts are those of an engine.ApplyError.
type problem struct {
	Error string            `json:"error,omitempty"`
	Parts map[string]string `json:"parts,omitempty"`
}

// handler answers on the control socket:
//
//	PUT  /config            the whole configuration; 200 also if parts of it can't be carried out, which the answer names
//	GET  /state             what the worker does
//	GET  /alive             that it answers
//	GET  /metrics           for Prometheus
//	POST /attach            stays open: the agent is there
//	POST /detach?after=5m   the agent leaves for good: without another one the worker ends after this time
//	POST /drain?timeout=30s end: accept nothing more, wait for connections
//	POST /stop              end now
func (s *server) handler() http.Handler {
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	metrics.MustRegister(s.options.Collectors...)
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /config", s.putConfig)
	mux.HandleFunc("GET /state", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, s.state()) })
	mux.HandleFunc("GET /alive", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, problem{}) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(prometheus.Gatherers{s.engine.Registry(), metrics}, promhttp.HandlerOpts{}))
	mux.HandleFunc("POST /attach", s.attach)
	mux.HandleFunc("POST /detach", s.detach)
	mux.HandleFunc("POST /drain", s.drain)
	mux.HandleFunc("POST /stop", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, problem{})
		s.finish("stopped by its agent", 0)
	})
	return mux
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

func (s *server) state() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return State{s.options.Identity, os.Getpid(), s.began, s.attached, s.handing, s.engine.State()}
}

func (s *server) putConfig(w http.ResponseWriter, r *http.Request) {
	data, err := io.ReadAll(r.Body)
	if err != nil {
		answer(w, http.StatusBadRequest, problem{Error: err.Error()})
		return
	}
	s.mu.Lock()
	handing := s.handing
	s.mu.Unlock()
	if handing {
		answer(w, http.StatusConflict, problem{Error: "another worker takes over"})
		return
	}
	err = s.apply(data)
	if partly, ok := errors.AsType[*engine.ApplyError](err); ok {
		parts := map[string]string{}
		for name, err := range partly.Parts {
			parts[name] = err.Error()
		}
		answer(w, http.StatusOK, problem{Parts: parts})
		return
	}
	switch {
	case errors.Is(err, engine.ErrClosed):
		answer(w, http.StatusConflict, problem{Error: err.Error()})
	case err != nil:
		answer(w, http.StatusBadRequest, problem{Error: err.Error()})
	default:
		answer(w, http.StatusOK, problem{})
	}
}

// attach is an agent that is there for as long as the request lasts. One that breaks off has been killed, and comes back; the worker
// waits for it without end.
func (s *server) attach(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.attached++
	if s.leave != nil {
		s.leave.Stop()
		s.leave = nil
	}
	s.mu.Unlock()
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	select {
	case <-r.Context().Done():
	case <-s.ending:
	}
	s.mu.Lock()
	s.attached--
	s.mu.Unlock()
}

func (s *server) detach(w http.ResponseWriter, r *http.Request) {
	after, err := duration(r, "after")
	if err != nil {
		answer(w, http.StatusBadRequest, problem{Error: err.Error()})
		return
	}
	s.mu.Lock()
	if s.leave != nil {
		s.leave.Stop()
	}
	var timer *time.Timer
	timer = time.AfterFunc(after, func() {
		s.mu.Lock()
		due := s.leave == timer
		s.mu.Unlock()
		if due {
			s.finish("its agent has left", s.options.Drain)
		}
	})
	s.leave = timer
	s.mu.Unlock()
	answer(w, http.StatusOK, problem{})
}

func (s *server) drain(w http.ResponseWriter, r *http.Request) {
	timeout, err := duration(r, "timeout")
	if err != nil {
		answer(w, http.StatusBadRequest, problem{Error: err.Error()})
		return
	}
	answer(w, http.StatusOK, problem{})
	s.finish("drained by its agent", timeout)
}

func duration(r *http.Request, name string) (time.Duration, error) {
	d, err := time.ParseDuration(r.URL.Query().Get(name))
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%s=%q: a duration like 30s is needed", name, r.URL.Query().Get(name))
	}
	return d, nil
}
