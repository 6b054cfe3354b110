package console

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Where moments of a timeline come from.
const (
	fromEndpoints = "endpoints"
	fromPods      = "pods"
	fromEvents    = "events"
	fromService   = "service"
)

// Moment is something that happened to a Service.
type Moment struct {
	Time time.Time `json:"time"`
	// From is one of endpoints, pods, events, service.
	From string `json:"from"`
	// Kind is good, bad or neutral.
	Kind string `json:"kind"`
	What string `json:"what"`
	// Reason and Count are an Event's.
	Reason string `json:"reason,omitempty"`
	Count  int32  `json:"count,omitempty"`
}

const (
	good    = "good"
	bad     = "bad"
	neutral = "neutral"

	// maxHistory is how many moments of a Service are kept, maxHistories of how many Services; maxMoments is how many a page gets.
	maxHistory   = 100
	maxHistories = 2000
	maxMoments   = 200
	// manyAtOnce is from how many on changes are shown together.
	manyAtOnce = 12
)

// history is what happened to endpoints since the feed began: the API keeps no record of it.
type history struct {
	since time.Time
	of    map[key][]Moment
}

func (h *history) add(k key, now time.Time, moments ...Moment) {
	if len(moments) == 0 {
		return
	}
	if h.of[k] == nil && len(h.of) >= maxHistories {
		h.dropOldest()
	}
	for i := range moments {
		moments[i].Time = now
	}
	h.of[k] = append(h.of[k], moments...)
	h.of[k] = h.of[k][max(0, len(h.of[k])-maxHistory):]
}

func (h *history) dropOldest() {
	var oldest key
	var when time.Time
	for k, list := range h.of {
		if last := list[len(list)-1].Time; when.IsZero() || last.Before(when) {
			oldest, when = k, last
		}
	}
	delete(h.of, oldest)
}

func endpointWord(e *Endpoint) string {
	switch {
	case e.Ready:
		return "ready"
	case e.Terminating:
		return "terminating"
	}
	return "not ready"
}

func endpointName(e *Endpoint) string {
	if e.Pod != "" {
		return fmt.Sprintf("%s (%s)", e.Address, e.Pod)
	}
	return e.Address
}

// compareEndpoints says what became of endpoints between two moments.
func compareEndpoints(before, after []Endpoint) (out []Moment) {
	add := func(kind, format string, args ...any) {
		out = append(out, Moment{From: fromEndpoints, Kind: kind, What: fmt.Sprintf(format, args...)})
	}
	old := map[string]*Endpoint{}
	for i := range before {
		old[before[i].Address] = &before[i]
	}
	ready := 0
	for i := range after {
		e := &after[i]
		was := old[e.Address]
		delete(old, e.Address)
		kind := neutral
		if e.Ready {
			kind = good
			ready++
		}
		switch {
		case was == nil:
			add(kind, "%s was added, %s", endpointName(e), endpointWord(e))
		case endpointWord(was) != endpointWord(e):
			if !e.Ready {
				kind = bad
			}
			add(kind, "%s is %s (was %s)", endpointName(e), endpointWord(e), endpointWord(was))
		}
	}
	for i := range before {
		e := &before[i]
		if old[e.Address] == nil {
			continue
		}
		kind := neutral
		if e.Ready {
			kind = bad
		}
		add(kind, "%s was removed (was %s)", endpointName(e), endpointWord(e))
	}
	if len(out) > manyAtOnce {
		kind := good
		if slices.ContainsFunc(out, func(m Moment) bool { return m.Kind == bad }) {
			kind = bad
		}
		return []Moment{{From: fromEndpoints, Kind: kind, What: fmt.Sprintf("%d endpoints changed at once: %d are ready now", len(out), ready)}}
	}
	return out
}

// note remembers what a new judgement of a Service changes. What is there when the feed begins is not news.
func (f *feed) note(k key, e *entry, row *Row, endpoints []Endpoint) {
	if !f.status.Synced || e.svc == nil {
		return
	}
	now := time.Now()
	if e.row.Name == "" {
		f.history.add(k, now, Moment{From: fromService, Kind: neutral, What: "The Service was created"})
		return
	}
	f.history.add(k, now, compareEndpoints(e.endpoints, endpoints)...)
	if e.row.Health != row.Health && e.row.Health != unknown {
		m := Moment{From: fromService, Kind: bad, What: "The Service is " + healthWords[row.Health]}
		if row.Health == healthy {
			m.Kind = good
		}
		if row.Problem != "" {
			m.What += ": " + row.Problem
		}
		f.history.add(k, now, m)
	}
}

var healthWords = map[string]string{healthy: "healthy", warning: "in part broken", broken: "broken", unknown: "not known yet"}

// podMoments are what a Pod's status still says of its past.
func podMoments(pod *corev1.Pod) (out []Moment) {
	add := func(at time.Time, kind, format string, args ...any) {
		if !at.IsZero() {
			out = append(out, Moment{Time: at, From: fromPods, Kind: kind, What: "Pod " + pod.Name + " " + fmt.Sprintf(format, args...)})
		}
	}
	add(pod.CreationTimestamp.Time, neutral, "was created")
	for _, c := range pod.Status.Conditions {
		switch {
		case c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue:
			add(c.LastTransitionTime.Time, good, "became ready")
		case c.Type == corev1.PodReady && c.LastTransitionTime.After(pod.CreationTimestamp.Add(time.Second)):
			add(c.LastTransitionTime.Time, bad, "stopped being ready%s", prefixed(": ", cmp.Or(c.Message, c.Reason)))
		case c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse:
			add(c.LastTransitionTime.Time, bad, "found no node: %s", c.Message)
		}
	}
	for i := range pod.Status.ContainerStatuses {
		c := &pod.Status.ContainerStatuses[i]
		if t := cmp.Or(c.State.Terminated, c.LastTerminationState.Terminated); t != nil {
			kind := neutral
			if t.ExitCode != 0 {
				kind = bad
			}
			add(t.FinishedAt.Time, kind, "had container %s end with exit code %d%s, restarted %d times", c.Name, t.ExitCode, prefixed(" ", bracketed(t.Reason)), c.RestartCount)
		}
	}
	if pod.DeletionTimestamp != nil {
		asked := pod.DeletionTimestamp.Time
		if grace := pod.DeletionGracePeriodSeconds; grace != nil {
			asked = asked.Add(-time.Duration(*grace) * time.Second)
		}
		add(asked, neutral, "was asked to end")
	}
	return out
}

func prefixed(prefix, text string) string {
	if text == "" {
		return ""
	}
	return prefix + text
}

func bracketed(text string) string {
	if text == "" {
		return ""
	}
	return "(" + text + ")"
}

// eventMoment is an Event on the timeline.
func eventMoment(e *corev1.Event) Moment {
	from := newEvent(e)
	m := Moment{Time: from.Last, From: fromEvents, Kind: neutral, What: from.Message, Reason: from.Reason, Count: from.Count}
	if from.Type == corev1.EventTypeWarning {
		m.Kind = bad
	}
	if kind := e.InvolvedObject.Kind; kind != "Service" {
		m.What = fmt.Sprintf("%s %s: %s", kind, e.InvolvedObject.Name, m.What)
	}
	return m
}

// newestFirst puts a timeline in order, and keeps its end.
func newestFirst(all []Moment) []Moment {
	slices.SortStableFunc(all, func(a, b Moment) int {
		return cmp.Or(b.Time.Compare(a.Time), cmp.Compare(a.From, b.From), cmp.Compare(a.What, b.What))
	})
	return all[:min(len(all), maxMoments)]
}
