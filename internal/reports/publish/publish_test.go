package publish

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	"portal/internal/reports"
)

// TestDeletedReportComesBack: also if there is nothing new to report.
func TestDeletedReportComesBack(t *testing.T) {
	var stored map[string]any
	made, written := 0, 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.URL.Path == "/api/v1/nodes":
			fmt.Fprint(w, `{"items":[{"metadata":{"name":"n","uid":"u"}}]}`)
		case r.Method == http.MethodPost:
			made++
			if err := json.NewDecoder(r.Body).Decode(&stored); err != nil {
				t.Error(err)
			}
			stored["metadata"].(map[string]any)["resourceVersion"] = "1"
			_ = json.NewEncoder(w).Encode(stored)
		case stored == nil:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
		default:
			written++
			_ = json.NewEncoder(w).Encode(stored)
		}
	}))
	defer server.Close()
	clock := clocktesting.NewFakeClock(time.Unix(1_000_000, 0))
	p, err := New(Options{
		Config: &rest.Config{Host: server.URL}, Node: "n", Part: reports.Proxy, Clock: clock, Log: slog.New(slog.DiscardHandler),
		Status: func() reports.Status { return reports.Status{State: reports.Running} },
	})
	if err != nil {
		t.Fatal(err)
	}
	minutes := func(n int) {
		for range n * 60 {
			clock.Step(time.Second)
			p.step(t.Context())
		}
	}
	minutes(60)
	if made != 1 || written < 4 || written > 8 {
		t.Fatalf("an hour: created %d times, replaced %d times", made, written)
	}
	stored = nil
	minutes(13)
	if made != 2 {
		t.Errorf("created %d times after somebody deleted it, want twice", made)
	}
}

// TestBackoffIsSpread: parts whose writes failed together do not come back together.
func TestBackoffIsSpread(t *testing.T) {
	tries := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/api/v1/nodes" {
			fmt.Fprint(w, `{"items":[{"metadata":{"name":"n","uid":"u"}}]}`)
			return
		}
		tries++
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"InternalError","code":500}`)
	}))
	defer server.Close()
	waits := map[int]bool{}
	for i := range 20 {
		clock := clocktesting.NewFakeClock(time.Unix(1_000_000, 0))
		p, err := New(Options{
			Config: &rest.Config{Host: server.URL}, Node: fmt.Sprintf("node-%d", i), Part: reports.Proxy, Clock: clock, Log: slog.New(slog.DiscardHandler),
			Status: func() reports.Status { return reports.Status{State: reports.Running} }, Pacing: reports.Pacing{Burst: 1, Refresh: time.Hour},
		})
		if err != nil {
			t.Fatal(err)
		}
		tries = 0
		var failed []int
		for second := range 60 {
			clock.Step(time.Second)
			if before := tries; len(failed) < 3 {
				if p.step(t.Context()); tries > before {
					failed = append(failed, second)
				}
			}
		}
		if len(failed) < 3 {
			t.Fatalf("node-%d tried at %v", i, failed)
		}
		waits[failed[2]-failed[1]] = true // of 10 s on average
	}
	if len(waits) < 5 {
		t.Errorf("20 nodes wait for one of %v seconds", waits)
	}
}
