package life

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/restarts"
)

// A Pod's containers run in rounds. One that ends with a code for which its rule says RestartAllContainers ends the round: the others are
// killed, and then the Pod begins again with its init containers, in the same sandbox. Each run knows its round, so that whoever takes over
// from an earlier process decides the same.

// findRound finds the latest round that something ran in, or the next one if a run has ended that. A Pod that ends does not begin again:
// sidecars that are stopped after the main containers may end with any code. But when a sidecar has ended a round, main containers are killed
// that may not be restarted by themselves; the Pod's condition tells these two apart, also to an agent that has just started.
func (s *step) findRound() {
	for _, r := range s.last {
		s.round = max(s.round, r.Round)
	}
	pod := s.Input.Pod
	if s.ending != nil || pod.DeletionTimestamp != nil || terminal(pod.Status.Phase) {
		return
	}
	begun := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.AllContainersRestarting && c.Status == corev1.ConditionTrue
	})
	if !begun && s.finished() {
		return
	}
	if slices.ContainsFunc(pod.Spec.InitContainers, s.initEndsRound) || slices.ContainsFunc(pod.Spec.Containers, s.endsRound) {
		s.round++
		s.restarting = true
	}
}

func (s *step) endsRound(c corev1.Container) bool {
	r := s.last[c.Name]
	return r != nil && r.ended() && !s.outdated(r) && restarts.AllAfter(&c, r.ExitCode)
}

// initEndsRound is endsRound for init containers: a regular one that has succeeded is done, whatever its rules say.
func (s *step) initEndsRound(c corev1.Container) bool {
	return s.endsRound(c) && (sidecar(&c) || !s.last[c.Name].succeeded())
}

// outdated says whether a run is of an earlier round.
func (s *step) outdated(r *Run) bool { return r.Round < s.round }

// stopOutdated kills what is left of earlier rounds, and says whether to wait for that. There is no grace and no preStop hook, as with a
// kubelet.
func (s *step) stopOutdated() (wait bool) {
	for _, list := range [][]corev1.Container{s.spec().InitContainers, s.spec().Containers} {
		for i := range list {
			name := list[i].Name
			if s.Observed.Starting[name] && s.asked[name] < s.round {
				wait = true
			}
			if r := s.running(name); r != nil && s.outdated(r) {
				wait = true
				s.emit("restart all "+r.ID, Event{Container: name, Reason: "Killing", Message: "Stopping container " + name + ": all containers of the Pod start again"})
				s.do(Signal{Container: name, Run: r.ID, Kill: true})
				s.wake(s.Now.Add(killInterval))
			}
		}
	}
	return wait
}

// mayRestartAll says whether all containers may start again because one has ended.
func (s *step) mayRestartAll() bool {
	may := func(c corev1.Container) bool { return restarts.MayRestartAll(&c) }
	return slices.ContainsFunc(s.spec().InitContainers, may) || slices.ContainsFunc(s.spec().Containers, may)
}
