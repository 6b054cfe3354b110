package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// link makes a hard link. The file may be in a layer below, from which it is copied.
func (u *unpacker) link(at place, base, target string) error {
	name, err := clean(target)
	if err != nil || name == "" {
		return fmt.Errorf("is a link to %s, which leads out of the image", printable(target))
	}
	dir, file := path.Split(name)
	found, err := u.resolve(strings.TrimSuffix(dir, "/"))
	if err != nil {
		return err
	}
	source := strings.TrimPrefix(found+"/"+file, "/")
	if source == strings.TrimPrefix(at.path+"/"+base, "/") {
		return errors.New("is a link to itself")
	}
	from, err := u.open(u.fd, found, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	var st unix.Stat_t
	err = unix.Fstatat(from, file, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		if err := u.copyUp(source, from, file); err != nil {
			return fmt.Errorf("is a link to %s: %w", printable(target), err)
		}
		err = unix.Fstatat(from, file, &st, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return err
	}
	if kind := st.Mode & unix.S_IFMT; kind == unix.S_IFDIR || isWhiteout(&st) {
		return fmt.Errorf("is a link to %s, which is no file", printable(target))
	}
	if err := u.clear(at, base); err != nil {
		return err
	}
	return unix.Linkat(from, file, at.fd, base, 0)
}

// copyUp takes a file from the layers below into this one.
func (u *unpacker) copyUp(name string, to int, base string) error {
	u.out.Dependent = true
	fd, st, err := u.beneath(name)
	if err != nil {
		return err
	}
	if fd < 0 {
		return errors.New("there is no such file in the image")
	}
	defer unix.Close(fd)
	h := &tar.Header{Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid), ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), Size: st.Size}
	at := place{path: strings.Trim(path.Dir("/"+name), "/"), fd: to}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if err := u.budget.take(st.Size); err != nil {
			return err
		}
		u.out.Size += st.Size
		h.Typeflag = tar.TypeReg
		f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err != nil {
			return err
		}
		defer f.Close()
		value := make([]byte, 64)
		if n, err := unix.Fgetxattr(int(f.Fd()), capability, value); err == nil {
			h.PAXRecords = map[string]string{paxAttribute + capability: string(value[:n])}
		}
		return u.makeFile(at, base, h, f)
	case unix.S_IFLNK:
		target, err := readlink(fd)
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(target, to, base); err != nil {
			return err
		}
		h.Typeflag = tar.TypeSymlink
		return u.attributes(at, base, h)
	}
	return errors.New("it is no file")
}

// whiteout hides what the layers below have.
func (u *unpacker) whiteout(at place, base string) error {
	if base == whiteoutOpaque {
		return u.setOpaque(at.path)
	}
	if strings.HasPrefix(base, whiteoutMeta) {
		return nil // other notes of one storage driver to itself
	}
	name := strings.TrimPrefix(base, whiteout)
	if name == "" || name == "." || name == ".." {
		return errors.New("hides nothing that has a name")
	}
	var st unix.Stat_t
	err := unix.Fstatat(at.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return u.setOpaque(strings.TrimPrefix(at.path+"/"+name, "/")) // the layer has a new one
	case err == nil:
		return nil
	case !errors.Is(err, unix.ENOENT):
		return err
	}
	return unix.Mknodat(at.fd, name, unix.S_IFCHR, 0)
}
