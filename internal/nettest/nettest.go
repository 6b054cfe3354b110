// Package nettest has network namespaces, free ports and a shortage of descriptors for tests. It knows nothing of what is tested.
package nettest

import (
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// InNamespace runs a test in a network namespace of its own. The thread is never given back: it ends with the test, and takes the namespace
// with it.
func InNamespace(t testing.TB, test func()) {
	t.Helper()
	needRoot(t)
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			defer close(done) // also if the test ends with FailNow
			test()
			return
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
}

// Namespace is a network namespace that lasts as long as the test.
type Namespace struct{ Handle netns.NsHandle }

// NewNamespace makes a network namespace in which all interfaces are down.
func NewNamespace(t testing.TB) *Namespace {
	t.Helper()
	needRoot(t)
	n := &Namespace{}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		var err error
		n.Handle, err = netns.New()
		ready <- err
	}()
	if err := <-ready; err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { _ = n.Handle.Close() })
	return n
}

// Do runs something in the namespace. A thread that can't come back is not used again.
func (n *Namespace) Do(f func()) {
	runtime.LockOSThread()
	own, err := netns.Get()
	if err != nil {
		panic(err)
	}
	defer own.Close()
	if err := netns.Set(n.Handle); err != nil {
		panic(err)
	}
	defer func() {
		if err := netns.Set(own); err != nil {
			panic(err)
		}
		runtime.UnlockOSThread()
	}()
	f()
}

// given are the addresses that UnusedPort has returned: the kernel may choose one again.
var given sync.Map

// UnusedPort is an address of loopback at which nobody listens.
func UnusedPort(t testing.TB) netip.AddrPort {
	t.Helper()
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		at := l.Addr().(*net.TCPAddr).AddrPort()
		_ = l.Close()
		if _, again := given.LoadOrStore(at, true); !again {
			return at
		}
	}
}

// Exhaust takes all descriptors of the process until release is called.
func Exhaust(tb testing.TB) (release func()) {
	tb.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		tb.Fatal(err)
	}
	few := before
	few.Cur = min(few.Cur, 512)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		tb.Fatal(err)
	}
	var taken []int
	for {
		fd, err := unix.Dup(0)
		if err == unix.EMFILE {
			break
		}
		if err != nil {
			tb.Fatal(err)
		}
		taken = append(taken, fd)
	}
	release = sync.OnceFunc(func() {
		for _, fd := range taken {
			unix.Close(fd)
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			tb.Error(err)
		}
	})
	tb.Cleanup(release)
	return release
}
