package shim

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What is seen in a container's PID namespace must have no more rights than the container: whoever may trace processes there could take
// them over. So a process that joins others is prepared outside of their namespace, by one that gives up its rights first and then
// forks into it. package syscall can't do that: what it forks shares the memory of its parent until it executes something.

// call is a system call that a forked process makes.
type call struct {
	number uintptr
	args   [6]uintptr
	// want is what it must return, if checked; lax: whatever it returns is fine.
	want    uintptr
	checked bool
	lax     bool
}

func system(number uintptr, args ...uintptr) call {
	c := call{number: number}
	copy(c.args[:], args)
	return c
}

// failure is what a forked process reports if it can't go on.
type failure struct {
	mark  byte
	exec  bool // at executing programs[index], not at calls[index]
	index uint16
	errno uint16
}

// The first byte of a packet of a stage's report that is no text.
const (
	terminalMark = 0 // a terminal's other end is beside it
	processMark  = 1 // the number of a forked process follows, and a descriptor of it is beside it
	failureMark  = 2
)

// program is what a forked process executes: the first of the paths that can be. Without any it waits forever.
type program struct {
	paths     []*byte
	argv, env **byte
}

// fork starts a process that makes the calls one after the other and then becomes the program. It is a child of this process's parent.
// The calling thread's namespaces, rights and filter are the new process's, and no handler of a signal may be installed: until it
// executes something it is a copy of one thread of this process, in which nothing of Go works.
func fork(calls []call, p program, report int) (pid, pidfd int, err error) {
	fd := int32(-1)
	n, e := forkRaw(unix.CLONE_PARENT|unix.CLONE_PIDFD|uintptr(unix.SIGCHLD), &fd, calls, &p, uintptr(report))
	runtime.KeepAlive(calls)
	runtime.KeepAlive(p)
	if e != 0 {
		return 0, -1, fmt.Errorf("fork: %w", e)
	}
	return int(n), int(fd), nil
}

// forkRaw uses no stack that would have to grow, allocates nothing and calls nothing but the kernel.
//
//go:nosplit
//go:norace
func forkRaw(flags uintptr, pidfd *int32, calls []call, p *program, report uintptr) (uintptr, syscall.Errno) {
	pid, _, e := syscall.RawSyscall6(unix.SYS_CLONE, flags, 0, uintptr(unsafe.Pointer(pidfd)), 0, 0, 0)
	if e != 0 || pid != 0 {
		return pid, e
	}
	out := failure{mark: failureMark}
	for i := range calls {
		c := &calls[i]
		r, _, e := syscall.RawSyscall6(c.number, c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], c.args[5])
		if !c.lax && (e != 0 || c.checked && r != c.want) {
			out.index, out.errno = uint16(i), uint16(e)
			_, _, _ = syscall.RawSyscall6(unix.SYS_WRITE, report, uintptr(unsafe.Pointer(&out)), unsafe.Sizeof(out), 0, 0, 0)
			_, _, _ = syscall.RawSyscall6(unix.SYS_EXIT_GROUP, 127, 0, 0, 0, 0, 0)
		}
	}
	for len(p.paths) == 0 {
		_, _, _ = syscall.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
	}
	out.exec, out.errno = true, uint16(unix.ENOENT)
	for i, path := range p.paths {
		_, _, e := syscall.RawSyscall6(unix.SYS_EXECVE, uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(p.argv)), uintptr(unsafe.Pointer(p.env)), 0, 0, 0)
		if e != unix.ENOENT && e != unix.ENOTDIR && out.errno == uint16(unix.ENOENT) {
			out.index, out.errno = uint16(i), uint16(e)
		}
	}
	_, _, _ = syscall.RawSyscall6(unix.SYS_WRITE, report, uintptr(unsafe.Pointer(&out)), unsafe.Sizeof(out), 0, 0, 0)
	for {
		_, _, _ = syscall.RawSyscall6(unix.SYS_EXIT_GROUP, 127, 0, 0, 0, 0, 0)
	}
}

// readFailure reads a failure as it is in memory.
func readFailure(data []byte) (failure, bool) {
	var f failure
	if len(data) != int(unsafe.Sizeof(f)) {
		return f, false
	}
	f.mark, f.exec = data[0], data[unsafe.Offsetof(f.exec)] != 0
	f.index = binary.NativeEndian.Uint16(data[unsafe.Offsetof(f.index):])
	f.errno = binary.NativeEndian.Uint16(data[unsafe.Offsetof(f.errno):])
	return f, f.mark == failureMark
}

// sendProcess tells the shim of a forked process.
func sendProcess(pid, pidfd int) error {
	packet := binary.NativeEndian.AppendUint32([]byte{processMark}, uint32(pid))
	if err := unix.Sendmsg(reportFD, packet, unix.UnixRights(pidfd), nil, 0); err != nil {
		return fmt.Errorf("report a process: %w", err)
	}
	return nil
}

