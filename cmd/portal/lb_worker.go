package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"portal/internal/lb/capture"
	"portal/internal/lb/engine"
	"portal/internal/lb/process"
	"portal/internal/lb/worker"
)

// newLBWorkerCommand runs the process that carries connections for `portal lb`, which starts it. People have no need for it.
func newLBWorkerCommand() *cobra.Command {
	var dir, identity string
	var transparent bool
	var drain, handoverDrain time.Duration
	var logs logOptions
	cmd := &cobra.Command{
		Use:    "worker",
		Short:  "Carry connections for portal lb, which starts this",
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return usageError{errors.New("--dir: a folder is needed")}
			}
			log, err := logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo)
			if err != nil {
				return usageError{err}
			}
			nameProcess(workerName)
			if identity == "" {
				identity = worker.Identity(version)
			}
			options := worker.ServeOptions{
				Dir: dir, Identity: identity, Drain: drain, HandoverDrain: handoverDrain, Ready: worker.Ready, Log: log,
				Engine: engine.Options{Transparent: transparent},
			}
			err = serveWorker(cmd.Context(), options)
			if _, there := os.Stat(filepath.Join(dir, "control")); transparent && there != nil {
				// No other process has taken over: what leads here must not outlive this one.
				err = errors.Join(err, capture.Remove())
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&dir, "dir", "", "folder of the process's sockets")
	f.StringVar(&identity, "identity", "", "identifies this binary; default: its version and file")
	f.BoolVar(&transparent, "transparent", true, "listen at addresses that no interface has")
	f.DurationVar(&drain, "drain-timeout", worker.DefaultDrain, "how long connections may last after the process was asked to stop")
	f.DurationVar(&handoverDrain, "handover-drain-timeout", worker.DefaultHandoverDrain, "how long connections may last after another process has taken over")
	logs.addFlags(f)
	return cmd
}

// serveWorker runs the engine with HTTP and access logs.
func serveWorker(ctx context.Context, o worker.ServeOptions) error {
	parts := process.New(o.Log)
	parts.Into(&o.Engine)
	o.Collectors = parts.Collectors()
	var wg sync.WaitGroup
	defer wg.Wait()
	running, stop := context.WithCancel(context.WithoutCancel(ctx)) // it lasts as long as connections do
	defer stop()
	wg.Go(func() { parts.Run(running) })
	return worker.Serve(ctx, o)
}
