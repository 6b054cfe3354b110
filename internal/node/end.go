package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/network/peers"
	"portal/internal/node/runtime"
)

// endGrace is how long containers have to end by themselves when their node does.
const endGrace = 3 * time.Second

// End stops all Pods and removes their network: it is for a node that ends with its agent, after Run. The API still has the Pods, so that
// the next agent starts them again, as after a restart of the machine.
func (a *Agent) End(ctx context.Context) error {
	if a.runtime == nil {
		return nil
	}
	pods, err := a.runtime.Pods()
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, p := range pods {
		all.Go(func() {
			endContainers(ctx, p)
			if err := p.Stop(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	all.Wait()
	if a.connections.bridge != nil {
		errs = append(errs, a.connections.nat.Remove(), peers.Remove(), a.connections.bridge.Remove())
	}
	return errors.Join(append(errs, a.runtime.Cgroups.Remove(""))...)
}

// endContainers asks containers to end, and waits for them for a while.
func endContainers(ctx context.Context, p *runtime.Pod) {
	asked := map[string]bool{}
	for end := time.Now().Add(endGrace); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		list, err := p.Statuses()
		if err != nil {
			return
		}
		left := 0
		for _, s := range list {
			if !s.Running() {
				continue
			}
			left++
			if !asked[s.ID] {
				asked[s.ID] = true
				_ = p.Signal(ctx, s.ID, unix.SIGTERM)
			}
		}
		if left == 0 {
			return
		}
	}
}
