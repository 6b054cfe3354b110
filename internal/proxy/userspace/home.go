package userspace

import (
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// home is the network namespace that the mode was opened in. Sockets belong to the namespace of the thread that makes
// them, and connections to endpoints are made by whichever thread is free.
type home struct{ ns *os.File } // nil: that of all threads

// here returns the namespace of the calling thread.
func here() (home, error) {
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return home{}, err
	}
	var mine unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &mine); err != nil {
		f.Close()
		return home{}, err
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	for _, task := range tasks {
		var other unix.Stat_t
		if unix.Stat(task, &other) == nil && other.Ino != mine.Ino {
			return home{f}, nil
		}
	}
	f.Close()
	return home{}, err
}

// do calls f in the namespace. Where threads are in several, it takes one that ends afterwards.
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
