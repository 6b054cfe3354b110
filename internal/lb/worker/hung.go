package worker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A worker can hang: stopped by a signal or a debugger, frozen with its control group, or by a mistake of its own. Its sockets are still there, so the kernel
// goes on accepting connections that nobody serves, and another worker can't take over from it. Whoever gets no answer for long ends it.

const (
	// killPatience is how long a killed process may take to be gone.
	killPatience = 10 * time.Second
	// killPause is between two looks whether it is.
	killPause = 100 * time.Millisecond
)

// unanswered says whether a request failed because the worker did not answer in time.
func unanswered(err error) bool { return errors.Is(err, context.DeadlineExceeded) }

// Unanswered says whether a call failed because the worker did not answer in time, although its caller had not given up. Then Close, and Ensure replaces the
// worker if it still does not answer.
func Unanswered(ctx context.Context, err error) bool { return unanswered(err) && ctx.Err() == nil }

// Alive asks the worker whether it still does anything, and waits for an answer half as long as Ensure would.
func (c *Client) Alive(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, c.patience/2)
	defer cancel()
	return c.do(asking, "GET", "/alive", nil, nil)
}

// kill ends the worker of the folder with SIGKILL, and returns when it is gone. No worker is no error.
func (d *folder) kill() (pid int, err error) {
	pid, err = d.listening()
	if pid == 0 {
		return 0, err
	}
	if pid == os.Getpid() {
		return pid, errors.New("this process itself listens there")
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return pid, nil
	}
	if err != nil {
		return pid, os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(fd)
	// The number may have become that of another process meanwhile. If the same one still listens now, it is the one that was opened.
	switch again, err := d.listening(); {
	case err != nil:
		return pid, err
	case again != pid:
		return pid, nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return pid, os.NewSyscallError("pidfd_send_signal", err)
	}
	for end := time.Now().Add(killPatience); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(killPause.Milliseconds()))
		switch {
		case n > 0:
			return pid, nil // its sockets are closed before
		case err != nil && !errors.Is(err, unix.EINTR):
			return pid, os.NewSyscallError("poll", err)
		case time.Now().After(end):
			return pid, fmt.Errorf("process %d was killed and is still there after %v", pid, killPatience)
		}
	}
}

// listening is the process that listens on the control socket; 0: none.
func (d *folder) listening() (pid int, err error) {
	conn, err := net.DialTimeout("unix", d.name(controlSocket), time.Second)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return 0, nil
	case err != nil:
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if failed != nil {
		return 0, os.NewSyscallError("getsockopt", failed)
	}
	if peer.Pid <= 1 {
		return 0, fmt.Errorf("the process that listens in %s can't be seen from here", d.path)
	}
	return int(peer.Pid), nil
}
