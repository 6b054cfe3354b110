package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/node/life"
	"portal/internal/node/probe"
	"portal/internal/node/runtime"
)

// watchProbes starts and ends probes so that those run which should.
func (w *worker) watchProbes(ctx context.Context, pod *corev1.Pod, want []life.Probe) {
	for p, cancel := range w.probes {
		if !slices.Contains(want, p) {
			cancel()
			delete(w.probes, p)
		}
	}
	for _, p := range want {
		if w.probes[p] != nil {
			continue
		}
		c := containerOf(&pod.Spec, p.Container)
		spec := map[life.ProbeKind]*corev1.Probe{life.Startup: c.StartupProbe, life.Liveness: c.LivenessProbe, life.Readiness: c.ReadinessProbe}[p.Kind]
		check, err := probe.New(spec.ProbeHandler, w.target(c, p.Run))
		if err != nil {
			message := err.Error()
			check = func(context.Context) error { return errors.New(message) }
		}
		ctx, cancel := context.WithCancel(ctx)
		w.probes[p] = cancel
		since, timing := w.statuses[p.Run].Started, probe.TimingOf(spec)
		timing.AwaitPort = p.Kind != life.Liveness // which counts every failure
		w.beside(ctx, "probe", func() {
			probe.Watch(ctx, timing, since, check, func(r probe.Result) {
				w.locked(func() { w.observed.Probes[p] = life.ProbeResult{Success: r.Success, Message: r.Message} })
				w.poke()
			}, func(message string) {
				w.locked(func() {
					w.event(true, "Unhealthy", fmt.Sprintf("%s probe of container %s failed: %s", title(string(p.Kind)), p.Container, message))
				})
			})
		})
	}
}

func title(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// target is a run as probes and hooks reach it.
func (w *worker) target(c *corev1.Container, run string) probe.Target {
	address := w.agent.NodeIPs[0]
	if len(w.observed.PodIPs) > 0 && !w.pod.Spec.HostNetwork {
		address = w.observed.PodIPs[0]
	}
	if external(w.pod) {
		return probe.Target{Address: address, Ports: c.Ports, Exec: refuseExec}
	}
	sandbox := w.sandbox
	return probe.Target{Address: address, Ports: c.Ports, Exec: func(ctx context.Context, args []string) (int, string, error) {
		return execute(ctx, sandbox, run, args)
	}}
}

// execute runs a command in a container and returns the beginning of what it wrote.
func execute(ctx context.Context, sandbox *runtime.Pod, run string, args []string) (int, string, error) {
	r, out, err := os.Pipe()
	if err != nil {
		return 0, "", err
	}
	var text []byte
	var reading sync.WaitGroup
	reading.Go(func() {
		text, _ = io.ReadAll(io.LimitReader(r, 10<<10))
		_, _ = io.Copy(io.Discard, r)
	})
	code, err := sandbox.Exec(ctx, run, args, nil, out, out)
	_ = out.Close()
	// What it left running may hold the pipe open.
	_ = r.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	reading.Wait()
	_ = r.Close()
	return code, string(text), err
}

// runHook runs a lifecycle hook.
func (w *worker) runHook(ctx context.Context, pod *corev1.Pod, action life.RunHook) {
	result := life.HookResult{Done: true, Failure: "the node's agent failed to run it"} // if it panics
	defer w.locked(func() { w.observed.Hooks[action.Hook] = result })
	c := containerOf(&pod.Spec, action.Hook.Container)
	handler := c.Lifecycle.PostStart
	if action.Hook.PreStop {
		handler = c.Lifecycle.PreStop
	}
	if action.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, action.Timeout)
		defer cancel()
	}
	var target probe.Target
	w.locked(func() { target = w.target(c, action.Hook.Run) })
	var err error
	if handler.Sleep != nil {
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(life.Seconds(handler.Sleep.Seconds)):
		}
	} else {
		var check probe.Check
		if check, err = probe.New(corev1.ProbeHandler{Exec: handler.Exec, HTTPGet: handler.HTTPGet, TCPSocket: handler.TCPSocket}, target); err == nil {
			err = check(ctx)
		}
	}
	result.Failure = ""
	if err != nil {
		result.Failure = err.Error()
	}
}
