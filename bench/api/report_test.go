package main

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestQuantile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, c := range []struct {
		name   string
		sorted []time.Duration
		q      float64
		want   time.Duration
	}{
		{"none", nil, 0.99, 0},
		{"one", []time.Duration{7}, 0.99, 7},
		{"p50 of 1…100", hundred, 0.50, 50},
		{"p99 of 1…100", hundred, 0.99, 99},
		{"p99 of few is the worst", hundred[:10], 0.99, 10},
		{"all", hundred, 1, 100},
	} {
		if got := quantile(c.sorted, c.q); got != c.want {
			t.Errorf("%s: got %d, want %d", c.name, got, c.want)
		}
	}
}

func TestCurveFollowsTheOrderOfCompletion(t *testing.T) {
	start := time.Unix(0, 0)
	var all samples
	for i := range 20 { // handed in backwards, as from several clients
		all = append(all, sample{took: time.Duration(20-i) * time.Millisecond, done: start.Add(time.Duration(20-i) * time.Second)})
	}
	points := curve(all, 100, start)
	if len(points) != 10 {
		t.Fatalf("got %d points, want 10", len(points))
	}
	first, last := points[0], points[9]
	if first.Services != 102 || first.P99 != 2 || first.PerSecond != 1 {
		t.Errorf("first tenth: %+v", first)
	}
	if last.Services != 120 || last.P99 != 20 || last.PerSecond != 1 {
		t.Errorf("last tenth: %+v", last)
	}
}

// good is a report in which Portal keeps every promise.
func good() *report {
	peer := &result{
		Server: kubernetes, Clients: 16, PerSecond: 70, Few: spread{10, 100}, Many: spread{100, 900}, Memory: 600, EtcdMemory: 100,
		Lists: &lists{Full: 100, Paged: 100, Cached: 100}, Watch: &watches{AfterRequest: spread{5, 50}, EventsPerSecond: 10_000},
	}
	own := &result{
		Server: portal, Clients: 16, PerSecond: 300, Few: spread{5, 20}, Many: spread{6, 30}, Memory: 290, EtcdMemory: 80,
		Lists: &lists{Full: 90, Paged: 100, Cached: 104}, Watch: &watches{AfterRequest: spread{4, 40}, EventsPerSecond: 12_000},
	}
	embedded := *own
	embedded.Server, embedded.Memory, embedded.EtcdMemory = portalEmbedded, 340, 0
	return &report{Services: 10_000, Results: []*result{peer, own, &embedded}}
}

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(portal *result)
		missed string
	}{
		{"everything kept", func(*result) {}, ""},
		{"too slow", func(r *result) { r.PerSecond = 279 }, "Services created a second"},
		{"a failed request", func(r *result) { r.Failed = 1 }, "failed requests"},
		{"slows down as it fills", func(r *result) { r.Many.P99 = 41 }, "p99 at 10000 / p99 at 100"},
		{"too much memory", func(r *result) { r.Memory = 301 }, "memory of the server, MB"},
		{"lists slower", func(r *result) { r.Lists.Paged = 110 }, "list in pages of 500, ms"},
		{"events later", func(r *result) { r.Watch.AfterRequest.P99 = 60 }, "last watcher after request p99, ms"},
		{"fewer events", func(r *result) { r.Watch.EventsPerSecond = 9_000 }, "events a second"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := good()
			lists, watch := *r.Results[1].Lists, *r.Results[1].Watch // not shared with the other one
			r.Results[1].Lists, r.Results[1].Watch = &lists, &watch
			c.change(r.Results[1])
			r.judge()
			var missed []string
			for _, v := range r.Verdicts {
				if !v.Met {
					missed = append(missed, v.Measure)
				}
			}
			if got := strings.Join(missed, "; "); got != c.missed || r.Met != (c.missed == "") {
				t.Errorf("missed %q (met: %v), want %q", got, r.Met, c.missed)
			}
		})
	}
}

func TestEmbeddedIsJudgedWithEtcdOnBothSides(t *testing.T) {
	r := good()
	r.Results[2].Memory = 351 // over half of 600 + 100
	r.judge()
	if v := r.verdict(portalEmbedded, 16, "memory with etcd, MB"); v == nil || v.Met {
		t.Errorf("verdict: %+v", v)
	}
	if v := r.verdict(portalEmbedded, 16, "memory of the server, MB"); v != nil {
		t.Errorf("a server with etcd inside is compared with one without: %+v", v)
	}
}

func TestWithoutAPeerOnlyPromisesAboutItselfAreJudged(t *testing.T) {
	r := good()
	r.Results = r.Results[1:]
	r.judge()
	for _, v := range r.Verdicts {
		if strings.Contains(v.Target, "×") {
			t.Errorf("judged without kube-apiserver: %+v", v)
		}
	}
	if len(r.Verdicts) != 4 || !r.Met {
		t.Errorf("verdicts: %+v", r.Verdicts)
	}
}

func TestTableNamesWhatWasMissed(t *testing.T) {
	r := good()
	r.Results[1].Failed, r.Results[1].FirstFailure = 2, "POST /api/v1/services: 500"
	r.judge()
	var out bytes.Buffer
	if err := r.writeTable(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Services created a second", "4.29× ok", "at least 4×",
		"Missed: failed requests of portal with 16 clients is 2.00, not at most 0",
		"First failure of portal, 16 clients: POST /api/v1/services: 500",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
}
