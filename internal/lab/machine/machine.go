// Package machine is the first process of a machine in a lab: it lives in namespaces of its own, gives them their mounts, runs one
// program and restarts it when it ends, as a service manager does, and looks after orphans. All that runs on the machine ends with it,
// and it ends when its lab does, however that ends. It knows nothing of networks or clusters.
//
// It is this binary under another name, and takes over before the packages of other commands are initialised, as the shims of Pods do:
// it may only import what is initialised early.
package machine

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Name is argument 0 of the process. Further arguments are the lab's name, the machine's, and a folder of its files.
const Name = "portal-machine"

// The files of the folder that replace those of the same name in /etc.
const (
	ResolvConf = "resolv.conf"
	Hosts      = "hosts"
)

// Flags are the namespaces that a machine has of its own.
const Flags = unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC

// Order is what a lab tells a machine, a line of JSON on its standard input. Each gets an Answer.
type Order struct {
	// Run is a program with its arguments to start, and to start again when it ends. Its output is appended to Log.
	Run []string `json:"run,omitempty"`
	Log string   `json:"log,omitempty"`
	// Kill ends the program at once, and Start starts it again.
	Kill  bool `json:"kill,omitempty"`
	Start bool `json:"start,omitempty"`
}

// Answer is how an order went. The first is sent without one, when the machine is ready.
type Answer struct {
	Error string `json:"error,omitempty"`
}

// restartDelay is how long a program that ended stays down.
const restartDelay = 500 * time.Millisecond

func init() {
	if len(os.Args) == 4 && os.Args[0] == Name {
		os.Exit(run(os.Args[2], os.Args[3]))
	}
}

func run(name, dir string) int {
	// Its end is that of its standard input; signals are the lab's business. They are not ignored, because programs would inherit that.
	signal.Notify(make(chan os.Signal, 1), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	answers := json.NewEncoder(os.Stdout)
	if err := setup(name, dir); err != nil {
		_ = answers.Encode(Answer{Error: err.Error()})
		return 1
	}
	_ = answers.Encode(Answer{})
	p := &program{}
	go p.reap()
	orders := bufio.NewScanner(os.Stdin)
	orders.Buffer(nil, 1<<20)
	for orders.Scan() {
		var o Order
		err := json.Unmarshal(orders.Bytes(), &o)
		switch {
		case err != nil:
		case len(o.Run) > 0:
			p.mu.Lock()
			p.args, p.log = o.Run, o.Log
			p.mu.Unlock()
			err = p.start()
		case o.Kill:
			p.kill()
		case o.Start:
			err = p.start()
		}
		var a Answer
		if err != nil {
			a.Error = err.Error()
		}
		_ = answers.Encode(a)
	}
	return 0 // and the kernel ends all others
}

// setup makes the machine's mounts: none of them is seen elsewhere.
func setup(name, dir string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	const plain = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("proc", "/proc", "proc", plain, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	// /sys shows the network namespace that it was mounted in. What is mounted below it is needed again.
	kept := map[string]int{}
	for _, path := range []string{"/sys/fs/cgroup", "/sys/fs/bpf"} {
		tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err == nil {
			kept[path] = tree
		}
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", plain, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	for path, tree := range kept {
		if err := unix.MoveMount(tree, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount %s: %w", path, err)
		}
		_ = unix.Close(tree)
	}
	// The resolver of the computer that the lab is on can't be reached from here, and its hosts are others.
	for _, file := range []string{ResolvConf, Hosts} {
		if err := unix.Mount(filepath.Join(dir, file), "/etc/"+file, "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("mount /etc/%s: %w", file, err)
		}
	}
	return nil
}

// program is what the machine runs.
type program struct {
	mu    sync.Mutex
	args  []string
	log   string
	pid   int // 0: it does not run
	held  bool
	ended chan struct{} // closed when the process of pid has
}

func (p *program) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = false
	if p.pid != 0 || len(p.args) == 0 {
		return nil
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	pid, err := syscall.ForkExec(p.args[0], p.args, &syscall.ProcAttr{
		Dir: "/", Env: os.Environ(), Files: []uintptr{null.Fd(), log.Fd(), log.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", p.args[0], err)
	}
	p.pid, p.ended = pid, make(chan struct{})
	return nil
}

// kill ends the program, and has it stay down.
func (p *program) kill() {
	p.mu.Lock()
	p.held = true
	pid, ended := p.pid, p.ended
	p.mu.Unlock()
	if pid != 0 {
		_ = unix.Kill(pid, unix.SIGKILL)
		<-ended
	}
}

// reap waits for all children: the program, and those whose parents have ended.
func (p *program) reap() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if errors.Is(err, unix.ECHILD) {
			time.Sleep(50 * time.Millisecond)
		}
		if err != nil {
			continue
		}
		p.mu.Lock()
		if pid == p.pid {
			p.pid = 0
			close(p.ended)
			if !p.held {
				fmt.Fprintf(os.Stderr, "%s ended with status %#x, starting it again\n", p.args[0], status)
				go p.restart()
			}
		}
		p.mu.Unlock()
	}
}

func (p *program) restart() {
	for {
		time.Sleep(restartDelay)
		p.mu.Lock()
		held := p.held
		p.mu.Unlock()
		if held {
			return
		}
		err := p.start()
		if err == nil {
			return
		}
		fmt.Fprintln(os.Stderr, err)
	}
}
