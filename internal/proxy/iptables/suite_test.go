package iptables

import (
	"testing"
	"time"

	"portal/internal/proxy/backend"
	"portal/internal/proxy/backend/backendtest"
)

func TestSuite(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			backendtest.Run(t, func() backend.Mode { return New(Options{Variant: v}) },
				backendtest.Options{PassesOtherPorts: true, PassesFromNode: true, RefusesFirst: true, Loopback: true, Patience: 2 * time.Second})
		})
	}
}
