package node

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"portal/internal/node/disk"
	"portal/internal/node/image"
)

// TestFullDisk: while the disk is full and no Pod is to blame, that is said once.
func TestFullDisk(t *testing.T) {
	var log bytes.Buffer
	a := &Agent{
		Options: Options{DataDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil)), Eviction: Eviction{Thresholds: disk.Thresholds{Bytes: disk.Amount{Number: 1 << 62}}}},
		images:  image.NewStore(image.Options{}), nodeChanged: make(chan struct{}, 1),
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*freeInterval+freeInterval/2)
	defer cancel()
	ended := make(chan struct{})
	go func() { defer close(ended); a.guardDisk(ctx) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Fatal("it does not end")
	}
	if n := strings.Count(log.String(), "no Pod is to be evicted"); n != 1 {
		t.Errorf("it is said %d times:\n%s", n, log.String())
	}
}
