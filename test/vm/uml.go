package vm

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

//go:embed uml/init.sh
var umlInit []byte

// NeedUML ends the test where a user-mode kernel can't be had: it fails for want of the kernel or a tool, and is skipped
// where the user is not root, who alone can give it process IDs of its own.
func NeedUML(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a user-mode kernel runs in a process namespace of its own, which needs root")
	}
	for _, path := range []string{umlKernel(), umlState()} {
		if _, err := os.Stat(path); err != nil {
			t.Fatalf("no user-mode kernel: %v (make uml)", err)
		}
	}
	if _, err := exec.LookPath("busybox"); err != nil {
		t.Fatalf("no user-mode kernel: %v (make uml)", err)
	}
}

func umlKernel() string { return filepath.Join(Dir(), "uml/linux") }
func umlState() string  { return filepath.Join(Dir(), "uml/fpstate.so") }

// RunUML is Run with a user-mode kernel: an ordinary process, whose programs the host's processor executes. System calls,
// page faults and the network are slower than the host's; it has one processor. Everything is built in, so that Modules of
// the Spec mean nothing. What the command says is logged as it comes.
func RunUML(t testing.TB, s Spec) Result {
	t.Helper()
	NeedUML(t)
	if s.Timeout == 0 {
		s.Timeout = 2 * time.Minute
	}
	if s.Memory == 0 {
		s.Memory = 1024
	}
	m := umlMachine{dir: t.TempDir(), spec: s, say: func(line string) { t.Log(line) }}
	start := time.Now()
	err := m.run(t.Context())
	text, exit := m.output.String(), 0
	if err == nil {
		text, exit, err = verdict(text)
	}
	if err != nil {
		t.Fatalf("%v\nwhat the kernel said:\n%s", err, &m.console)
	}
	return Result{text, exit, time.Since(start)}
}

type umlMachine struct {
	dir             string
	spec            Spec
	say             func(line string)
	output, console bytes.Buffer
}

// run starts the kernel and waits until it has halted. Its processes are processes of the host, too, in a process namespace
// whose first is the kernel: with it they all end.
func (m *umlMachine) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.spec.Timeout)
	defer cancel()
	for name, content := range map[string][]byte{"init": umlInit, "command": []byte(m.spec.Command)} {
		if err := os.WriteFile(filepath.Join(m.dir, name), content, 0o700); err != nil {
			return err
		}
	}
	lines, line, err := os.Pipe()
	if err != nil {
		return err
	}
	defer lines.Close()
	// The kernel dies with the thread that started it, should the test be killed; so the thread must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, umlKernel(), m.args()...)
	cmd.Env = []string{"HOME=" + m.dir, "PATH=" + os.Getenv("PATH"), "TMPDIR=/dev/shm", "LD_PRELOAD=" + umlState()}
	cmd.Stdout, cmd.Stderr = &m.console, &m.console
	cmd.ExtraFiles = []*os.File{line}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Start()
	line.Close()
	if err != nil {
		return err
	}
	heard := make(chan error, 1)
	go func() { heard <- m.hear(lines) }()
	err = cmd.Wait()
	if ctx.Err() != nil {
		err = fmt.Errorf("not done after %v: %w", m.spec.Timeout, ctx.Err())
	}
	return errors.Join(err, <-heard)
}

func (m *umlMachine) args() []string {
	return []string{
		fmt.Sprintf("mem=%dM", m.spec.Memory), "rootfstype=hostfs", "rootflags=/", "ro", "init=" + filepath.Join(m.dir, "init"), "panic=-1", "quiet",
		"con=null", "con0=fd:0,fd:1", "ssl0=null,fd:3", "uml_dir=" + m.dir, // the command's line is the first of ExtraFiles
	}
}

// hear reads what the command says until the kernel has halted.
func (m *umlMachine) hear(from io.Reader) error {
	r := bufio.NewReader(from)
	for {
		line, err := r.ReadString('\n')
		m.output.WriteString(line)
		if text := strings.TrimRight(line, "\r\n"); text != "" {
			m.say(text)
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}
