package proxy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
)

// lateAfter is how long a change may wait for a sync before the proxy counts as unhealthy.
const lateAfter = time.Minute

// Health knows whether the proxy keeps up, and answers /healthz and /livez as kube-proxy does.
type Health struct {
	// Node returns the node as the API has it, nil for unknown. Listed says whether all has been read from there.
	Node   func() *intent.Node
	Listed func() bool

	mu      sync.Mutex
	known   bool // there has been a Node
	updated map[intent.Family]time.Time
	waiting time.Time // since when the oldest change does; zero: none does
	// lost are the problems of this machine's network because of which packets are lost.
	lost    []string
	answers func(path string, code int)
}

// SetProblems says what is wrong with this machine's network.
func (h *Health) SetProblems(all []hostnet.Problem) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lost = nil
	for _, p := range all {
		if p.Lost {
			h.lost = append(h.lost, p.String())
		}
	}
}

// Queued says that a change waits for a sync.
func (h *Health) Queued(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waiting.IsZero() {
		h.waiting = now
	}
}

// Updated says that everything is in sync.
func (h *Health) Updated(families []intent.Family, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.updated == nil {
		h.updated = map[intent.Family]time.Time{}
	}
	for _, f := range families {
		h.updated[f] = now
	}
	h.waiting = time.Time{}
}

// InSync says whether no change waits for a sync.
func (h *Health) InSync() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.updated) > 0 && h.waiting.IsZero()
}

// Healthy says whether no change has waited too long.
func (h *Health) Healthy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.healthy(time.Now())
}

// Serving says whether rules are there, and no change has waited too long.
func (h *Health) Serving() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.updated) > 0 && h.healthy(time.Now())
}

func (h *Health) healthy(now time.Time) bool {
	return h.waiting.IsZero() || now.Sub(h.waiting) < lateAfter
}

// Known says that the API has had a Node for this machine.
func (h *Health) Known() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known = true
}

// Eligible says whether balancers may send traffic to this node: it is not on its way out. A machine that never had a
// Node, since nobody registers any, is not; one whose Node has gone is.
func (h *Health) Eligible() bool {
	n := h.Node()
	if n == nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		return !h.known && h.Listed()
	}
	if n.Deleting {
		return false
	}
	for _, t := range n.Taints {
		if t.Key == "ToBeDeletedByClusterAutoscaler" {
			return false
		}
	}
	return true
}

type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

type healthAnswer struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyHealth `json:"status,omitempty"`
	// Problems are why packets to Services are lost on this machine.
	Problems []string `json:"problems,omitempty"`
}

func (h *Health) answer(now time.Time) healthAnswer {
	h.mu.Lock()
	defer h.mu.Unlock()
	a := healthAnswer{CurrentTime: now, Healthy: h.healthy(now), Status: map[string]familyHealth{}, Problems: h.lost}
	for f, at := range h.updated {
		a.Status[familyName(f)] = familyHealth{at, a.Healthy}
		if at.After(a.LastUpdated) {
			a.LastUpdated = at
		}
	}
	return a
}

func familyName(f intent.Family) string { return fmt.Sprintf("IPv%d", f) }

// ServeHTTP answers /healthz, which also asks whether the node may get traffic and its network lets it through, and /livez,
// which does not: restarting the proxy would help in neither case.
func (h *Health) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	now := time.Now()
	a := h.answer(now)
	ok := a.Healthy
	if r.URL.Path == "/healthz" {
		eligible := h.Eligible()
		a.NodeEligible = &eligible
		ok = ok && eligible && len(a.Problems) == 0
	}
	code := http.StatusServiceUnavailable
	if ok {
		// Whoever looks at the time expects a recent one of a healthy proxy, also when nothing has changed for days.
		code, a.LastUpdated = http.StatusOK, now
	}
	if h.answers != nil {
		h.answers(r.URL.Path, code)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(a)
}
