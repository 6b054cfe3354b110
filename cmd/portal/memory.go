package main

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"sync"
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
	// garbageOfLook is for commands that read everything once, and end: collecting would be a third of what they do.
	garbageOfLook = 400
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
	// With costlyHeap or more in use the processor's caches are no help, and a collection with garbageOfServer took half of the server's time while
	// 20,000 Pods were created. When it takes costlyCores, or would, garbageOfFlood is for that too.
	costlyHeap  = 256 << 20
	costlyCores = 0.25
	// collectorInterval is how often that is looked at.
	collectorInterval = 5 * time.Second
)

// collector adapts how much garbage starts a collection to what is asked of a server; unless GOGC says.
type collector struct {
	mu           sync.Mutex
	load         apiserver.Load
	many, costly bool
	now          int
}

func newCollector() *collector { return &collector{now: garbageOfServer} }

// loaded notes a change of the load.
func (c *collector) loaded(load apiserver.Load) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.load = load
	switch {
	case load.Connections >= manyConnections:
		c.many = true
	case load.Connections < manyConnections/2:
		c.many = false
	}
	c.set()
}

// costs notes what collecting has cost.
func (c *collector) costs(cores float64, inUse uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// What it would cost with garbageOfServer: twice as much garbage is half as many collections.
	cores *= float64(c.now) / garbageOfServer
	switch {
	case inUse >= costlyHeap && cores >= costlyCores:
		c.costly = true
	case inUse < costlyHeap/2 || cores < costlyCores/3:
		c.costly = false
	}
	c.set()
}

// set makes it so. The lock is held.
func (c *collector) set() {
	percent := garbageOfServer
	switch {
	case c.many:
		percent = garbageOfMany
	case c.costly, c.load.Waiting:
		percent = garbageOfFlood
	}
	if percent != c.now {
		c.now = percent
		collectAt(percent)
	}
}

// watch measures what collecting costs, until ctx ends.
func (c *collector) watch(ctx context.Context) {
	samples := []metrics.Sample{{Name: "/cpu/classes/gc/total:cpu-seconds"}, {Name: "/gc/heap/live:bytes"}}
	metrics.Read(samples)
	for before, at := samples[0].Value.Float64(), time.Now(); wait(ctx, collectorInterval); {
		metrics.Read(samples)
		spent, now := samples[0].Value.Float64(), time.Now()
		c.costs((spent-before)/now.Sub(at).Seconds(), samples[1].Value.Uint64())
		before, at = spent, now
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
