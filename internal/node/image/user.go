package image

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// User is who a container runs as.
type User struct {
	UID, GID int64
	// Groups are the further ones that the image's /etc/group has the user in.
	Groups []int64
	// Named says that the image gave a name.
	Named bool
}

// maxAccounts is how much of /etc/passwd and /etc/group is read.
const maxAccounts = 4 << 20

// Lookup finds a user, who is written as in an image: name or number, perhaps with a group, also by name or number. Empty: root.
func (i Image) Lookup(account string) (User, error) {
	who, group, _ := strings.Cut(account, ":")
	out := User{}
	number, isNumber, err := parseID(who)
	if err != nil {
		return out, fmt.Errorf("the image's user %q: %w", account, err)
	}
	out.UID, out.Named = number, who != "" && !isNumber
	name, found := "", false
	if err := i.lines("/etc/passwd", 4, func(f []string) bool {
		uid, err1 := strconv.ParseInt(f[2], 10, 64)
		gid, err2 := strconv.ParseInt(f[3], 10, 64)
		if err1 != nil || err2 != nil || f[0] != who && !(isNumber && uid == number) && !(who == "" && uid == 0) {
			return true
		}
		name, found, out.UID, out.GID = f[0], true, uid, gid
		return false
	}); err != nil {
		return out, err
	}
	if out.Named && !found {
		return out, fmt.Errorf("the image's user %q: the image's /etc/passwd has no such name; set securityContext.runAsUser", who)
	}
	gid, groupIsNumber, err := parseID(group)
	if err != nil {
		return out, fmt.Errorf("the image's user %q: %w", account, err)
	}
	explicit := group != ""
	if explicit && groupIsNumber {
		out.GID = gid
	}
	known := !explicit || groupIsNumber
	if err := i.lines("/etc/group", 3, func(f []string) bool {
		gid, err := strconv.ParseInt(f[2], 10, 64)
		if err != nil {
			return true
		}
		if explicit && !groupIsNumber && f[0] == group && !known {
			out.GID, known = gid, true
		}
		// A group that is given is the only one.
		if !explicit && name != "" && len(f) > 3 && slices.Contains(strings.Split(f[3], ","), name) {
			out.Groups = append(out.Groups, gid)
		}
		return true
	}); err != nil {
		return out, err
	}
	if !known {
		return out, fmt.Errorf("the image's user %q: the image's /etc/group has no group %q; set securityContext.runAsGroup", account, group)
	}
	for _, n := range append([]int64{out.UID, out.GID}, out.Groups...) {
		if n < 0 || n > math.MaxInt32 {
			return out, fmt.Errorf("the image's user %q: has the number %d, which can't be", account, n)
		}
	}
	return out, nil
}

func parseID(text string) (n int64, isNumber bool, err error) {
	if text == "" || strings.Trim(text, "0123456789") != "" {
		return 0, false, nil
	}
	n, err = strconv.ParseInt(text, 10, 32)
	if err != nil {
		return 0, true, errors.New("the number is too large")
	}
	return n, true, nil
}

// lines reads a file of accounts, as far as the caller wants to.
func (i Image) lines(file string, fields int, each func([]string) bool) error {
	r, err := i.open(file)
	if r == nil || err != nil {
		return err
	}
	defer r.Close()
	s := bufio.NewScanner(io.LimitReader(r, maxAccounts))
	s.Buffer(nil, maxAccounts)
	for s.Scan() {
		if f := strings.Split(s.Text(), ":"); len(f) >= fields && !each(f) {
			break
		}
	}
	return s.Err()
}

// open opens a regular file of the image in the uppermost layer that has it; nil: there is none. Links are followed in one layer only,
// which is enough for files that programs replace as a whole.
func (i Image) open(file string) (*os.File, error) {
	for _, dir := range i.Lower {
		root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: dir, Err: err}
		}
		fd, err := unix.Openat2(root, strings.TrimPrefix(file, "/"), &unix.OpenHow{
			Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		_ = unix.Close(root)
		switch {
		case errors.Is(err, unix.ENXIO), errors.Is(err, unix.EACCES): // hidden by a whiteout: a device that does not exist
			return nil, nil
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
			continue
		case err != nil:
			return nil, &os.PathError{Op: "open", Path: file, Err: err}
		}
		f := os.NewFile(uintptr(fd), file)
		if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
			_ = f.Close()
			return nil, err
		}
		return f, nil
	}
	return nil, nil
}
