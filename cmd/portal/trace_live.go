package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/lab"
	"portal/internal/proxy"
	"portal/internal/trace"
	"portal/internal/trace/live"
)

// liveOptions are the flags of `portal trace --live`.
type liveOptions struct {
	live       bool
	lab, netns string
	patience   time.Duration
}

// liveReport is a trace with what a real packet did.
type liveReport struct {
	*trace.Report
	Live *live.Result `json:"live"`
}

// places finds the network namespaces of the sender and of the node that decides.
func (o *traceOptions) places(objects *trace.Objects, r *trace.Report) (sender, node func(func() error) error, err error) {
	if unix.Geteuid() != 0 {
		return nil, nil, errors.New("--live: run this as root: it looks into the kernel")
	}
	if o.lab != "" {
		running, err := findLab(o.lab)
		if err != nil {
			return nil, nil, err
		}
		return o.placesInLab(running, objects, r)
	}
	here := func(f func() error) error { return f() }
	machine, err := machineName("")
	if err != nil {
		return nil, nil, err
	}
	switch {
	case o.netns != "":
		sender = func(f func() error) error { return inNetns(o.netns, f) }
	case o.question.From == machine:
		sender = here
	default:
		return nil, nil, usageError{fmt.Errorf("--live: a packet can be sent here from node %s, from a Pod on it with --netns /proc/PID/ns/net, and in a lab with --lab", machine)}
	}
	if r.Node == machine {
		node = here
	}
	return sender, node, nil
}

func (o *traceOptions) placesInLab(running *lab.Running, objects *trace.Objects, r *trace.Report) (sender, node func(func() error) error, err error) {
	if r.Node != "" {
		m, err := running.Machine(r.Node)
		if err != nil {
			return nil, nil, err
		}
		node = m.Do
	}
	if m, err := running.Machine(o.question.From); err == nil {
		return m.Do, node, nil
	}
	namespace, name := o.question.Namespace, o.question.From
	if before, after, found := strings.Cut(name, "/"); found {
		namespace, name = before, after
	}
	for i := range objects.Pods {
		pod := &objects.Pods[i]
		if pod.Namespace != namespace || pod.Name != name {
			continue
		}
		m, err := running.Machine(pod.Spec.NodeName)
		if err != nil || pod.Spec.HostNetwork {
			return m.Do, node, err
		}
		return func(f func() error) error { return m.DoInPod(lab.NodeDir(running.Dir, m.Name), string(pod.UID), f) }, node, nil
	}
	return nil, nil, usageError{fmt.Errorf("--live: %s is no Pod and no machine of the lab %s, so nothing can be sent from there", o.question.From, running.Name)}
}

// inNetns runs a function in a network namespace that a file stands for, on a thread that ends with it.
func inNetns(path string, f func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return usageError{fmt.Errorf("--netns: %w", err)}
	}
	defer ns.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- usageError{fmt.Errorf("--netns %s: it is no network namespace: %w", path, err)}
			return
		}
		done <- f()
	}()
	return <-done
}

// sendLive sends a packet the traced way, and compares.
func (o *traceOptions) sendLive(ctx context.Context, world *trace.World, objects *trace.Objects, r *trace.Report) (*live.Result, error) {
	if !r.Target.IsValid() {
		return nil, fmt.Errorf("--live: there is no address to send to: %s", r.Reason)
	}
	sender, node, err := o.places(objects, r)
	if err != nil {
		return nil, err
	}
	protocol := intent.TCP
	switch r.Protocol {
	case "UDP":
		protocol = intent.UDP
	case "SCTP":
		return nil, usageError{errors.New("--live: packets of TCP and UDP can be sent, not of SCTP")}
	}
	result, err := live.Run(live.Options{Sender: sender, Node: node, To: r.Target, Protocol: protocol, Patience: o.patience})
	if err != nil {
		return nil, fmt.Errorf("--live: %w", err)
	}
	result.Compare(r, protocol, r.Mode == "userspace")
	if node == nil {
		return result, nil
	}
	state, err := proxyState(ctx, node)
	if err != nil {
		result.Differences = append(result.Differences, fmt.Sprintf("the proxy of node %s does not say what it does: %v", r.Node, err))
		return result, nil
	}
	for i, difference := range world.Compare(r.Node, state) {
		if i == 10 {
			result.Differences = append(result.Differences, "and more of the same")
			break
		}
		result.Differences = append(result.Differences, fmt.Sprintf("the proxy of node %s: %s", r.Node, difference))
	}
	return result, nil
}

// proxyState asks the node's own proxy.
func proxyState(ctx context.Context, node func(func() error) error) (*proxy.State, error) {
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = node(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10249/state", nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var state proxy.State
	if err := json.NewDecoder(io.LimitReader(response.Body, 256<<20)).Decode(&state); err != nil {
		return nil, errors.New("it is another proxy than Portal's")
	}
	return &state, nil
}

// printLive writes what a packet did.
func printLive(w io.Writer, node string, l *live.Result) error {
	var b strings.Builder
	fmt.Fprintf(&b, "live\n  %-9s %s, from %s\n", "packet", l.Outcome, l.Source)
	if l.Endpoint.IsValid() {
		fmt.Fprintf(&b, "  %-9s on node %s: to %s, from %s\n", "conntrack", node, l.Endpoint, l.Seen)
	} else if l.Looked {
		fmt.Fprintf(&b, "  %-9s on node %s: no connection\n", "conntrack", node)
	}
	for _, r := range l.Rules {
		fmt.Fprintf(&b, "  %-9s %s\n", "nftables", r)
	}
	if !l.Looked {
		fmt.Fprintf(&b, "  %-9s of the node that decides can't be seen from here\n", "kernel")
	}
	if len(l.Differences) == 0 {
		b.WriteString("The packet did what was worked out.\n")
	}
	for _, d := range l.Differences {
		fmt.Fprintf(&b, "DIFFERENT: %s\n", d)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
