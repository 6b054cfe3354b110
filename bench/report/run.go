package report

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
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
