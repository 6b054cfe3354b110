package reports

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

var start = time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)

// writes runs a pace for a while, with a status for each second, and returns the seconds in which it wrote.
func writes(p *Pace, seconds int, status func(second int) Status) (out []int) {
	for i := range seconds {
		s := status(i)
		if now := start.Add(time.Duration(i) * time.Second); p.Due(now, &s) {
			p.Wrote(now, &s)
			out = append(out, i)
		}
	}
	return out
}

func TestPace(t *testing.T) {
	const hour = 3600
	running := func(int) Status { return Status{State: Running} }
	for _, c := range []struct {
		name   string
		jitter float64
		status func(int) Status
		want   string
	}{
		{"nothing changes", 0, running, "[0 450 900 1350 1800 2250 2700 3150]"},
		{"spread over nodes", 0.5, running, "[3 603 1203 1803 2403 3003]"},
		{"what moves on is refreshed seldom", 0, func(i int) Status {
			return Status{State: Running, Synced: &Synced{Revision: fmt.Sprint(i)}}
		}, "[0 450 900 1350 1800 2250 2700 3150]"},
		{"a full table is written soon, how full it is exactly is not", 0, func(i int) Status {
			return Status{State: Running, Conntrack: &Conntrack{Percent: 85 + i/1000*6}}
		}, "[0 450 900 1000 1450 1900 2000 2450 2900 3350]"},
		{"a failure and its end", 0, func(i int) Status {
			if i >= 100 && i < 200 {
				return Status{State: Failing, LastError: &Error{Message: fmt.Sprint(i)}}
			}
			return Status{State: Running}
		}, "[0 100 200 650 1100 1550 2000 2450 2900 3350]"},
		{"not more often than the gap", 0, func(i int) Status {
			if i == 1 {
				return Status{State: Failing}
			}
			if i == 3 {
				return Status{State: Degraded}
			}
			return Status{State: Running, Message: fmt.Sprint(i >= 2)}
		}, "[0 5 455 905 1355 1805 2255 2705 3155]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := fmt.Sprint(writes(&Pace{Pacing: DefaultPacing, Jitter: c.jitter}, hour, c.status)); got != c.want {
				t.Errorf("wrote at %s, want %s", got, c.want)
			}
		})
	}
}

// TestFlapping: a state that changes all the time costs no more than one write a minute.
func TestFlapping(t *testing.T) {
	p := &Pace{Pacing: DefaultPacing}
	got := writes(p, 3600, func(i int) Status { return Status{State: Running, Message: fmt.Sprint(i)} })
	if len(got) < 55 || len(got) > 65 {
		t.Errorf("%d writes in an hour, want about 60", len(got))
	}
	if got[0] != 0 || got[1] != 5 || got[2] != 10 {
		t.Errorf("the first changes were written at %v, want them at once", got[:3])
	}
}

func TestTrim(t *testing.T) {
	long := strings.Repeat("é", 1000)
	s := Status{Message: long, Limits: make([]string, 100), Refused: &Refused{Count: 100, Some: []string{long, long, long, long, long, long, long}}, LastError: &Error{Message: long}, Drift: &Drift{Last: "a\xffb"}}
	some := s.Refused.Some
	s.Trim()
	for _, text := range []string{s.Message, s.Refused.Some[4], s.LastError.Message} {
		if len(text) > 410 || !strings.HasSuffix(text, "é…") {
			t.Errorf("%d bytes: %q", len(text), text)
		}
	}
	if len(s.Refused.Some) != 5 || len(s.Limits) != 10 || s.Refused.Count != 100 || s.Drift.Last != "a?b" {
		t.Errorf("%d refused, %d limits, %q", len(s.Refused.Some), len(s.Limits), s.Drift.Last)
	}
	if some[0] != long {
		t.Error("the part's own list was changed")
	}
}

func TestNames(t *testing.T) {
	for _, c := range []struct{ node, part string }{{"node1", Proxy}, {"a.b.example", DNS}, {"x.proxy", LB}} {
		if node, part, ok := SplitName(Name(c.node, c.part)); !ok || node != c.node || part != c.part {
			t.Errorf("%s: %q %q %v", Name(c.node, c.part), node, part, ok)
		}
	}
	for _, name := range []string{"", "node1", "node1.else", ".proxy", "proxy"} {
		if _, _, ok := SplitName(name); ok {
			t.Errorf("%q is the name of a report", name)
		}
	}
}
