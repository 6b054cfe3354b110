package life

import (
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/restarts"
)

// run brings the Pod nearer to what its spec says: a sandbox, the init containers in order, then all others.
func (s *step) run() {
	if s.stopOutdated() {
		s.restarting = true
		return
	}
	if s.Observed.Sandbox != SandboxReady {
		if at := s.retryAt(s.Observed.SandboxFailure); at.After(s.Now) {
			s.wake(at)
			return
		}
		s.do(CreateSandbox{})
		return
	}
	initialized := s.initialized()
	spec := s.spec()
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		done := s.runInit(c, initialized)
		if !done && !initialized {
			return
		}
	}
	for i := range spec.Containers {
		s.keep(&spec.Containers[i], false)
	}
}

// runInit does what an init container needs, and says whether the next one may start.
func (s *step) runInit(c *corev1.Container, initialized bool) bool {
	if sidecar(c) {
		s.keep(c, true)
		r := s.running(c.Name)
		return r != nil && s.started(c, r)
	}
	if initialized {
		return true
	}
	r := s.current(c.Name)
	if r != nil && r.succeeded() {
		return true
	}
	s.keep(c, true)
	return false
}

// keep has a container running: it starts it, restarts it, and stops it if it should be replaced.
func (s *step) keep(c *corev1.Container, init bool) {
	r := s.last[c.Name]
	switch {
	case s.Observed.Starting[c.Name]:
	case r == nil:
		s.start(c, init, 0, 0)
	case !r.ended():
		s.tend(c, r)
	case s.current(c.Name) != nil && !s.again(c, init, r):
	default:
		s.restart(c, init, r)
	}
}

// again says whether a run that ended is to be followed by another. Init containers run until they succeed.
func (s *step) again(c *corev1.Container, init bool, r *Run) bool {
	if init && !sidecar(c) && r.succeeded() {
		return false
	}
	return restarts.After(c, s.spec(), r.ExitCode)
}

// restart starts a container again, after its back-off.
func (s *step) restart(c *corev1.Container, init bool, r *Run) {
	if at := s.backoffEnd(r); at.After(s.Now) {
		s.emit("backoff "+r.ID, Event{Container: c.Name, Warning: true, Reason: "BackOff", Message: "Back-off before restarting container " + c.Name + ": " + backoffMessage(r)})
		s.wake(at)
		return
	}
	s.start(c, init, r.Attempt+1, nextBackoff(r))
}

// start starts a container, unless the last try failed recently.
func (s *step) start(c *corev1.Container, init bool, attempt int32, backoff time.Duration) {
	if f := s.Observed.Failures[c.Name]; f != nil {
		s.wake(f.At.Add(errorShown))
		if at := s.retryAt(f); at.After(s.Now) {
			if pullFailure(f.Reason) && !s.Now.Before(f.At.Add(errorShown)) {
				s.emit(fmt.Sprint("pull ", c.Name, f.At), Event{Container: c.Name, Warning: true, Reason: "BackOff", Message: fmt.Sprintf(
					"Back-off before pulling image %q of container %s again: the next try is %s after the last one", c.Image, c.Name, at.Sub(f.At))})
			}
			s.wake(at)
			return
		}
	}
	// A Pod that was here before the machine was restarted has left its counts in the API only.
	if attempt == 0 {
		if before := s.reported(c.Name); before != nil && (before.RestartCount > 0 || before.State.Terminated != nil || before.State.Running != nil) {
			attempt = before.RestartCount + 1
		}
	}
	s.asked[c.Name] = s.round
	s.do(StartContainer{Container: c.Name, Init: init, Attempt: attempt, Round: s.round, Backoff: backoff})
}

func (s *step) reported(name string) *corev1.ContainerStatus {
	status := &s.Input.Pod.Status
	for _, list := range [][]corev1.ContainerStatus{status.InitContainerStatuses, status.ContainerStatuses} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}

