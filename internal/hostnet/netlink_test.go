package hostnet

import (
	"errors"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// netlinkSockets are this process' descriptors of netlink sockets.
func netlinkSockets(t *testing.T) map[int]bool {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	out := map[int]bool{}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && domain == unix.AF_NETLINK {
			out[fd] = true
		}
	}
	return out
}

// TestNetlinkDeadline: a request on a socket that is kept fails when no answer has come for a while, and the next one can succeed.
func TestNetlinkDeadline(t *testing.T) {
	before := netlinkSockets(t)
	h, err := openNetlink(netns.None(), unix.NETLINK_ROUTE, 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	var fds []int
	for fd := range netlinkSockets(t) {
		if !before[fd] {
			fds = append(fds, fd)
		}
	}
	if len(fds) != 1 {
		t.Fatalf("%d sockets were opened", len(fds))
	}
	look := func() error {
		done := make(chan error, 1)
		go func() {
			_, err := h.LinkByIndex(1)
			done <- err
		}()
		select {
		case err := <-done:
			return err
		case <-time.After(20 * time.Second):
			return errWaits
		}
	}
	// A filter that lets nothing in: the answers are lost.
	nothing := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	if err := unix.SetsockoptSockFprog(fds[0], unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing[0]}); err != nil {
		t.Fatal(err)
	}
	if err := look(); !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("a request without an answer: %v", err)
	}
	if err := unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil {
		t.Fatal(err)
	}
	var last error
	for range 100 { // a busy machine may need more than the 50 ms
		if last = look(); last == nil {
			return
		}
	}
	t.Errorf("the requests after it: %v", last)
}

var errWaits = errors.New("it still waits")
