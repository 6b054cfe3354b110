package userspace

import (
	"math"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"portal/internal/plan"
)

// files bounds how many descriptors something uses.
type files struct {
	most int64
	used atomic.Int64
}

// take says whether so many more may be used; give returns them.
func (f *files) take(n int64) bool {
	if f.used.Add(n) <= f.most {
		return true
	}
	f.give(n)
	return false
}

func (f *files) give(n int64) { f.used.Add(-n) }

// linkFiles and pipeFiles are how many a connection and a pipe use.
const linkFiles, pipeFiles = 2, 2

// fitDescriptors bounds what connections, pipes and UDP sessions use, so that the rest of the process has the other descriptors. Without a
// share, only those of sessions are bounded.
func (s *server) fitDescriptors() {
	s.linkFiles.most, s.pipeFiles.most, s.mostSessions = math.MaxInt64, math.MaxInt64, math.MaxInt
	if s.FileShare == 0 {
		return
	}
	sockets := int64(len(families)) * int64(plan.Origins)
	left := max(0, fileLimit()/int64(s.FileShare)-3*sockets-2*int64(runtime.GOMAXPROCS(0))) // TCP, UDP and conntrack; loops
	s.linkFiles.most, s.pipeFiles.most = max(left/2, 4*linkFiles), max(left/4, 2*pipeFiles)
	s.mostSessions = int(max(left/4/sockets, 1))
}

// fileLimit is how many descriptors the process may have.
func fileLimit() int64 {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 1 << 20
	}
	return int64(min(limit.Cur, 1<<30))
}
