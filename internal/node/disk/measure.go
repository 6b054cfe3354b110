// Package disk measures what Pods take of a node's disk, and decides who takes too much: of what they may have themselves, or of a disk
// that is nearly full. What becomes of them it does not know.
package disk

import (
	"context"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Usage is what files take.
type Usage struct {
	Bytes  int64
	Inodes int64
	// TooDeep says that folders are nested so deeply that not all was measured.
	TooDeep bool
}

// Add adds another.
func (u *Usage) Add(other Usage) {
	u.Bytes += other.Bytes
	u.Inodes += other.Inodes
	u.TooDeep = u.TooDeep || other.TooDeep
}

// Measure adds up what is below paths: the blocks that are allocated, a file with several names once, nothing of other file systems, no
// links followed. Files that appear and go meanwhile may or may not count.
func Measure(ctx context.Context, paths ...string) (Usage, error) {
	m := &meter{ctx: ctx, seen: map[[2]uint64]bool{}}
	for _, p := range paths {
		fd, err := unix.Open(p, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return m.sum, &os.PathError{Op: "measure", Path: p, Err: err}
		}
		var st unix.Stat_t
		err = unix.Fstat(fd, &st)
		_ = unix.Close(fd)
		if err != nil {
			return m.sum, err
		}
		m.add(&st)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		if err := m.folder(unix.AT_FDCWD, p, st.Dev, 0); err != nil {
			return m.sum, err
		}
	}
	return m.sum, nil
}

// maxDepth bounds what is open at a time.
const maxDepth = 500

type meter struct {
	ctx  context.Context
	sum  Usage
	seen map[[2]uint64]bool
}

func (m *meter) add(st *unix.Stat_t) {
	if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		id := [2]uint64{uint64(st.Dev), st.Ino}
		if m.seen[id] {
			return
		}
		m.seen[id] = true
	}
	m.sum.Bytes += st.Blocks * 512
	m.sum.Inodes++
}

// folder adds what is in a folder. Its files are being changed by containers: nothing is followed, and what is gone does not count.
func (m *meter) folder(at int, name string, dev uint64, depth int) error {
	if err := m.ctx.Err(); err != nil {
		return err
	}
	if depth > maxDepth {
		m.sum.TooDeep = true
		return nil
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	for {
		names, err := f.Readdirnames(256)
		for _, n := range names {
			var st unix.Stat_t
			if err := unix.Fstatat(fd, n, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || st.Dev != dev {
				continue
			}
			m.add(&st)
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				if err := m.folder(fd, n, dev, depth+1); err != nil {
					return err
				}
			}
		}
		if errors.Is(err, io.EOF) || len(names) == 0 {
			return nil
		}
		if err != nil {
			return nil
		}
	}
}
