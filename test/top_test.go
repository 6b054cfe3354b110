package test

import (
	"encoding/json"
	"net/netip"
	"testing"
	"time"

	"portal/internal/top"
	"portal/test/harness"
)

// top has the program count on a node what a Pod there sends to a Service.
func (l *traceLab) top(t *testing.T, mode string) {
	t.Helper()
	to := netip.AddrPortFrom(netip.MustParseAddr(l.services["all"].Spec.ClusterIP), 80)
	type result struct {
		out string
		err error
	}
	done := make(chan result, 1)
	go func() {
		out, err := harness.Run(t.Context(), nil, harness.Portal(), "top", "services", "--once", "-o", "json", "--lab", l.Name, "--node", "node1", "--interval", "3s")
		done <- result{out, err}
	}()
	asked := 0
	var r result
	for r.out == "" && r.err == nil {
		select {
		case r = <-done:
		default:
			if got := l.places["p1a"].ask("tcp", to, tracePatience); got.what != "answered" {
				t.Fatalf("the Service did not answer: %v", got)
			}
			asked++
			time.Sleep(5 * time.Millisecond)
		}
	}
	var sample top.Sample
	if r.err == nil {
		r.err = json.Unmarshal([]byte(r.out), &sample)
	}
	if r.err != nil {
		t.Fatalf("portal top services: %v\n%s", r.err, r.out)
	}
	for _, s := range sample.Services {
		if s.Namespace != "default" || s.Name != "all" || s.Port != "web" {
			continue
		}
		endpoints := 0
		for _, e := range s.Endpoints {
			if e.Address.Port() == tracePort {
				endpoints++
			}
		}
		// A relay's endpoints are not in conntrack.
		if s.Counts.New == 0 || s.Counts.New > uint64(asked) || (endpoints > 0) == (mode == "userspace") {
			t.Errorf("%d connections of %d were counted, to %d endpoints:\n%s", s.Counts.New, asked, endpoints, r.out)
		}
		return
	}
	t.Errorf("the Service is not there:\n%s", r.out)
}
