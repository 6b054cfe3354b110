package node

import (
	"context"
	"fmt"
	"time"
)

const (
	// processInterval is how often it is looked at whether Pods could not start processes.
	processInterval = 5 * time.Second
	// processAgain is after which time a Pod that still can't is reported again.
	processAgain = 5 * time.Minute
)

// watchProcesses says of Pods that they have as many processes as they may: what fails in them for it says so in many ways, or not at all.
func (a *Agent) watchProcesses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(processInterval):
		}
		for _, w := range a.allWorkers() {
			w.mu.Lock()
			sandbox := w.sandbox
			w.mu.Unlock()
			if sandbox == nil {
				continue
			}
			count := sandbox.Refused()
			w.mu.Lock()
			if count > w.refusedProcesses && time.Since(w.toldProcesses) > processAgain {
				w.toldProcesses = time.Now()
				w.event(true, "TooManyProcesses", fmt.Sprintf("The Pod has %d processes and threads, as many as it may (--pod-max-pids of the node): it could not start more %d times", a.PodProcesses, count))
			}
			w.refusedProcesses = count
			w.mu.Unlock()
		}
	}
}
