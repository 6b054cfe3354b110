package health

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
)

// A check that could not be made, since this process has no descriptors left, says nothing about the endpoint.
func TestNoDescriptors(t *testing.T) {
	c := &check{checker: New(slog.New(slog.DiscardHandler)), pool: balance.New(nil, "", time.Now), healthy: true, target: target{check: config.HealthCheck{Unhealthy: 1}}}
	c.note(fmt.Errorf("dial: %w", unix.EMFILE))
	if !c.healthy {
		t.Error("the endpoint counts as unhealthy")
	}
	if c.note(fmt.Errorf("dial: %w", unix.ECONNREFUSED)); c.healthy {
		t.Error("an endpoint that refuses connections counts as healthy")
	}
}
