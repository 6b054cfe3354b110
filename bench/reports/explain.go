package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/test/harness"
)

// measureExplain runs explain over everything, with a plain kubeconfig, and returns the longest time.
func measureExplain(ctx context.Context, c *cluster) (longest time.Duration, err error) {
	n := startLeases(ctx, c) // or all nodes would be lost
	defer n.stop()
	err = c.client.DiscoveryV1().EndpointSlices("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "bench=churn"})
	if err != nil {
		return 0, err
	}
	for i := range c.looks {
		before, err := c.cpu()
		if err != nil {
			return 0, err
		}
		cmd := exec.CommandContext(ctx, harness.Portal(), "explain", "--kubeconfig", c.api.Kubeconfig)
		began := time.Now()
		out, err := cmd.CombinedOutput()
		took := time.Since(began)
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) || exit != nil && exit.ExitCode() != 1 {
			return 0, fmt.Errorf("portal explain: %w\n%s", err, out)
		}
		after, err := c.cpu()
		if err != nil {
			return 0, err
		}
		longest = max(longest, took)
		first, _, _ := strings.Cut(string(out), "\n")
		fmt.Printf("explain %d: %s; CPU: its own %s, the server's %s: %s\n", i+1, took.Round(10*time.Millisecond),
			(cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Round(10*time.Millisecond), (after - before).Round(10*time.Millisecond), first)
	}
	return longest, nil
}

// startLeases has nodes do nothing but renew their Leases.
func startLeases(ctx context.Context, c *cluster) *nodes {
	ctx, cancel := context.WithCancel(ctx)
	n := &nodes{c: c, cancel: cancel}
	for i := range c.nodes {
		n.running.Go(func() { n.keepLease(ctx, nodeName(i)) })
	}
	return n
}
