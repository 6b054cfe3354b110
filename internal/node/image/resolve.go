package image

import (
	"errors"
	"fmt"
	"os"
	"path"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// place is a folder in the layer: as it was asked for, and as it is.
type place struct {
	asked, path string
	fd          int
}

// open opens a path that is known to have no links in it.
func (u *unpacker) open(root int, path string, flags int) (int, error) {
	if path == "" {
		path = "."
	}
	return unix.Openat2(root, path, &unix.OpenHow{
		Flags: uint64(flags | unix.O_CLOEXEC), Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
}

func (u *unpacker) leave() {
	if u.at.fd >= 0 && u.at.fd != u.fd {
		_ = unix.Close(u.at.fd)
	}
	u.at = place{fd: -1}
}

// folder finds a folder, follows links to it as a container would, and makes what is missing like the layers below have it.
func (u *unpacker) folder(asked string) (place, error) {
	if asked == "" {
		return place{fd: u.fd}, nil
	}
	if u.at.fd >= 0 && u.at.asked == asked {
		return u.at, nil
	}
	found, err := u.resolve(asked)
	if err != nil {
		return place{}, err
	}
	fd := u.fd
	if found != "" {
		if fd, err = u.open(u.fd, found, unix.O_PATH|unix.O_DIRECTORY); err != nil {
			return place{}, &os.PathError{Op: "open", Path: found, Err: err}
		}
	}
	u.leave()
	u.at = place{asked: asked, path: found, fd: fd}
	return u.at, nil
}

// maxSteps bounds what finding a layer's folders may take: links can lead a long way round, again and again.
const maxSteps = 20_000_000

func (u *unpacker) resolve(asked string) (string, error) {
	at, links := "", 0
	for todo := strings.Split(asked, "/"); len(todo) > 0; {
		if u.steps++; u.steps > maxSteps {
			return "", errors.New("its layer leads through too many folders and links")
		}
		if n := u.there(at, todo); n > 0 {
			at = below(at, todo[:n])
			todo = todo[n:]
			if strings.Count(at, "/") > maxDepth {
				return "", errors.New("its path is too long")
			}
			continue
		}
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			at = strings.Trim(path.Dir("/"+at), "/")
			continue
		}
		next := below(at, []string{part})
		if strings.Count(next, "/") > maxDepth {
			return "", errors.New("its path is too long")
		}
		target, isLink, err := u.enter(next)
		if err != nil {
			return "", err
		}
		if !isLink {
			at = next
			continue
		}
		if links++; links > maxLinks {
			return "", errors.New("there are too many symbolic links in its path")
		}
		if strings.HasPrefix(target, "/") {
			at = ""
		}
		todo = append(strings.Split(target, "/"), todo...)
		if len(todo) > 4096 {
			return "", errors.New("its path is too long")
		}
	}
	return at, nil
}

func below(at string, parts []string) string {
	return strings.TrimPrefix(at+"/"+strings.Join(parts, "/"), "/")
}

// there says how many of the parts of a path lead through folders that this layer has, without a link. Asking the kernel takes a few calls
// and no memory, where remembering all folders would take as much as the layer's author likes.
func (u *unpacker) there(at string, parts []string) int {
	plain := 0
	for plain < len(parts) && parts[plain] != "" && parts[plain] != "." && parts[plain] != ".." {
		plain++
	}
	exists := func(n int) bool {
		fd, err := u.open(u.fd, below(at, parts[:n]), unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return false
		}
		_ = unix.Close(fd)
		return true
	}
	if plain == 0 || exists(plain) {
		return plain
	}
	// If a part of the way is there, so is what leads to it.
	return sort.Search(plain-1, func(n int) bool { return !exists(n + 1) })
}

// enter makes sure that there is a folder, or says where the link leads that is there instead.
func (u *unpacker) enter(name string) (target string, isLink bool, err error) {
	fd, err := u.open(u.fd, name, unix.O_PATH|unix.O_NOFOLLOW)
	if err == nil {
		defer unix.Close(fd)
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return "", false, err
		}
		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			return "", false, nil
		case st.Mode&unix.S_IFMT == unix.S_IFLNK:
			target, err := readlink(fd)
			return target, true, err
		case !isWhiteout(&st):
			return "", false, fmt.Errorf("%s is in its path and no folder", printable(name))
		}
		// It is a new folder instead of one that is gone.
		if err := u.dir.Remove(name); err != nil {
			return "", false, err
		}
		if err := u.mkdir(name, 0o755, 0, 0); err != nil {
			return "", false, err
		}
		return "", false, u.setOpaque(name)
	}
	if !errors.Is(err, unix.ENOENT) {
		return "", false, err
	}
	u.out.Dependent = true
	fd, st, err := u.beneath(name)
	if err != nil {
		return "", false, err
	}
	if fd < 0 {
		return "", false, u.mkdir(name, 0o755, 0, 0)
	}
	defer unix.Close(fd)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "", false, u.mkdir(name, st.Mode&0o7777, int(st.Uid), int(st.Gid))
	case unix.S_IFLNK:
		target, err := readlink(fd)
		return target, true, err
	}
	return "", false, fmt.Errorf("%s is in its path and no folder", printable(name))
}

// beneath finds a path in the layers below; fd -1: it is in none.
func (u *unpacker) beneath(name string) (int, *unix.Stat_t, error) {
	for _, parent := range u.parents {
		fd, err := u.open(parent, name, unix.O_PATH|unix.O_NOFOLLOW)
		switch {
		case errors.Is(err, unix.ENOENT):
			// A layer that hides a folder hides what is in it.
			if u.hides(parent, name) {
				return -1, nil, nil
			}
			continue
		case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
			return -1, nil, nil // something else is in its path, and hides it
		case err != nil:
			return -1, nil, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			_ = unix.Close(fd)
			return -1, nil, err
		}
		if isWhiteout(&st) {
			_ = unix.Close(fd)
			return -1, nil, nil
		}
		return fd, &st, nil
	}
	return -1, nil, nil
}

// hides says whether a folder above a path is opaque in a layer.
func (u *unpacker) hides(layer int, name string) bool {
	for dir := path.Dir(name); ; dir = path.Dir(dir) {
		fd, err := u.open(layer, dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
		if err == nil {
			value := make([]byte, 8)
			n, err := unix.Fgetxattr(fd, opaque, value)
			_ = unix.Close(fd)
			if err == nil && string(value[:n]) == "y" {
				return true
			}
		}
		if dir == "." {
			return false
		}
	}
}

func isWhiteout(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 }

func readlink(fd int) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}
