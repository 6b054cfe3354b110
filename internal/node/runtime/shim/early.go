package shim

import "os"

// The names that the binary is run under: its argument 0.
const (
	ShimName  = "portal-shim"
	initName  = "portal-init"
	execName  = "portal-exec"
	pauseName = "portal-pause"
)

// init takes over the process if it was started as one of these. Go initialises packages in the order of their paths, each as soon
// as all that it imports has been; this package imports so little that its turn comes before that of k8s.io and nearly all else. A
// test watches over that.
func init() {
	if len(os.Args) == 0 {
		return
	}
	switch os.Args[0] {
	case ShimName:
		os.Exit(runShim(os.Args[1:]))
	case initName, execName:
		os.Exit(runStage())
	case pauseName:
		os.Exit(runPause())
	}
}
