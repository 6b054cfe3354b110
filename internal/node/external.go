package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"portal/internal/externalpod"
	"portal/internal/node/life"
	"portal/internal/node/runtime/shim"
)

// A Pod of the RuntimeClass external stands for a process or machine that is run by somebody else. Its containers count as running, its
// addresses are those that it is annotated with, and its probes are asked from the node. Nothing of it is on this machine.

func external(pod *corev1.Pod) bool { return externalpod.Is(pod) }

const externalSandbox = "external"

// observeExternal notes the addresses, which may be changed at any time. It is called with the worker's lock.
func (w *worker) observeExternal(pod *corev1.Pod) {
	if !external(pod) {
		return
	}
	if addrs, err := externalpod.Addresses(pod); err == nil && w.observed.Sandbox == life.SandboxReady {
		if !slices.Equal(w.observed.PodIPs, addrs) && len(w.observed.PodIPs) > 0 {
			// Probes have the old address.
			for p, cancel := range w.probes {
				cancel()
				delete(w.probes, p)
				delete(w.observed.Probes, p)
			}
		}
		w.observed.PodIPs = addrs
	}
}

// rejectExternal says what is wrong with a Pod that stands for something else.
func rejectExternal(pod *corev1.Pod) *life.Rejection {
	if _, err := externalpod.Addresses(pod); err != nil && pod.Status.StartTime == nil {
		return &life.Rejection{Reason: "InvalidExternalAddresses", Message: err.Error()}
	}
	return nil
}

// resumeExternal goes on with what an earlier agent found out: all of it is in the API.
func (w *worker) resumeExternal() {
	status := &w.pod.Status
	if len(status.PodIPs) == 0 || status.Phase == corev1.PodFailed || status.Phase == corev1.PodSucceeded {
		return
	}
	w.observed.Sandbox, w.observed.SandboxID = life.SandboxReady, externalSandbox
	for _, ip := range status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			w.observed.PodIPs = append(w.observed.PodIPs, a)
		}
	}
	for _, c := range slices.Concat(status.InitContainerStatuses, status.ContainerStatuses) {
		id, ok := strings.CutPrefix(c.ContainerID, "portal://")
		if !ok || c.State.Running == nil {
			continue
		}
		w.startExternal(id, runMeta{Container: c.Name, Attempt: c.RestartCount}, c.State.Running.StartedAt.Time)
		w.observed.Hooks[life.Hook{Container: c.Name, Run: id}] = life.HookResult{Done: true}
		if c.Started != nil && *c.Started {
			w.observed.Probes[life.Probe{Container: c.Name, Run: id, Kind: life.Startup}] = life.ProbeResult{Success: true}
		}
		if c.Ready {
			w.observed.Probes[life.Probe{Container: c.Name, Run: id, Kind: life.Readiness}] = life.ProbeResult{Success: true}
		}
	}
}

// startExternal notes a run that somebody else began.
func (w *worker) startExternal(id string, meta runMeta, at time.Time) {
	meta.Image = externalpod.Image
	text, _ := json.Marshal(meta)
	w.statuses[id] = &shim.Status{ID: id, Sandbox: externalSandbox, Started: at, Meta: text}
}

// carryOutExternal does what was decided, where it is other than for Pods that run here. It is called with the worker's lock.
func (w *worker) carryOutExternal(action life.Action) bool {
	switch action := action.(type) {
	case life.CreateSandbox:
		w.observed.Sandbox, w.observed.SandboxID = life.SandboxReady, externalSandbox
	case life.StopSandbox:
		w.observed.Sandbox = life.SandboxStopped
	case life.StartContainer:
		id := fmt.Sprintf("%s-%d-%s", action.Container, action.Attempt, strings.ReplaceAll(string(uuid.NewUUID()), "-", "")[:8])
		w.startExternal(id, runMeta{Container: action.Container, Attempt: action.Attempt, Round: action.Round, Backoff: action.Backoff}, time.Now().UTC())
		for _, old := range w.outdated(action.Container) {
			delete(w.statuses, old)
		}
	case life.Signal:
		if s := w.statuses[action.Run]; s != nil && s.Running() {
			ended := *s
			ended.Finished = time.Now().UTC()
			w.statuses[action.Run] = &ended
		}
	default:
		return false
	}
	w.poke()
	return true
}

// errExternal is what a command in a container gets that is not here.
var errExternal = errors.New("the container is not run by this node: the Pod stands for something external, where no command can be executed")

func refuseExec(context.Context, []string) (int, string, error) { return 0, "", errExternal }
