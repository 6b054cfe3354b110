package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lab/machine"
)

// Machine is one of a lab's: a few namespaces, and a process that holds them.
type Machine struct {
	Name string
	// PID is the process', as others on this computer see it.
	PID int

	// What only the lab has that started it.
	cmd     *exec.Cmd
	mu      sync.Mutex
	orders  io.WriteCloser
	answers *bufio.Scanner
	closed  bool
}

// startMachine starts the first process of a machine. It ends when orders is closed: with this process at the latest.
func startMachine(lab, name, portal, dir, hosts string) (*Machine, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	for file, text := range map[string]string{machine.ResolvConf: "", machine.Hosts: hosts} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	log, err := os.OpenFile(filepath.Join(dir, "machine.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	m := &Machine{Name: name}
	m.cmd = &exec.Cmd{
		Path: portal, Args: []string{machine.Name, lab, name, dir}, Dir: "/", Stderr: log,
		SysProcAttr: &syscall.SysProcAttr{Cloneflags: machine.Flags, Setsid: true},
	}
	if m.orders, err = m.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := m.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the machine %s: %w", name, err)
	}
	m.PID, m.answers = m.cmd.Process.Pid, bufio.NewScanner(out)
	if err := m.answer(); err != nil {
		m.end()
		return nil, err
	}
	return m, nil
}

func (m *Machine) answer() error {
	if !m.answers.Scan() {
		return fmt.Errorf("the machine %s has ended", m.Name)
	}
	var a machine.Answer
	if err := json.Unmarshal(m.answers.Bytes(), &a); err != nil {
		return fmt.Errorf("the machine %s: %w", m.Name, err)
	}
	if a.Error != "" {
		return fmt.Errorf("the machine %s: %s", m.Name, a.Error)
	}
	return nil
}

func (m *Machine) order(o machine.Order) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.orders == nil || m.closed {
		return fmt.Errorf("the machine %s is not this process' own, or has ended", m.Name)
	}
	if err := json.NewEncoder(m.orders).Encode(o); err != nil {
		return fmt.Errorf("the machine %s: %w", m.Name, err)
	}
	return m.answer()
}

// run starts the machine's program.
func (m *Machine) run(log string, args ...string) error {
	return m.order(machine.Order{Run: args, Log: log})
}

// Kill ends the machine's program with SIGKILL, and has it stay down. What it started goes on.
func (m *Machine) Kill() error { return m.order(machine.Order{Kill: true}) }

// Start starts the machine's program again.
func (m *Machine) Start() error { return m.order(machine.Order{Start: true}) }

// end switches the machine off: all of its processes are killed.
func (m *Machine) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	m.closed = true
	_ = m.orders.Close()
	_ = m.cmd.Process.Kill()
	_ = m.cmd.Wait()
}

// Do runs a function in the machine's network namespace.
func (m *Machine) Do(f func() error) error {
	return m.enter(unix.CLONE_NEWNET, f)
}

// enter runs a function on a thread in some of the machine's namespaces.
func (m *Machine) enter(namespaces int, f func() error) error {
	fd, err := unix.PidfdOpen(m.PID, 0)
	if err != nil {
		return fmt.Errorf("the machine %s has ended: %w", m.Name, err)
	}
	defer unix.Close(fd)
	return onThread(func() error {
		if namespaces&unix.CLONE_NEWNS != 0 {
			// Threads share their root and working directory, which are about to change.
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
		}
		if err := unix.Setns(fd, namespaces); err != nil {
			return fmt.Errorf("enter the machine %s: %w", m.Name, err)
		}
		return f()
	})
}

// onThread runs a function on a thread that nobody uses afterwards.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

// all are the namespaces that a process on the machine is in.
const all = unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC

// Run runs a command on the machine to its end.
func (m *Machine) Run(cmd *exec.Cmd) error {
	if cmd.Dir == "" {
		cmd.Dir = "/"
	}
	return m.enter(all, cmd.Run)
}

// Exec runs a command on the machine and returns what it printed.
func (m *Machine) Exec(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	return output(cmd, m.Run)
}

func output(cmd *exec.Cmd, run func(*exec.Cmd) error) (string, error) {
	var out, errs limited
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = time.Second
	if err := run(cmd); err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", cmd.Args[0], err, errs)
	}
	return string(out), nil
}

// limited keeps the first 16 MiB.
type limited []byte

func (l *limited) Write(p []byte) (int, error) {
	*l = append(*l, p[:min(len(p), 16<<20-len(*l))]...)
	return len(p), nil
}

// RunInPod runs a command of the machine's in the network of a Pod, and with its resolv.conf.
func (m *Machine) RunInPod(nodeDir, uid string, cmd *exec.Cmd) error {
	ns, err := m.podNetwork(nodeDir, uid)
	if err != nil {
		return err
	}
	defer ns.Close()
	resolvers, _ := filepath.Glob(filepath.Join(nodeDir, "pods", uid, "containers", "*", "resolv.conf"))
	if cmd.Dir == "" {
		cmd.Dir = "/"
	}
	return m.enter(all, func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the Pod's network: %w", err)
		}
		if len(resolvers) > 0 {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount(resolvers[0], "/etc/resolv.conf", "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("mount the Pod's resolv.conf: %w", err)
			}
		}
		return cmd.Run()
	})
}

// DoInPod runs a function in the network namespace of a Pod.
func (m *Machine) DoInPod(nodeDir, uid string, f func() error) error {
	ns, err := m.podNetwork(nodeDir, uid)
	if err != nil {
		return err
	}
	defer ns.Close()
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the Pod's network: %w", err)
		}
		return f()
	})
}

// podNetwork opens the network namespace of a Pod.
func (m *Machine) podNetwork(nodeDir, uid string) (*os.File, error) {
	data, err := os.ReadFile(filepath.Join(nodeDir, "pods", uid, "shim.pid"))
	if err != nil {
		return nil, errors.New("the Pod does not run")
	}
	var shim int
	if _, err := fmt.Sscan(string(data), &shim); err != nil {
		return nil, fmt.Errorf("the Pod's shim: %w", err)
	}
	// The number is of the machine's own PID namespace, which its /proc shows.
	ns, err := os.Open(fmt.Sprintf("/proc/%d/root/proc/%d/ns/net", m.PID, shim))
	if err != nil {
		return nil, fmt.Errorf("the Pod does not run: %w", err)
	}
	return ns, nil
}

// dial connects from the machine.
func (m *Machine) dial(ctx context.Context, address string) (c net.Conn, err error) {
	err = m.Do(func() error {
		c, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", address)
		return err
	})
	return c, err
}
