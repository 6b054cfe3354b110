// Package descriptor passes open files and values between processes over Unix sockets. It knows nothing of what they are for. The shim has
// the same of its own, since it may import nothing.
package descriptor

import (
	"encoding/json"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Number is a file's descriptor. Fd would have it block from then on, and whoever it is sent to: a process that writes to one which
// does not read would hold a thread for as long as that takes.
func Number(f *os.File) (int, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	out := -1
	err = raw.Control(func(fd uintptr) { out = int(fd) })
	return out, err
}

// Rights is the control message that sends files. It is empty if there are none.
func Rights(files ...*os.File) ([]byte, error) {
	if len(files) == 0 {
		return nil, nil
	}
	fds := make([]int, len(files))
	for i, f := range files {
		var err error
		if fds[i], err = Number(f); err != nil {
			return nil, err
		}
	}
	return unix.UnixRights(fds...), nil
}

// Received are the files that came with a packet, from its control messages. Their descriptors are closed on exec if the packet was received
// with MSG_CMSG_CLOEXEC, as package net does.
func Received(rights []byte) (out []*os.File) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			out = append(out, os.NewFile(uintptr(fd), "received"))
		}
	}
	return out
}

// InMemory writes a value as JSON to a file that has no name and is on no disk.
func InMemory(name string, v any) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	err = json.NewEncoder(f).Encode(v)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// CloseAll closes files.
func CloseAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
