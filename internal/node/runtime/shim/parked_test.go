package shim

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestWaitingTakesNoThread: an agent waits for answers of each of its Pods, and does so without a thread for each.
func TestWaitingTakesNoThread(t *testing.T) {
	dir := t.TempDir()
	listener, err := listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(listener)
	const n = 50
	answers := make(chan error, n)
	var shims []*conn
	for range n {
		client, err := Dial(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Release()
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		shims = append(shims, &conn{fd: fd})
		go func() {
			a, _, err := client.Receive()
			if err == nil && !a.Listed {
				t.Errorf("got %+v", a)
			}
			answers <- err
		}()
	}
	stacks := make([]byte, 4<<20)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		parked := 0
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if head, body, _ := strings.Cut(stack, "\n"); strings.Contains(head, "IO wait") && strings.Contains(body, "(*Client).Receive(") {
				parked++
			}
		}
		if parked == n {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d of %d are parked", parked, n)
		}
	}
	for _, c := range shims {
		c.answer(Answer{Listed: true})
	}
	for range n {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
}

// TestClosingEndsWaiting: also when the connection is closed by who waits, nobody waits on.
func TestClosingEndsWaiting(t *testing.T) {
	dir := t.TempDir()
	listener, err := listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(listener)
	client, err := Dial(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Release()
	ended := make(chan error, 1)
	go func() {
		_, _, err := client.Receive()
		ended <- err
	}()
	client.Close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("an answer that nobody gave")
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it waits on")
	}
}
