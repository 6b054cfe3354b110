package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Files that a stage finds open, after the standard ones.
const (
	configFD  = 3 // an order to read, to the end
	reportFD  = 4 // a socket for what the shim must know, and for what went wrong
	processFD = 5 // a process whose namespaces to enter, if the order says so
)

// order is what a stage does.
type order struct {
	*Container
	// Enter has it enter the file system of the process that processFD is, instead of building one.
	Enter bool
	// Join has it fork into that process's PID namespace, which others are in. Otherwise it becomes the container's process itself.
	Join bool
}

// runStage makes a container's process: it enters or builds the container's file system, gives up all rights that the container does
// not have, and executes. All is done on one thread, since most of it is a thread's own, and execve and fork take the calling
// thread's.
func runStage() int {
	runtime.LockOSThread()
	// Nobody in the container gets at this process and what it has open.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 1
	}
	report := os.NewFile(reportFD, "report")
	err := func() error {
		// A shim that has ended before this has closed the configuration's pipe, too.
		if err := endWithShim(); err != nil {
			return err
		}
		var o order
		file := os.NewFile(configFD, "config")
		data, err := io.ReadAll(file)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(data, &o); err != nil || o.Container == nil {
			return fmt.Errorf("read the configuration: %w", err)
		}
		_ = file.Close()
		if err := scoreOOM(o.Process.OOMScoreAdj); err != nil {
			return err
		}
		if o.Enter {
			err = enterExisting()
		} else {
			err = enterNew(o.Container)
		}
		if err != nil {
			return err
		}
		return become(&o.Process, o.Join)
	}()
	if err == nil {
		return 0 // the forked process has taken over
	}
	// The shim takes a silent end for a successful execve, so this must be said.
	fmt.Fprint(report, err)
	return 1
}

// enterNew builds the file system of a container whose first process this is.
func enterNew(c *Container) error {
	if len(c.Cgroups) > 0 {
		// The shim has put this process where it belongs: that is the root of what it sees.
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return fmt.Errorf("unshare the cgroup namespace: %w", err)
		}
	}
	return buildRoot(c)
}

// enterExisting enters the file system of a container that runs.
func enterExisting() error {
	// A mount namespace can only be entered by who shares root and working directory with nobody: other threads do, at first.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the working directory: %w", err)
	}
	if err := unix.Setns(processFD, unix.CLONE_NEWCGROUP|unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the container: %w", err)
	}
	return nil
}

func scoreOOM(score int) error {
	err := os.WriteFile("/proc/self/oom_score_adj", fmt.Append(nil, score), 0)
	if errors.Is(err, os.ErrPermission) && score <= 0 {
		return nil // lowering takes CAP_SYS_RESOURCE, which a nested machine may lack
	}
	return err
}

// become executes the process in the container's file system, with its rights and no others: in this process, or in one that it forks
// into the PID namespace of others, where only what has these rights already may be seen.
func become(p *Process, join bool) error {
	if len(p.Args) == 0 || p.Args[0] == "" {
		return errors.New("no command: the container has none, nor does its image")
	}
	if p.TTY {
		if err := openTerminal(p, !join); err != nil {
			return fmt.Errorf("open a terminal: %w", err)
		}
	}
	for _, l := range p.Rlimits {
		if err := unix.Setrlimit(l.Resource, &unix.Rlimit{Cur: l.Soft, Max: l.Hard}); err != nil {
			return fmt.Errorf("set resource limit %d: %w", l.Resource, err)
		}
	}
	if err := chdir(p.Dir); err != nil {
		return err
	}
	// So that /dev/stdout can be opened again by a user that is not root.
	for fd := range 3 {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
			_ = unix.Fchown(fd, int(p.UID), -1)
		}
	}
	// Nothing of the machine's stays open. Only marked: the report is still needed if execve fails.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close files: %w", err)
	}
	var begin []call
	var then program
	if join {
		var err error
		if then, err = programOf(p); err != nil {
			return err
		}
		word := new(byte)
		kept = append(kept, word)
		begin = beginCalls(p.TTY, word)
		if err := unix.Setns(processFD, unix.CLONE_NEWPID); err != nil {
			return fmt.Errorf("enter the PID namespace: %w", err)
		}
		if err := forgetFiles(); err != nil {
			return err
		}
	}
	resetSignals()
	if err := restrict(p); err != nil {
		return err
	}
	if !join {
		return execute(p)
	}
	pid, pidfd, err := fork(begin, then, reportFD)
	if err != nil {
		return err
	}
	return sendProcess(pid, pidfd)
}

// forgetFiles leaves the calling thread, and what it forks, the standard files and the report. Go's own threads keep theirs: the runtime has
// files of control groups open.
func forgetFiles() error {
	if err := unix.CloseRange(reportFD+1, ^uint(0), unix.CLOSE_RANGE_UNSHARE); err != nil {
		return fmt.Errorf("close files: %w", err)
	}
	return unix.CloseRange(3, reportFD-1, 0)
}

