package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"testing"
)

// TestInterrupted: a person at the keyboard means the end, a service manager perhaps a restart.
func TestInterrupted(t *testing.T) {
	for s, want := range map[syscall.Signal]bool{syscall.SIGINT: true, syscall.SIGTERM: false, syscall.SIGHUP: false} {
		ctx, stop := signal.NotifyContext(t.Context(), s)
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Fatal(err)
		}
		<-ctx.Done()
		// Parts run with contexts of their own.
		part, cancel := context.WithCancelCause(ctx)
		if got := interrupted(part); got != want {
			t.Errorf("%v: interrupted: %v; the cause is %v", s, got, context.Cause(part))
		}
		cancel(nil)
		stop()
	}
	failed, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("something else"))
	if interrupted(failed) || interrupted(t.Context()) {
		t.Error("nobody interrupted it")
	}
}

// TestStop: what a machine does with its addresses when it ends depends on the flag, and on whether it is for trying only.
func TestStop(t *testing.T) {
	for _, c := range []struct {
		what      string
		onStop    string
		ephemeral bool
		keeps     bool
	}{{"default", onStopKeep, false, true}, {"release", onStopRelease, false, false}, {"portal up", onStopKeep, true, false}} {
		o := &balancerOptions{l2OnStop: c.onStop}
		o.ephemeral = c.ephemeral
		got := o.stop(t.Context(), nil)
		if keeps := got.Grace > 0 && got.StandIn != nil; keeps != c.keeps || got.Settled == nil {
			t.Errorf("%s: keeps its addresses: %v, want %v", c.what, keeps, c.keeps)
		}
	}
}
