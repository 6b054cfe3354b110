package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestQuantile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[(i*37)%100] = time.Duration(i+1) * time.Millisecond // not sorted
	}
	for _, c := range []struct {
		name string
		all  []time.Duration
		q    float64
		want float64
	}{
		{"none", nil, 0.99, 0},
		{"one", []time.Duration{7 * time.Millisecond}, 0.99, 7},
		{"p50 of 1…100", hundred, 0.50, 50},
		{"p99 of 1…100", hundred, 0.99, 99},
		{"all", hundred, 1, 100},
	} {
		if got := Quantile(c.all, c.q); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestRatiosSayHowManyTimesBetter(t *testing.T) {
	r := New("x", "X", []string{"peer"}, []string{"portal"})
	at := r.At("clean machine", 10_000, "Services")
	at.Lower("peer", "start", 30, "s")
	at.Lower("portal", "start", 1, "s")
	at.Higher("peer", "rate", 100, "queries/s")
	at.Higher("portal", "rate", 50, "queries/s")
	for name, want := range map[string]float64{"start": 30, "rate": 0.5} {
		if got, ok := r.Ratio(at.Place, name, "portal", "peer"); !ok || got != want {
			t.Errorf("%s: %v (%v), want %v", name, got, ok, want)
		}
	}
	if _, ok := r.Ratio(at.Place, "start", "portal", "nobody"); ok {
		t.Error("there is a ratio to what was not measured")
	}
}

func TestTargets(t *testing.T) {
	for _, c := range []struct {
		name string
		want func(At)
		met  bool
		n    int
	}{
		{"times better, met", func(a At) { a.WantTimes("portal", "start", "peer", 30) }, true, 1},
		{"times better, missed", func(a At) { a.WantTimes("portal", "start", "peer", 31) }, false, 1},
		{"the peer was not measured", func(a At) { a.WantTimes("portal", "start", "other", 31) }, true, 0},
		{"the subject was not ready in time", func(a At) { a.WantTimes("portal", "restart", "peer", 1) }, false, 1},
		{"within a limit, met", func(a At) { a.WantWithin("portal", "start", 1) }, true, 1},
		{"within a limit, missed", func(a At) { a.WantWithin("portal", "start", 0.5) }, false, 1},
		{"a rate within a limit", func(a At) { a.WantWithin("portal", "rate", 60) }, false, 1},
	} {
		r := New("x", "X", []string{"peer", "other"}, []string{"portal"})
		at := r.At("clean machine", 10, "Services")
		at.Lower("peer", "start", 30, "s")
		at.Lower("portal", "start", 1, "s")
		at.Lower("peer", "restart", 30, "s")
		at.Higher("portal", "rate", 50, "queries/s")
		c.want(at)
		if r.Met != c.met || len(r.Targets) != c.n {
			t.Errorf("%s: met %v with %d targets, want %v with %d", c.name, r.Met, len(r.Targets), c.met, c.n)
		}
	}
}

func TestWhatIsSavedIsShownAsBefore(t *testing.T) {
	r := New("x", "Proxy beside others", []string{"peer"}, []string{"portal"})
	r.Note("the peer does more")
	at := r.At("clean machine", 10_000, "Services")
	at.Lower("peer", "start", 21.94, "s")
	at.Lower("portal", "start", 0.7, "s")
	at.WantTimes("portal", "start", "peer", 40)
	file := filepath.Join(t.TempDir(), "folder", "x.json")
	if err := r.Save(file); err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	var table, again, markdown bytes.Buffer
	r.WriteTable(&table)
	loaded.WriteTable(&again)
	if table.String() != again.String() {
		t.Errorf("saved:\n%s\nloaded:\n%s", table.String(), again.String())
	}
	loaded.WriteMarkdown(&markdown)
	for out, wants := range map[string][]string{
		table.String(): {
			"clean machine, 10,000 Services", "21.9", "31.3×", "at least 40× peer: MISSED", "Note: the peer does more",
			"MISSED: clean machine, 10,000 Services: start of portal is 31.3×, wanted at least 40× peer",
		},
		markdown.String(): {"## Proxy beside others", "| start, s | 21.9 | 0.70 | 31.3× | at least 40× peer: MISSED |", r.Machine.Kernel, "- the peer does more"},
	} {
		for _, want := range wants {
			if !strings.Contains(out, want) {
				t.Errorf("%q is missing in:\n%s", want, out)
			}
		}
	}
	other := filepath.Join(t.TempDir(), "other.json")
	if err := os.WriteFile(other, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(other); err == nil {
		t.Error("a file that is no report was loaded")
	}
}

// TestUsageIncludesChildren: kube-proxy's work is done by commands that it starts.
func TestUsageIncludesChildren(t *testing.T) {
	cmd := exec.Command("sh", "-c", `i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done & wait; sleep 60 & wait`)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := Follow(cmd.Process.Pid)
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		s.Stop()
	}()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		u, err := s.Read()
		if err != nil {
			t.Fatal(err)
		}
		own, _, err := rollup(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		if u.CPU > 0 && u.PSS > own && u.Anonymous > 0 && s.Peak().PSS >= u.PSS {
			for _, p := range tree(cmd.Process.Pid)[1:] {
				child, err := os.FindProcess(p)
				if err == nil {
					_ = child.Kill()
				}
			}
			return
		}
		if time.Now().After(end) {
			t.Fatalf("usage %+v, PSS without children %v", u, own)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 3: "3", 0.694: "0.69", 0.0341: "0.034", 21.94: "21.9", 176.4: "176", 27800.2: "27,800", 1234567: "1,234,567"} {
		if got := number(v); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
}

func TestPrivateCopyRuns(t *testing.T) {
	path, err := Private("/bin/true", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := exec.Command(path).Run(); err != nil {
		t.Error(err)
	}
}

func TestEachDoesAllUntilOneFails(t *testing.T) {
	var done [100]atomic.Int32
	if err := Each(t.Context(), 7, len(done), func(i int) error { done[i].Add(1); return nil }); err != nil {
		t.Fatal(err)
	}
	for i := range done {
		if n := done[i].Load(); n != 1 {
			t.Errorf("%d was done %d times", i, n)
		}
	}
	broken := errors.New("broken")
	calls := 0
	err := Each(t.Context(), 1, len(done), func(i int) error {
		calls++
		if i == 10 {
			return broken
		}
		return nil
	})
	if !errors.Is(err, broken) || calls != 11 {
		t.Errorf("after %d calls: %v", calls, err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := Each(ended, 2, 10, func(int) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("ended: %v", err)
	}
}

func TestUntilSaysWhyItGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries, begin := 0, time.Now()
		try := func() error {
			if tries++; tries < 5 {
				return fmt.Errorf("try %d", tries)
			}
			return nil
		}
		if err := Until(t.Context(), 2*time.Second, time.Second, try); err == nil || err.Error() != "try 4" || time.Since(begin) != 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		tries = 0
		if err := Until(t.Context(), time.Minute, time.Second, try); err != nil || tries != 5 {
			t.Errorf("%v after %d tries", err, tries)
		}
	})
}
