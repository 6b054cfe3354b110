package shim

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// The files of /proc and /sys that tell about or change the machine rather than the container: hidden, or not to be written.
var (
	hidden = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
		"/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware", "/sys/kernel/debug", "/sys/kernel/tracing",
	}
	readOnly = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
	devices  = []string{"null", "zero", "full", "random", "urandom", "tty"}
)

// OpenNull opens /dev/null through a mount that is read-only: who has it can write, but not change the mode or owner of the machine's file.
func OpenNull() (*os.File, error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, "/dev/null", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mount /dev/null: %w", err)
	}
	defer unix.Close(tree)
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: ro | noSuid | noExec}); err != nil {
		return nil, fmt.Errorf("mount /dev/null read-only: %w", err)
	}
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", tree), os.O_RDWR, 0)
}

// root is a container's file system while it is built. Paths in it are resolved so that no symbolic link leads out of it.
type root struct {
	fd        int
	container *Container
	// mode is that of folders that are made; 0: everybody may enter them.
	mode uint32
}

// buildRoot mounts all that a container sees, in the mount namespace of this process, and makes it the root. Nobody else sees the
// mounts, and they go with the container's last process.
func buildRoot(c *Container) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("detach mounts: %w", err)
	}
	path := filepath.Join(c.Dir, "root")
	if err := overlay(c, path); err != nil {
		return err
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	r := &root{fd: fd, container: c}
	for _, step := range []func() error{r.hide, r.system, r.devices, r.volumes, r.protect} {
		if err := step(); err != nil {
			return err
		}
	}
	if dir := c.Process.Dir; strings.HasPrefix(dir, "/") && filepath.Clean(dir) != "/" {
		// The working directory is made if there is none, which can't be done later in a root that is read-only.
		if fd, err := r.ensure(dir, true); err == nil {
			_ = unix.Close(fd)
		}
	}
	if c.Root.ReadOnly {
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return fmt.Errorf("make the root read-only: %w", err)
		}
	}
	return pivot(fd)
}

// pivot makes the folder the root and leaves the old root behind.
func pivot(fd int) error {
	if err := unix.Fchdir(fd); err != nil {
		return err
	}
	// The old root ends up on top of the new one, where it is taken away.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the old root: %w", err)
	}
	return unix.Chdir("/")
}

