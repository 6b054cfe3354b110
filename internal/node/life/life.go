// Package life decides what becomes of a Pod on its node: from its spec, what is observed of its processes and the time, to what is
// to be done next and what its status is. It is pure: it starts nothing, waits for nothing and reads no clock. How containers are
// started, probed and stopped, others know.
package life

import (
	"math"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"portal/internal/restarts"
)

// Run is one run of a container: a restart begins another one.
type Run struct {
	ID string
	// Sandbox is that which the run is in. Runs in an earlier sandbox have ended.
	Sandbox string
	// Attempt counts the runs before this one: the restartCount of the API.
	Attempt int32
	// Round counts how often all containers were started again together before. It came out of StartContainer.
	Round          int32
	Image, ImageID string
	StartedAt      time.Time
	FinishedAt     time.Time // zero: it runs
	ExitCode       int32
	Signal         int32
	// Reason and Message say why it ended. An empty Reason follows from the exit code.
	Reason, Message string
	// Backoff is how long to wait after this run, if it ends soon. It came out of StartContainer.
	Backoff time.Duration
}

func (r *Run) ended() bool     { return !r.FinishedAt.IsZero() }
func (r *Run) succeeded() bool { return r.ended() && r.ExitCode == 0 }

// Failure is what kept a sandbox or a container from being started.
type Failure struct {
	Reason, Message string // Reason as in a container's state.waiting
	At              time.Time
	Count           int // consecutive failures, this one included
}

// SandboxState is the state of what a Pod's containers share: namespaces and network.
type SandboxState int

// The states of a sandbox.
const (
	SandboxNone SandboxState = iota
	SandboxReady
	// SandboxStopped has no processes and no network any more; logs and exit codes are still there.
	SandboxStopped
)

// ProbeKind is one of a container's three probes.
type ProbeKind string

// The probes.
const (
	Startup   ProbeKind = "startup"
	Liveness  ProbeKind = "liveness"
	Readiness ProbeKind = "readiness"
)

// Probe names a probe of a run.
type Probe struct {
	Container, Run string
	Kind           ProbeKind
}

// ProbeResult is what a probe has come to, after its thresholds.
type ProbeResult struct {
	Success bool
	Message string // of the last failure
}

// Hook names a lifecycle hook of a run.
type Hook struct {
	Container, Run string
	PreStop        bool // else postStart
}

// HookResult is what became of a hook.
type HookResult struct {
	Done    bool // else it still runs
	Failure string
}

// Observed is what is known of a Pod's processes.
type Observed struct {
	Sandbox   SandboxState
	SandboxID string
	// SandboxFailure is why there is no sandbox, nil once there is.
	SandboxFailure *Failure
	PodIPs         []netip.Addr
	// Runs are those of each container, oldest first: at least the last two.
	Runs map[string][]Run
	// Failures are why a container could not be started, until it could.
	Failures map[string]*Failure
	// Starting are the containers that StartContainer is at work for.
	Starting map[string]bool
	Probes   map[Probe]ProbeResult
	Hooks    map[Hook]HookResult
	// Drain is how a Pod that is deleted leaves the endpoints of its Services.
	Drain Drain
}

// Drain is how far a Pod has left the endpoints of the Services that select it. The zero value is for one that was no endpoint.
type Drain struct {
	// Endpoint: it was a ready endpoint when it was deleted.
	Endpoint bool
	// Out is when this node stopped sending new connections to it; zero: it still does.
	Out time.Time
}

// Rejection is why a node does not run a Pod at all.
type Rejection struct{ Reason, Message string }

// Input is all that a decision follows from.
type Input struct {
	// Pod is as the API has it, with the status that was last written.
	Pod      *corev1.Pod
	Observed Observed
	HostIPs  []netip.Addr
	Reject   *Rejection
	// Evict is why a Pod that the node has accepted has to go.
	Evict *Rejection
	Now   time.Time
}

// Action is something to do. The same action is returned until what it leads to is observed, so whoever carries it out ignores those
// that are under way.
type Action interface{ action() }

// The actions.
type (
	// CreateSandbox makes namespaces and network.
	CreateSandbox struct{}
	// StopSandbox ends all that is left in it and gives its network back. Logs and exit codes stay.
	StopSandbox struct{}
	// Forget removes all that is left of the Pod on this node, and then the Pod from the API.
	Forget struct{}
	// StartContainer makes a container's next run: image, configuration, process.
	StartContainer struct {
		Container string
		Init      bool
		Attempt   int32
		Round     int32
		Backoff   time.Duration
	}
	// RunHook runs a hook, for at most Timeout if that is not 0.
	RunHook struct {
		Hook    Hook
		Timeout time.Duration
	}
	// Signal asks a run to end or, with Kill, ends it.
	Signal struct {
		Container, Run string
		Kill           bool
	}
)