// beginCalls are what a forked process does before it becomes a container's: it ends with the shim, is the leader of a session, and waits
// until the shim knows of it. A shim that is gone says nothing, ever.
func beginCalls(tty bool, word *byte) []call {
	calls := []call{
		system(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL)),
		system(unix.SYS_SETSID),
	}
	if tty {
		calls = append(calls, system(unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0))
	}
	read := system(unix.SYS_READ, reportFD, uintptr(unsafe.Pointer(word)), 1)
	read.want, read.checked = 1, true
	return append(calls, read)
}

// programOf is what a Process executes.
func programOf(p *Process) (out program, err error) {
	for _, path := range candidates(p) {
		pointer, err := unix.BytePtrFromString(path)
		if err != nil {
			return out, fmt.Errorf("exec: %q: must not contain a zero byte", path)
		}
		out.paths = append(out.paths, pointer)
	}
	argv, err := pointers(p.Args)
	if err != nil {
		return out, errors.New("exec: an argument must not contain a zero byte")
	}
	env, err := pointers(p.Env)
	if err != nil {
		return out, errors.New("exec: an environment variable must not contain a zero byte")
	}
	out.argv, out.env = &argv[0], &env[0]
	return out, nil
}

// pointers are strings as the kernel reads them.
func pointers(list []string) ([]*byte, error) {
	out := make([]*byte, 0, len(list)+1)
	for _, s := range list {
		p, err := unix.BytePtrFromString(s)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return append(out, nil), nil
}

// nobody is the user and group of processes that need no rights at all.
const nobody = 65534

// runPause makes the process that holds the PID namespace which containers share, and ends. Nobody else is in the namespace yet. What is
// made mounts a /proc of the namespace at the path in its configuration, for containers; then it has an empty root, no rights, nothing
// open and hardly a system call left, and waits forever. What the namespace leaves behind the kernel reaps.
func runPause() int {
	runtime.LockOSThread()
	report := os.NewFile(reportFD, "report")
	err := func() error {
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return err
		}
		if err := endWithShim(); err != nil {
			return err
		}
		path, err := io.ReadAll(os.NewFile(configFD, "config"))
		if err != nil || len(path) == 0 || bytes.IndexByte(path, 0) >= 0 {
			return errors.New("portal-pause is started by portal-shim")
		}
		calls := pauseCalls(string(path))
		if err := unix.Unshare(unix.CLONE_NEWPID); err != nil {
			return fmt.Errorf("unshare the PID namespace: %w", err)
		}
		if err := forgetFiles(); err != nil {
			return err
		}
		resetSignals()
		pid, pidfd, err := fork(calls, program{}, reportFD)
		if err != nil {
			return err
		}
		return sendProcess(pid, pidfd)
	}()
	if err != nil {
		fmt.Fprint(report, err)
		return 1
	}
	return 0
}

func pauseCalls(proc string) []call {
	text := func(s string) uintptr {
		p, err := unix.BytePtrFromString(s)
		if err != nil {
			panic(err)
		}
		kept = append(kept, p)
		return uintptr(unsafe.Pointer(p))
	}
	end := system(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL))
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	calls := []call{
		end,
		system(unix.SYS_MOUNT, text("proc"), text(proc), text("proc"), quiet, 0),
		system(unix.SYS_UNSHARE, unix.CLONE_NEWNS),
		system(unix.SYS_MOUNT, text("none"), text("/"), 0, unix.MS_REC|unix.MS_PRIVATE, 0),
		system(unix.SYS_MOUNT, text("tmpfs"), text(proc), text("tmpfs"), quiet|unix.MS_RDONLY, text("size=4k,mode=555")),
		system(unix.SYS_CHDIR, text(proc)),
		system(unix.SYS_PIVOT_ROOT, text("."), text(".")),
		system(unix.SYS_UMOUNT2, text("."), unix.MNT_DETACH),
		system(unix.SYS_CHDIR, text("/")),
	}
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		drop := system(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c)
		drop.lax = true // what the kernel doesn't know
		calls = append(calls, drop)
	}
	ignore := &[4]uint64{uint64(1)} // struct sigaction of the kernel: SIG_IGN
	header := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	none := &[2]unix.CapUserData{}
	filter := allowOnly(unix.SYS_PPOLL, unix.SYS_RESTART_SYSCALL, unix.SYS_CLOSE_RANGE, unix.SYS_EXIT_GROUP)
	prog := &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	kept = append(kept, ignore, header, none, filter, prog)
	return append(calls,
		system(unix.SYS_SETGROUPS, 0, 0),
		system(unix.SYS_SETRESGID, nobody, nobody, nobody),
		system(unix.SYS_SETRESUID, nobody, nobody, nobody),
		system(unix.SYS_CAPSET, uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(none))),
		end, // once more, as a change of the user clears it
		system(unix.SYS_RT_SIGACTION, uintptr(unix.SIGCHLD), uintptr(unsafe.Pointer(ignore)), 0, 8),
		system(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
		system(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(prog))),
		system(unix.SYS_CLOSE_RANGE, 0, uintptr(^uint32(0)), 0),
	)
}

// kept keeps what calls point to: the garbage collector doesn't see that.
var kept []any
