package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// profileTime is for how long the processor is profiled, from the start of a fill or of a fan-out.
const profileTime = 20 * time.Second

// startProfile takes a processor profile of the server; what it returns waits for it and takes one of the heap.
// It does nothing without a folder.
func (s *subject) startProfile(ctx context.Context, dir, during string) func() error {
	if dir == "" {
		return func() error { return nil }
	}
	save := func(kind string, params map[string]string) error {
		client, err := s.client()
		if err != nil {
			return err
		}
		request := client.Discovery().RESTClient().Get().AbsPath("/debug/pprof/" + kind)
		for name, value := range params {
			request = request.Param(name, value)
		}
		data, err := request.Do(ctx).Raw()
		if err != nil {
			return fmt.Errorf("profile %s: %w", kind, err)
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		name := fmt.Sprintf("%s-%s-%s.pprof", s.name, during, kind)
		return os.WriteFile(filepath.Join(dir, name), data, 0o644)
	}
	done := make(chan error, 1)
	go func() {
		done <- save("profile", map[string]string{"seconds": strconv.Itoa(int(profileTime.Seconds()))})
	}()
	return func() error {
		if err := save("heap", nil); err != nil {
			return err
		}
		if err := save("allocs", nil); err != nil {
			return err
		}
		return <-done
	}
}
