package runtime

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// buffer is written to by one goroutine and read by another.
type buffer struct {
	mu   sync.Mutex
	data bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.String()
}

func (b *buffer) waitFor(t *testing.T, text string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !strings.Contains(b.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%q does not come; there is %q", text, b.String())
		}
	}
}

func TestExecStreams(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	if err := p.Start(t.Context(), script(p, "c0", "sleep 1000"), Limits{}); err != nil {
		t.Fatal(err)
	}
	// Large input and output arrive whole, and both streams are apart.
	data := make([]byte, 5<<20)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	var out, errs buffer
	code, err := p.ExecStream(t.Context(), "c0", []string{"sh", "-c", "cat; echo problem >&2; exit 9"}, Streams{In: bytes.NewReader(data), Out: &out, Err: &errs})
	if err != nil || code != 9 || errs.String() != "problem\n" || sha256.Sum256([]byte(out.String())) != sha256.Sum256(data) {
		t.Errorf("code %d, %v; %d bytes, %q", code, err, len(out.String()), errs.String())
	}
	// Something left running that holds the output open holds nobody up.
	start := time.Now()
	out = buffer{}
	if code, err := p.ExecStream(t.Context(), "c0", []string{"sh", "-c", "sleep 500 & echo done"}, Streams{Out: &out}); err != nil || code != 0 || out.String() != "done\n" {
		t.Errorf("code %d, %v: %q", code, err, out.String())
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	var failed *StartError
	if _, err := p.ExecStream(t.Context(), "c0", []string{"/etc/passwd"}, Streams{Out: &out}); !errors.As(err, &failed) || !strings.Contains(err.Error(), "permission denied") {
		t.Error(err)
	}
	if _, err := p.ExecStream(t.Context(), "c0", []string{"/no/such"}, Streams{Out: &out}); !errors.As(err, &failed) || !strings.Contains(err.Error(), "no such file") {
		t.Error(err)
	}
	// Killed by a signal, and what it started with it when the client goes.
	if code, err := p.ExecStream(t.Context(), "c0", []string{"sh", "-c", "kill -9 $$"}, Streams{}); err != nil || code != 137 {
		t.Errorf("code %d, %v", code, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	out = buffer{}
	ended := make(chan error)
	go func() {
		_, err := p.ExecStream(ctx, "c0", []string{"sh", "-c", "echo begun; sleep 7531; true"}, Streams{Out: &out})
		ended <- err
	}()
	out.waitFor(t, "begun")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		code, err := p.Exec(t.Context(), "c0", []string{"sh", "-c", `grep -l 753[1] /proc/[0-9]*/cmdline | grep -v "/$$/"`}, nil, nil, nil)
		if err == nil && code == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("what the command started outlives the client")
		}
	}
}

// TestTerminal: a command with a terminal has one of the container's own, of the client's size, and job control.
func TestTerminal(t *testing.T) {
	p := create(t, newRuntime(t), "a", func(c *SandboxConfig) { c.SharedPID = true })
	c := script(p, "c0", "sleep 1000")
	c.Process.UID, c.Process.Capabilities = 1000, 0
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	in, typed := io.Pipe()
	sizes := make(chan Size, 1)
	sizes <- Size{Columns: 123, Rows: 45}
	var out buffer
	ended := make(chan int)
	go func() {
		code, err := p.ExecStream(t.Context(), "c0", []string{"sh"}, Streams{In: in, Out: &out, TTY: true, Resize: sizes})
		if err != nil {
			t.Error(err)
		}
		ended <- code
	}()
	type step struct{ send, want string }
	for _, s := range []step{
		{"PS1=ready:; tty; stty size\n", "/dev/pts/"}, {"", "45 123"}, {"sleep 1000\n", "sleep 1000"}, {"\x03", "^C"}, {"echo \"a\"live\n", "alive"},
		{"stat -c %u $(tty)\n", "1000"}, {"echo x > /dev/tty && echo \"c\"ontrols\n", "controls"},
	} {
		if s.send != "" {
			if s.send == "\x03" {
				time.Sleep(300 * time.Millisecond) // until the command runs: what is echoed was only typed
			}
			if _, err := io.WriteString(typed, s.send); err != nil {
				t.Fatal(err)
			}
		}
		out.waitFor(t, s.want)
	}
	sizes <- Size{Columns: 77, Rows: 66}
	time.Sleep(50 * time.Millisecond)
	_, _ = io.WriteString(typed, "stty size\n")
	out.waitFor(t, "66 77")
	_, _ = io.WriteString(typed, "exit 4\n")
	select {
	case code := <-ended:
		if code != 4 {
			t.Errorf("code %d", code)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("it does not end")
	}
	// A container can't have the terminal come from elsewhere.
	k := script(p, "k0", "rm /dev/ptmx; umount /dev/pts 2>/dev/null; sleep 1000")
	if err := p.Start(t.Context(), k, Limits{}); err != nil {
		t.Fatal(err)
	}
	if code, err := p.ExecStream(t.Context(), "k0", []string{"tty"}, Streams{Out: &out, TTY: true}); err != nil || code != 0 {
		t.Errorf("code %d, %v", code, err)
	}
}

func TestAttach(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", `echo before; while read line; do echo "got $line"; echo "err $line" >&2; done; echo over; exit 3`)
	c.Stdin, c.StdinOnce = true, true
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	in, typed := io.Pipe()
	var out, errs, second buffer
	ended := make(chan error, 2)
	go func() {
		_, err := p.Attach(t.Context(), "c0", Streams{In: in, Out: &out, Err: &errs})
		ended <- err
	}()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, err := p.Attach(ctx, "c0", Streams{Out: &second})
		ended <- err
	}()
	time.Sleep(100 * time.Millisecond)
	_, _ = io.WriteString(typed, "one\n")
	out.waitFor(t, "got one")
	errs.waitFor(t, "err one")
	second.waitFor(t, "got one")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	_, _ = io.WriteString(typed, "two\n")
	out.waitFor(t, "got two")
	if strings.Contains(second.String(), "two") {
		t.Errorf("who has gone got %q", second.String())
	}
	// The end of the input is the container's, as it is read once.
	_ = typed.Close()
	select {
	case err := <-ended:
		if err != nil || !strings.HasSuffix(out.String(), "over\n") {
			t.Errorf("%v: %q", err, out.String())
		}
	case <-time.After(5 * time.Second):
		t.Error("the end of the input does not reach the container")
	}
	if s := wait(t, p, "c0"); s.ExitCode != 3 {
		t.Errorf("%+v", s)
	}
	if got := text(t, p, "c0"); !strings.Contains(got, "before") || !strings.Contains(got, "got two") {
		t.Errorf("the log has %q", got)
	}
	if _, err := p.Attach(t.Context(), "c0", Streams{Out: &out}); err == nil || !strings.Contains(err.Error(), "does not run") {
		t.Error(err)
	}
}

// TestSlowReader: somebody who is attached and does not read stops nobody for long.
func TestSlowReader(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", `sleep 0.3; head -c 3000000 /dev/zero | tr '\\0' '\\n'; echo over`)
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe() // nobody reads
	defer r.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _, _ = p.Attach(ctx, "c0", Streams{Out: w}) }()
	if s := wait(t, p, "c0"); s.ExitCode != 0 {
		t.Errorf("%+v", s)
	}
}

