// Package startup puts off the first collection of garbage until the heap is as large as a small cluster's lists make it.
// While a program starts there is hardly any garbage to find, and everything else waits for the processor too: what the
// packages of a program with an API server and kubectl in it allocate while they are initialised is reason enough for several.
// Nor are samples taken for profiles that nobody can ask for.
//
// It imports next to nothing, so that it is initialised before most others: Go takes packages in the order of their
// paths, each when all that it imports has been, and those of Kubernetes wait for packages from sigs.k8s.io.
package startup

import (
	"os"
	"runtime"
	"runtime/debug"
	"sync"
)

// enough is the memory from which on garbage is collected.
const enough = 64 << 20

var first struct {
	sync.Mutex
	waits   bool
	limit   int64 // of memory, as it was
	percent int   // to be set when the wait is over
}

// sampled is how many bytes Go lets pass between two samples for its profile of the heap, unless told otherwise.
const sampled = 512 << 10

func init() {
	if runtime.MemProfileRate == sampled {
		runtime.MemProfileRate = 0
	}
	if os.Getenv("GOGC") != "" {
		return // whoever set it knows better
	}
	first.waits, first.percent, first.limit = true, 100, debug.SetMemoryLimit(-1)
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(min(first.limit, enough))
	// The first collection finds that nobody needs this.
	runtime.SetFinalizer(&struct{ _ [16]byte }{}, func(any) {
		first.Lock()
		defer first.Unlock()
		over()
	})
}

// Profile takes samples of what is allocated from here on, for those that can be asked for them. Nobody else needs them, and
// each walks through tables of the binary that would otherwise not be in memory.
func Profile() {
	if runtime.MemProfileRate == 0 {
		runtime.MemProfileRate = sampled
	}
}

// over ends the wait, if it has not ended.
func over() {
	if first.waits {
		first.waits = false
		debug.SetMemoryLimit(first.limit)
		debug.SetGCPercent(first.percent)
	}
}

// Then sets after how much garbage, in percent of what is in use, it is collected once the first collection has been;
// unless GOGC says otherwise.
func Then(percent int) {
	set(percent, false)
}

// Collect sets the same from now on.
func Collect(percent int) {
	set(percent, true)
}

func set(percent int, now bool) {
	if os.Getenv("GOGC") != "" {
		return
	}
	first.Lock()
	defer first.Unlock()
	first.percent = percent
	if !first.waits {
		debug.SetGCPercent(percent)
	} else if now {
		over()
	}
}
