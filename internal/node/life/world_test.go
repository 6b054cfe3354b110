package life

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// script is how a container behaves.
type script struct {
	runs       []time.Duration // how long each run lasts, the last again and again; none: for ever
	codes      []int32         // with which code each ends, the last again and again
	ignoreTerm bool
	termTime   time.Duration // between SIGTERM and the end
	startError []string      // reasons why the first starts fail
	hook       time.Duration // how long each hook takes
	hookFails  bool
}

// world carries out actions with a clock that only it turns, and notes what happened when.
type world struct {
	t       *testing.T
	now     time.Time
	pod     *corev1.Pod
	life    *Pod
	seen    Observed
	scripts map[string]script
	ends    map[string]time.Time // by run
	killed  map[string]bool
	hooks   map[Hook]time.Time
	starts  map[string]int
	log     []string
	gone    bool
	evict   *Rejection
	probes  map[Probe]bool
	last    Decision
}

func newWorld(t *testing.T, spec corev1.PodSpec, scripts map[string]script) *world {
	if spec.RestartPolicy == "" {
		spec.RestartPolicy = corev1.RestartPolicyAlways
	}
	return &world{
		t: t, now: epoch, life: New(), scripts: scripts, ends: map[string]time.Time{}, killed: map[string]bool{}, hooks: map[Hook]time.Time{}, starts: map[string]int{}, probes: map[Probe]bool{},
		pod:  &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", Generation: 1}, Spec: spec},
		seen: Observed{Runs: map[string][]Run{}, Failures: map[string]*Failure{}, Starting: map[string]bool{}, Probes: map[Probe]ProbeResult{}, Hooks: map[Hook]HookResult{}},
	}
}

func (w *world) note(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%s ", w.now.Sub(epoch))+fmt.Sprintf(format, args...))
}

// until runs the world up to a time after its beginning.
func (w *world) until(d time.Duration) *world {
	w.t.Helper()
	end := epoch.Add(d)
	for range 10000 {
		w.events()
		w.decide()
		next := w.last.Wake
		for _, at := range w.ends {
			if next.IsZero() || at.Before(next) {
				next = at
			}
		}
		for _, at := range w.hooks {
			if next.IsZero() || at.Before(next) {
				next = at
			}
		}
		if next.IsZero() || next.After(end) {
			w.now = end
			w.decide()
			return w
		}
		if next.After(w.now) {
			w.now = next
		}
	}
	w.t.Fatalf("no end after 10000 decisions: the last at %s", w.now.Sub(epoch))
	return w
}

// events are those of the present moment.
func (w *world) events() {
	for name, runs := range w.seen.Runs {
		for i := range runs {
			r := &runs[i]
			if at, ok := w.ends[r.ID]; ok && !w.now.Before(at) {
				delete(w.ends, r.ID)
				r.FinishedAt = at
				if w.killed[r.ID] {
					r.ExitCode = 137
				} else if codes := w.scripts[name].codes; len(codes) > 0 {
					r.ExitCode = codes[min(int(r.Attempt), len(codes)-1)]
				}
				w.note("%s ended", name)
			}
		}
	}
	for hook, at := range w.hooks {
		if !w.now.Before(at) {
			delete(w.hooks, hook)
			result := HookResult{Done: true}
			if w.scripts[hook.Container].hookFails {
				result.Failure = "no"
			}
			w.seen.Hooks[hook] = result
		}
	}
}

// decide decides until nothing new is to be done now.
func (w *world) decide() {
	for range 50 {
		w.last = w.life.Next(Input{Pod: w.pod, Observed: w.seen, HostIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Evict: w.evict, Now: w.now})
		w.pod.Status = w.last.Status
		for _, e := range w.last.Events {
			w.note("event %s", e.Reason)
		}
		did := false
		for _, a := range w.last.Actions {
			did = w.carryOut(a) || did
		}
		if !did {
			return
		}
	}
	w.t.Fatalf("decisions never settle: %v", w.last.Actions)
}

