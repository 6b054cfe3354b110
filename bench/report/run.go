package report

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// Main runs a benchmark with the process' arguments until it is done or interrupted, and ends the process: with status 1 if a target was
// missed, with 2 if something could not be measured.
func Main(name string, run func(ctx context.Context, args []string) (met bool, err error)) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	met, err := run(ctx, os.Args[1:])
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(2)
	case !met:
		os.Exit(1)
	}
}

// Logf prints progress, with the time.
func Logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, time.Now().Format("15:04:05 ")+format+"\n", args...)
}

// Each does something for the numbers below n, several at a time, until one fails.
func Each(ctx context.Context, atOnce, n int, do func(i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range atOnce {
		group.Go(func() error {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := do(i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// Until tries something every now and then until it succeeds. After a while, or when ctx ends, it returns why it did not.
func Until(ctx context.Context, limit, every time.Duration, try func() error) error {
	for end := time.Now().Add(limit); ; time.Sleep(every) {
		if err := try(); err == nil || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
	}
}