// tend looks after a run: its hook after the start, and its probes.
func (s *step) tend(c *corev1.Container, r *Run) {
	if s.stops[r.ID] != nil {
		s.stop(c, r, time.Time{}, Event{})
		return
	}
	if postStart(c) {
		hook := Hook{Container: c.Name, Run: r.ID}
		result, known := s.Observed.Hooks[hook]
		switch {
		case !known:
			s.do(RunHook{Hook: hook})
			return
		case !result.Done:
			return
		case result.Failure != "":
			s.stop(c, r, s.Now.Add(s.grace()), Event{Warning: true, Reason: "FailedPostStartHook", Message: "postStart hook failed: " + result.Failure})
			return
		}
	}
	for _, kind := range []ProbeKind{Startup, Liveness} {
		probe := probeOf(c, kind)
		if probe == nil || kind == Liveness && !s.started(c, r) {
			continue
		}
		result, known := s.Observed.Probes[Probe{c.Name, r.ID, kind}]
		if known && !result.Success {
			grace := s.grace()
			if probe.TerminationGracePeriodSeconds != nil {
				grace = Seconds(*probe.TerminationGracePeriodSeconds)
			}
			s.stop(c, r, s.Now.Add(grace), Event{
				Reason:  "Killing",
				Message: fmt.Sprintf("Container %s failed its %s probe and is restarted if its restart policy says so: %s", c.Name, kind, result.Message),
			})
			return
		}
	}
	s.probe(c, r)
}

// probe names the probes that a run needs now.
func (s *step) probe(c *corev1.Container, r *Run) {
	if !s.started(c, r) {
		if probeOf(c, Startup) != nil {
			s.out.Probes = append(s.out.Probes, Probe{c.Name, r.ID, Startup})
		}
		return
	}
	for _, kind := range []ProbeKind{Liveness, Readiness} {
		if probeOf(c, kind) != nil && (kind == Readiness || s.ending == nil && s.stops[r.ID] == nil) {
			s.out.Probes = append(s.out.Probes, Probe{c.Name, r.ID, kind})
		}
	}
}

func probeOf(c *corev1.Container, kind ProbeKind) *corev1.Probe {
	switch kind {
	case Startup:
		return c.StartupProbe
	case Liveness:
		return c.LivenessProbe
	}
	return c.ReadinessProbe
}

func postStart(c *corev1.Container) bool { return c.Lifecycle != nil && c.Lifecycle.PostStart != nil }
func preStop(c *corev1.Container) bool   { return c.Lifecycle != nil && c.Lifecycle.PreStop != nil }

// started says whether a run is past its postStart hook and its startup probe.
func (s *step) started(c *corev1.Container, r *Run) bool {
	if r.ended() {
		return false
	}
	if postStart(c) {
		if result := s.Observed.Hooks[Hook{Container: c.Name, Run: r.ID}]; !result.Done || result.Failure != "" {
			return false
		}
	}
	return c.StartupProbe == nil || s.Observed.Probes[Probe{c.Name, r.ID, Startup}].Success
}

// backoffEnd is when a container may be started again after a run.
func (s *step) backoffEnd(r *Run) time.Time {
	if r.Backoff == 0 || r.FinishedAt.Sub(r.StartedAt) > BackoffReset {
		return r.FinishedAt
	}
	return r.FinishedAt.Add(r.Backoff)
}

// nextBackoff is how long to wait after the next run: the first restart is immediate, then each waits twice as long.
func nextBackoff(r *Run) time.Duration {
	if r.Backoff == 0 || r.FinishedAt.Sub(r.StartedAt) > BackoffReset {
		return FirstBackoff
	}
	return min(2*r.Backoff, MaxBackoff)
}

func backoffMessage(r *Run) string {
	return fmt.Sprintf("it ended with %s; the next start is %s after that", describeExit(r), r.Backoff)
}

func describeExit(r *Run) string {
	text := "exit code " + strconv.Itoa(int(r.ExitCode))
	if r.Reason != "" && r.Reason != "Error" {
		text += " (" + r.Reason + ")"
	}
	return text
}

// retryAt is when to try again what failed.
func (s *step) retryAt(f *Failure) time.Time {
	if f == nil {
		return time.Time{}
	}
	first, most := FirstBackoff, MaxBackoff
	if !pullFailure(f.Reason) {
		// What is missing is often created a moment later.
		first, most = time.Second, 30*time.Second
	}
	wait := first << min(max(f.Count, 1)-1, 16)
	return f.At.Add(min(wait, most))
}

// pullFailure says whether a reason is about an image, for which somebody else's server is asked.
func pullFailure(reason string) bool {
	return reason == "ErrImagePull" || reason == "RegistryUnavailable"
}