func (CreateSandbox) action()  {}
func (StopSandbox) action()    {}
func (Forget) action()         {}
func (StartContainer) action() {}
func (RunHook) action()        {}
func (Signal) action()         {}

// Event is for people, about the Pod or one of its containers.
type Event struct {
	Container       string
	Warning         bool
	Reason, Message string
}

// Decision is what follows.
type Decision struct {
	Actions []Action
	Probes  []Probe // those that should run now; all others should not
	Events  []Event
	Status  corev1.PodStatus
	// Wake is when to decide again, if nothing is observed before; zero: never.
	Wake time.Time
}

// Timing of restarts and ends, as users of Kubernetes know it.
const (
	FirstBackoff = 10 * time.Second
	MaxBackoff   = 5 * time.Minute
	// BackoffReset is how long a container must have run to be restarted immediately again.
	BackoffReset = 10 * time.Minute
	// leastGrace is left for a process after a preStop hook used up the whole grace period.
	leastGrace = 2 * time.Second
	// clockDifference is how far the clocks of the API server and the node may be apart without an effect on grace periods.
	clockDifference = 5 * time.Second
	// killInterval is how long SIGKILL may take before it is sent again.
	killInterval = 5 * time.Second
	// evictionGrace is what an evicted Pod's processes have to end: what they take is needed.
	evictionGrace = time.Second
	// Between leaving the endpoints on its own node and being asked to end, a Pod goes on serving for those who learn of it later: for
	// as long again as its own node took to learn, times drainFactor, and drainPause at least. All of it takes maxDrain and half of the
	// grace period at most.
	drainFactor = 2
	drainPause  = 500 * time.Millisecond
	maxDrain    = 10 * time.Second
	// errorShown is how long a failure is shown by its own name, before it is shown as a back-off.
	errorShown = 2 * time.Second
)

// Pod is the memory of one Pod's life: what can't be observed.
type Pod struct {
	stops map[string]*stop // by run
	// deleted is when the deletion was first seen.
	deleted time.Time
	// ending is why the Pod ends before its containers do by themselves.
	ending  *ending
	asked   map[string]int32 // for which round a container's last start is
	emitted map[string]bool  // events that were emitted already
}

// ending ends a Pod for good.
type ending struct {
	deadline        time.Time // of all its containers
	reason, message string    // of the Pod's status; empty: it is deleted
	evicted         bool
}

// New makes a Pod's memory. That of a Pod that has been running begins with what is observed.
func New() *Pod {
	return &Pod{stops: map[string]*stop{}, asked: map[string]int32{}, emitted: map[string]bool{}}
}

// step is one decision in the making.
type step struct {
	*Pod
	Input
	out Decision
	// running and last are of each container.
	last map[string]*Run
	// round is the present one, and restarting says that nothing has run in it yet, or that something of an earlier one still does.
	round      int32
	restarting bool
}

// Next decides.
func (p *Pod) Next(in Input) Decision {
	s := &step{Pod: p, Input: in, last: map[string]*Run{}}
	for name, runs := range in.Observed.Runs {
		if len(runs) > 0 {
			last := runs[len(runs)-1]
			s.last[name] = &last
		}
	}
	s.findRound()
	s.end()
	switch {
	case p.ending != nil:
		s.stopAll()
	case s.finished():
		s.stopSidecars(time.Time{})
	default:
		s.run()
	}
	s.clean()
	s.out.Status = s.status()
	return s.out
}

func (s *step) spec() *corev1.PodSpec { return &s.Input.Pod.Spec }

func (s *step) do(a Action) { s.out.Actions = append(s.out.Actions, a) }

func (s *step) emit(once string, e Event) {
	if once != "" {
		if s.emitted[once] {
			return
		}
		s.emitted[once] = true
	}
	s.out.Events = append(s.out.Events, e)
}

// wake asks to be called at t.
func (s *step) wake(t time.Time) {
	if t.After(s.Now) && (s.out.Wake.IsZero() || t.Before(s.out.Wake)) {
		s.out.Wake = t
	}
}

// current is a container's last run if it is in the present sandbox and round.
func (s *step) current(name string) *Run {
	if r := s.last[name]; r != nil && r.Sandbox == s.Observed.SandboxID && !s.outdated(r) {
		return r
	}
	return nil
}

// running is a container's run that has not ended.
func (s *step) running(name string) *Run {
	if r := s.last[name]; r != nil && !r.ended() {
		return r
	}
	return nil
}

