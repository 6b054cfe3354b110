package main

import (
	"context"
	"os"
	"runtime/debug"
	"time"

	"portal/internal/apiserver"
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
	// garbageOfServer: of what a server has in use, most is caches that stay. Collecting more often costs a create 7 % of CPU and saves a
	// fifth of the memory.
	garbageOfServer = 25
	// With manyConnections a change goes to so many watches that collecting what this leaves behind is what the last of them wait for;
	// from then on memory is traded for time, until half of them have gone.
	manyConnections = 500
	garbageOfMany   = 150
	// garbageOfFlood is for when requests with large answers have to wait for each other: with garbageOfServer half of the server's time would go into
	// collecting what lists of everything leave behind, and all users would wait for that.
	garbageOfFlood = 100
)

// collectByLoad adapts how much garbage starts a collection to what is asked of the server; unless GOGC says. It is called by one
// goroutine at a time.
func collectByLoad() func(apiserver.Load) {
	many, now := false, garbageOfServer
	return func(load apiserver.Load) {
		switch {
		case load.Connections >= manyConnections:
			many = true
		case load.Connections < manyConnections/2:
			many = false
		}
		percent := garbageOfServer
		switch {
		case many:
			percent = garbageOfMany
		case load.Waiting:
			percent = garbageOfFlood
		}
		if percent != now {
			now = percent
			collectAt(percent)
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
