// Package rmtree removes folders that somebody else has filled: however deeply they are nested and however much is in them, it takes a few
// descriptors and little memory, and follows no links. It knows nothing of whose they were.
package rmtree

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// maxDepth is how deep it goes. What is below is moved up first: os.RemoveAll would open a descriptor for each level, and a process can
	// make more levels than another can open.
	maxDepth = 32
	// batch is how many names are read at a time.
	batch = 1024
)

// Remove removes a file or folder with all that is in it. What is not there is no error.
func Remove(path string) error {
	err := unix.Unlink(path)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	// Linux says EISDIR, POSIX EPERM.
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	fd, err := openFolder(unix.AT_FDCWD, path)
	if err != nil {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	r := &remover{top: fd}
	err = r.empty(fd, 0)
	_ = unix.Close(fd)
	if err == nil {
		err = unix.Rmdir(path)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}

func openFolder(at int, name string) (int, error) {
	return unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

type remover struct {
	top   int
	moved int
}

// empty removes what is in a folder.
func (r *remover) empty(fd, depth int) error {
	// A descriptor of its own for reading names: it is closed with the file.
	own, err := openFolder(fd, ".")
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(own), "folder")
	defer f.Close()
	for {
		// From the start each time: what has gone may have moved the rest.
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		names, err := f.Readdirnames(batch)
		if errors.Is(err, io.EOF) || err == nil && len(names) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		removed := 0
		var first error
		for _, name := range names {
			switch err := r.remove(fd, name, depth); {
			case err == nil:
				removed++
			case first == nil:
				first = err
			}
		}
		if removed == 0 {
			return first
		}
	}
}

// remove removes one entry of a folder, or moves it up.
func (r *remover) remove(at int, name string, depth int) error {
	err := unix.Unlinkat(at, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	if depth >= maxDepth {
		return r.raise(at, name)
	}
	fd, err := openFolder(at, name)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return err
	}
	err = r.empty(fd, depth+1)
	_ = unix.Close(fd)
	if err != nil {
		return err
	}
	return unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
}

// raise moves a folder to the top, where its turn comes.
func (r *remover) raise(at int, name string) error {
	if unix.Unlinkat(at, name, unix.AT_REMOVEDIR) == nil {
		return nil
	}
	for {
		err := unix.Renameat2(at, name, r.top, fmt.Sprintf(".removed-%d", r.moved), unix.RENAME_NOREPLACE)
		r.moved++
		if !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
}