func TestAttachTerminal(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	c := script(p, "c0", `while read line; do stty size; echo "got $line"; done`)
	c.Stdin, c.Process.TTY = true, true
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	for i := range 2 { // it can be left and come back to
		in, typed := io.Pipe()
		sizes := make(chan Size, 1)
		sizes <- Size{Columns: uint16(100 + i), Rows: 30}
		var out buffer
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			stdin, _ := p.Attach(ctx, "c0", Streams{In: in, Out: &out, TTY: true, Resize: sizes})
			if !stdin {
				t.Error("there was no standard input")
			}
		}()
		time.Sleep(100 * time.Millisecond)
		_, _ = io.WriteString(typed, "x\n")
		out.waitFor(t, "got x")
		out.waitFor(t, fmt.Sprintf("30 %d", 100+i))
		cancel()
		<-ended
		_ = in.Close()
	}
}

func TestDial(t *testing.T) {
	r := newRuntime(t)
	p := create(t, r, "a")
	c := script(p, "c0", `ip link set lo up; exec python3 -u -c '
import socket
s = socket.create_server(("::1", 7000), family=socket.AF_INET6)
print("listening")
while True:
    c, _ = s.accept()
    c.sendall(c.recv(100).upper())
    c.close()'`)
	c.Process.Capabilities |= 1 << unix.CAP_NET_ADMIN
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); !strings.Contains(text(t, p, "c0"), "listening"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(text(t, p, "c0"))
		}
	}
	for range 20 {
		conn, err := p.Dial(t.Context(), 7000)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "hello")
		data, err := io.ReadAll(conn)
		if err != nil || string(data) != "HELLO" {
			t.Errorf("%q, %v", data, err)
		}
		_ = conn.Close()
	}
	if _, err := p.Dial(t.Context(), 7001); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Error(err)
	}
}

// TestPauseKilled: the sandbox ends with the process that holds its PID namespace.
func TestPauseKilled(t *testing.T) {
	r := newRuntime(t)
	p := create(t, r, "a", func(c *SandboxConfig) { c.SharedPID = true })
	c := script(p, "c0", "sleep 1000 & sleep 1000")
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	killed := false
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.PID))
	for _, f := range tasks {
		data, _ := os.ReadFile(f)
		for _, field := range strings.Fields(string(data)) {
			var pid int
			_, _ = fmt.Sscan(field, &pid)
			if line, _ := os.ReadFile("/proc/" + field + "/cmdline"); strings.HasPrefix(string(line), "portal-pause") {
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
				killed = true
			}
		}
	}
	if !killed {
		t.Fatal("there is no portal-pause")
	}
	for end := time.Now().Add(5 * time.Second); p.Alive(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the shim lives on")
		}
	}
	if s := wait(t, p, "c0"); s.ExitCode != 137 {
		t.Errorf("%+v", s)
	}
}

