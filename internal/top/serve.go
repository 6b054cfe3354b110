package top

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"portal/internal/intent"
)

// Path is where a node serves its samples, among what it serves to those who may use nodes/proxy.
const Path = "/traffic"

const (
	// servedInterval is the time between two samples that are served.
	servedInterval = 2 * time.Second
	// servedIdle is how long counting goes on after the last question.
	servedIdle = 15 * time.Second
	// servedPatience is how long a question waits for the first sample.
	servedPatience = 10 * time.Second
)

// Server answers how much goes through Services on this machine. It counts from the first question until a while after the last: while nobody
// asks, it costs nothing. It answers while Run does.
type Server struct {
	// Source says which Services there are; nil: it is not known yet.
	Source func() *intent.Cluster
	// Local are the machine's own addresses.
	Local func() ([]netip.Addr, error)
	// Interval and Idle are for tests; 0: the usual ones.
	Interval, Idle time.Duration

	mu    sync.Mutex
	asked time.Time
	wake  chan struct{}
	next  chan struct{} // closed at the next sample, or failure
	last  *Sample
	err   error
}

// NewServer returns a Server.
func NewServer(source func() *intent.Cluster, local func() ([]netip.Addr, error)) *Server {
	return &Server{Source: source, Local: local, Interval: servedInterval, Idle: servedIdle, wake: make(chan struct{}, 1), next: make(chan struct{})}
}

// Run counts whenever somebody asks, until ctx ends.
func (s *Server) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		err := s.count(ctx)
		s.publish(nil, err)
		if err != nil && ctx.Err() == nil { // a machine on which it can't work is not tried all the time
			select {
			case <-ctx.Done():
			case <-time.After(s.Interval):
			}
		}
	}
}

// count makes samples as long as somebody asks for them.
func (s *Server) count(ctx context.Context) error {
	cluster := s.Source()
	if cluster == nil || !cluster.Complete() {
		return errors.New("the node does not know the Services yet, or has no proxy of its own")
	}
	local, err := s.Local()
	if err != nil {
		return err
	}
	kernel, err := Open()
	if err != nil {
		return err
	}
	defer kernel.Close()
	t := New(Options{Kernel: kernel, Cluster: cluster, Local: local, Interval: s.Interval})
	defer t.Close()
	for s.wanted() {
		sample, err := t.Next(ctx)
		if err != nil {
			return err
		}
		s.publish(sample, nil)
	}
	return nil
}

func (s *Server) wanted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.asked) < s.Idle
}

func (s *Server) publish(sample *Sample, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last, s.err = sample, err
	if sample != nil || err != nil {
		close(s.next)
		s.next = make(chan struct{})
	}
}

// latest returns the last sample; if there is none yet, it waits for one.
func (s *Server) latest(ctx context.Context) (*Sample, error) {
	s.mu.Lock()
	s.asked = time.Now()
	last, next := s.last, s.next
	s.mu.Unlock()
	if last != nil {
		return last, nil
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
	select {
	case <-next:
	case <-ctx.Done():
		return nil, errors.New("there is no sample yet")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last, s.err
}

// ServeHTTP answers with the last sample: Services that have traffic. For each ?service=NAMESPACE/NAME the answer has its endpoints too, and
// only such Services unless there is &all=true.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	for _, name := range query["service"] {
		if namespace, rest, ok := strings.Cut(name, "/"); !ok || namespace == "" || rest == "" {
			http.Error(w, "service: must be NAMESPACE/NAME", http.StatusBadRequest)
			return
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), servedPatience)
	defer cancel()
	sample, err := s.latest(ctx)
	if sample == nil {
		if err == nil {
			err = errors.New("counting has just ended: ask again")
		}
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(sample.only(query["service"], len(query["service"]) == 0 || query.Get("all") == "true")) // a client that has gone needs no answer
}

// only leaves out what was not asked for, and Services without traffic.
func (s *Sample) only(detailed []string, all bool) *Sample {
	out := *s
	out.Services = []Service{}
	for _, one := range s.Services {
		asked := slices.Contains(detailed, one.Namespace+"/"+one.Name)
		if !asked && (!all || one.Counts.idle()) {
			continue
		}
		if !asked {
			one.Endpoints, one.Counts.Latency = nil, nil
		}
		out.Services = append(out.Services, one)
	}
	return &out
}
