package proxy

import (
	"cmp"
	"slices"
	"time"
)

// Summary is State without what is served: it costs the same with one Service as with ten thousand.
type Summary struct {
	Mode     string
	Limits   []string
	Complete bool // everything has been listed from the API
	Synced   bool // at least once
	// InSync: nothing that is known waits to be programmed.
	InSync   bool
	Services int
	LastSync time.Time
	// Refused are the frontends that the kernel does not have, with the reason, in order.
	Refused           []string
	Drifts            int
	LastDrift         string
	LastDriftAt       time.Time
	LastError         string
	LastErrorAt       time.Time
	Problems, Foreign []string
}

// Failing says whether the last sync failed.
func (s *Summary) Failing() bool { return s.LastError != "" && s.LastErrorAt.After(s.LastSync) }

// Summary returns how the proxy is.
func (p *Proxy) Summary() Summary {
	out := Summary{Complete: p.Cluster.Complete(), InSync: p.Health == nil || p.Health.InSync()}
	p.mu.RLock()
	st := p.status
	if p.snap != nil {
		out.Services = len(p.snap.Services)
	}
	p.mu.RUnlock()
	out.Mode, out.Limits, out.Synced, out.LastSync = cmp.Or(st.Mode, st.Wanted), st.Limits, st.Synced, st.LastSync
	out.Drifts, out.LastDrift, out.LastDriftAt = st.Drifts, st.LastDrift, st.LastDriftAt
	out.LastError, out.LastErrorAt = st.LastError, st.LastErrorAt
	for k, err := range st.Refused {
		out.Refused = append(out.Refused, k.String()+": "+err.Error())
	}
	slices.Sort(out.Refused)
	for _, problem := range st.Problems {
		if problem.Lost {
			out.Problems = append(out.Problems, problem.String())
		}
	}
	for _, l := range st.Foreign {
		out.Foreign = append(out.Foreign, l.String())
	}
	return out
}
