package report

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"k8s.io/client-go/rest"
)

// profileTime is for how long the processor is profiled.
const profileTime = 20 * time.Second

// Profile takes a processor profile of an API server; what it returns waits for it and takes profiles of the heap and of allocations. The
// files' names begin with a name. It does nothing without a folder.
func Profile(ctx context.Context, server rest.Interface, dir, name string) func() error {
	if dir == "" {
		return func() error { return nil }
	}
	save := func(kind string, params map[string]string) error {
		request := server.Get().AbsPath("/debug/pprof/" + kind)
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
		return os.WriteFile(filepath.Join(dir, name+"-"+kind+".pprof"), data, 0o644)
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
