package main

import (
	"context"
	"os"
	"runtime/debug"
	"time"
)

// collectAt sets how much garbage, in percent of what is in use, starts a collection; unless GOGC says otherwise.
func collectAt(percent int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

// trimMemory returns the garbage of the first lists to the system once they are in: it is several times what stays.
func trimMemory(ctx context.Context, ready func() bool) {
	for !ready() {
		if !wait(ctx, 200*time.Millisecond) {
			return
		}
	}
	debug.FreeOSMemory()
}

func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
