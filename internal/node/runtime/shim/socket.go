package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The agent and a shim exchange packets over a socket in the Pod's folder, which only root can enter.

// maxPacket holds any Request and any Answer. What is larger is in a file beside it.
const maxPacket = 64 << 10

// listen makes the socket.
func listen(dir string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	_ = os.Remove(filepath.Join(dir, SocketFile))
	address, done, err := socketAddress(dir)
	if err != nil {
		return -1, err
	}
	defer done()
	if err := unix.Bind(fd, address); err != nil {
		return -1, fmt.Errorf("bind %s: %w", SocketFile, err)
	}
	return fd, unix.Listen(fd, 16)
}

// socketAddress is the socket's, by a path that is short however deep the folder is: an address holds 108 bytes.
func socketAddress(dir string) (*unix.SockaddrUnix, func(), error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", fd, SocketFile)}, func() { _ = unix.Close(fd) }, nil
}

// Dial connects to the shim of a Pod's folder. A shim that is gone refuses.
func Dial(dir string) (*Client, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	address, done, err := socketAddress(dir)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	defer done()
	if err := connect(fd, address); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("connect to the shim: %w", err)
	}
	// From here on who waits for an answer is parked, and takes no thread: an agent waits for each of its Pods.
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	file := os.NewFile(uintptr(fd), SocketFile)
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return &Client{fd: fd, file: file, raw: raw}, nil
}

// dialTimeout is how long a shim may take to accept a connection, and what is sent to it.
const dialTimeout = 5 * time.Second

// connect waits for a shim whose queue is full, but not forever. EAGAIN: it did not accept in time.
func connect(fd int, address unix.Sockaddr) error {
	timeout := unix.NsecToTimeval(dialTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
		return err
	}
	for end := time.Now().Add(dialTimeout); ; {
		if err := unix.Connect(fd, address); !errors.Is(err, unix.EINTR) || time.Now().After(end) {
			return err
		}
	}
}

// Client is the agent's end of a connection.
type Client struct {
	fd       int
	file     *os.File // of fd
	raw      syscall.RawConn
	mu       sync.Mutex
	released bool
}

// Close ends the connection, and what waits for an answer: closing a descriptor would not wake who reads from it.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.released {
		_ = unix.Shutdown(c.fd, unix.SHUT_RDWR)
	}
}

// Release frees the connection once nobody waits for an answer. Whoever dialled calls it.
func (c *Client) Release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.released {
		c.released = true
		_ = c.file.Close()
	}
}

// Send sends a request with a body and open files, if any.
func (c *Client) Send(r *Request, body any, files ...*os.File) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	var fds []int
	if body != nil {
		f, err := inMemory(body)
		if err != nil {
			return err
		}
		defer f.Close()
		fds = append(fds, int(f.Fd()))
	}
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	for end := time.Now().Add(dialTimeout); ; {
		c.mu.Lock()
		if c.released { // the number may be another's by now
			c.mu.Unlock()
			return os.ErrClosed
		}
		err := unix.Sendmsg(c.fd, data, rights, nil, unix.MSG_NOSIGNAL)
		if left := time.Until(end); errors.Is(err, unix.EAGAIN) && left > 0 {
			poll := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLOUT}}
			_, _ = unix.Poll(poll, int(left.Milliseconds())+1)
			err = unix.EINTR // it has room now, or time is over
		}
		c.mu.Unlock()
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Receive waits for an answer. io.EOF: the shim is gone.
func (c *Client) Receive() (*Answer, []*os.File, error) {
	var a Answer
	var files []*os.File
	var err error
	if e := c.raw.Read(func(fd uintptr) bool {
		files, err = receive(int(fd), &a)
		return !errors.Is(err, unix.EAGAIN)
	}); e != nil {
		return &a, nil, e
	}
	return &a, files, err
}

// Pending is what a shim has said and nobody has received yet, if anything.
func (c *Client) Pending() *Answer {
	poll := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, 0); err != nil || n == 0 {
		return nil
	}
	a, files, err := c.Receive()
	closeAll(files)
	if err != nil {
		return nil
	}
	return a
}

// inMemory writes a value to a file that has no name.
func inMemory(v any) (*os.File, error) {
	fd, err := unix.MemfdCreate("portal", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "memfd")
	if err := json.NewEncoder(f).Encode(v); err != nil {
		_ = f.Close()
		return nil, err
	}
	_, err = f.Seek(0, io.SeekStart)
	return f, err
}

// receive takes the next packet. It waits for it if the descriptor does.
func receive(fd int, into any) ([]*os.File, error) {
	// Its size first: who waits, which may be for days, holds no buffer.
	size, err := recvmsg(fd, nil, nil, unix.MSG_PEEK|unix.MSG_TRUNC)
	if err != nil {
		return nil, err
	}
	buf, rights := make([]byte, min(size.n, maxPacket)+1), make([]byte, unix.CmsgSpace(4*8))
	got, err := recvmsg(fd, buf, rights, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, err
	}
	files := receivedFiles(rights[:got.rights])
	if got.n == 0 && len(files) == 0 {
		return nil, io.EOF
	}
	if got.flags&unix.MSG_TRUNC != 0 || got.n > maxPacket {
		for _, f := range files {
			_ = f.Close()
		}
		return nil, fmt.Errorf("a packet of more than %d bytes", maxPacket)
	}
	return files, json.Unmarshal(buf[:got.n], into)
}