// resetSignals gives all signals their default effect: execve keeps those ignored that whoever started the agent ignored.
func resetSignals() {
	const last = 64
	var action [4]uint64 // struct sigaction of the kernel: SIG_DFL, no flags, nothing masked
	for sig := uintptr(1); sig <= last; sig++ {
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	}
	var none uint64
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&none)), 0, 8, 0, 0)
}

// chdir goes to the working directory, which is made if there is none. A path that leads to a directory of the machine, through
// something that was left open, is refused.
func chdir(dir string) error {
	if dir == "" {
		dir = "/"
	}
	if dir[0] != '/' {
		return fmt.Errorf("workingDir %q: must be an absolute path", dir)
	}
	// Links of /proc lead to where processes are, these with the machine's rights among them: they are not followed.
	base, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("workingDir: %w", err)
	}
	defer unix.Close(base)
	fd := base
	if filepath.Clean(dir) != "/" {
		if fd, err = (&root{fd: base}).ensure(dir, true); err != nil {
			return fmt.Errorf("workingDir: %w", err)
		}
		defer unix.Close(fd)
	}
	if err := unix.Fchdir(fd); err != nil {
		return fmt.Errorf("workingDir %q: %w", dir, err)
	}
	var buf [unix.PathMax]byte
	n, err := unix.Getcwd(buf[:])
	if err != nil || n < 1 || buf[0] != '/' {
		return fmt.Errorf("workingDir %q: is outside of the container", dir)
	}
	return nil
}

// candidates are where a process's program may be.
func candidates(p *Process) []string {
	name := p.Args[0]
	if strings.Contains(name, "/") {
		return []string{name}
	}
	path := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, e := range p.Env {
		if value, ok := strings.CutPrefix(e, "PATH="); ok {
			path = value
		}
	}
	var out []string
	for _, dir := range strings.Split(path, ":") {
		if dir == "" {
			dir = "."
		}
		out = append(out, dir+"/"+name)
	}
	return out
}

// execute finds the program in the container's PATH and becomes it.
func execute(p *Process) error {
	f := failure{errno: uint16(unix.ENOENT)}
	for i, path := range candidates(p) {
		err := unix.Exec(path, p.Args, p.Env)
		var e unix.Errno
		if !errors.As(err, &e) {
			return explain(path, err)
		}
		if e != unix.ENOENT && e != unix.ENOTDIR && f.errno == uint16(unix.ENOENT) {
			f.index, f.errno = uint16(i), uint16(e)
		}
	}
	return notExecuted(p, f)
}

// notExecuted says why none of the candidates could be executed.
func notExecuted(p *Process, f failure) error {
	paths := candidates(p)
	if e := unix.Errno(f.errno); e != unix.ENOENT || strings.Contains(p.Args[0], "/") {
		return explain(paths[min(int(f.index), len(paths)-1)], e)
	}
	return fmt.Errorf("exec: %q: executable file not found in $PATH", p.Args[0])
}

func explain(path string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("exec: %q: no such file or directory, nor its interpreter", path)
	case errors.Is(err, unix.EACCES):
		return fmt.Errorf("exec: %q: permission denied: it must be a file that the user may execute", path)
	case errors.Is(err, unix.ENOEXEC):
		return fmt.Errorf("exec: %q: is not a program for this machine", path)
	}
	return fmt.Errorf("exec: %q: %w", path, err)
}

// openTerminal makes a terminal of the container's own, gives its other end to the shim, and makes it the process's: the one that
// controls its session, or that of the process that is forked later.
func openTerminal(p *Process, control bool) error {
	// What is at the path is the container's to choose; only a multiplexer of terminals will do.
	master, err := unix.Openat2(unix.AT_FDCWD, "/dev/pts/ptmx", &unix.OpenHow{
		Flags: unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC | unix.O_NONBLOCK, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(master, &fs); err != nil {
		return err
	}
	if fs.Type != unix.DEVPTS_SUPER_MAGIC {
		return errors.New("/dev/pts/ptmx is none of the container's terminals")
	}
	if err := unix.SetNonblock(master, false); err != nil {
		return err
	}
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return err
	}
	fd, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if e != 0 {
		return e
	}
	terminal := int(fd)
	_ = unix.Fchown(terminal, int(p.UID), -1)
	if err := unix.Sendmsg(reportFD, []byte{terminalMark}, unix.UnixRights(master), nil, 0); err != nil {
		return err
	}
	_ = unix.Close(master)
	if control {
		if err := unix.IoctlSetInt(terminal, unix.TIOCSCTTY, 0); err != nil {
			return err
		}
	}
	for fd := range 3 {
		if err := unix.Dup3(terminal, fd, 0); err != nil {
			return err
		}
	}
	return nil
}
