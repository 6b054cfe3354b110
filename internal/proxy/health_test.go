package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
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
