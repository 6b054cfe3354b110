package ipvs

import (
	"os"
	"testing"

	"portal/internal/proxy/backend"
	"portal/internal/proxy/backend/backendtest"
)

// TestSuite is run by package test/vm in a machine that has IPVS, where most test machines have none.
func TestSuite(t *testing.T) {
	if err := hasIPVS(); err != nil && os.Getenv("PORTAL_VM") == "" {
		t.Skipf("%v; test/vm runs this in a kernel that has it", err)
	}
	backendtest.Run(t, func() backend.Mode { return New(Options{}) }, backendtest.Options{ServiceSource: true, NotRandom: true})
}
