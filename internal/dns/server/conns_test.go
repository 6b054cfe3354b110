package server

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// faulty is a listener that fails some times before it accepts.
type faulty struct {
	net.Listener
	times int
	err   error
}

func (f *faulty) Accept() (net.Conn, error) {
	if f.times--; f.times >= 0 {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", f.err)}
	}
	return f.Listener.Accept()
}

// TestAcceptErrors: a listener waits after each failure, twice as long as before, and ends only when it is closed.
func TestAcceptErrors(t *testing.T) {
	for _, err := range []error{unix.EMFILE, unix.ENOBUFS, unix.EPERM} {
		real, e := net.Listen("tcp", "127.0.0.1:0")
		if e != nil {
			t.Fatal(e)
		}
		f := &faulty{real, 4, err}
		l := limitConns(f, 1, prometheus.NewCounter(prometheus.CounterOpts{}), slog.New(slog.DiscardHandler))
		client, e := net.Dial("tcp", real.Addr().String())
		if e != nil {
			t.Fatal(e)
		}
		began := time.Now()
		c, e := l.Accept()
		if e != nil {
			t.Fatalf("%v ended the listener: %v", err, e)
		}
		if took := time.Since(began); took < (1+2+4+8)*minAcceptNap {
			t.Errorf("%v: four failures in %v", err, took)
		}
		c.Close()
		client.Close()
		f.times = 20 // of which the last naps are of a second each
		time.AfterFunc(20*time.Millisecond, func() { l.Close() })
		began = time.Now()
		if _, e := l.Accept(); !errors.Is(e, net.ErrClosed) {
			t.Errorf("%v: closed, and got %v", err, e)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%v: closed, and ended after %v", err, took)
		}
	}
}
