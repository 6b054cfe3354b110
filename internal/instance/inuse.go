package instance

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// InUse completes the error of a listener whose address is taken with who has it, if that can be seen. Other errors stay as they are.
func InUse(address string, err error) error {
	if !errors.Is(err, unix.EADDRINUSE) {
		return err
	}
	if h, found := ListenerAt(address); found {
		return &inUseError{fmt.Sprintf("in use by %v", h), err}
	}
	return &inUseError{"in use by another program", err}
}

type inUseError struct {
	text  string
	cause error
}

func (e *inUseError) Error() string { return e.text }
func (e *inUseError) Unwrap() error { return e.cause }

// ListenerAt is the process that keeps others from listening at a TCP address, host:port, in this network namespace.
func ListenerAt(address string) (Holder, bool) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return Holder{}, false
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return Holder{}, false
	}
	wanted, _ := netip.ParseAddr(host) // a name, or none: any address
	var sockets []string
	for _, file := range []string{"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"} {
		data, _ := os.ReadFile(file)
		sockets = append(sockets, listening(string(data), wanted.Unmap(), uint16(number))...)
	}
	return openBy(func(path string) bool {
		to, err := os.Readlink(path)
		return err == nil && slices.Contains(sockets, to)
	})
}

// listening are the sockets in a table of the kernel that listen where addr and port would conflict, as /proc/PID/fd calls them.
func listening(table string, addr netip.Addr, port uint16) (out []string) {
	const state, listen, inode = 3, "0A", 9
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) <= inode || f[state] != listen {
			continue
		}
		at, err := parseLocal(f[1])
		if err != nil || at.Port() != port {
			continue
		}
		if own := at.Addr(); !addr.IsValid() || addr.IsUnspecified() || own.IsUnspecified() || own == addr {
			out = append(out, "socket:["+f[inode]+"]")
		}
	}
	return out
}

// parseLocal reads an address as the kernel's tables have it: words of 4 bytes in the machine's order, in hexadecimal, and the port.
func parseLocal(text string) (netip.AddrPort, error) {
	words, port, _ := strings.Cut(text, ":")
	number, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	bytes, err := hex.DecodeString(words)
	if err != nil {
		return netip.AddrPort{}, err
	}
	for i := 0; i+4 <= len(bytes); i += 4 {
		slices.Reverse(bytes[i : i+4])
	}
	addr, ok := netip.AddrFromSlice(bytes)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("%q is no address", text)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(number)), nil
}

// UserOf is another process that has a file open.
func UserOf(path string) (Holder, bool) {
	file, err := os.Stat(path)
	if err != nil {
		return Holder{}, false
	}
	return openBy(func(path string) bool {
		other, err := os.Stat(path)
		return err == nil && os.SameFile(file, other)
	})
}

// openBy is a process other than this one with an open file that fits.
func openBy(fits func(path string) bool) (Holder, bool) {
	self := strconv.Itoa(os.Getpid())
	folders, _ := filepath.Glob("/proc/[0-9]*/fd")
	for _, folder := range folders {
		process := filepath.Dir(folder)
		if filepath.Base(process) == self {
			continue
		}
		entries, err := os.ReadDir(folder)
		if err != nil { // another user's
			continue
		}
		for _, e := range entries {
			if !fits(filepath.Join(folder, e.Name())) {
				continue
			}
			h := Holder{Command: commandOf(process)}
			h.PID, _ = strconv.Atoi(filepath.Base(process))
			var st unix.Stat_t
			if unix.Stat(process, &st) == nil {
				h.UID = int(st.Uid)
			}
			return h, true
		}
	}
	return Holder{}, false
}

// commandOf is the program and subcommand of a process, by its folder in /proc.
func commandOf(process string) string {
	line, _ := os.ReadFile(filepath.Join(process, "cmdline"))
	words := strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
	return strings.Join(words[:min(2, len(words))], " ")
}