// overlay mounts the image's folders with one of the container's own on top. Device files in it don't work.
func overlay(c *Container, path string) error {
	upper, work := filepath.Join(c.Dir, "upper"), filepath.Join(c.Dir, "work")
	for _, dir := range []string{path, upper, work} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	escape := strings.NewReplacer(`\`, `\\`, `:`, `\:`, `,`, `\,`)
	var lower []string
	for _, l := range c.Root.Lower {
		lower = append(lower, escape.Replace(l))
	}
	// Nothing of it outlives a crash of the machine, so nothing has to be written to the disk in order.
	options := "lowerdir=" + strings.Join(lower, ":") + ",upperdir=" + escape.Replace(upper) + ",workdir=" + escape.Replace(work) + ",volatile"
	if len(options) >= os.Getpagesize() {
		return longOverlay(c.Root.Lower, upper, work, path)
	}
	if err := unix.Mount("overlay", path, "overlay", unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount the image's file system: %w", err)
	}
	return nil
}

// longOverlay mounts more folders than mount(2) can be told in one page.
func longOverlay(lower []string, upper, work, path string) error {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("mount the image's file system: %w", err)
	}
	defer unix.Close(fs)
	for _, dir := range lower {
		if err := unix.FsconfigSetString(fs, "lowerdir+", dir); err != nil {
			return fmt.Errorf("mount the image's %d layers: %w (Linux 6.5 or later is needed for so many)", len(lower), err)
		}
	}
	for key, dir := range map[string]string{"upperdir": upper, "workdir": work} {
		if err := unix.FsconfigSetString(fs, key, dir); err != nil {
			return fmt.Errorf("mount the image's file system: %w", err)
		}
	}
	if err := unix.FsconfigSetFlag(fs, "volatile"); err != nil {
		return fmt.Errorf("mount the image's file system: %w", err)
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("mount the image's file system: %w", err)
	}
	tree, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, noDev)
	if err != nil {
		return fmt.Errorf("mount the image's file system: %w", err)
	}
	defer unix.Close(tree)
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount the image's file system: %w", err)
	}
	return nil
}

// open resolves a path in the container.
func (r *root) open(path string, flags int) (int, error) {
	fd, err := unix.Openat2(r.fd, strings.TrimPrefix(path, "/"), &unix.OpenHow{
		Flags: uint64(flags | unix.O_CLOEXEC), Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// ensure opens a path in the container, and makes the folders to it, and itself a folder or file, if they are missing.
func (r *root) ensure(path string, folder bool) (int, error) {
	path = filepath.Clean("/" + path)
	if path == "/" {
		return -1, errors.New("nothing can be mounted on /")
	}
	fd, err := r.open(path, unix.O_PATH)
	if err == nil || !errors.Is(err, os.ErrNotExist) {
		return fd, err
	}
	dir, name := filepath.Split(path)
	parent := -1
	if dir == "/" {
		parent, err = unix.Openat(r.fd, ".", unix.O_PATH|unix.O_CLOEXEC, 0)
	} else {
		parent, err = r.ensure(dir, true)
	}
	if err != nil {
		return -1, err
	}
	defer unix.Close(parent)
	if folder {
		err = unix.Mkdirat(parent, name, cmp.Or(r.mode, 0o755))
	} else {
		var file int
		if file, err = unix.Openat(parent, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o644); err == nil {
			_ = unix.Close(file)
		}
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, &os.PathError{Op: "create", Path: path, Err: err}
	}
	return r.open(path, unix.O_PATH)
}

// attach puts a detached mount at a path of the container.
func (r *root) attach(tree int, path string, folder bool) error {
	defer unix.Close(tree)
	target, err := r.ensure(path, folder)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if err := unix.MoveMount(tree, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount at %s: %w", path, err)
	}
	return nil
}

// fresh mounts a new file system of a type.
func (r *root) fresh(kind, path string, attributes int, options ...string) error {
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("mount %s: %w", kind, err)
	}
	defer unix.Close(fs)
	for _, o := range options {
		if key, value, ok := strings.Cut(o, "="); ok {
			err = unix.FsconfigSetString(fs, key, value)
		} else {
			err = unix.FsconfigSetFlag(fs, key)
		}
		if err != nil {
			return fmt.Errorf("mount %s with %s: %w", kind, o, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("mount %s: %w", kind, err)
	}
	tree, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return fmt.Errorf("mount %s: %w", kind, err)
	}
	return r.attach(tree, path, true)
}

// bind mounts what is open, or a path of this mount namespace, at a path of the container.
func (r *root) bind(dirfd int, source, target string, set uint64, recursive bool) error {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if source == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	change := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
		change |= unix.AT_RECURSIVE
	}
	tree, err := unix.OpenTree(dirfd, source, flags)
	if err != nil {
		return &os.PathError{Op: "bind", Path: source, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstatat(tree, "", &st, unix.AT_EMPTY_PATH); err != nil {
		_ = unix.Close(tree)
		return err
	}
	// Private: what the container's file system does never reaches the machine's.
	if err := unix.MountSetattr(tree, "", change, &unix.MountAttr{Attr_set: set, Propagation: unix.MS_PRIVATE}); err != nil {
		_ = unix.Close(tree)
		return fmt.Errorf("bind %s: %w", source, err)
	}
	return r.attach(tree, target, st.Mode&unix.S_IFMT == unix.S_IFDIR)
}

const (
	noSuid = unix.MOUNT_ATTR_NOSUID
	noDev  = unix.MOUNT_ATTR_NODEV
	noExec = unix.MOUNT_ATTR_NOEXEC
	ro     = unix.MOUNT_ATTR_RDONLY
)

// system mounts /proc, /sys and the control groups.
func (r *root) system() error {
	for _, path := range []string{"/proc", "/sys", "/dev"} {
		// An image must not choose where these are.
		fd, err := r.ensure(path, true)
		if err != nil {
			return err
		}
		_ = unix.Close(fd)
		fd, err = unix.Openat2(r.fd, path[1:], &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS})
		if err != nil {
			return fmt.Errorf("the image's %s must be a folder: %w", path, err)
		}
		_ = unix.Close(fd)
	}
	if err := r.proc(); err != nil {
		return err
	}
	attributes := noSuid | noDev | noExec
	if !r.container.Privileged {
		attributes |= ro
	}
	if err := r.fresh("sysfs", "/sys", attributes); err != nil {
		return err
	}
	return r.cgroups(attributes)
}

// proc mounts /proc: a new one of this process's PID namespace, or the one that is there of the namespace that containers share.
func (r *root) proc() error {
	if r.container.Proc != "" {
		return r.bind(unix.AT_FDCWD, r.container.Proc, "/proc", noSuid|noDev|noExec, false)
	}
	return r.fresh("proc", "/proc", noSuid|noDev|noExec)
}

func (r *root) cgroups(attributes int) error {
	mounts := r.container.CgroupMounts
	if len(mounts) == 0 {
		return nil
	}
	if mounts[0].Type == "cgroup2" {
		return r.fresh("cgroup2", "/sys/fs/cgroup", attributes)
	}
	if err := r.fresh("tmpfs", "/sys/fs/cgroup", noSuid|noDev|noExec, "mode=755", "size=64k"); err != nil {
		return err
	}
	for _, m := range mounts {
		if err := r.fresh("cgroup", "/sys/fs/cgroup/"+m.Name, attributes, m.Name); err != nil {
			return err
		}
	}
	return nil
}

// devices makes /dev. Only the devices that are mounted into it work: it has no others, and those that a process makes are refused.
func (r *root) devices() error {
	if r.container.Privileged {
		if err := r.bind(unix.AT_FDCWD, "/dev", "/dev", noSuid, false); err != nil {
			return err
		}
	} else {
		if err := r.fresh("tmpfs", "/dev", noSuid|noDev, "mode=755", "size=64k"); err != nil {
			return err
		}
		for _, name := range devices {
			// What is written goes to the device all the same; only the machine's file stays as it is.
			if err := r.bind(unix.AT_FDCWD, "/dev/"+name, "/dev/"+name, ro|noSuid|noExec, false); err != nil {
				return err
			}
		}
		for link, target := range map[string]string{
			"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
		} {
			if err := r.symlink(target, "/dev", link); err != nil {
				return err
			}
		}
	}
	if err := r.fresh("devpts", "/dev/pts", noSuid|noExec, "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"); err != nil {
		return err
	}
	if err := r.fresh("mqueue", "/dev/mqueue", noSuid|noDev|noExec); err != nil {
		return err
	}
	if r.container.Shm == "" {
		return r.fresh("tmpfs", "/dev/shm", noSuid|noDev|noExec, "mode=1777", "size=64m")
	}
	return r.bind(unix.AT_FDCWD, r.container.Shm, "/dev/shm", noSuid|noDev|noExec, false)
}

func (r *root) symlink(target, dir, name string) error {
	fd, err := r.open(dir, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Symlinkat(target, fd, name)
}

// volumes mounts the Pod's volumes and files, those that contain others first.
func (r *root) volumes() error {
	mounts := slices.Clone(r.container.Mounts)
	slices.SortStableFunc(mounts, func(a, b Mount) int {
		return strings.Count(filepath.Clean(a.Target), "/") - strings.Count(filepath.Clean(b.Target), "/")
	})
	for _, m := range mounts {
		if err := r.volume(m); err != nil {
			return fmt.Errorf("volume at %s: %w", m.Target, err)
		}
	}
	return nil
}

func (r *root) volume(m Mount) error {
	set := uint64(0)
	if m.ReadOnly {
		set |= ro
	}
	if !m.Devices {
		set |= noDev
	}
	if m.SubPath == "" {
		return r.bind(unix.AT_FDCWD, m.Source, m.Target, set, true)
	}
	fd, err := openBelow(m.Source, m.SubPath)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return r.bind(fd, "", m.Target, set, true)
}

// openBelow opens a path below a volume. Links that containers made in the volume can't lead out of it. Missing folders are made, with the
// volume's own mode: whoever may write in it may write in them.
func openBelow(volume, path string) (int, error) {
	base, err := unix.Open(volume, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: volume, Err: err}
	}
	defer unix.Close(base)
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(base, path, how)
	if !errors.Is(err, unix.ENOENT) {
		if err != nil {
			return -1, fmt.Errorf("subPath %s: %w", path, err)
		}
		return fd, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(base, &st); err != nil {
		return -1, err
	}
	defer unix.Umask(unix.Umask(0))
	r := &root{fd: base, mode: st.Mode & 0o777}
	made, err := r.ensure(path, true)
	if err != nil {
		return -1, fmt.Errorf("subPath %s: %w", path, err)
	}
	_ = unix.Close(made)
	if fd, err = unix.Openat2(base, path, how); err != nil {
		return -1, fmt.Errorf("subPath %s: %w", path, err)
	}
	return fd, nil
}

// hide covers paths of the image.
func (r *root) hide() error {
	for _, path := range r.container.Root.Hide {
		if err := r.cover(path); err != nil {
			return err
		}
	}
	return nil
}

// protect hides and write-protects what belongs to the machine.
func (r *root) protect() error {
	if r.container.Privileged {
		return nil
	}
	for _, path := range hidden {
		if err := r.cover(path); err != nil {
			return err
		}
	}
	for _, path := range readOnly {
		fd, err := r.open(path, unix.O_PATH)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		err = r.bind(fd, "", path, ro|noSuid|noDev|noExec, true)
		_ = unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}

// cover puts an empty folder or file over a path, if there is something.
func (r *root) cover(path string) error {
	fd, err := r.open(path, unix.O_PATH)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return err
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	_ = unix.Close(fd)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return r.fresh("tmpfs", path, ro|noSuid|noDev|noExec, "size=4k", "mode=755")
	}
	return r.bind(unix.AT_FDCWD, "/dev/null", path, ro|noSuid|noExec, false)
}
