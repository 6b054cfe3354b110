package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Budget is how much an image may still take when it is unpacked: somebody else wrote it.
type Budget struct {
	Size    int64 // bytes in files
	Entries int
}

// maxEntries are more files than any image that people use has.
const maxEntries = 2_000_000

// TooLargeError says that an image exceeds what a node accepts.
type TooLargeError struct{ What string }

func (e *TooLargeError) Error() string {
	return "the image has more than " + e.What + ", the most that this node accepts"
}

func (b *Budget) take(size int64) error {
	b.Entries--
	if b.Entries < 0 {
		return &TooLargeError{fmt.Sprintf("%d files", maxEntries)}
	}
	if size < 0 || size > b.Size {
		return &TooLargeError{"--image-max-size allows"}
	}
	b.Size -= size
	return nil
}

// Unpacked is what came out of a layer.
type Unpacked struct {
	Size int64
	// Dependent says that something was taken from the layers below: on other layers, this one is another.
	Dependent bool
	// Dropped counts device files.
	Dropped int
}

// How a layer says that something of the layers below is gone, and how overlayfs wants it.
const (
	whiteout       = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
	opaque         = "trusted.overlay.opaque"
)

// maxLinks is how many symbolic links may be in the way to one file, as in Linux.
const maxLinks = 40

// maxDepth is how deep folders may be nested: what making one costs grows with its depth.
const maxDepth = 255

// unpacker writes a layer's files to a folder. Names are resolved in it and the layers below as in a running container, so that none
// leads out; nobody else writes to the folder meanwhile.
type unpacker struct {
	ctx     context.Context
	dir     *os.Root
	fd      int
	parents []int // folders of the layers below, the uppermost first
	budget  *Budget
	out     Unpacked

	// times are those of folders, which are set in the end, and timed is what is kept of them, in bytes. What is kept of a layer is bounded
	// however many folders it has.
	times []folderTime
	timed int
	// steps counts what it took to find folders.
	steps int
	// at is the folder that was last resolved. stale says that something was removed since, perhaps a link on the way to it.
	at    place
	stale bool
}

// maxTimes is how much is kept of the times of a layer's folders.
const maxTimes = 16 << 20

type folderTime struct {
	path string
	when time.Time
}

// Unpack writes the layer that is in a tar stream to an empty folder. parents are the folders of the layers below, the uppermost first.
func Unpack(ctx context.Context, r io.Reader, dir string, parents []string, budget *Budget) (Unpacked, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Unpacked{}, err
	}
	defer root.Close()
	u := &unpacker{ctx: ctx, dir: root, budget: budget, at: place{fd: -1}}
	if u.fd, err = unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return Unpacked{}, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(u.fd)
	defer func() { u.leave() }()
	for _, p := range parents {
		fd, err := unix.Open(p, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return Unpacked{}, &os.PathError{Op: "open", Path: p, Err: err}
		}
		defer unix.Close(fd)
		u.parents = append(u.parents, fd)
	}
	if err := u.all(tar.NewReader(r)); err != nil {
		return u.out, err
	}
	u.leave()
	// What was written in a folder changed its time.
	for _, t := range slices.Backward(u.times) {
		if fd, err := u.open(u.fd, t.path, unix.O_RDONLY|unix.O_DIRECTORY); err == nil {
			_ = utimes(fd, "", t.when)
			_ = unix.Close(fd)
		}
	}
	return u.out, nil
}

func (u *unpacker) all(r *tar.Reader) error {
	for {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the layer: %w", err)
		}
		if err := u.entry(h, r); err != nil {
			return fmt.Errorf("%s: %w", printable(h.Name), err)
		}
	}
}

func printable(name string) string {
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return fmt.Sprintf("%q", name)
}

// clean makes a name in an archive one below the root, "" for the root itself.
func clean(name string) (string, error) {
	if strings.ContainsRune(name, 0) {
		return "", errors.New("has a null byte in its name")
	}
	depth := 0
	for _, part := range strings.Split(name, "/") {
		switch part {
		case "", ".":
		case "..":
			depth--
		default:
			depth++
		}
		if depth < 0 {
			return "", errors.New("its name leads out of the image")
		}
	}
	return strings.TrimPrefix(path.Clean("/"+name), "/"), nil
}

