package engine

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// pipe is what splice(2) moves bytes through. Only directions in which bytes are under way have one.
type pipe struct{ r, w int }

const (
	// pipeSize is how much a pipe holds, if the kernel allows: it counts pages, and packets fill them only partly.
	pipeSize = 1 << 20
	// mostPipes are kept for the next one.
	mostPipes = 64
	// mostHeld bounds what is in all pipes together: it is memory of the kernel that no limit of sockets holds for, and many receivers that take nothing
	// could fill the machine's with it. Beyond it bytes are copied, a buffer at a time.
	mostHeld = 256 << 20
)

// inPipes is how many bytes are in pipes.
var inPipes atomic.Int64

var pipes struct {
	sync.Mutex
	free []*pipe
}

// takePipe returns nil if there is none to be had: then bytes are copied.
func takePipe() *pipe {
	pipes.Lock()
	if n := len(pipes.free); n > 0 {
		p := pipes.free[n-1]
		pipes.free = pipes.free[:n-1]
		pipes.Unlock()
		return p
	}
	pipes.Unlock()
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return nil
	}
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize) // a smaller one does too
	return &pipe{fds[0], fds[1]}
}

func givePipe(p *pipe) {
	pipes.Lock()
	if len(pipes.free) < mostPipes {
		pipes.free = append(pipes.free, p)
		p = nil
	}
	pipes.Unlock()
	if p != nil {
		p.close()
	}
}

func (p *pipe) close() {
	_ = unix.Close(p.r)
	_ = unix.Close(p.w)
}
