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

const (
	// garbage is in percent of what is in use: a little less than usual, which trades a few percent of CPU for a part of the memory.
	garbage = 70
	// garbageOfServer: of what a server has in use, most is caches that stay. Collecting more often costs a create 6 % of CPU and saves a
	// sixth of the memory.
	garbageOfServer = 30
	// With manyConnections a change goes to so many watches that collecting what this leaves behind is what the last of them wait for;
	// from then on memory is traded for time, until half of them have gone.
	manyConnections = 500
	garbageOfMany   = 150
)

// collectByConnections adapts how much garbage starts a collection to the number of connected clients; unless GOGC says.
// It is called by one goroutine at a time.
func collectByConnections() func(open int) {
	many := false
	return func(open int) {
		switch {
		case !many && open >= manyConnections:
			many = true
			collectAt(garbageOfMany)
		case many && open < manyConnections/2:
			many = false
			collectAt(garbageOfServer)
		}
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
