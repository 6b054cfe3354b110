package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/node/runtime"
	"portal/internal/node/stream"
)

// StreamOptions are how a node serves logs and commands of its Pods.
type StreamOptions struct {
	// Addresses to serve at; none: the node's own.
	Addresses []netip.Addr
	// Port to serve at; 0: nothing is served.
	Port uint16
	// Authorities are the CAs of clients' certificates, in PEM.
	Authorities func() ([]byte, error)
	// State answers what this node does for Services, to those who may get nodes/proxy; nil: nobody does.
	State http.Handler
	// Traffic answers how much goes through Services on this node, to the same; nil: nobody does.
	Traffic http.Handler
}

// serveStreams serves logs and commands until ctx ends.
func (a *Agent) serveStreams(ctx context.Context) error {
	addresses := a.Stream.Addresses
	if len(addresses) == 0 {
		addresses = a.NodeIPs
	}
	o := stream.Options{Node: a.Name, Host: streamHost{a}, Client: a.Client, Authorities: a.Stream.Authorities, Dir: a.DataDir, State: a.Stream.State, Traffic: a.Stream.Traffic, Panics: a.panics.Load, Log: a.Log}
	for _, addr := range addresses {
		o.Listen = append(o.Listen, netip.AddrPortFrom(addr, a.Stream.Port))
	}
	server, err := stream.New(o)
	if err != nil {
		return err
	}
	a.running.Go(func() {
		select {
		case <-ctx.Done():
		case <-a.registered: // the certificate is for the Node
			server.Run(ctx)
		}
	})
	return nil
}

// streamHost is the agent as package stream sees it.
type streamHost struct{ agent *Agent }

// Pods are those of the node, with the status that was last decided.
func (h streamHost) Pods() []*corev1.Pod {
	h.agent.mu.Lock()
	workers := make([]*worker, 0, len(h.agent.workers))
	for _, w := range h.agent.workers {
		workers = append(workers, w)
	}
	h.agent.mu.Unlock()
	var out []*corev1.Pod
	for _, w := range workers {
		w.mu.Lock()
		pod := w.pod.DeepCopy()
		pod.Status = *w.writer.last.DeepCopy()
		w.mu.Unlock()
		out = append(out, pod)
	}
	slices.SortFunc(out, func(a, b *corev1.Pod) int {
		return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
	})
	return out
}

// Find finds a Pod by name. Of two that have had the name, it is the one that the API has.
func (h streamHost) Find(namespace, name string) stream.Pod {
	obj, ok, err := h.agent.pods.GetStore().GetByKey(namespace + "/" + name)
	if err != nil || !ok {
		return nil
	}
	h.agent.mu.Lock()
	defer h.agent.mu.Unlock()
	w := h.agent.workers[obj.(*corev1.Pod).UID]
	if w == nil {
		return nil
	}
	return streamPod{w}
}

type streamPod struct{ *worker }

// UID is the Pod's.
func (p streamPod) UID() string { return string(p.pod.UID) }

// status is a container's, with the Pod's sandbox.
func (p streamPod) status(container string) (*corev1.ContainerStatus, *runtime.Pod, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range [][]corev1.ContainerStatus{p.writer.last.ContainerStatuses, p.writer.last.InitContainerStatuses} {
		for i := range list {
			if list[i].Name == container {
				return list[i].DeepCopy(), p.sandbox, nil
			}
		}
	}
	return nil, nil, fmt.Errorf("container %q in pod %q is not available", container, p.pod.Name)
}

// runOf is the run that a ContainerID names.
func runOf(id string) string { return strings.TrimPrefix(id, "portal://") }

// Log finds a container's log. The words of the errors are those that clients look for.
func (p streamPod) Log(container string, previous bool) (stream.Log, error) {
	status, sandbox, err := p.status(container)
	if err != nil {
		return stream.Log{}, err
	}
	id, err := logRun(p.pod.Name, status, previous)
	if err != nil {
		return stream.Log{}, err
	}
	if id == "" || sandbox == nil {
		return stream.Log{}, fmt.Errorf("container %q in pod %q is terminated", container, p.pod.Name)
	}
	return stream.Log{Path: filepath.Join(sandbox.LogDir(), id+".log"), Ended: func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		s := p.statuses[id]
		return s == nil || !s.Running()
	}}, nil
}

// logRun is the run whose log is meant: the last that there was, or the one that ended before.
func logRun(pod string, s *corev1.ContainerStatus, previous bool) (string, error) {
	last := s.LastTerminationState.Terminated
	switch {
	case previous:
		if last == nil || last.ContainerID == "" {
			return "", fmt.Errorf("previous terminated container %q in pod %q not found", s.Name, pod)
		}
		return runOf(last.ContainerID), nil
	case s.State.Running != nil:
		return runOf(s.ContainerID), nil
	case s.State.Terminated != nil && s.State.Terminated.ContainerID != "":
		return runOf(s.State.Terminated.ContainerID), nil
	case last != nil:
		return runOf(last.ContainerID), nil
	case s.State.Terminated != nil:
		return "", nil
	}
	reason := "no logs yet"
	if w := s.State.Waiting; w != nil && w.Reason != "" {
		switch reason = w.Reason; reason {
		case "ErrImagePull", "ImagePullBackOff":
			reason = "the image can't be pulled (" + reason + ")"
		}
	}
	return "", fmt.Errorf("container %q in pod %q is waiting to start: %s", s.Name, pod, reason)
}

// Running says why there is no process to connect to.
func (p streamPod) Running(container string) error {
	_, _, err := p.running(container)
	return err
}

func (p streamPod) running(container string) (*runtime.Pod, string, error) {
	status, sandbox, err := p.status(container)
	if err != nil {
		return nil, "", err
	}
	if status.State.Running == nil || sandbox == nil {
		return nil, "", fmt.Errorf("container not found (%q): it does not run", container)
	}
	return sandbox, runOf(status.ContainerID), nil
}

func runtimeStreams(s stream.Streams) (runtime.Streams, func()) {
	out := runtime.Streams{In: s.In, Out: s.Out, Err: s.Err, TTY: s.TTY}
	if s.Resize == nil {
		return out, func() {}
	}
	sizes, ended := make(chan runtime.Size), make(chan struct{})
	out.Resize = sizes
	go func() {
		defer close(sizes)
		for {
			select {
			case <-ended:
				return
			case size, ok := <-s.Resize:
				if !ok {
					return
				}
				select {
				case sizes <- runtime.Size(size):
				case <-ended:
					return
				}
			}
		}
	}()
	return out, func() { close(ended) }
}

// Exec runs a command in a container.
func (p streamPod) Exec(ctx context.Context, container string, command []string, s stream.Streams) (int, error) {
	sandbox, run, err := p.running(container)
	if err != nil {
		return 0, err
	}
	streams, done := runtimeStreams(s)
	defer done()
	return sandbox.ExecStream(ctx, run, command, streams)
}

// Attach connects to a container.
func (p streamPod) Attach(ctx context.Context, container string, s stream.Streams) error {
	sandbox, run, err := p.running(container)
	if err != nil {
		return err
	}
	streams, done := runtimeStreams(s)
	defer done()
	_, err = sandbox.Attach(ctx, run, streams)
	return err
}

// Dial connects to a port of the Pod.
func (p streamPod) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	p.mu.Lock()
	sandbox := p.sandbox
	p.mu.Unlock()
	if sandbox == nil {
		return nil, errors.New("the Pod does not run")
	}
	return sandbox.Dial(ctx, port)
}
