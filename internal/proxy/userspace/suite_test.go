package userspace

import (
	"testing"

	"portal/internal/proxy/backend"
	"portal/internal/proxy/backend/backendtest"
)

func TestSuite(t *testing.T) {
	backendtest.Run(t, func() backend.Mode { return New(Options{}) },
		backendtest.Options{HidesSource: true, Loopback: true, RestartBreaks: true, NotRandom: true})
}

// TestPreserve: endpoints on the node see clients outside as they are.
func TestPreserve(t *testing.T) {
	backendtest.Run(t, func() backend.Mode { return New(Options{Source: Preserve}) },
		backendtest.Options{HidesSource: true, ShowsOutside: true, Loopback: true, RestartBreaks: true, NotRandom: true, Only: "routes"})
}
