package life

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// stop is how far ending a run has come: preStop hook, SIGTERM, SIGKILL.
type stop struct {
	deadline   time.Time
	terminated time.Time // when SIGTERM was decided
	killed     time.Time // when SIGKILL last was
}

// stop ends a run by the deadline, or goes on ending it if the deadline is zero.
func (s *step) stop(c *corev1.Container, r *Run, deadline time.Time, why Event) {
	st := s.stops[r.ID]
	if st == nil {
		st = &stop{deadline: deadline}
		s.stops[r.ID] = st
		if why.Reason == "" {
			why = Event{Reason: "Killing", Message: "Stopping container " + c.Name}
		}
		why.Container = c.Name
		s.emit("", why)
	}
	if !deadline.IsZero() && deadline.Before(st.deadline) {
		st.deadline = deadline
	}
	if st.terminated.IsZero() {
		if s.Now.Before(st.deadline) && (s.awaitHook(c, r, st) || s.awaitDrain()) {
			return
		}
		st.terminated = s.Now
	}
	end := st.deadline
	if preStop(c) && end.Before(st.terminated.Add(leastGrace)) && end.After(s.deleted) {
		end = st.terminated.Add(leastGrace)
	}
	if s.Now.Before(end) {
		s.do(Signal{Container: c.Name, Run: r.ID})
		s.wake(end)
		return
	}
	if st.killed.IsZero() || !s.Now.Before(st.killed.Add(killInterval)) {
		st.killed = s.Now
	}
	s.do(Signal{Container: c.Name, Run: r.ID, Kill: true})
	s.wake(st.killed.Add(killInterval))
}

// awaitHook runs a preStop hook and says whether to wait for it.
func (s *step) awaitHook(c *corev1.Container, r *Run, st *stop) bool {
	if !preStop(c) {
		return false
	}
	hook := Hook{Container: c.Name, Run: r.ID, PreStop: true}
	result, known := s.Observed.Hooks[hook]
	if known && result.Done {
		if result.Failure != "" {
			s.emit("prestop "+r.ID, Event{Container: c.Name, Warning: true, Reason: "FailedPreStopHook", Message: "preStop hook failed: " + result.Failure})
		}
		return false
	}
	if !known {
		s.do(RunHook{Hook: hook, Timeout: st.deadline.Sub(s.Now)})
	}
	s.wake(st.deadline)
	return true
}

// awaitDrain says whether a Pod that is deleted goes on serving, because somebody may still send new connections to it.
func (s *step) awaitDrain() bool {
	drain := s.Observed.Drain
	if s.deleted.IsZero() || !drain.Endpoint {
		return false
	}
	until := s.deleted.Add(min(maxDrain, s.ending.deadline.Sub(s.deleted)/2))
	if !drain.Out.IsZero() {
		enough := drain.Out.Add(max(drainPause, drainFactor*drain.Out.Sub(s.deleted)))
		if enough.Before(until) {
			until = enough
		}
	}
	s.wake(until)
	return s.Now.Before(until)
}

// stopAll ends the main containers and regular init containers together, and after them the sidecars, last first.
func (s *step) stopAll() {
	spec := s.spec()
	busy := false
	end := func(c *corev1.Container) {
		if s.Observed.Starting[c.Name] {
			busy = true
		}
		if r := s.running(c.Name); r != nil {
			busy = true
			s.stop(c, r, s.ending.deadline, Event{})
			s.probe(c, r)
		}
	}
	for i := range spec.Containers {
		end(&spec.Containers[i])
	}
	for i := range spec.InitContainers {
		if c := &spec.InitContainers[i]; !sidecar(c) {
			end(c)
		}
	}
	if !busy {
		s.stopSidecars(s.ending.deadline)
		return
	}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if r := s.running(c.Name); r != nil && sidecar(c) {
			// Out of time, all end at once.
			if !s.Now.Before(s.ending.deadline) {
				s.stop(c, r, s.ending.deadline, Event{})
				continue
			}
			s.wake(s.ending.deadline)
			s.probe(c, r)
		}
	}
}

// stopSidecars ends the sidecars one after the other, the last first. A zero deadline gives each the Pod's grace period.
func (s *step) stopSidecars(deadline time.Time) {
	spec := s.spec()
	for i := len(spec.InitContainers) - 1; i >= 0; i-- {
		c := &spec.InitContainers[i]
		r := s.running(c.Name)
		if r == nil || !sidecar(c) {
			continue
		}
		if st := s.stops[r.ID]; deadline.IsZero() && st == nil {
			deadline = s.Now.Add(s.grace())
		}
		s.stop(c, r, deadline, Event{})
		if deadline.IsZero() || s.Now.Before(deadline) {
			return
		}
	}
}
