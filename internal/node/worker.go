package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/node/life"
	"portal/internal/node/runtime"
	"portal/internal/node/runtime/shim"
)

// worker looks after one Pod: it gathers what is observed, has it decided, and carries it out. Only its goroutine decides; what takes
// time is done in others, which report back and wake it.
type worker struct {
	agent *Agent
	life  *life.Pod
	wake  chan struct{}

	mu  sync.Mutex
	pod *corev1.Pod // as the API has it
	// deleted says that the API no longer has the Pod.
	deleted  bool
	observed life.Observed
	sandbox  *runtime.Pod
	statuses map[string]*shim.Status // by run
	busy     map[string]bool         // what is being done
	panics   map[string]int          // how often in a row that has panicked
	signals  map[string]syscall.Signal
	probes   map[life.Probe]context.CancelFunc
	pulls    map[string]context.CancelFunc // by container
	evict    *life.Rejection               // why the Pod has to go
	refused  *life.Rejection               // why it was never started: its ports of the node are taken, or the disk is full
	tokens   *podTokens

	certificates *podCertificates
	// stopVolumes ends, and volumesChanged wakes, what keeps the volumes' files up to date; nil: nothing does.
	stopVolumes    context.CancelFunc
	volumesChanged func()
	// refusedProcesses is how often the Pod could not start a process, and toldProcesses when that was last told.
	refusedProcesses int64
	toldProcesses    time.Time
	writer           statusWriter
	forgot           bool
	// begun says that the worker knows what an earlier agent left of the Pod, which is found.
	begun   bool
	found   *runtime.Pod
	helpers sync.WaitGroup
}

// runMeta is what the agent remembers about a run, in the runtime's own record of it.
type runMeta struct {
	Container, Image, ImageID string
	StopSignal                string `json:",omitempty"`
	Attempt                   int32
	Round                     int32 `json:",omitempty"`
	Backoff                   time.Duration
}

// sandboxMeta is for people who look into a Pod's folder.
type sandboxMeta struct{ Namespace, Name string }

func newWorker(a *Agent, pod *corev1.Pod, found *runtime.Pod) *worker {
	w := &worker{
		agent: a, found: found, life: life.New(), wake: make(chan struct{}, 1), pod: pod, statuses: map[string]*shim.Status{}, busy: map[string]bool{}, panics: map[string]int{},
		signals: map[string]syscall.Signal{}, probes: map[life.Probe]context.CancelFunc{}, tokens: newPodTokens(a.Client), certificates: newPodCertificates(a.Client, a.Name),
		observed: life.Observed{Failures: map[string]*life.Failure{}, Probes: map[life.Probe]life.ProbeResult{}, Hooks: map[life.Hook]life.HookResult{}},
	}
	w.writer.last, w.writer.written = pod.Status.DeepCopy(), pod.Status.DeepCopy()
	_ = w.begin() // run tries again
	return w
}

// begin claims the Pod's ports, and finds out what an earlier agent left of it.
func (w *worker) begin() error {
	return w.attempt("begin", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !terminal(w.pod.Status.Phase) {
			w.refused = w.agent.claims.take(w.pod)
		}
		if w.found != nil {
			w.resume(w.found)
		}
		if external(w.pod) {
			w.resumeExternal()
		}
		w.begun, w.found = true, nil
		return nil
	})
}

