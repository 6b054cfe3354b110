package worker

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
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

// agentHeader has the number of an agent that attaches.
const agentHeader = "Agent"

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
//	POST /attach            stays open: the agent is there; the header Agent of the answer has its number
//	POST /detach?after=5m&agent=N
//	                        the agent stops: unless one attaches within this time, the worker drains and ends
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
	return State{s.options.Identity, os.Getpid(), s.began, len(s.agents), s.handing, s.engine.State()}
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
	s.lastAgent++
	id := s.lastAgent
	s.agents[id] = struct{}{}
	s.stopLeaving()
	s.mu.Unlock()
	w.Header().Set(agentHeader, strconv.FormatUint(id, 10))
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	select {
	case <-r.Context().Done():
	case <-s.ending:
	}
	s.mu.Lock()
	delete(s.agents, id)
	s.mu.Unlock()
}

// detach takes an agent out that stops, for a restart or for good. If it was the last one, the worker ends after some time, unless one attaches.
func (s *server) detach(w http.ResponseWriter, r *http.Request) {
	after, err := duration(r, "after")
	id, err2 := strconv.ParseUint(cmp.Or(r.URL.Query().Get("agent"), "0"), 10, 64)
	if err2 != nil {
		err = fmt.Errorf("agent=%q: the number that /attach answered is needed", r.URL.Query().Get("agent"))
	}
	if err != nil {
		answer(w, http.StatusBadRequest, problem{Error: err.Error()})
		return
	}
	s.mu.Lock()
	delete(s.agents, id) // its connection may last a little longer
	if len(s.agents) == 0 {
		s.stopLeaving()
		s.leave = time.AfterFunc(after, s.left)
	}
	s.mu.Unlock()
	answer(w, http.StatusOK, problem{})
}

// stopLeaving has the worker stay. The lock is held.
func (s *server) stopLeaving() {
	if s.leave != nil {
		s.leave.Stop()
		s.leave = nil
	}
}

// handingPause is how long to wait with the end of a worker that another one is just taking over from.
const handingPause = time.Second

// left is called when the time of the last agent's absence is over.
func (s *server) left() {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.leave == nil || len(s.agents) > 0: // an agent came while this call was on its way
	case s.handing:
		// Connections have the longer time of a handover. If that fails, nobody else ends this worker.
		s.leave = time.AfterFunc(handingPause, s.left)
	default:
		s.finish("its agent has left", s.options.Drain)
	}
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
