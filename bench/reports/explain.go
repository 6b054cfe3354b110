package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/bench/report"
	"portal/test/harness"
)

const (
	explainSlowest = "time, slowest"
	explainTarget  = 5 // seconds
)

// measureExplain runs explain over everything, with a plain kubeconfig, while nothing changes but Leases.
func measureExplain(ctx context.Context, c *cluster, r *report.Report) error {
	at := r.At(fmt.Sprintf("portal explain over everything, %d Pods on %d nodes", c.services*c.pods, c.nodes), c.services, "Services")
	defer func() { at.WantWithin(portal, explainSlowest, explainTarget) }()
	if err := c.client.DiscoveryV1().EndpointSlices("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "bench=churn"}); err != nil {
		return err
	}
	var times, own, servers, memory []float64
	for i := range c.looks {
		before, err := c.cpu()
		if err != nil {
			return err
		}
		took, out, cmd, err := c.explain(ctx)
		if err != nil {
			return err
		}
		after, err := c.cpu()
		if err != nil {
			return err
		}
		used := cmd.ProcessState
		times = append(times, took.Seconds())
		own, servers = append(own, (used.UserTime()+used.SystemTime()).Seconds()), append(servers, (after-before).Seconds())
		memory = append(memory, peakMemory(used))
		first, _, _ := strings.Cut(out, "\n")
		report.Logf("explain %d took %s: %s", i+1, took.Round(10*time.Millisecond), first)
	}
	at.Lower(portal, "time, median", report.Median(times), "s")
	at.Lower(portal, explainSlowest, report.Max(times), "s")
	at.Lower(portal, "CPU of the command, median", report.Median(own), "s")
	at.Lower(portal, "CPU of the server, median", report.Median(servers), "s")
	at.Lower(portal, "resident memory of the command, peak", report.Max(memory), "MB")
	r.Note("explain is the command on the server's machine, where answers are not compressed, from its start to its end, of which the slowest of %d counts.", c.looks)
	return nil
}

// explain runs the command once. That it finds something is no error.
func (c *cluster) explain(ctx context.Context) (took time.Duration, out string, cmd *exec.Cmd, err error) {
	cmd = exec.CommandContext(ctx, harness.Portal(), "explain", "--kubeconfig", c.api.Kubeconfig)
	began := time.Now()
	data, err := cmd.CombinedOutput()
	took = time.Since(began)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("portal explain: %w\n%s", err, data)
	}
	return took, string(data), cmd, err
}
