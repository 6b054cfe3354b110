package reports

import (
	"reflect"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Pacing bounds how often a part writes. What matters is written soon; what only moves on, such as the synced revision, seldom: a thousand
// nodes see the same change at the same moment.
type Pacing struct {
	// Gap is the least time between two writes.
	Gap time.Duration
	// Burst is how many changes are written as they come; after that, one for each Sustained.
	Burst     int
	Sustained time.Duration
	// Refresh is how old a report may become: it shows that the part is alive, and comes back if somebody deleted it.
	Refresh time.Duration
}

// DefaultPacing is what parts use. 1,000 nodes with three parts each write 5 times a second while all is well.
var DefaultPacing = Pacing{Gap: 5 * time.Second, Burst: 3, Sustained: time.Minute, Refresh: 10 * time.Minute}

// Stale is how old a report is whose part has ended, or does not reach the API: with the default pacing reports are refreshed within a quarter of an hour.
const Stale = 30 * time.Minute

// Pace decides when a part's report is due. Its owner says what was written.
type Pace struct {
	Pacing
	// Jitter is between 0 and 1, and the part's own: nodes that started together do not write together.
	Jitter float64

	written *Status
	at      time.Time
	tokens  float64
	filled  time.Time
	noted   time.Time // since when there is something that matters and is not written
}

// Due says whether a status is to be written now. It expects to be asked every second or so.
func (p *Pace) Due(now time.Time, s *Status) bool {
	p.fill(now)
	if p.written == nil || Differs(p.written, s) {
		if p.noted.IsZero() {
			p.noted = now
		}
		// The gap, spread over nodes: a change that all see is not written by all at once, and those that follow it closely go along.
		return now.Sub(p.noted) >= p.spread(p.Gap) && now.Sub(p.at) >= p.Gap && p.tokens >= 1
	}
	p.noted = time.Time{}
	return now.Sub(p.at) >= p.Refresh*3/4+p.spread(p.Refresh/2)
}

// Wrote notes that a status was written.
func (p *Pace) Wrote(now time.Time, s *Status) {
	p.fill(now)
	kept := *s
	p.written, p.at, p.noted = &kept, now, time.Time{}
	p.tokens = max(p.tokens-1, 0)
}

func (p *Pace) fill(now time.Time) {
	if p.filled.IsZero() {
		p.tokens = float64(p.Burst)
	} else if p.Sustained > 0 {
		p.tokens = min(float64(p.Burst), p.tokens+float64(now.Sub(p.filled))/float64(p.Sustained))
	}
	p.filled = now
}

func (p *Pace) spread(d time.Duration) time.Duration { return time.Duration(p.Jitter * float64(d)) }

// Differs says whether two statuses differ in what people should learn soon.
func Differs(a, b *Status) bool { return !reflect.DeepEqual(lasting(*a), lasting(*b)) }

// lasting is a status without what moves on by itself.
func lasting(s Status) Status {
	s.Updated, s.Synced, s.Services = metav1.Time{}, nil, nil
	if s.Conntrack != nil {
		s.Conntrack = &Conntrack{Percent: step(s.Conntrack.Percent)}
	}
	if s.LastError != nil { // it comes again and again while the state lasts
		s.LastError = &Error{}
	}
	if s.Drift != nil {
		s.Drift = &Drift{Count: min(s.Drift.Count, 1)}
	}
	if s.Refused != nil {
		s.Refused = &Refused{Count: s.Refused.Count}
	}
	return s
}

// step rounds how full a table is: below 70 % nobody has to know soon.
func step(percent int) int {
	switch {
	case percent >= 95:
		return 95
	case percent >= 90:
		return 90
	case percent >= 70:
		return 70
	}
	return 0
}
