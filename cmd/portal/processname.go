package main

import "os"

// The names of processes that this binary starts from itself, as ps and top show them: at most 15 bytes. A process that was started from
// /proc/self/exe has the name exe otherwise.
const (
	workerName  = "portal-lb"
	standInName = "portal-stand-in"
)

// nameProcess gives this process a name. Without one it works as well.
func nameProcess(name string) { _ = os.WriteFile("/proc/self/comm", []byte(name), 0) }
