package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Extended attributes, as tar has them, and those that an image may set. Others change how overlayfs or the machine treats a file.
const (
	paxAttribute = "SCHILY.xattr."
	capability   = "security.capability"
)

func mayHave(attribute string) bool {
	return attribute == capability || strings.HasPrefix(attribute, "user.") && !strings.HasPrefix(attribute, "user.overlay.")
}

// attributes sets who owns a file, what may be done with it, and when it was written.
func (u *unpacker) attributes(at place, base string, h *tar.Header) error {
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= math.MaxUint32 || int64(h.Gid) >= math.MaxUint32 {
		return fmt.Errorf("belongs to user %d and group %d, which can't be", h.Uid, h.Gid)
	}
	if err := unix.Fchownat(at.fd, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set its owner: %w", err)
	}
	if h.Typeflag != tar.TypeSymlink {
		// After the owner, a change of which takes the set-user-ID bit away.
		if err := unix.Fchmodat(at.fd, base, uint32(h.Mode)&0o7777, 0); err != nil {
			return fmt.Errorf("set its mode: %w", err)
		}
		if err := u.extended(at, base, h); err != nil {
			return err
		}
	}
	return utimes(at.fd, base, h.ModTime)
}

func (u *unpacker) extended(at place, base string, h *tar.Header) error {
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, paxAttribute)
		if !ok || !mayHave(name) || h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir {
			continue
		}
		fd, err := unix.Openat(at.fd, base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		err = unix.Fsetxattr(fd, name, []byte(value), 0)
		_ = unix.Close(fd)
		if err != nil && !(errors.Is(err, unix.ENOTSUP) && name != capability) {
			return fmt.Errorf("set its attribute %s: %w", name, err)
		}
	}
	return nil
}

// utimes sets a file's time, which must be one that the kernel knows.
func utimes(fd int, base string, when time.Time) error {
	if when.Unix() < 0 || when.Unix() > math.MaxUint32 {
		when = time.Unix(0, 0)
	}
	stamp := unix.NsecToTimespec(when.UnixNano())
	if base == "" {
		base = "."
	}
	if err := unix.UtimesNanoAt(fd, base, []unix.Timespec{stamp, stamp}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set its time: %w", err)
	}
	return nil
}