// resume goes on with a Pod that an earlier agent started. What it had found out is in the API: containers that were ready are, until a
// probe says otherwise.
func (w *worker) resume(found *runtime.Pod) {
	w.sandbox = found
	w.observed.SandboxID = found.Sandbox.ID
	w.observed.Sandbox = life.SandboxStopped
	if found.PID != 0 {
		w.observed.Sandbox = life.SandboxReady
	}
	if w.pod.Spec.HostNetwork {
		w.observed.PodIPs = w.agent.NodeIPs
	} else if addrs, err := w.agent.network.Addresses(found.UID); err == nil {
		w.observed.PodIPs = addrs
	} else {
		w.agent.Log.Error("a Pod's addresses could not be read", "pod", w.pod.Name, "namespace", w.pod.Namespace, "err", err)
	}
	list, err := found.Statuses()
	if err != nil {
		w.agent.Log.Error("a Pod's records can't be read", "pod", w.pod.Name, "namespace", w.pod.Namespace, "err", err)
	}
	known := slices.Concat(w.pod.Status.InitContainerStatuses, w.pod.Status.ContainerStatuses)
	for _, s := range list {
		w.statuses[s.ID] = s
		var meta runMeta
		if !s.Running() || json.Unmarshal(s.Meta, &meta) != nil {
			continue
		}
		w.observed.Hooks[life.Hook{Container: meta.Container, Run: s.ID}] = life.HookResult{Done: true}
		for _, c := range known {
			if c.Name != meta.Container || c.ContainerID != "portal://"+s.ID {
				continue
			}
			if c.Started != nil && *c.Started {
				w.observed.Probes[life.Probe{Container: c.Name, Run: s.ID, Kind: life.Startup}] = life.ProbeResult{Success: true}
			}
			if c.Ready {
				w.observed.Probes[life.Probe{Container: c.Name, Run: s.ID, Kind: life.Readiness}] = life.ProbeResult{Success: true}
			}
		}
	}
}

// note takes a run's status, unless something newer is known: what has ended stays so.
func (w *worker) note(s *shim.Status) {
	if have := w.statuses[s.ID]; have == nil || have.Running() || !s.Running() {
		w.statuses[s.ID] = s
	}
}

// poke has the worker decide again.
func (w *worker) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *worker) update(pod *corev1.Pod) {
	w.locked(func() {
		before := w.pod
		w.pod = pod
		if pod.DeletionTimestamp != nil {
			w.abandonPulls()
		}
		w.writer.written = observed(w.writer.written, &pod.Status) // a write that is under way does so again
		if w.volumesChanged != nil && !(maps.Equal(before.Labels, pod.Labels) && maps.Equal(before.Annotations, pod.Annotations)) {
			w.volumesChanged() // they may be in files
		}
	})
	w.poke()
}

func (w *worker) removed() {
	w.mu.Lock()
	w.deleted = true
	w.abandonPulls()
	w.mu.Unlock()
	w.poke()
}

// run decides whenever something has changed, until the Pod is forgotten or ctx ends.
func (w *worker) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer w.helpers.Wait()
	defer cancel()
	for panics := 1; !w.begun; panics++ {
		if !pause(ctx, panicBackoff(panics)) {
			return
		}
		_ = w.begin()
	}
	var listed <-chan struct{}
	w.locked(func() {
		if w.observed.Sandbox == life.SandboxReady && w.sandbox != nil {
			// A container that the earlier agent was starting is known to the shim only: it must not be started a second time.
			listed = w.follow(ctx, w.sandbox)
			w.keepVolumes(ctx, w.sandbox)
		}
	})
	if listed != nil {
		select {
		case <-ctx.Done():
			return
		case <-listed:
		case <-time.After(listTimeout):
			w.locked(func() {
				w.agent.Log.Warn("a Pod's shim does not answer", "pod", w.pod.Name, "namespace", w.pod.Namespace)
			})
		}
	}
	for panics := 0; ; {
		var next time.Time
		if err := w.attempt("decide", func() error { next = w.step(ctx); return nil }); err != nil {
			// What others report does not shorten the wait: a step that panics again and again must not keep a processor busy.
			panics++
			if !pause(ctx, panicBackoff(panics)) {
				return
			}
			continue
		}
		panics = 0
		w.mu.Lock()
		over := w.forgot
		w.mu.Unlock()
		if over {
			return
		}
		var timer <-chan time.Time
		if !next.IsZero() {
			timer = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-timer:
		}
	}
}