func (w *world) carryOut(a Action) bool {
	switch a := a.(type) {
	case CreateSandbox:
		w.seen.Sandbox, w.seen.SandboxID = SandboxReady, "s"+w.seen.SandboxID
		w.seen.PodIPs = []netip.Addr{netip.MustParseAddr("10.244.0.2")}
		w.note("sandbox")
	case StopSandbox:
		w.seen.Sandbox = SandboxStopped
		w.note("sandbox stopped")
	case Forget:
		if w.gone {
			return false
		}
		w.gone = true
		w.note("forgotten")
	case StartContainer:
		w.start(a)
	case RunHook:
		if _, ok := w.hooks[a.Hook]; ok {
			return false
		}
		if _, ok := w.seen.Hooks[a.Hook]; ok {
			return false
		}
		took := w.scripts[a.Hook.Container].hook
		if a.Timeout > 0 {
			took = min(took, a.Timeout)
		}
		w.hooks[a.Hook] = w.now.Add(took)
		w.note("%s hook preStop=%v", a.Hook.Container, a.Hook.PreStop)
	case Signal:
		return w.signal(a)
	}
	return true
}

func (w *world) start(a StartContainer) {
	s := w.scripts[a.Container]
	if n := w.starts[a.Container]; n < len(s.startError) {
		w.starts[a.Container]++
		w.seen.Failures[a.Container] = &Failure{Reason: s.startError[n], Message: "because", At: w.now, Count: n + 1}
		w.note("%s failed: %s", a.Container, s.startError[n])
		return
	}
	delete(w.seen.Failures, a.Container)
	r := Run{ID: fmt.Sprintf("%s-%d", a.Container, a.Attempt), Sandbox: w.seen.SandboxID, Attempt: a.Attempt, Round: a.Round, StartedAt: w.now, Backoff: a.Backoff}
	w.seen.Runs[a.Container] = append(w.seen.Runs[a.Container], r)
	if len(s.runs) > 0 {
		w.ends[r.ID] = w.now.Add(s.runs[min(int(a.Attempt), len(s.runs)-1)])
	}
	w.note("%s started", a.Container)
}

func (w *world) signal(a Signal) bool {
	s := w.scripts[a.Container]
	key := a.Run + fmt.Sprint(a.Kill)
	if w.killed[key] {
		return false
	}
	w.killed[key] = true
	if a.Kill {
		w.note("%s SIGKILL", a.Container)
		w.ends[a.Run], w.killed[a.Run] = w.now, true
		w.events()
		return true
	}
	w.note("%s SIGTERM", a.Container)
	if !s.ignoreTerm {
		w.ends[a.Run] = w.now.Add(s.termTime)
		w.events()
	}
	return true
}

func (w *world) delete(grace int64) {
	at := metav1.NewTime(w.now.Add(time.Duration(grace) * time.Second))
	w.pod.DeletionTimestamp, w.pod.DeletionGracePeriodSeconds = &at, &grace
}

func (w *world) want(lines ...string) {
	w.t.Helper()
	if !slices.Equal(w.log, lines) {
		w.t.Errorf("got\n  %s\nwant\n  %s", strings.Join(w.log, "\n  "), strings.Join(lines, "\n  "))
	}
	w.log = nil
}

func (w *world) condition(kind corev1.PodConditionType) corev1.PodCondition {
	for _, c := range w.pod.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return corev1.PodCondition{}
}

// ready is the Pod's phase, whether it is ready, and the state of each container.
func (w *world) state() string {
	out := []string{string(w.pod.Status.Phase), "ready=" + string(w.condition(corev1.PodReady).Status)}
	for _, list := range [][]corev1.ContainerStatus{w.pod.Status.InitContainerStatuses, w.pod.Status.ContainerStatuses} {
		for _, c := range list {
			text := c.Name + ":"
			switch s := c.State; {
			case s.Waiting != nil:
				text += s.Waiting.Reason
			case s.Running != nil:
				text += "running"
			case s.Terminated != nil:
				text += fmt.Sprintf("%s(%d)", s.Terminated.Reason, s.Terminated.ExitCode)
			}
			out = append(out, text)
		}
	}
	return strings.Join(out, " ")
}

func (w *world) wantState(want string) {
	w.t.Helper()
	if got := w.state(); got != want {
		w.t.Errorf("at %s: %s\nwant %s", w.now.Sub(epoch), got, want)
	}
}

func named(names ...string) (out []corev1.Container) {
	for _, n := range names {
		out = append(out, corev1.Container{Name: n})
	}
	return out
}

func sidecars(names ...string) (out []corev1.Container) {
	for _, n := range names {
		out = append(out, corev1.Container{Name: n, RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways)})
	}
	return out
}

const minute = time.Minute
