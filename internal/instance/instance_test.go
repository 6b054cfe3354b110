package instance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// name is one that no other test on this machine uses.
func name(t *testing.T) string { return fmt.Sprintf("portal-test-%d-%s", os.Getpid(), t.Name()) }

func TestSecondIsToldWhoHoldsTheLock(t *testing.T) {
	first, err := Acquire(t.Context(), name(t), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Release()
	_, err = Acquire(t.Context(), name(t), 0, nil)
	var held *HeldError
	if !errors.As(err, &held) || held.Holder.PID != os.Getpid() {
		t.Fatalf("second Acquire: %v; want a HeldError with pid %d", err, os.Getpid())
	}
	if want := fmt.Sprintf("pid %d", os.Getpid()); !strings.Contains(err.Error(), want) {
		t.Errorf("the error does not name the holder's %s: %v", want, err)
	}
}

func TestWaitsForAnEarlierProcessToEnd(t *testing.T) {
	first, err := Acquire(t.Context(), name(t), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	told := 0
	second, err := Acquire(t.Context(), name(t), time.Minute, func(h Holder) {
		told++
		first.Release()
	})
	if err != nil {
		t.Fatal(err)
	}
	second.Release()
	if told != 1 {
		t.Errorf("waiting was called %d times; want once", told)
	}
}

func TestStopsWaitingWithTheContext(t *testing.T) {
	first, err := Acquire(t.Context(), name(t), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Release()
	ctx, cancel := context.WithCancel(t.Context())
	if _, err = Acquire(ctx, name(t), time.Minute, func(Holder) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("Acquire: %v; want context.Canceled", err)
	}
}

// TestHelper is no test: it holds a lock in a process of its own until its standard input ends.
func TestHelper(t *testing.T) {
	lock := os.Getenv("PORTAL_TEST_LOCK")
	if lock == "" {
		return
	}
	if _, err := Acquire(t.Context(), lock, 0, nil); err != nil {
		t.Fatal(err)
	}
	fmt.Println("holding")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// holdElsewhere holds the lock in another process.
func holdElsewhere(t *testing.T, attr *syscall.SysProcAttr) (kill func(), pid int) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestHelper$", "-test.v")
	cmd.Env = append(os.Environ(), "PORTAL_TEST_LOCK="+name(t))
	cmd.SysProcAttr = attr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = func() { _ = cmd.Process.Kill(); in.Close(); _ = cmd.Wait() }
	t.Cleanup(kill)
	buf, text := make([]byte, 1024), ""
	for !strings.Contains(text, "holding") {
		n, err := out.Read(buf)
		text += string(buf[:n])
		if err != nil {
			t.Fatalf("the helper ended: %s", text)
		}
	}
	return kill, cmd.Process.Pid
}

func TestAKilledHolderLeavesNothing(t *testing.T) {
	kill, pid := holdElsewhere(t, nil)
	_, err := Acquire(t.Context(), name(t), 0, nil)
	var held *HeldError
	if !errors.As(err, &held) || held.Holder.PID != pid {
		t.Fatalf("Acquire: %v; want held by pid %d", err, pid)
	}
	kill()
	l, err := Acquire(t.Context(), name(t), 10*time.Second, nil)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
}

func TestOtherUsersCannotKeepRootOut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	holdElsewhere(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	l, err := Acquire(t.Context(), name(t), 0, nil)
	if err != nil {
		t.Fatalf("a lock held by nobody keeps root out: %v", err)
	}
	l.Release()
}

func TestEachNetworkNamespaceHasItsOwn(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	here, err := Acquire(t.Context(), name(t), 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer here.Release()
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread, which is in another namespace, ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			var l *Lock
			if l, err = Acquire(t.Context(), name(t), 0, nil); err == nil {
				l.Release()
			}
		}
		failed <- err
	}()
	if err := <-failed; err != nil {
		t.Errorf("another network namespace: %v", err)
	}
}
