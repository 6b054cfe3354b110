package process

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// A balancer has little in use and makes garbage with every new connection and handshake. The runtime's own rule would collect it after every
// 4 MB, each time looking at everything in use. So at least leastGarbage is left lying before it is collected; with much in use, as much
// as there is in use, as usual.
const (
	leastGarbage = 32 << 20
	mostPercent  = 800
)

// percentOf is how much garbage starts a collection, in percent of what is in use.
func percentOf(live uint64) int {
	if live == 0 {
		return mostPercent
	}
	return int(min(max(leastGarbage*100/live, 100), mostPercent))
}

// collect adapts the collector to what is in use, until ctx ends; unless GOGC says how.
func collect(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	now := percentOf(0)
	was := debug.SetGCPercent(now)
	defer func() { debug.SetGCPercent(was) }()
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		metrics.Read(live)
		// Setting it stops everything for a moment: small differences are not worth that.
		if want := percentOf(live[0].Value.Uint64()); want > now*5/4 || want < now*4/5 {
			now = want
			debug.SetGCPercent(now)
		}
	}
}
