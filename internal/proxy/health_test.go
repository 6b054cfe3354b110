package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
)

// TestHealth: /healthz fails when a change waits too long or the node leaves; /livez only for the former. A machine that
// never had a Node does not leave.
func TestHealth(t *testing.T) {
	in(t, nil, func(w *world) {
		expect := func(when string, healthz, livez int) {
			w.Helper()
			for path, want := range map[string]int{"/healthz": healthz, "/livez": livez} {
				r := httptest.NewRecorder()
				w.proxy.Health.ServeHTTP(r, httptest.NewRequest(http.MethodGet, path, nil))
				if r.Code != want {
					w.Errorf("%s: %s answers %d, want %d: %s", when, path, r.Code, want, r.Body)
				}
				var body struct {
					NodeEligible *bool `json:"nodeEligible"`
					LastUpdated  time.Time
				}
				if err := json.Unmarshal(r.Body.Bytes(), &body); err != nil || (body.NodeEligible != nil) != (path == "/healthz") {
					w.Errorf("%s: %s says %s", when, path, r.Body)
				}
				if r.Code == http.StatusOK && !body.LastUpdated.Equal(time.Now()) {
					w.Errorf("%s: healthy, but last updated %v", when, body.LastUpdated)
				}
			}
		}
		node := func(change func(*intent.Node)) {
			n := &intent.Node{Name: "n1"}
			change(n)
			w.cluster.SetNode(n)
			w.settle()
		}
		expect("nothing known yet", 503, 200)
		w.listed()
		expect("synced, and there is no Node", 200, 200)
		node(func(*intent.Node) {})
		expect("a Node", 200, 200)
		w.cluster.DeleteNode("n1")
		w.settle()
		expect("its Node has gone", 503, 200)
		node(func(*intent.Node) {})
		expect("it is back", 200, 200)
		w.after(time.Hour)
		expect("nothing to do for an hour", 200, 200)
		node(func(n *intent.Node) { n.Taints = []intent.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}} })
		expect("to be deleted", 503, 200)
		node(func(n *intent.Node) { n.Deleting = true })
		expect("being deleted", 503, 200)
		node(func(*intent.Node) {})
		w.cluster.SetService(service("b", "10.96.0.2"))
		for range 4000 {
			w.kernel.fail = errors.New("stuck")
			w.after(20 * time.Millisecond)
		}
		expect("stuck for longer than a minute", 503, 503)
		w.kernel.fail = nil
		w.after(time.Minute)
		expect("unstuck", 200, 200)
	})
}

// TestHealthOfRules: rules that can't be written make the proxy unhealthy, also if nothing else has changed, and before the first are written.
func TestHealthOfRules(t *testing.T) {
	in(t, nil, func(w *world) {
		stuck := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); w.after(10 * time.Millisecond) {
				w.kernel.fail = errors.New("stuck")
			}
			w.kernel.fail = nil
		}
		expect := func(when string, healthy, serving bool) {
			w.Helper()
			if h := w.proxy.Health; h.Healthy() != healthy || h.Serving() != serving {
				w.Errorf("%s: healthy %v, serving %v; want %v, %v", when, h.Healthy(), h.Serving(), healthy, serving)
			}
		}
		expect("not listed", true, false)
		w.kernel.fail = errors.New("stuck")
		w.listed()
		expect("not programmed", true, false)
		stuck(2 * time.Minute)
		expect("not programmed for two minutes", false, false)
		w.after(time.Minute)
		expect("programmed", true, true)
		w.kernel.lose()
		stuck(3 * time.Minute)
		expect("lost, and not programmed again for minutes", false, false)
		w.after(time.Minute)
		expect("programmed again", true, true)
	})
}

// TestPlannedChecks: health checks get to know of Services that can't be written, at the start and later.
func TestPlannedChecks(t *testing.T) {
	in(t, nil, func(w *world) {
		checked := func(name, ip string) {
			s := service(name, ip)
			s.Type, s.ExternalLocal, s.HealthCheckNodePort = intent.LoadBalancer, true, 31000
			w.cluster.SetService(s)
		}
		expect := func(name string, acknowledged int) {
			w.Helper()
			if got := *w.checks.planned.Load(); len(got) != 1 || got[0].Service.Name != name || w.checks.changes != acknowledged {
				w.Errorf("planned %v, %d acknowledged; want %s and %d", got, w.checks.changes, name, acknowledged)
			}
		}
		checked("a", "10.96.0.1")
		w.kernel.fail = errors.New("stuck")
		w.listed()
		expect("a", 0)
		w.after(time.Minute)
		checked("b", "10.96.0.2")
		w.kernel.fail = errors.New("stuck")
		w.settle()
		expect("b", 1)
	})
}

// TestChecksOfRefused: health checks get to know which Services were refused, and that they are no more; their own notes are in /state.
func TestChecksOfRefused(t *testing.T) {
	in(t, nil, func(w *world) {
		key := intent.Key{Namespace: "ns", Name: "a"}
		w.kernel.refuse = map[plan.FrontendKey]error{{Addr: netip.MustParseAddr("10.96.0.1"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80}: errors.New("no room")}
		w.listed()
		if !w.checks.refused[key] {
			w.Error("a refused Service is not told")
		}
		w.kernel.refuse = nil
		w.after(2 * refusedInterval)
		if len(w.checks.refused) != 0 {
			w.Errorf("still refused: %v", w.checks.refused)
		}
		w.checks.notes = map[intent.Key][]string{key: {"port 31000 is taken"}}
		if got := w.proxy.State(key).Notes; len(got) != 1 || got[0] != (NoteState{"ns", "a", "port 31000 is taken"}) {
			w.Errorf("/state has %v", got)
		}
		if got := w.proxy.State(intent.Key{Namespace: "ns", Name: "b"}).Notes; len(got) != 0 {
			w.Errorf("/state of another Service has %v", got)
		}
	})
}

// TestHealthOfTheNetwork: a node on which packets are lost gets none from balancers, and its proxy is not restarted for it.
func TestHealthOfTheNetwork(t *testing.T) {
	var problems atomic.Pointer[[]hostnet.Problem]
	problems.Store(&[]hostnet.Problem{})
	in(t, func(o *Options) {
		o.Network = func(n hostnet.Needs) []hostnet.Problem {
			if n.Forward4 {
				return *problems.Load()
			}
			return nil
		}
	}, func(w *world) {
		codes := func() string {
			out := ""
			for _, path := range []string{"/healthz", "/livez"} {
				r := httptest.NewRecorder()
				w.proxy.Health.ServeHTTP(r, httptest.NewRequest("GET", path, nil))
				out += fmt.Sprint(r.Code, " ")
				if path == "/healthz" && r.Code != 200 && !strings.Contains(r.Body.String(), "ip_forward is 0") {
					w.Errorf("%s does not say why: %s", path, r.Body)
				}
			}
			return out
		}
		w.listed()
		for _, c := range []struct {
			found []hostnet.Problem
			want  string
		}{
			{nil, "200 200 "},
			{[]hostnet.Problem{{Message: "ip_forward is 0", Lost: true}}, "503 200 "},
			{[]hostnet.Problem{{Message: "rp_filter is strict"}}, "200 200 "},
			{nil, "200 200 "},
		} {
			problems.Store(&c.found)
			w.after(networkInterval)
			if got := codes(); got != c.want {
				w.Errorf("%v: /healthz and /livez answer %s, want %s", c.found, got, c.want)
			}
			if got := len(w.proxy.State().Problems); got != len(c.found) {
				w.Errorf("%v: /state has %d problems", c.found, got)
			}
		}
	})
}
