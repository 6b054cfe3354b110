package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"portal/internal/lb/standin"
	"portal/internal/nettest"
)

// wantProcess checks what ps shows of a process: its name, and how its command line begins.
func wantProcess(t *testing.T, pid int, name, command string) {
	t.Helper()
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		t.Fatal(err)
	}
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(comm)); got != name {
		t.Errorf("process %d has the name %q, want %q", pid, got, name)
	}
	if got := strings.ReplaceAll(string(line), "\x00", " "); !strings.HasPrefix(got, command) {
		t.Errorf("process %d has the command line %q, want %q", pid, got, command)
	}
}

// TestStandInName: the process that stands in says in ps what it is.
func TestStandInName(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("answering for addresses needs root")
	}
	t.Setenv(asPortal, "1")
	dir := filepath.Join(t.TempDir(), "lb")
	nettest.InNamespace(t, func() {
		out := (&balancerOptions{l2OnStop: onStopKeep, balancingOptions: balancingOptions{dir: dir}}).stop(t.Context(), nil)
		if err := out.StandIn([]netip.Addr{netip.MustParseAddr("192.0.2.1")}, time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		wantProcess(t, processOf(t, dir), standInName, "portal lb stand-in --dir "+dir)
		if err := standin.End(t.Context(), dir); err != nil {
			t.Error(err)
		}
	})
}

// processOf is the process, other than this one, that has a folder in its command line.
func processOf(t *testing.T, dir string) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if line, _ := os.ReadFile(f); pid != os.Getpid() && strings.Contains(string(line), "\x00"+dir+"\x00") {
			return pid
		}
	}
	t.Fatalf("no process has %s in its command line", dir)
	return 0
}