// entry writes one file.
func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	size := int64(0)
	if h.Typeflag == tar.TypeReg || h.Typeflag == tar.TypeGNUSparse {
		size = h.Size
	}
	if err := u.budget.take(size); err != nil {
		return err
	}
	u.out.Size += size
	name, err := clean(h.Name)
	if err != nil {
		return err
	}
	if name == "" {
		if h.Typeflag != tar.TypeDir {
			return errors.New("the root of an image must be a folder")
		}
		return u.attributes(place{fd: u.fd}, ".", h)
	}
	if u.stale {
		u.leave()
		u.stale = false
	}
	dir, base := path.Split(name)
	at, err := u.folder(strings.TrimSuffix(dir, "/"))
	if err != nil {
		return err
	}
	if strings.HasPrefix(base, whiteout) {
		return u.whiteout(at, base)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.makeFolder(at, base, h)
	case tar.TypeReg, tar.TypeGNUSparse:
		return u.makeFile(at, base, h, content)
	case tar.TypeSymlink:
		if err := u.clear(at, base); err != nil {
			return err
		}
		if err := unix.Symlinkat(h.Linkname, at.fd, base); err != nil {
			return err
		}
	case tar.TypeLink:
		return u.link(at, base, h.Linkname)
	case tar.TypeFifo:
		if err := u.clear(at, base); err != nil {
			return err
		}
		if err := unix.Mknodat(at.fd, base, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
	case tar.TypeChar, tar.TypeBlock:
		// A container gets its devices from the node. One with the numbers 0 and 0 would hide files of other layers.
		u.out.Dropped++
		return nil
	default:
		return fmt.Errorf("is of a kind (%q) that layers don't have", h.Typeflag)
	}
	return u.attributes(at, base, h)
}

// mkdir makes a folder that the layer only implies.
func (u *unpacker) mkdir(name string, mode uint32, uid, gid int) error {
	if err := u.budget.take(0); err != nil {
		return err
	}
	if err := u.dir.Mkdir(name, 0o700); err != nil {
		return err
	}
	if err := u.dir.Lchown(name, uid, gid); err != nil {
		return err
	}
	fd, err := u.open(u.fd, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fchmod(fd, mode)
}

func (u *unpacker) setOpaque(name string) error {
	fd, err := u.open(u.fd, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fsetxattr(fd, opaque, []byte("y"), 0); err != nil {
		return fmt.Errorf("set %s (the data directory must be on a file system that keeps it): %w", opaque, err)
	}
	return nil
}

// clear removes what an earlier entry of the layer put there.
func (u *unpacker) clear(at place, base string) error {
	err := unix.Unlinkat(at.fd, base, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	u.stale = true
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, unix.EISDIR):
		return err
	}
	return u.dir.RemoveAll(strings.TrimPrefix(at.path+"/"+base, "/"))
}

func (u *unpacker) makeFolder(at place, base string, h *tar.Header) error {
	full := strings.TrimPrefix(at.path+"/"+base, "/")
	var st unix.Stat_t
	err := unix.Fstatat(at.fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	fresh := errors.Is(err, unix.ENOENT)
	hidden := err == nil && isWhiteout(&st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if err := u.clear(at, base); err != nil {
			return err
		}
		fresh = true
	} else if err != nil && !fresh {
		return err
	}
	if fresh {
		if err := unix.Mkdirat(at.fd, base, 0o700); err != nil {
			return err
		}
	}
	if hidden {
		if err := u.setOpaque(full); err != nil {
			return err
		}
	}
	// The times of more folders than usual images have are left as they are.
	if u.timed += len(full) + int(unsafe.Sizeof(folderTime{})); u.timed <= maxTimes {
		u.times = append(u.times, folderTime{full, h.ModTime})
	}
	return u.attributes(at, base, h)
}

func (u *unpacker) makeFile(at place, base string, h *tar.Header, content io.Reader) error {
	if err := u.clear(at, base); err != nil {
		return err
	}
	fd, err := unix.Openat(at.fd, base, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), base)
	defer f.Close()
	// Once more: what is read is what was counted.
	n, err := io.Copy(f, io.LimitReader(content, h.Size))
	if err == nil && n < h.Size {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("write it: %w", err)
	}
	if err := u.attributes(at, base, h); err != nil {
		return err
	}
	return f.Close()
}
