package shim

import (
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLargePackets: what does not fit is an error, not half of it, and errors are made to fit.
func TestLargePackets(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	c := &conn{fd: pair[0]}
	long := errors.New(strings.Repeat("\x01é", 100_000))
	var got Answer
	c.answer(Answer{Error: short(long)})
	if _, err := receive(pair[1], &got); err != nil || len(got.Error) < maxError/2 || len(got.Error) > maxError+len("…") {
		t.Errorf("%d bytes, %v", len(got.Error), err)
	}
	c.answer(Answer{Error: strings.Repeat("x", 2*maxPacket)})
	if _, err := receive(pair[1], &got); err == nil || !strings.Contains(err.Error(), "packet of more than") {
		t.Errorf("half of a packet was taken: %v", err)
	}
}

// TestDialEnds: a shim that accepts nothing holds nobody up.
func TestDialEnds(t *testing.T) {
	dir := t.TempDir()
	if _, err := Dial(dir); !errors.Is(err, unix.ENOENT) {
		t.Errorf("no socket: %v", err)
	}
	fd, err := listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		begin := time.Now()
		client, err := Dial(dir)
		if err == nil {
			defer client.Release()
			continue
		}
		if took := time.Since(begin); !errors.Is(err, unix.EAGAIN) || took > dialTimeout+2*time.Second {
			t.Errorf("after %s: %v", took, err)
		}
		_ = unix.Close(fd)
		if _, err := Dial(dir); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("nobody listens: %v", err)
		}
		return
	}
	t.Error("its queue has no end")
}