// end finds out whether the Pod has to end, for a reason that is not in its containers.
func (s *step) end() {
	pod := s.Input.Pod
	if pod.DeletionTimestamp != nil {
		if s.deleted.IsZero() {
			s.deleted = s.Now
		}
		grace := Seconds(ptr.Deref(pod.DeletionGracePeriodSeconds, 0))
		deadline := s.deleted.Add(grace)
		// The API says when it is to have ended. That counts if the deletion is seen late, by an agent that was away: an earlier one may
		// have begun. Clocks of machines differ a little.
		// The API server's arithmetic overflows with the longest grace periods: its time means nothing then.
		if asked := pod.DeletionTimestamp.Time; grace < longest && asked.Add(clockDifference).Before(deadline) {
			deadline = s.deleted.Add(min(grace, leastGrace))
			if asked.After(deadline) {
				deadline = asked
			}
		}
		switch {
		case s.ending == nil:
			s.ending = &ending{deadline: deadline}
		case deadline.Before(s.ending.deadline):
			s.ending.deadline = deadline
		}
		return
	}
	if s.ending != nil {
		return
	}
	switch started := pod.Status.StartTime; {
	case s.Reject != nil:
		s.ending = &ending{deadline: s.Now, reason: s.Reject.Reason, message: s.Reject.Message}
	case terminal(pod.Status.Phase):
		// It was decided before, perhaps by an earlier process. It stays so.
		s.ending = &ending{deadline: s.Now.Add(s.grace()), reason: pod.Status.Reason, message: pod.Status.Message}
	case s.Evict != nil && !s.finished():
		s.ending = &ending{deadline: s.Now.Add(evictionGrace), reason: s.Evict.Reason, message: s.Evict.Message, evicted: true}
		s.emit("", Event{Warning: true, Reason: s.Evict.Reason, Message: s.Evict.Message})
	case pod.Spec.ActiveDeadlineSeconds != nil && started != nil && !s.finished():
		end := started.Add(Seconds(*pod.Spec.ActiveDeadlineSeconds))
		if s.Now.Before(end) {
			s.wake(end)
			return
		}
		s.ending = &ending{deadline: s.Now.Add(s.grace()), reason: "DeadlineExceeded", message: "it ran for longer than spec.activeDeadlineSeconds"}
		s.emit("", Event{Warning: true, Reason: "DeadlineExceeded", Message: "Pod ran for longer than spec.activeDeadlineSeconds"})
	}
}

func terminal(phase corev1.PodPhase) bool {
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed
}

func (s *step) grace() time.Duration {
	return Seconds(ptr.Deref(s.spec().TerminationGracePeriodSeconds, 30))
}

// longest is the most that Seconds returns.
const longest = math.MaxInt64 / time.Second * time.Second

// Seconds converts to a duration between 0 and longest: the API takes any number.
func Seconds(n int64) time.Duration {
	return time.Duration(min(max(n, 0), int64(longest/time.Second))) * time.Second
}

// clean stops the sandbox of a Pod that has ended, and forgets it once it is deleted.
func (s *step) clean() {
	if !s.over() {
		return
	}
	switch {
	case s.Observed.Sandbox == SandboxReady:
		s.do(StopSandbox{})
	case s.Input.Pod.DeletionTimestamp != nil && len(s.Observed.Starting) == 0:
		s.do(Forget{})
	}
}

// over says whether the Pod has ended for good and has no processes any more.
func (s *step) over() bool {
	if s.ending == nil && !s.finished() {
		return false
	}
	for _, r := range s.last {
		if !r.ended() {
			return false
		}
	}
	return len(s.Observed.Starting) == 0
}

// finished says whether the containers have ended by themselves and none is to be started again: also when an init container
// failed for good.
func (s *step) finished() bool {
	spec := s.spec()
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if r := s.last[c.Name]; r != nil && !s.outdated(r) && !sidecar(c) && r.ended() && r.ExitCode != 0 && !restarts.After(c, spec, r.ExitCode) && !s.initialized() {
			return true
		}
	}
	for i := range spec.Containers {
		c := &spec.Containers[i]
		r := s.last[c.Name]
		if r == nil || s.outdated(r) || !r.ended() || restarts.After(c, spec, r.ExitCode) {
			return false
		}
	}
	return true
}

// initialized says whether main containers have been started, in this sandbox or, if none of them can be again, in another.
func (s *step) initialized() bool {
	return slices.ContainsFunc(s.spec().Containers, func(c corev1.Container) bool { return s.current(c.Name) != nil })
}

func sidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