// attempt does something for the Pod. What panics has failed: what is wrong with one Pod must not end the agent, and with it what the node
// does for all others. All that a worker does goes through here, in whichever goroutine; it gives the worker's lock back whatever happens.
func (w *worker) attempt(what string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			w.mu.Lock()
			defer w.mu.Unlock()
			err = w.agent.panicked(p, what, "pod", w.pod.Name, "namespace", w.pod.Namespace)
			w.event(true, "FailedSync", "The node's agent failed to sync the Pod and tries again: "+err.Error())
		}
	}()
	return f()
}

// panicked counts and logs what a recover returned, and says it as an error.
func (a *Agent) panicked(p any, what string, about ...any) error {
	said, where, _ := strings.Cut(fmt.Sprint(p), "\n") // a pull's says where it began
	err := errors.New("panic: " + said)
	a.panics.Add(1)
	a.Log.Error("sync panicked, retrying", append(about, "doing", what, "err", err, "stack", where+string(debug.Stack()))...)
	return err
}

// attempt does something for a Pod that has no worker, or for the whole node. What panics has failed, as with a worker's.
func (a *Agent) attempt(what string, f func() error, about ...any) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = a.panicked(p, what, about...)
		}
	}()
	return f()
}

// locked runs something with the worker's lock.
func (w *worker) locked(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// pause waits, and says whether ctx goes on.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// panicBackoff is how long to wait after so many steps in a row have panicked.
func panicBackoff(panics int) time.Duration {
	return min(retryDelay<<min(panics-1, 16), maxPanicBackoff)
}

// step decides once.
func (w *worker) step(ctx context.Context) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	pod := w.view()
	w.observed.Runs, w.observed.Starting = w.runs(), map[string]bool{}
	for key := range w.busy {
		if name, ok := strings.CutPrefix(key, "start "); ok {
			w.observed.Starting[name] = true
		}
	}
	w.observeExternal(pod)
	w.observeDrain(ctx, pod)
	d := w.life.Next(life.Input{Pod: pod, Observed: w.observed, HostIPs: w.agent.NodeIPs, Reject: w.reject(pod), Evict: w.evict, Now: time.Now()})
	if terminal(d.Status.Phase) {
		w.agent.claims.release(pod.UID)
	}
	for _, e := range d.Events {
		w.event(e.Warning, e.Reason, e.Message)
	}
	w.watchProbes(ctx, pod, d.Probes)
	w.write(ctx, &d.Status)
	for _, action := range d.Actions {
		w.carryOut(ctx, pod, action)
	}
	return d.Wake
}

// view is the Pod as life should see it: with the status that was last decided, and what others added to it since.
func (w *worker) view() *corev1.Pod {
	pod := w.pod.DeepCopy()
	if w.deleted && pod.DeletionTimestamp == nil {
		grace := ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, 30)
		pod.DeletionTimestamp = ptr.To(metav1.NewTime(time.Now().Add(life.Seconds(grace))))
		pod.DeletionGracePeriodSeconds = &grace
	}
	status := w.writer.last.DeepCopy()
	for _, c := range pod.Status.Conditions {
		i := slices.IndexFunc(status.Conditions, func(have corev1.PodCondition) bool { return have.Type == c.Type })
		switch {
		case i < 0:
			status.Conditions = append(status.Conditions, c)
		case !ours(c.Type):
			status.Conditions[i] = c
		}
	}
	pod.Status = *status
	return pod
}

func ours(kind corev1.PodConditionType) bool {
	switch kind {
	case corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized, corev1.PodReadyToStartContainers, corev1.PodScheduled, corev1.AllContainersRestarting:
		return true
	}
	return false
}

