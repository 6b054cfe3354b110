package node

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/node/disk"
	"portal/internal/node/life"
	"portal/internal/node/runtime"
	"portal/internal/rmtree"
)

// Eviction says when Pods have to go for what they take of the disk.
type Eviction struct {
	Thresholds disk.Thresholds
	// Transition is how long a node counts as full after it was.
	Transition time.Duration
}

const (
	// freeInterval is how often the disk's free space is looked at, which costs nothing, and usageInterval how often Pods with limits are
	// measured, which does. Measuring takes at most a twentieth of the time.
	freeInterval  = 2 * time.Second
	usageInterval = 10 * time.Second
	usagePart     = 20
	// recovery is how long an evicted Pod's space may take to be free, before another one goes, and how long it is not tried again if none could.
	recovery = 10 * time.Second
	// youngImage is how long an image stays that was used: its container may be about to start.
	youngImage = 30 * time.Second
)

// guardDisk evicts Pods that take more than they may, and while the disk is nearly full the one that takes most.
func (a *Agent) guardDisk(ctx context.Context) {
	g := diskGuard{agent: a, interval: usageInterval}
	for panics := 0; ; {
		// What panics for one Pod must not end the agent, nor keep a processor busy.
		if !pause(ctx, max(freeInterval, panicBackoff(max(panics, 1)))) {
			return
		}
		if err := a.attempt("guard the disk", func() error { g.look(ctx); return nil }); err != nil {
			panics++
		} else {
			panics = 0
		}
	}
}

// diskGuard is when what of guardDisk was done.
type diskGuard struct {
	agent           *Agent
	measured, tried time.Time
	interval        time.Duration
	logged          bool
}

// look does what is due.
func (g *diskGuard) look(ctx context.Context) {
	a := g.agent
	if time.Since(g.measured) >= g.interval {
		begin := time.Now()
		a.enforceLimits(ctx)
		g.measured = time.Now()
		g.interval = max(usageInterval, usagePart*g.measured.Sub(begin))
	}
	if !a.diskFull() {
		g.logged = false
		return
	}
	if time.Since(g.tried) < recovery {
		return
	}
	g.tried = time.Now()
	hopeless := !a.makeRoom(ctx) && a.diskFull() // perhaps for days: others fill the disk, too
	g.tried = time.Now()
	if hopeless && !g.logged && ctx.Err() == nil {
		g.logged = true
		a.Log.Warn("the disk is full, and no Pod is to be evicted for it")
	}
}

// enforceLimits measures the Pods that have limits.
func (a *Agent) enforceLimits(ctx context.Context) {
	for _, w := range a.allWorkers() {
		w.mu.Lock()
		pod, sandbox, settled := w.pod, w.sandbox, w.evict != nil
		w.mu.Unlock()
		if settled || sandbox == nil || !disk.Limited(pod) {
			continue
		}
		usage, err := w.usage(ctx, pod, sandbox)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			a.Log.Warn("a Pod's disk usage could not be measured", "pod", pod.Name, "namespace", pod.Namespace, "err", err)
			continue
		}
		if message, over := disk.OverLimit(pod, usage); over {
			w.evictFor(message)
		}
	}
}

func (a *Agent) allWorkers() (out []*worker) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.workers {
		out = append(out, w)
	}
	return out
}

// evictFor has the Pod ended.
func (w *worker) evictFor(message string) {
	w.mu.Lock()
	if w.evict == nil {
		w.evict = &life.Rejection{Reason: "Evicted", Message: message}
		w.agent.Log.Info("evicting a Pod", "pod", w.pod.Name, "namespace", w.pod.Namespace, "why", message)
	}
	w.mu.Unlock()
	w.poke()
}

// usage is what a Pod takes of the disk. If it can't be said of one, others are looked at all the same.
func (w *worker) usage(ctx context.Context, pod *corev1.Pod, sandbox *runtime.Pod) (out disk.PodUsage, err error) {
	err = w.attempt("measure what it takes of the disk", func() (err error) {
		out, err = w.measure(ctx, pod, sandbox)
		return err
	})
	return out, err
}

