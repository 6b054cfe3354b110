package node

import (
	"context"
	"fmt"
	"os"
	"time"

	"portal/internal/node/runtime"
)

const (
	// processInterval is how often it is looked at whether Pods could not start processes.
	processInterval = 5 * time.Second
	// processAgain is after which time a Pod that still can't is reported again.
	processAgain = 5 * time.Minute
)

// protect has the kernel end Pods, and not the agent, when memory is scarce, until what it returns is called. Where this process may not say
// so, it is as others are.
func protect() (undo func()) {
	const path, score = "/proc/self/oom_score_adj", "-999"
	before, err := os.ReadFile(path)
	if err != nil || os.WriteFile(path, []byte(score), 0) != nil {
		return func() {}
	}
	return func() { _ = os.WriteFile(path, before, 0) }
}

// watchProcesses says of Pods that they have as many processes as they may: what fails in them for it says so in many ways, or not at all.
func (a *Agent) watchProcesses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(processInterval):
		}
		for _, w := range a.allWorkers() {
			_ = w.attempt("count its processes", func() error { w.observeProcesses(); return nil })
		}
	}
}

func (w *worker) observeProcesses() {
	var sandbox *runtime.Pod
	w.locked(func() { sandbox = w.sandbox })
	if sandbox == nil {
		return
	}
	count := sandbox.Refused()
	w.locked(func() {
		if count > w.refusedProcesses && time.Since(w.toldProcesses) > processAgain {
			w.toldProcesses = time.Now()
			w.event(true, "TooManyProcesses", fmt.Sprintf("The Pod has %d processes and threads, as many as it may (--pod-max-pids of the node): it could not start more %d times", w.agent.PodProcesses, count))
		}
		w.refusedProcesses = count
	})
}