// runs are the runs of each container, oldest first.
func (w *worker) runs() map[string][]life.Run {
	out := map[string][]life.Run{}
	for _, s := range w.statuses {
		var meta runMeta
		if json.Unmarshal(s.Meta, &meta) != nil {
			continue
		}
		r := life.Run{
			ID: s.ID, Sandbox: s.Sandbox, Attempt: meta.Attempt, Round: meta.Round, Image: meta.Image, ImageID: meta.ImageID, Backoff: meta.Backoff,
			StartedAt: s.Started, FinishedAt: s.Finished, ExitCode: int32(s.ExitCode), Signal: int32(s.Signal),
		}
		switch {
		case s.StartError != "":
			r.Reason, r.Message = "StartError", s.StartError
		case s.OOM && s.ExitCode == 137:
			r.Reason = "OOMKilled"
		}
		if !s.Running() && r.Message == "" {
			r.Message = w.terminationMessage(meta.Container, s)
		}
		out[meta.Container] = append(out[meta.Container], r)
	}
	for name := range out {
		slices.SortFunc(out[name], func(a, b life.Run) int { return int(a.Attempt - b.Attempt) })
	}
	return out
}

// terminationMessage is what a container left to be read, or the end of its log if it is to be.
func (w *worker) terminationMessage(name string, s *shim.Status) string {
	const most, ofPod = 4 << 10, 12 << 10
	c := containerOf(&w.pod.Spec, name)
	if c == nil || w.sandbox == nil {
		return ""
	}
	text := readEnd(terminationFile(w.sandbox, s.ID), most)
	if text == "" && c.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError && s.ExitCode != 0 {
		text = lastLines(w.sandbox.LogDir()+"/"+s.ID+".log", 80, 2048)
	}
	return firstBytes(strings.ToValidUTF8(text, "?"), ofPod/(len(w.pod.Spec.InitContainers)+len(w.pod.Spec.Containers)))
}

// firstBytes is the beginning of a text, cut between two characters.
func firstBytes(text string, most int) string {
	for len(text) > most && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:min(len(text), most)]
}

// readEnd reads the end of a file that a container may have written.
func readEnd(path string, most int64) string {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > most {
		_, _ = f.Seek(-most, io.SeekEnd)
	}
	data, _ := io.ReadAll(io.LimitReader(f, most))
	return string(data)
}

func containerOf(spec *corev1.PodSpec, name string) *corev1.Container {
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}

// maxMessage is the most that an Event or a status says: what it quotes may be a container's or a registry's, and anything.
const maxMessage = 1 << 10

// maxPanicBackoff is the longest wait after a panic. A Pod that is changed or deleted meanwhile is looked at then.
const maxPanicBackoff = time.Minute

// listTimeout is how long a Pod that is found waits for its shim. One that says nothing can still be ended.
const listTimeout = 30 * time.Second

// follow keeps the statuses of a sandbox's containers, and notices when its shim ends. What it returns is closed when all are known.
func (w *worker) follow(ctx context.Context, sandbox *runtime.Pod) <-chan struct{} {
	known := make(chan struct{})
	listed := sync.OnceFunc(func() { close(known) })
	w.beside(ctx, "follow containers", func() {
		for ctx.Err() == nil {
			_ = sandbox.Watch(ctx, listed, func(s *shim.Status) {
				w.locked(func() { w.note(s) })
				w.poke()
			})
			if ctx.Err() != nil {
				return
			}
			if sandbox.Alive() {
				time.Sleep(50 * time.Millisecond)
				continue
			}
			list, err := sandbox.Statuses()
			w.locked(func() {
				if err == nil {
					for _, s := range list {
						w.note(s)
					}
				}
				lost := w.observed.Sandbox == life.SandboxReady && w.sandbox == sandbox && !w.busy["sandbox"]
				if lost {
					w.observed.Sandbox = life.SandboxStopped
					w.event(true, "SandboxChanged", "The process that holds the Pod's namespaces ended; its containers ended with it")
				}
			})
			listed()
			w.poke()
			return
		}
	})
	return known
}
