package jobs

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestIndexes(t *testing.T) {
	for text, want := range map[string]struct {
		n   int
		out string
	}{
		"": {0, ""}, "0": {1, "0"}, "1,3-5,7": {5, "1,3-5,7"}, "1,2": {2, "1,2"}, "1-2": {2, "1,2"}, "1,2,3": {3, "1-3"}, "0-99": {100, "0-99"},
	} {
		got, err := ParseIndexes(text, 100)
		if err != nil || got.Len() != want.n || got.String() != want.out {
			t.Errorf("%q: %v with %d (%v), want %+v", text, got, got.Len(), err, want)
		}
	}
	for _, text := range []string{"x", "-1", "1-", "3-1", "1-1", "2,1", "1,1", "1-3,2", "100", "1-100", "1-2-3", ","} {
		if got, err := ParseIndexes(text, 100); err == nil {
			t.Errorf("%q is taken for %v", text, got)
		}
	}
	if got := ReadIndexes("1,x,3-9,12", 6).String(); got != "1,3-5" {
		t.Errorf("what can be read is %q", got)
	}
}

func TestIndexSets(t *testing.T) {
	a, b := IndexesOf(5, 1, 2, 9), IndexesOf(3, 9, 10)
	if got := a.Union(b).String(); got != "1-3,5,9,10" {
		t.Errorf("together %s", got)
	}
	if n := a.Common(b); n != 1 {
		t.Errorf("%d in common", n)
	}
	if n := IndexesOf(0, 1, 2, 3).Common(IndexesOf(1, 2, 5)); n != 2 {
		t.Errorf("%d in common", n)
	}
	for i, want := range map[int]bool{0: false, 1: true, 2: true, 3: false, 5: true, 9: true, 10: false} {
		if a.Has(i) != want {
			t.Errorf("%d: %v", i, a.Has(i))
		}
	}
	for _, c := range []struct {
		n, limit int
		want     []int
	}{{0, 9, nil}, {2, 20, []int{0, 3}}, {9, 7, []int{0, 3, 4, 6}}, {9, 2, []int{0}}} {
		if got := a.Missing(c.n, c.limit); !slices.Equal(got, c.want) {
			t.Errorf("the first %d missing below %d are %v", c.n, c.limit, got)
		}
	}
	// A set is not changed by what is made of it.
	if a.String() != "1,2,5,9" {
		t.Errorf("it became %s", a)
	}
}

func at(text string) time.Time {
	out, err := time.Parse(time.DateTime, text)
	if err != nil {
		panic(err)
	}
	return out
}

func TestDue(t *testing.T) {
	for _, c := range []struct {
		schedule, zone, since, now string
		due                        string
		missed                     bool
	}{
		{"*/5 * * * *", "UTC", "2026-01-01 10:02:00", "2026-01-01 10:04:59", "", false},
		{"*/5 * * * *", "UTC", "2026-01-01 10:02:00", "2026-01-01 10:05:00", "2026-01-01 10:05:00", false},
		{"*/5 * * * *", "UTC", "2026-01-01 10:02:00", "2026-01-01 10:14:00", "2026-01-01 10:10:00", false},
		{"*/5 * * * *", "UTC", "2016-01-01 10:02:00", "2026-01-01 10:14:00", "2026-01-01 10:10:00", true},
		{"0 9 * * *", "Europe/Paris", "2026-07-01 00:00:00", "2026-07-01 12:00:00", "2026-07-01 07:00:00", false},
		{"0 9 * * *", "Europe/Paris", "2026-01-01 00:00:00", "2026-01-01 12:00:00", "2026-01-01 08:00:00", false},
		// Mondays to Fridays: over a weekend there is more than one step.
		{"30 6-16/4 * * 1-5", "UTC", "2026-01-02 15:00:00", "2026-01-05 06:31:00", "2026-01-05 06:30:00", false},
		{"30 6-16/4 * * 1-5", "UTC", "2026-01-01 20:00:00", "2026-01-05 05:00:00", "2026-01-02 14:30:00", false},
		{"@every 1h", "UTC", "2026-01-01 10:02:00", "2026-01-01 13:30:00", "2026-01-01 13:02:00", false},
		{"59 23 31 2 *", "UTC", "2026-01-01 10:02:00", "2026-05-01 13:30:00", "", false},
	} {
		schedule, err := ParseSchedule(c.schedule, c.zone)
		if err != nil {
			t.Errorf("%s: %v", c.schedule, err)
			continue
		}
		due, missed, err := Due(schedule, at(c.since), at(c.now))
		want := time.Time{}
		if c.due != "" {
			want = at(c.due)
		}
		if err != nil || !due.Equal(want) || missed != c.missed {
			t.Errorf("%s from %s to %s: %v, %v (%v)", c.schedule, c.since, c.now, due, missed, err)
		}
	}
}

func TestNoSchedules(t *testing.T) {
	for _, c := range [][2]string{{"", ""}, {"* * * *", ""}, {"TZ=0", ""}, {"TZ=", ""}, {"CRON_TZ=UTC", ""}, {"* * * * *", "Nowhere/Land"}, {"* * * * *", "local"}, {"61 * * * *", "UTC"}} {
		if _, err := ParseSchedule(c[0], c[1]); err == nil {
			t.Errorf("%q in %q is taken for a schedule", c[0], c[1])
		}
	}
}

// TestSeconds: what is longer than a Duration can be is the longest one, not a negative one.
func TestSeconds(t *testing.T) {
	for n, want := range map[int64]time.Duration{0: 0, 90: 90 * time.Second, -1: -time.Second, 9223372036: 9223372036 * time.Second,
		9223372037: 9223372036 * time.Second, math.MaxInt64: 9223372036 * time.Second, math.MinInt64: -9223372036 * time.Second} {
		if got := Seconds(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}
