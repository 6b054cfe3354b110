package shim

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// restrict gives the calling thread the user, groups and capabilities of the container's process, and the filter of system calls.
func restrict(p *Process) error {
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if p.Capabilities&(1<<c) != 0 {
			continue
		}
		// What the machine itself does not have can't be dropped, and does no harm.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil && err != unix.EINVAL {
		return fmt.Errorf("drop ambient capabilities: %w", err)
	}
	if p.NoNewPrivileges {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	// The filter needs rights that are about to go. It allows what follows.
	if !p.Unconfined {
		if err := install(filter(p.Capabilities)); err != nil {
			return err
		}
	}
	if err := setIDs(p); err != nil {
		return err
	}
	if err := setCapabilities(p.Capabilities); err != nil {
		return err
	}
	return endWithShim() // once more, as a change of the user clears it
}

// endWithShim has the calling thread's process killed when the thread that started it ends: when the shim does.
func endWithShim() error {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("end with the shim: %w", err)
	}
	return nil
}

// setIDs changes the calling thread only: package syscall would change all, and the others are about to end.
func setIDs(p *Process) error {
	var groups unsafe.Pointer
	if len(p.Groups) > 0 {
		groups = unsafe.Pointer(&p.Groups[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(p.Groups)), uintptr(groups), 0); e != 0 {
		return fmt.Errorf("set the supplementary groups: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(p.GID), uintptr(p.GID), uintptr(p.GID)); e != 0 {
		return fmt.Errorf("become group %d: %w", p.GID, e)
	}
	// The capabilities are needed once more, to set them; execve clears this flag and, for a user that is not root, them.
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return err
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(p.UID), uintptr(p.UID), uintptr(p.UID)); e != 0 {
		return fmt.Errorf("become user %d: %w", p.UID, e)
	}
	return unix.Prctl(unix.PR_SET_KEEPCAPS, 0, 0, 0, 0)
}

func setCapabilities(want uint64) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return err
	}
	permitted := uint64(has[0].Permitted) | uint64(has[1].Permitted)<<32
	want &= permitted
	data := [2]unix.CapUserData{
		{Effective: uint32(want), Permitted: uint32(want)},
		{Effective: uint32(want >> 32), Permitted: uint32(want >> 32)},
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("set the capabilities: %w", err)
	}
	return nil
}