type received struct{ n, rights, flags int }

func recvmsg(fd int, buf, rights []byte, flags int) (received, error) {
	for {
		n, oobn, got, _, err := unix.Recvmsg(fd, buf, rights, flags)
		if !errors.Is(err, unix.EINTR) {
			return received{n, oobn, got}, err
		}
	}
}

// conn is the shim's end of a connection.
type conn struct {
	fd int
	mu sync.Mutex
}

func (c *conn) answer(a Answer, files ...*os.File) {
	data, err := json.Marshal(&a)
	if err != nil {
		return
	}
	var rights []byte
	if len(files) > 0 {
		var fds []int
		for _, f := range files {
			fds = append(fds, number(f))
		}
		rights = unix.UnixRights(fds...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// An agent that doesn't read must not hold a Pod up: it asks again when it is back.
	if err := unix.Sendmsg(c.fd, data, rights, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT); err != nil {
		_ = unix.Shutdown(c.fd, unix.SHUT_RDWR)
	}
}

// number is a file's descriptor. Fd would have it block from then on, and whoever it is sent to: somebody who writes to a container that
// does not read would hold a thread for as long as it runs.
func number(f *os.File) int {
	out := -1
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { out = int(fd) })
	}
	return out
}

func (s *shim) accept(listener int) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err != nil {
			if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) {
				continue
			}
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) {
				time.Sleep(100 * time.Millisecond) // the Pod must not end for want of a descriptor
				continue
			}
			fmt.Fprintln(os.Stderr, "accept:", err)
			os.Exit(1)
		}
		go s.serve(&conn{fd: fd})
	}
}

// serve answers one connection's requests, one after the other.
func (s *shim) serve(c *conn) {
	defer func() {
		s.mu.Lock()
		delete(s.watchers, c)
		s.mu.Unlock()
		_ = unix.Close(c.fd)
	}()
	for {
		var r Request
		files, err := receive(c.fd, &r)
		if err != nil {
			return
		}
		s.handle(c, &r, files)
		for _, f := range files {
			_ = f.Close()
		}
	}
}

func (s *shim) handle(c *conn, r *Request, files []*os.File) {
	fail := func(err error) {
		a := Answer{}
		if err != nil {
			a.Error = short(err)
		}
		c.answer(a)
	}
	switch r.Op {
	case OpStart:
		var config Container
		if err := readBody(files, &config); err != nil {
			fail(err)
			return
		}
		fail(s.start(&config))
	case OpSignal:
		fail(s.kill(r.ID, r.Signal))
	case OpExec:
		if err := s.serveExec(c, r, files); err != nil {
			fail(err)
		}
	case OpAttach:
		if err := s.serveAttach(c, r); err != nil {
			fail(err)
		}
	case OpWatch:
		s.mu.Lock()
		for _, k := range s.containers {
			status := k.status
			c.answer(Answer{Status: &status})
		}
		s.watchers[c] = true
		s.mu.Unlock()
		c.answer(Answer{Listed: true})
	case OpForget:
		fail(s.forget(r.ID))
	case OpStop:
		c.answer(Answer{})
		s.stop()
	default:
		fail(fmt.Errorf("unknown request %q: the agent is newer than this shim", r.Op))
	}
}

// maxError is how much of an error is passed on: it may quote what a Pod says, which can be anything.
const maxError = 1 << 10

func short(err error) string {
	text := err.Error()
	if len(text) > maxError {
		text = strings.ToValidUTF8(text[:maxError], "") + "…"
	}
	return text
}

func readBody(files []*os.File, into any) error {
	if len(files) == 0 {
		return errors.New("a request without a body")
	}
	return json.NewDecoder(files[0]).Decode(into)
}

// serveExec runs a process and answers when it runs and when it has ended. The connection is its own.
func (s *shim) serveExec(c *conn, r *Request, files []*os.File) error {
	var e Exec
	if err := readBody(files, &e); err != nil {
		return err
	}
	null, err := OpenNull()
	if err != nil {
		return err
	}
	defer null.Close()
	stdio := [3]*os.File{null, null, null}
	if !e.TTY && len(files) == 4 {
		copy(stdio[:], files[1:])
	}
	ended := make(chan unix.WaitStatus, 1)
	terminal := make(chan *os.File, 1)
	started, err := s.exec(r.ID, &e, stdio, terminal, func(status unix.WaitStatus) { ended <- status })
	if err != nil {
		select {
		case t := <-terminal:
			_ = t.Close()
		default:
		}
		return err
	}
	defer started.file.Close()
	for _, f := range files { // so that who reads its output sees the end
		_ = f.Close()
	}
	select {
	case t := <-terminal:
		c.answer(Answer{}, t)
		_ = t.Close()
	default:
		c.answer(Answer{})
	}
	gone := make(chan struct{})
	if r.KillOnClose {
		go func() {
			var none Request
			_, _ = receive(c.fd, &none) // nothing more is asked on this connection
			close(gone)
		}()
	}
	var status unix.WaitStatus
	select {
	case status = <-ended:
	case <-gone:
		s.killGroup(started)
		status = <-ended
	}
	code := status.ExitStatus()
	if status.Signaled() {
		code = 128 + int(status.Signal())
	}
	c.answer(Answer{ExitCode: &code})
	if r.KillOnClose {
		<-gone
	}
	return nil
}