// TestEndOfSharing: what a container has started ends with it, also where others share its processes.
func TestEndOfSharing(t *testing.T) {
	r := newRuntime(t)
	p := create(t, r, "a", func(c *SandboxConfig) { c.SharedPID = true })
	run(t, p, script(p, "c0", "(trap '' TERM HUP; exec setsid sleep 1000) & exit 0"), Limits{})
	group := filepath.Join(r.Cgroups.dir("poda", "pids"), "c0", "cgroup.procs")
	for end := time.Now().Add(5 * time.Second); lines(group) > 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d processes are left", lines(group))
		}
	}
}

// endless has something to read forever, and says how much was read of it.
type endless struct{ read atomic.Int64 }

func (e *endless) Read(p []byte) (int, error) {
	e.read.Add(int64(len(p)))
	return len(p), nil
}

// TestInputNobodyReads: who writes to a container that does not read can leave it, and leaves nothing behind that waits.
func TestInputNobodyReads(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	for id, tty := range map[string]bool{"c0": false, "c1": true} {
		c := script(p, id, "test -t 0 && stty raw -echo; echo begun; sleep 1000")
		c.Stdin, c.Process.TTY = true, tty
		if err := p.Start(t.Context(), c, Limits{}); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(10 * time.Second); !strings.Contains(text(t, p, id), "begun"); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("it does not begin")
			}
		}
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			in := &endless{}
			ended := make(chan error, 1)
			go func() {
				_, err := p.Attach(ctx, id, Streams{In: in, Out: io.Discard, TTY: tty})
				ended <- err
			}()
			for last, still := int64(-1), 0; still < 20; time.Sleep(5 * time.Millisecond) {
				if now := in.read.Load(); now > 0 && now == last {
					still++
				} else {
					last, still = now, 0
				}
			}
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			stacks := make([]byte, 1<<20)
			stacks = stacks[:goruntime.Stack(stacks, true)]
			if !bytes.Contains(stacks, []byte("(*Pod).Attach")) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("terminal %v: something still waits:\n%s", tty, stacks)
			}
		}
	}
}

// TestReadersWhoDoNotRead: those who are attached and do not read hold up neither the container nor the shim, and learn why they were cut off.
// The owner of the input is waited for, but not for long.
func TestReadersWhoDoNotRead(t *testing.T) {
	p := create(t, newRuntime(t), "a")
	// It says something now and then until all are attached.
	c := script(p, "c0", `while :; do echo .; sleep 0.05; done & read go; kill $!; head -c 8000000 /dev/zero | tr '\0' x; echo; echo over; read more; exit 7`)
	c.Stdin = true
	if err := p.Start(t.Context(), c, Limits{}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 4)
	release := make(chan struct{})
	var attached sync.WaitGroup
	for range 4 {
		attached.Add(1)
		go func() {
			_, err := p.Attach(t.Context(), "c0", Streams{Out: &blocked{release: release, begun: attached.Done}})
			ended <- err
		}()
	}
	attached.Wait()
	var whole buffer
	in, typed := io.Pipe()
	owner := make(chan error, 1)
	go func() {
		_, err := p.Attach(t.Context(), "c0", Streams{In: in, Out: &whole})
		owner <- err
	}()
	_, _ = io.WriteString(typed, "go\n")
	for end := time.Now().Add(time.Minute); !strings.Contains(text(t, p, "c0"), "over"); time.Sleep(20 * time.Millisecond) {
		// The shim answers meanwhile.
		if code, err := p.Exec(t.Context(), "c0", []string{"true"}, nil, nil, nil); err != nil || code != 0 {
			t.Fatal(code, err)
		}
		if time.Now().After(end) {
			t.Fatal("the container is held up")
		}
	}
	whole.waitFor(t, "over\n")
	if n := strings.Count(whole.String(), "x"); n != 8000000 {
		t.Errorf("the owner of the input got %d bytes", n)
	}
	close(release)
	for range 4 {
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "the log has all of it") {
			t.Errorf("who did not read was told %v", err)
		}
	}
	_, _ = io.WriteString(typed, "more\n")
	if err := <-owner; err != nil {
		t.Error(err)
	}
	if s := wait(t, p, "c0"); s.ExitCode != 7 {
		t.Errorf("%+v", s)
	}
}

// blocked takes nothing until it is released.
type blocked struct {
	once    sync.Once
	begun   func()
	release chan struct{}
}

func (b *blocked) Write(p []byte) (int, error) {
	b.once.Do(b.begun)
	<-b.release
	return len(p), nil
}
