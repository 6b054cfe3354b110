package main

import (
	"context"
	"os"
	"runtime"

	"portal/internal/apiserver"
)

// extraThreads bounds by how many threads a server runs more than there are CPUs.
const extraThreads = 4

// threadsByLoad lets a server's goroutines run on up to twice as many threads as there are CPUs while requests with large answers, or TLS handshakes, wait for each other;
// unless GOMAXPROCS says otherwise. Go's scheduler looks for packets when a thread has nothing to do, or else every 10 ms: on two CPUs a list of everything and a
// collection of garbage keep both threads busy, and whoever asks meanwhile waits. With idle threads the kernel decides, within a millisecond or two. At other
// times more threads would only take CPU from Pods on the same machine.
func threadsByLoad() func(apiserver.Load) {
	cpus := runtime.GOMAXPROCS(0)
	now := cpus
	return func(load apiserver.Load) {
		want := cpus
		if load.Waiting {
			want += min(cpus, extraThreads)
		}
		if want != now && os.Getenv("GOMAXPROCS") == "" {
			now = want
			runtime.GOMAXPROCS(want)
		}
	}
}

// adapt has the process adapt to what is asked of the server in it: to its load, and to what collecting garbage costs.
func adapt(ctx context.Context, opts *apiserver.Options) {
	collectAt(garbageOfServer)
	collect, threads := newCollector(), threadsByLoad()
	go collect.watch(ctx)
	opts.CPUs, opts.OnLoad = runtime.GOMAXPROCS(0), func(load apiserver.Load) {
		collect.loaded(load)
		threads(load)
	}
}
