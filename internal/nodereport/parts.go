package nodereport

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/proxy"
	"portal/internal/reports"
)

const (
	// recentDrift is how long after a change by somebody else a proxy counts as degraded.
	recentDrift = 5 * time.Minute
	// nearlyFull is how full the table of connections may be, in percent.
	nearlyFull = 90
)

// ProxyStatus is what a proxy says about itself. revision is that of the API up to which it has programmed everything.
func ProxyStatus(s proxy.Summary, revision uint64, table *Usage, now time.Time) reports.Status {
	out := reports.Status{State: reports.Running, Mode: s.Mode, Limits: s.Limits, Services: &s.Services, Conntrack: Percent(table)}
	if s.Synced {
		out.Synced = &reports.Synced{Revision: number64(revision), Time: stamp(s.LastSync)}
	}
	if len(s.Refused) > 0 {
		out.Refused = &reports.Refused{Count: len(s.Refused), Some: s.Refused}
	}
	if s.Drifts > 0 {
		out.Drift = &reports.Drift{Count: s.Drifts, Last: s.LastDrift, Time: stamp(s.LastDriftAt)}
	}
	if s.LastError != "" {
		out.LastError = &reports.Error{Message: s.LastError, Time: stamp(s.LastErrorAt)}
	}
	switch {
	case s.Failing():
		out.State, out.Message = reports.Failing, "can't program the kernel: "+firstLine(s.LastError)
	case !s.Complete:
		out.State, out.Message = reports.Starting, "has not read everything from the API yet"
	case !s.Synced:
		out.State, out.Message = reports.Starting, "has not programmed anything yet"
	case len(s.Problems) > 0:
		out.State, out.Message = reports.Degraded, "packets are lost: "+s.Problems[0]
	case len(s.Refused) > 0:
		out.State, out.Message = reports.Degraded, fmt.Sprintf("the kernel refuses %s: %s", plural(len(s.Refused), "frontend"), s.Refused[0])
	case out.Conntrack != nil && out.Conntrack.Percent >= nearlyFull:
		out.State, out.Message = reports.Degraded, "the table of connections is nearly full"
	case len(s.Foreign) > 0:
		out.State, out.Message = reports.Degraded, "there are rules of another proxy: "+strings.Join(s.Foreign, ", ")
	case s.Drifts > 0 && now.Sub(s.LastDriftAt) < recentDrift:
		out.State, out.Message = reports.Degraded, "somebody changes its rules: "+firstLine(s.LastDrift)
	}
	return out
}

// Percent is how full a table is, for a report.
func Percent(u *Usage) *reports.Conntrack {
	if u == nil || u.Max <= 0 {
		return nil
	}
	return &reports.Conntrack{Count: u.Count, Max: u.Max, Percent: u.Count * 100 / u.Max}
}

// Follower is what a part that only follows the API says about itself.
func Follower(ready bool, mode string, revision uint64, now time.Time) reports.Status {
	if !ready {
		return reports.Status{State: reports.Starting, Mode: mode, Message: "has not read everything from the API yet"}
	}
	out := reports.Status{State: reports.Running, Mode: mode}
	if revision > 0 {
		out.Synced = &reports.Synced{Revision: number64(revision), Time: stamp(now)}
	}
	return out
}

func stamp(t time.Time) metav1.Time { return metav1.NewTime(t.UTC().Truncate(time.Second)) }

func number64(n uint64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
