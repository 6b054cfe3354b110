package process

import (
	"context"
	"os"
	"runtime"
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

// Connections that are idle for hours should not hold the memory of their handshakes and first requests for as long. After quietSeconds in which at
// most quietBytes a second were allocated, garbage is collected and what is free is given back to the system, if that is worth it.
const (
	quietSeconds = 3
	quietBytes   = 256 << 10
	worthGiving  = 8 << 20
)

// percentOf is how much garbage starts a collection, in percent of what is in use.
func percentOf(live uint64) int {
	if live == 0 {
		return mostPercent
	}
	return int(min(max(leastGarbage*100/live, 100), mostPercent))
}

// usage is what the runtime says of its memory, in bytes.
type usage struct {
	live      uint64 // what was in use after the last collection
	allocated uint64 // since the process' begin
	objects   uint64 // in use or garbage
	free      uint64 // room for objects that could be given back
}

// quiet finds the moments at which memory can be given back.
type quiet struct {
	allocated uint64
	seconds   int
	given     bool // since the last time that it was not quiet
}

// now is called every second. It returns true if memory should be given back.
func (q *quiet) now(u usage) bool {
	busy := u.allocated-q.allocated > quietBytes
	q.allocated = u.allocated
	if busy {
		q.seconds, q.given = 0, false
		return false
	}
	q.seconds++
	if q.given || q.seconds < quietSeconds || u.objects+u.free < u.live+worthGiving {
		return false
	}
	q.given = true
	return true
}

// collect adapts the collector to what is in use, until ctx ends; unless GOGC says how.
func collect(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	now := percentOf(0)
	was := debug.SetGCPercent(now)
	defer func() { debug.SetGCPercent(was) }()
	var q quiet
	read := reader()
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		u := read()
		if q.now(u) {
			runtime.GC() // once more than FreeOSMemory does: buffers in pools survive one
			debug.FreeOSMemory()
			u = read()
		}
		// Setting it stops everything for a moment: small differences are not worth that.
		if want := percentOf(u.live); want > now*5/4 || want < now*4/5 {
			now = want
			debug.SetGCPercent(now)
		}
	}
}

// reader returns what reads the usage.
func reader() func() usage {
	samples := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/gc/heap/allocs:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
	}
	return func() usage {
		metrics.Read(samples)
		of := func(i int) uint64 { return samples[i].Value.Uint64() }
		return usage{live: of(0), allocated: of(1), objects: of(2), free: of(3)}
	}
}
