package userspace

import (
	"cmp"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// pipe is what data waits in on its way from one socket to another, without leaving the kernel.
type pipe struct{ r, w int }

// pipeSize is how much one may hold, moved at once where both sides are fast.
const pipeSize = 256 << 10

// pipes are those that no connection uses at the moment. A connection holds one only while data is on its way, so that
// thousands of silent connections cost none.
type pipes chan *pipe

func newPipes() pipes { return make(pipes, 64) }

func (idle pipes) take() (*pipe, error) {
	select {
	case p := <-idle:
		return p, nil
	default:
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	// Where the system's limit is smaller, the default does.
	unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize)
	return &pipe{fds[0], fds[1]}, nil
}

// give hands an empty pipe on.
func (idle pipes) give(p *pipe) {
	select {
	case idle <- p:
	default:
		p.close()
	}
}

// close frees the pipes, once no connection is left.
func (idle pipes) close() {
	for {
		select {
		case p := <-idle:
			p.close()
		default:
			return
		}
	}
}

func (p *pipe) close() {
	unix.Close(p.r)
	unix.Close(p.w)
}

// end is one side of a connection.
type end interface {
	syscall.Conn
	CloseWrite() error
	SetLinger(int) error
	Close() error
}

// relay joins two connections until both directions have ended. An end of data is passed on alone, so that the other
// direction goes on; an error ends both, and is passed on as a reset.
func (idle pipes) relay(a, b end) {
	var done sync.WaitGroup
	done.Go(func() { idle.oneWay(a, b) })
	idle.oneWay(b, a)
	done.Wait()
}

func (idle pipes) oneWay(dst, src end) {
	if err := idle.pump(dst, src); err != nil {
		for _, c := range []end{src, dst} {
			c.SetLinger(0)
			c.Close()
		}
		return
	}
	dst.CloseWrite()
}

// pump moves data until its end. It reads no more than the other side takes.
func (idle pipes) pump(dst, src end) error {
	in, err := src.SyscallConn()
	if err != nil {
		return err
	}
	out, err := dst.SyscallConn()
	if err != nil {
		return err
	}
	m := &mover{idle: idle}
	fill, drain := m.fill, m.drain
	for {
		if err := in.Read(fill); err != nil || m.err != nil {
			m.drop()
			return cmp.Or(err, m.err)
		}
		if m.held == 0 {
			m.drop()
			return nil
		}
		for m.held > 0 {
			if err := out.Write(drain); err != nil || m.err != nil {
				m.drop()
				return cmp.Or(err, m.err)
			}
		}
		m.drop()
	}
}

// mover is the state of one direction.
type mover struct {
	idle pipes
	pipe *pipe
	held int
	err  error
}

// drop lets go of a pipe, and closes it where data is left in it.
func (m *mover) drop() {
	switch {
	case m.pipe == nil:
	case m.held > 0:
		m.pipe.close()
	default:
		m.idle.give(m.pipe)
	}
	m.pipe = nil
}

// fill moves data from a socket to the pipe; false: there is none yet.
func (m *mover) fill(fd uintptr) bool {
	if m.pipe == nil {
		if m.pipe, m.err = m.idle.take(); m.err != nil {
			return true
		}
	}
	m.held, m.err = splice(int(fd), m.pipe.w, pipeSize)
	if m.err == unix.EAGAIN {
		m.err, m.held = nil, 0
		m.drop()
		return false
	}
	return true
}

// drain moves data from the pipe to a socket; false: it takes none at the moment.
func (m *mover) drain(fd uintptr) bool {
	var n int
	n, m.err = splice(m.pipe.r, int(fd), m.held)
	if m.err == unix.EAGAIN {
		m.err = nil
		return false
	}
	m.held -= n
	if n == 0 && m.err == nil {
		m.err = syscall.EPIPE
	}
	return true
}

func splice(from, to, n int) (int, error) {
	for {
		moved, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		if err != unix.EINTR {
			return max(int(moved), 0), err
		}
	}
}
