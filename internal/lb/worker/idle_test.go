package worker

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
)

// idleMost is what an idle connection may cost the worker, in bytes.
const idleMost = 12 << 10

// TestIdleConnections: 10,000 connections that have spoken and are idle cost little. Where fewer files can be open, there are fewer.
func TestIdleConnections(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	// Each has two ends in the worker and two here.
	count := min(10_000, (int(limit.Cur)-300)/2)
	if count < 1000 {
		t.Fatalf("only %d files can be open", limit.Cur)
	}
	dir, at := folderFor(t), unused(t)
	c := ensure(t, dir, "0")
	cfg := configOf(at, echo(t))
	cfg.Listeners[0].Limits.ClientConnections = count
	cfg.Listeners[0].IdleTimeout = time.Hour
	if err := c.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	pid := stateOf(t, c).PID
	open := func(n int) {
		buf := make([]byte, 1<<10)
		for range n {
			conn, err := net.Dial("tcp", at.String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close() })
			_ = conn.SetDeadline(time.Now().Add(patience))
			if _, err := conn.Write(buf); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(conn, buf); err != nil {
				t.Fatal(err)
			}
		}
	}
	open(100) // what is made once is there
	before := resident(t, pid)
	open(count - 100)
	if s := stateOf(t, c); s.Connections != count {
		t.Fatalf("%d connections, want %d", s.Connections, count)
	}
	each := (resident(t, pid) - before) / (count - 100)
	t.Logf("%d idle connections cost %d bytes each; the process has %d kB", count, each, resident(t, pid)>>10)
	if each > idleMost {
		t.Errorf("an idle connection costs %d bytes, want at most %d", each, idleMost)
	}
	if config.DefaultConnections < 10_000 {
		t.Error("a listener can't have 10,000 connections by default")
	}
}

// resident is the memory that a process has, in bytes.
func resident(t *testing.T, pid int) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}
