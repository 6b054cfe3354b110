package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
	"portal/internal/lb/worker"
	"portal/internal/nettest"
)

// asPortal has this test's binary be portal: processes that it starts from itself are then those that portal starts.
const asPortal = "PORTAL_TEST_AS_PORTAL"

func TestMain(m *testing.M) {
	if os.Getenv(asPortal) != "" {
		main()
	}
	os.Exit(m.Run())
}

// hang stops a process as a debugger would.
func hang(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !ended(pid) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	for end := time.Now().Add(time.Minute); !strings.HasPrefix(processState(pid), "T"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the process does not stop")
		}
	}
}

// processState is the letter for what a process does, and what follows it; empty: there is none.
func processState(pid int) string {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(data), ") ")
	return rest
}

func ended(pid int) bool {
	state := processState(pid)
	return state == "" || strings.HasPrefix(state, "Z")
}

// TestHungWorker: a balancing process that hangs is replaced while its agent runs, whether or not there is a new configuration, and ended by portal lb --cleanup.
func TestHungWorker(t *testing.T) {
	t.Setenv(asPortal, "1")
	dir := filepath.Join(t.TempDir(), "lb")
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("the process's log:\n%s", log)
		}
	})
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	// In a namespace of its own, because the end removes rules.
	nettest.InNamespace(t, func() {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		o, patient := balancingOptions{dir: dir, patience: 4 * time.Second}, balancingOptions{dir: dir}
		e := &outside{options: o.worker(log)}
		pid := func() int {
			t.Helper()
			client, err := worker.Ensure(ctx, patient.worker(log))
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			s, err := client.State(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return s.PID
		}
		// What a pass does, again and again.
		apply := func(c config.Config) {
			t.Helper()
			for err := e.Apply(ctx, c); err != nil; err = e.Apply(ctx, c) {
				if ctx.Err() != nil {
					t.Fatal(err)
				}
			}
		}
		first := config.Config{Zone: "a"}
		apply(first)
		was := pid()
		wantProcess(t, was, workerName, "portal lb worker --dir "+dir)
		hang(t, was)
		// Nothing is new: it is noticed all the same.
		if err := e.Apply(ctx, first); !worker.Unanswered(ctx, err) {
			t.Errorf("of a process that hangs: %v", err)
		}
		apply(first)
		now := pid()
		if now == was || !ended(was) {
			t.Errorf("it is process %d, was %d, which has ended: %v", now, was, ended(was))
		}
		hang(t, now)
		e.client.Close()
		err := o.cleanUp(ctx, log)
		for worker.Unanswered(ctx, err) { // by the one that took the place of the first, because this machine is slow
			err = o.cleanUp(ctx, log)
		}
		if err != nil {
			t.Errorf("clean-up: %v", err)
		}
		if _, err := os.Stat(filepath.Join(dir, "control")); err == nil || !ended(now) {
			t.Errorf("after the clean-up process %d has ended: %v, its socket: %v", now, ended(now), err)
		}
	})
}
