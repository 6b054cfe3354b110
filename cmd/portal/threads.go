package main

import (
	"os"
	"runtime"
)

// extraThreads bounds by how many threads a server runs more than there are CPUs.
const extraThreads = 4

// runMoreThreads lets a server's goroutines run on twice as many threads as there are CPUs, on small machines, and returns how many CPUs there
// are; unless GOMAXPROCS says otherwise. Go's scheduler looks for packets when a thread has nothing to do, or else every 10 ms: on two CPUs a list of everything
// and a collection of garbage keep both threads busy, and whoever asks meanwhile waits. With idle threads the kernel decides, within a millisecond or two.
func runMoreThreads() (cpus int) {
	cpus = runtime.GOMAXPROCS(0)
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(cpus + min(cpus, extraThreads))
	}
	return cpus
}
