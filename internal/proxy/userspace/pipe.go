package userspace

import "golang.org/x/sys/unix"

// pipe is what data waits in on its way from one socket to another, without leaving the kernel.
type pipe struct{ r, w int }

const (
	// pipeSize is how much one may hold, moved at once where both sides are fast.
	pipeSize = 256 << 10
	// spare is how many are kept for the next connection.
	spare = 32
)

// pipes are those that no connection uses at the moment. A connection holds one only while data is on its way, so that
// thousands of silent connections cost none.
type pipes struct {
	files *files
	idle  []*pipe
}

func (s *pipes) take() (*pipe, error) {
	if n := len(s.idle); n > 0 {
		p := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return p, nil
	}
	if !s.files.take(pipeFiles) {
		return nil, unix.EMFILE
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		s.files.give(pipeFiles)
		return nil, err
	}
	// Where the system's limit is smaller, the default does.
	unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize)
	return &pipe{fds[0], fds[1]}, nil
}

// give hands an empty pipe on.
func (s *pipes) give(p *pipe) {
	if len(s.idle) < spare {
		s.idle = append(s.idle, p)
		return
	}
	s.discard(p)
}

func (s *pipes) close() {
	for _, p := range s.idle {
		s.discard(p)
	}
	s.idle = nil
}

func (s *pipes) discard(p *pipe) {
	unix.Close(p.r)
	unix.Close(p.w)
	s.files.give(pipeFiles)
}

func splice(from, to, n int) (int, error) {
	moved, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	return max(int(moved), 0), err
}
