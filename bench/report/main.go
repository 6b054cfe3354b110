package report

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
)

// Main runs a benchmark in a folder of its own, until it ends or is interrupted, and exits with status 1 if it failed.
func Main(name string, run func(ctx context.Context, dir string) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	dir, err := os.MkdirTemp("", "bench-"+name)
	if err == nil {
		err = errors.Join(run(ctx, dir), os.RemoveAll(dir))
	}
	stop()
	if err != nil {
		log.Fatal(err)
	}
}
