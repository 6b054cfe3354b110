package shim

import (
	"fmt"
	"maps"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A container's processes can't make system calls that reach beyond the container, even if they are root in it: those that change
// mounts, namespaces, the clock or the kernel, that reach memory of others, or that few programs use and many attacks did. What a
// capability is meant for is allowed to who has it.
//
// The filter names what is denied. Calls with numbers that this table doesn't know yet don't exist in a container.

// denied maps system calls to the capability that allows them; never: nobody.
var denied = map[uintptr]int{
	unix.SYS_KEXEC_LOAD: unix.CAP_SYS_BOOT, unix.SYS_KEXEC_FILE_LOAD: unix.CAP_SYS_BOOT, unix.SYS_REBOOT: unix.CAP_SYS_BOOT,
	unix.SYS_INIT_MODULE: unix.CAP_SYS_MODULE, unix.SYS_FINIT_MODULE: unix.CAP_SYS_MODULE, unix.SYS_DELETE_MODULE: unix.CAP_SYS_MODULE,
	unix.SYS_MOUNT: unix.CAP_SYS_ADMIN, unix.SYS_UMOUNT2: unix.CAP_SYS_ADMIN, unix.SYS_PIVOT_ROOT: unix.CAP_SYS_ADMIN,
	unix.SYS_MOVE_MOUNT: unix.CAP_SYS_ADMIN, unix.SYS_OPEN_TREE: unix.CAP_SYS_ADMIN, unix.SYS_FSOPEN: unix.CAP_SYS_ADMIN,
	unix.SYS_FSCONFIG: unix.CAP_SYS_ADMIN, unix.SYS_FSMOUNT: unix.CAP_SYS_ADMIN, unix.SYS_FSPICK: unix.CAP_SYS_ADMIN,
	unix.SYS_MOUNT_SETATTR: unix.CAP_SYS_ADMIN, unix.SYS_OPEN_TREE_ATTR: unix.CAP_SYS_ADMIN,
	unix.SYS_UNSHARE: unix.CAP_SYS_ADMIN, unix.SYS_SETNS: unix.CAP_SYS_ADMIN,
	unix.SYS_BPF: unix.CAP_SYS_ADMIN, unix.SYS_PERF_EVENT_OPEN: unix.CAP_SYS_ADMIN, unix.SYS_FANOTIFY_INIT: unix.CAP_SYS_ADMIN,
	unix.SYS_QUOTACTL: unix.CAP_SYS_ADMIN, unix.SYS_QUOTACTL_FD: unix.CAP_SYS_ADMIN, unix.SYS_LOOKUP_DCOOKIE: unix.CAP_SYS_ADMIN,
	unix.SYS_SETHOSTNAME: unix.CAP_SYS_ADMIN, unix.SYS_SETDOMAINNAME: unix.CAP_SYS_ADMIN,
	unix.SYS_SWAPON: unix.CAP_SYS_ADMIN, unix.SYS_SWAPOFF: unix.CAP_SYS_ADMIN,
	unix.SYS_OPEN_BY_HANDLE_AT: unix.CAP_DAC_READ_SEARCH,
	unix.SYS_PROCESS_VM_READV:  unix.CAP_SYS_PTRACE, unix.SYS_PROCESS_VM_WRITEV: unix.CAP_SYS_PTRACE, unix.SYS_KCMP: unix.CAP_SYS_PTRACE,
	unix.SYS_PROCESS_MADVISE: unix.CAP_SYS_PTRACE, unix.SYS_PIDFD_GETFD: unix.CAP_SYS_PTRACE,
	unix.SYS_ACCT: unix.CAP_SYS_PACCT, unix.SYS_SYSLOG: unix.CAP_SYSLOG, unix.SYS_VHANGUP: unix.CAP_SYS_TTY_CONFIG,
	unix.SYS_SETTIMEOFDAY: unix.CAP_SYS_TIME, unix.SYS_CLOCK_SETTIME: unix.CAP_SYS_TIME, unix.SYS_CLOCK_ADJTIME: unix.CAP_SYS_TIME,
	unix.SYS_ADJTIMEX: unix.CAP_SYS_TIME,
	unix.SYS_MBIND:    unix.CAP_SYS_NICE, unix.SYS_SET_MEMPOLICY: unix.CAP_SYS_NICE, unix.SYS_MOVE_PAGES: unix.CAP_SYS_NICE,
	unix.SYS_MIGRATE_PAGES: unix.CAP_SYS_NICE, unix.SYS_SET_MEMPOLICY_HOME_NODE: unix.CAP_SYS_NICE,
	unix.SYS_KEYCTL: never, unix.SYS_ADD_KEY: never, unix.SYS_REQUEST_KEY: never, unix.SYS_USERFAULTFD: never,
	unix.SYS_IO_URING_SETUP: never, unix.SYS_IO_URING_ENTER: never, unix.SYS_IO_URING_REGISTER: never, unix.SYS_NFSSERVCTL: never,
}

const (
	never = -1
	// lastKnown is the highest number of a system call that this table was made with: file_setattr of Linux 6.17.
	lastKnown = 469
)

// namespaces are the flags of clone that make one. CLONE_NEWTIME shares its bit with the signal in clone's flags.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP

// filter is the program for a process with capabilities.
func filter(capabilities uint64) []unix.SockFilter {
	has := func(c int) bool { return c >= 0 && capabilities&(1<<c) != 0 }
	const (
		load    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		greater = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
		anyBit  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		ret     = unix.BPF_RET | unix.BPF_K
		// The fields of struct seccomp_data. Both architectures are little-endian: the lower half of an argument comes first.
		number, architecture, argument0 = 0, 4, 16

		allow, kill, errno = unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_KILL_PROCESS, unix.SECCOMP_RET_ERRNO
	)
	var out []unix.SockFilter
	add := func(code uint16, k uint32, yes, no uint8) {
		out = append(out, unix.SockFilter{Code: code, Jt: yes, Jf: no, K: k})
	}
	// when returns a verdict if a test holds.
	when := func(test uint16, k uint32, verdict uint32) { add(test, k, 0, 1); add(ret, verdict, 0, 0) }

	add(load, architecture, 0, 0)
	add(equal, auditArch, 1, 0) // other architectures have other numbers
	add(ret, kill, 0, 0)
	add(load, number, 0, 0)
	when(greater, lastKnown, errno|uint32(unix.ENOSYS)) // the x32 calls of amd64, too
	for _, call := range legacy {
		when(equal, uint32(call), errno|uint32(unix.EPERM))
	}
	for _, call := range slices.Sorted(maps.Keys(denied)) {
		if !has(denied[call]) {
			when(equal, uint32(call), errno|uint32(unix.EPERM))
		}
	}
	if !has(unix.CAP_SYS_ADMIN) {
		// A filter can't see the flags of clone3, which are in memory. C libraries fall back to clone.
		when(equal, unix.SYS_CLONE3, errno|uint32(unix.ENOSYS))
		add(equal, unix.SYS_CLONE, 0, 3)
		add(load, argument0, 0, 0)
		add(anyBit, namespaces, 0, 1)
		add(ret, errno|uint32(unix.EPERM), 0, 0)
		add(load, number, 0, 0)
	}
	// Virtual machines talk to their host with these sockets; a network namespace does not contain them.
	add(equal, unix.SYS_SOCKET, 0, 3)
	add(load, argument0, 0, 0)
	add(equal, unix.AF_VSOCK, 0, 1)
	add(ret, errno|uint32(unix.EPERM), 0, 0)
	add(ret, allow, 0, 0)
	return out
}

// allowOnly is a filter that allows a few system calls and denies all others.
func allowOnly(calls ...uint32) []unix.SockFilter {
	const (
		load, equal, ret = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K

		number, architecture = 0, 4
	)
	out := []unix.SockFilter{
		{Code: load, K: architecture}, {Code: equal, K: auditArch, Jt: 1}, {Code: ret, K: unix.SECCOMP_RET_KILL_PROCESS}, {Code: load, K: number},
	}
	for _, c := range calls {
		out = append(out, unix.SockFilter{Code: equal, K: c, Jf: 1}, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW})
	}
	return append(out, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)})
}

// install puts the filter on the calling thread, and on what it executes.
func install(program []unix.SockFilter) error {
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		return fmt.Errorf("filter system calls: %w", e)
	}
	return nil
}
