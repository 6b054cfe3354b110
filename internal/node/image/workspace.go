package image

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"portal/internal/rmtree"
)

// workspace is a folder for what is not complete. It is locked while its process lives: what a killed one left is removed by the next.
type workspace struct {
	dir  string
	lock *os.File
}

const workspaceLock = "lock"

// workspace makes one, after it removed those that were left.
func (s *Store) workspace(ctx context.Context) (*workspace, error) {
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	s.sweep()
	dir, err := os.MkdirTemp(s.temporary(), "")
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, workspaceLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, err
	}
	return &workspace{dir: dir, lock: f}, nil
}

// sweep removes workspaces of processes that are gone. It is called with the lock.
func (s *Store) sweep() {
	list, _ := os.ReadDir(s.temporary())
	for _, e := range list {
		dir := filepath.Join(s.temporary(), e.Name())
		f, err := os.OpenFile(filepath.Join(dir, workspaceLock), os.O_RDWR, 0)
		if err == nil {
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			if err == nil {
				_ = rmtree.Remove(dir)
			}
			_ = f.Close()
			continue
		}
		if errors.Is(err, os.ErrNotExist) {
			_ = rmtree.Remove(dir)
		}
	}
	files, _ := filepath.Glob(filepath.Join(s.records(), ".new-*"))
	for _, f := range files {
		_ = os.Remove(f)
	}
}

// Clean removes what killed processes left, and layers that no image has.
func (s *Store) Clean(ctx context.Context) error {
	if _, err := os.Stat(s.Dir); s.Dir == "" || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	work, err := s.workspace(ctx)
	if err != nil {
		return err
	}
	defer work.close()
	return s.dropLayers(ctx, work)
}

// dropLayers removes layers that no image has.
func (s *Store) dropLayers(ctx context.Context, work *workspace) error {
	unlock, err := s.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	list, err := s.List()
	if err != nil {
		return err
	}
	needed := map[string]bool{}
	for _, r := range list {
		for _, l := range r.Layers {
			needed[l.Dir] = true
		}
	}
	have, err := os.ReadDir(s.layers())
	if err != nil {
		return err
	}
	for _, e := range have {
		if needed[e.Name()] || !strings.HasPrefix(e.Name(), "sha256-") {
			continue
		}
		// Out of the way at once, and removed without the lock.
		if err := os.Rename(s.layer(e.Name()), filepath.Join(work.dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (w *workspace) close() {
	_ = rmtree.Remove(w.dir)
	_ = w.lock.Close()
}

// copy writes a stream, decompressed, to a file that can be read at any place.
func (w *workspace) copy(r io.Reader, most int64) (*os.File, error) {
	plain, err := decompress(r)
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	f, err := os.CreateTemp(w.dir, "archive-*")
	if err != nil {
		return nil, err
	}
	if _, err := io.Copy(f, &bounded{plain, most}); err != nil {
		_ = f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// syncFolder has a folder's file system write what it has to the disk, so that a layer that is there is there as a whole.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}
