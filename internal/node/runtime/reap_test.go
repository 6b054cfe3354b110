package runtime

import (
	"errors"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestReapTakesNoThread: a child that ends is waited for, by a goroutine that is parked until then.
func TestReapTakesNoThread(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	pid, err := syscall.ForkExec(sleep, []string{"sleep", "1000"}, &syscall.ProcAttr{Env: []string{}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		reap(pid)
		close(done)
	}()
	stacks := make([]byte, 4<<20)
	parked := func() bool {
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if head, body, _ := strings.Cut(stack, "\n"); strings.Contains(head, "IO wait") && strings.Contains(body, "runtime.reap(") {
				return true
			}
		}
		return false
	}
	for end := time.Now().Add(30 * time.Second); !parked(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Error("it is not parked")
			break
		}
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("a child that has ended is waited for")
	}
	if _, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); !errors.Is(err, unix.ECHILD) {
		t.Errorf("it is still there: %v", err)
	}
}