func (w *worker) measure(ctx context.Context, pod *corev1.Pod, sandbox *runtime.Pod) (disk.PodUsage, error) {
	out := disk.PodUsage{Volumes: map[string]int64{}, Containers: map[string]int64{}}
	note := func(to map[string]int64, name string, paths ...string) error {
		u, err := disk.Measure(ctx, paths...)
		to[name] += u.Bytes
		out.Inodes += u.Inodes
		out.TooDeep = out.TooDeep || u.TooDeep
		return err
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.EmptyDir == nil || v.EmptyDir.Medium == corev1.StorageMediumMemory {
			continue
		}
		if err := note(out.Volumes, v.Name, w.agent.volume(pod, v.Name)); err != nil {
			return out, err
		}
	}
	runs := map[string]string{}
	w.locked(func() {
		for id, s := range w.statuses {
			var meta runMeta
			if json.Unmarshal(s.Meta, &meta) == nil {
				runs[id] = meta.Container
			}
		}
	})
	for id, name := range runs {
		dir := sandbox.ContainerDir(id)
		paths := []string{filepath.Join(dir, "upper"), filepath.Join(dir, "scratch"), filepath.Join(dir, "termination-log")}
		logs, _ := filepath.Glob(filepath.Join(sandbox.LogDir(), id+".log*"))
		if err := note(out.Containers, name, append(paths, logs...)...); err != nil {
			return out, err
		}
	}
	return out, nil
}

// diskFull looks at the disk's free space, and notes whether the node is under pressure.
func (a *Agent) diskFull() bool {
	var st unix.Statfs_t
	if err := unix.Statfs(a.DataDir, &st); err != nil {
		return false
	}
	message, full := disk.Full(disk.Free{
		Bytes: int64(st.Bavail) * st.Bsize, Capacity: int64(st.Blocks) * st.Bsize, Inodes: int64(st.Ffree), InodesCapacity: int64(st.Files),
	}, a.Eviction.Thresholds)
	a.pressureMu.Lock()
	was := a.pressure.On
	a.pressure.Update(message, full, time.Now(), a.Eviction.Transition)
	now := a.pressure.On
	a.pressureMu.Unlock()
	if was != now {
		a.Log.Warn("disk pressure", "on", now, "why", message)
		select {
		case a.nodeChanged <- struct{}{}:
		default:
		}
	}
	return full
}

// diskPressure is why the node takes no more Pods, if it does not.
func (a *Agent) diskPressure() (string, bool) {
	a.pressureMu.Lock()
	defer a.pressureMu.Unlock()
	return a.pressure.Message, a.pressure.On
}

// makeRoom removes unused images and, if that was not enough, evicts a Pod. It says whether it did.
func (a *Agent) makeRoom(ctx context.Context) bool {
	removed, err := a.images.Prune(ctx, 1<<62, time.Now().Add(-youngImage))
	if err != nil && ctx.Err() == nil {
		a.Log.Warn("unused images could not be removed", "err", err)
	}
	if len(removed) > 0 {
		a.Log.Info("unused images were removed: the disk is full", "images", len(removed))
		if !a.diskFull() {
			return false
		}
	}
	var list []disk.Candidate
	byUID := map[types.UID]*worker{}
	for _, w := range a.allWorkers() {
		w.mu.Lock()
		pod, sandbox, ready := w.pod, w.sandbox, w.observed.Sandbox == life.SandboxReady && w.evict == nil
		w.mu.Unlock()
		if sandbox == nil || !ready || pod.DeletionTimestamp != nil {
			continue
		}
		usage, err := w.usage(ctx, pod, sandbox)
		if ctx.Err() != nil {
			return false
		}
		if err == nil {
			list = append(list, disk.Candidate{Pod: pod, Usage: usage})
			byUID[pod.UID] = w
		}
	}
	victim, ok := disk.Victim(list)
	if !ok {
		return false
	}
	why, _ := a.diskPressure()
	byUID[victim.Pod.UID].evictFor(fmt.Sprintf("%s; the Pod takes %s", why, victim.Usage.Describe()))
	return true
}

// freeDisk removes what a Pod that has ended for good took of the disk, except its logs and how its containers ended.
func (w *worker) freeDisk(uid types.UID, sandbox *runtime.Pod) error {
	if err := rmtree.Remove(w.agent.volumesDir(uid)); err != nil {
		return err
	}
	dirs, _ := filepath.Glob(filepath.Join(sandbox.ContainerDir("*")))
	for _, dir := range dirs {
		for _, name := range []string{"upper", "work", "scratch"} {
			if err := rmtree.Remove(filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// mayStart says why a Pod that is new to the node is not accepted now.
func (w *worker) mayStart(pod *corev1.Pod) *life.Rejection {
	if w.sandbox != nil || w.observed.Sandbox != life.SandboxNone || pod.Status.StartTime != nil || disk.Critical(pod) || pod.DeletionTimestamp != nil {
		return nil
	}
	if message, on := w.agent.diskPressure(); on {
		return &life.Rejection{Reason: "Evicted", Message: "The node has the condition DiskPressure: " + strings.TrimSpace(message)}
	}
	return nil
}

func (w *worker) reject(pod *corev1.Pod) *life.Rejection {
	if external(pod) {
		return rejectExternal(pod)
	}
	if r := reject(pod); r != nil {
		return r
	}
	if w.refused == nil {
		w.refused = w.mayStart(pod)
	}
	return w.refused
}
