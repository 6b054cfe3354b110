package descriptor

import (
	"encoding/json"
	"net"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPass sends a value and a socket over a socket, and neither socket blocks threads afterwards.
func TestPass(t *testing.T) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range ends {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns[i] = c.(*net.UnixConn)
	}
	value, err := InMemory("test", map[string]int{"a": 1})
	if err != nil {
		t.Fatal(err)
	}
	defer value.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	socket, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	rights, err := Rights(value, socket)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := conns[0].WriteMsgUnix([]byte("x"), rights, nil); err != nil {
		t.Fatal(err)
	}
	data, oob := make([]byte, 8), make([]byte, unix.CmsgSpace(4*8))
	_, n, _, _, err := conns[1].ReadMsgUnix(data, oob)
	if err != nil {
		t.Fatal(err)
	}
	files := Received(oob[:n])
	defer CloseAll(files)
	if len(files) != 2 {
		t.Fatalf("%d files", len(files))
	}
	var got map[string]int
	if err := json.NewDecoder(files[0]).Decode(&got); err != nil || got["a"] != 1 {
		t.Error(got, err)
	}
	for _, f := range []*os.File{socket, files[1]} {
		fd, err := Number(f)
		if err != nil {
			t.Fatal(err)
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || flags&syscall.O_NONBLOCK == 0 {
			t.Errorf("the socket blocks: flags %#x, %v", flags, err)
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("the socket is inherited by programs: flags %#x, %v", flags, err)
		}
	}
}

func TestNothing(t *testing.T) {
	if rights, err := Rights(); rights != nil || err != nil {
		t.Error(rights, err)
	}
	if files := Received([]byte("no control message")); files != nil {
		t.Error(files)
	}
	closed, err := InMemory("test", 1)
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	if _, err := Rights(closed); err == nil {
		t.Error("a closed file is sent")
	}
	if _, err := InMemory("test", make(chan int)); err == nil {
		t.Error("a value that JSON has no form for is written")
	}
}
