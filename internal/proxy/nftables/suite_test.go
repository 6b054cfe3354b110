package nftables

import (
	"testing"

	"portal/internal/proxy/backend"
	"portal/internal/proxy/backend/backendtest"
)

func TestSuite(t *testing.T) {
	backendtest.Run(t, func() backend.Mode { return New(Options{}) }, backendtest.Options{DropsUnallocated: true})
}
