package userspace

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// home is the network namespace that the mode was opened in. Sockets belong to the namespace of the thread that makes
// them, and connections to endpoints are made by whichever thread is free.
type home struct{ ns *os.File } // nil: the process' own

// here returns the namespace of the calling thread.
func here() (home, error) {
	var own, mine unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &own); err != nil {
		return home{}, err
	}
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return home{}, err
	}
	if err := unix.Fstat(int(f.Fd()), &mine); err != nil || mine.Ino == own.Ino {
		f.Close()
		return home{}, err
	}
	return home{f}, nil
}

// do calls f in the namespace. In a strange one it takes a thread that ends afterwards.
func (h home) do(f func() error) error {
	if h.ns == nil {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(int(h.ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

func (h home) close() {
	if h.ns != nil {
		h.ns.Close()
	}
}
