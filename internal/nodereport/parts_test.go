package nodereport

import (
	"testing"
	"time"

	"portal/internal/proxy"
	"portal/internal/reports"
)

func TestProxyStatus(t *testing.T) {
	now := time.Date(2026, 11, 17, 12, 0, 0, 0, time.UTC)
	well := proxy.Summary{Mode: "nftables", Complete: true, Synced: true, InSync: true, Services: 3, LastSync: now.Add(-time.Minute)}
	for _, c := range []struct {
		name    string
		change  func(*proxy.Summary)
		table   *Usage
		state   reports.State
		message string
	}{
		{"well", func(*proxy.Summary) {}, &Usage{10, 100}, reports.Running, ""},
		{"listing", func(s *proxy.Summary) { s.Complete, s.Synced = false, false }, nil, reports.Starting, "has not read everything from the API yet"},
		{"before the first sync", func(s *proxy.Summary) { s.Synced, s.LastSync = false, time.Time{} }, nil, reports.Starting, "has not programmed anything yet"},
		{"failing", func(s *proxy.Summary) { s.LastError, s.LastErrorAt = "no memory\nand more", now }, nil, reports.Failing, "can't program the kernel: no memory"},
		{"failed once", func(s *proxy.Summary) { s.LastError, s.LastErrorAt = "no memory", now.Add(-time.Hour) }, nil, reports.Running, ""},
		{"refused", func(s *proxy.Summary) { s.Refused = []string{"10.96.0.1:80/TCP: no", "10.96.0.2:80/TCP: no"} }, nil, reports.Degraded, "the kernel refuses 2 frontends: 10.96.0.1:80/TCP: no"},
		{"lost", func(s *proxy.Summary) { s.Problems = []string{"forwarding is off"} }, nil, reports.Degraded, "packets are lost: forwarding is off"},
		{"a full table", func(*proxy.Summary) {}, &Usage{95, 100}, reports.Degraded, "the table of connections is nearly full"},
		{"another proxy", func(s *proxy.Summary) { s.Foreign = []string{"kube-proxy (iptables)"} }, nil, reports.Degraded, "there are rules of another proxy: kube-proxy (iptables)"},
		{"drift", func(s *proxy.Summary) { s.Drifts, s.LastDrift, s.LastDriftAt = 1, "a table is gone", now }, nil, reports.Degraded, "somebody changes its rules: a table is gone"},
		{"drift long ago", func(s *proxy.Summary) {
			s.Drifts, s.LastDrift, s.LastDriftAt = 1, "a table is gone", now.Add(-time.Hour)
		}, nil, reports.Running, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := well
			c.change(&s)
			got := ProxyStatus(s, 42, c.table, now)
			if got.State != c.state || got.Message != c.message || got.Mode != "nftables" || *got.Services != 3 {
				t.Errorf("%+v, want %s: %s", got, c.state, c.message)
			}
			if s.Synced != (got.Synced != nil) || s.Synced && got.Synced.Revision != "42" {
				t.Errorf("synced: %+v", got.Synced)
			}
			if (s.Drifts > 0) != (got.Drift != nil) || (len(s.Refused) > 0) != (got.Refused != nil) || (s.LastError != "") != (got.LastError != nil) {
				t.Errorf("%+v", got)
			}
		})
	}
}

func TestFollower(t *testing.T) {
	if s := Follower(false, "m", 7, time.Now()); s.State != reports.Starting || s.Synced != nil || s.Mode != "m" {
		t.Errorf("%+v", s)
	}
	if s := Follower(true, "m", 7, time.Now()); s.State != reports.Running || s.Synced.Revision != "7" {
		t.Errorf("%+v", s)
	}
	if Percent(nil) != nil || Percent(&Usage{1, 0}) != nil || Percent(&Usage{1, 2}).Percent != 50 {
		t.Error("percentages are wrong")
	}
}
